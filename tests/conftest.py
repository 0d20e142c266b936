"""Engines that tests share, so that each kernel family is compiled once."""

from __future__ import annotations

import pytest
from hypothesis import settings
from kvproof.fast import Engine, HostBackend

settings.register_profile("kvproof", deadline=None, print_blob=True)
settings.load_profile("kvproof")


@pytest.fixture(scope="session")
def engine() -> Engine:
    """The kernels on the CPU, threads in order."""
    return Engine(HostBackend())
