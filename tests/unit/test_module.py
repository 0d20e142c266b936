"""What the modules of every backend share: a new one that derives from `LoadedModule` has it too."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from kvproof.fast import Pointer, Source
from kvproof.fast.arguments import Signature
from kvproof.fast.backend import Parameter
from kvproof.fast.cuda_backend import CudaModule
from kvproof.fast.host_backend import HostModule
from kvproof.fast.module import LoadedModule
from kvproof.reference.arrays import HOST
from kvproof.reference.layout import BF16

INT = Parameter("i", 4, 4)


class Kernel:
    """A kernel that is a signature alone."""

    def __init__(self, name, parameters):
        self.signature = Signature(name, parameters, HOST)


class Third(LoadedModule[Kernel]):
    """A backend's module that notes what it is given to launch."""

    def __init__(self, **kernels):
        super().__init__(Source("third", ""), {name: Kernel(name, given) for name, given in kernels.items()})
        self.ran = []

    def _prepared(self, kernel, grid, block, shared, packed):
        return lambda: self.ran.append((kernel.signature.entry, grid, block, shared, packed))


@pytest.fixture
def third():
    return Third(scale=[INT, INT], fill=[])


def test_entries_and_parameters(third):
    assert third.entries == ("scale", "fill")
    assert third.parameters("scale") == (INT, INT)
    assert third.parameters("fill") == ()
    with pytest.raises(KeyError, match=r"^'other'$"):
        third.parameters("other")


def test_a_launch_is_checked_and_packed_once_and_runs_as_often_as_it_is_called(third):
    launch = third.bind("scale", grid=3, block=(8, 2, 1), args=[np.int32(5), np.int32(7)], shared=16)
    assert third.ran == []
    launch()
    launch()
    third.launch("fill", grid=(1, 2, 3), block=1, args=[])
    packed = np.array([5, 7], np.int32).tobytes()
    assert third.ran == [("scale", (3, 1, 1), (8, 2, 1), 16, packed)] * 2 + [("fill", (1, 2, 3), (1, 1, 1), 0, b"")]


REFUSED = {
    "entry": ("other", {}, KeyError, "third has no kernel 'other'; it has scale, fill"),
    "grid": ("fill", {"grid": (1, 2)}, ValueError, r"\(1, 2\) is not a size: give an integer, or a tuple \(x, y, z\)"),
    "no-blocks": ("fill", {"grid": 0}, ValueError, r"fill: grid \(0, 1, 1\) is out of range"),
    "threads": ("fill", {"block": (64, 32, 1)}, ValueError, "2048 threads; at most 1024 are allowed"),
    "shared": ("fill", {"shared": -1}, ValueError, "fill: -1 bytes of dynamic shared memory"),
    "arguments": ("scale", {}, TypeError, "scale takes 2 arguments, not 0"),
}


@pytest.mark.parametrize(("entry", "changes", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_a_launch_that_cannot_be_is_refused(third, entry, changes, error, message):
    with pytest.raises(error, match=message):
        third.launch(entry, **{"grid": 1, "block": 1, "args": [], **changes})
    assert third.ran == []


def test_a_module_without_kernels_says_so():
    with pytest.raises(KeyError, match="third has no kernel 'x'; it has none"):
        Third().bind("x", grid=1, block=1, args=[])


@pytest.mark.parametrize("module", [HostModule, CudaModule])
def test_the_backends_share_it(module):
    assert issubclass(module, LoadedModule)
    assert not {"entries", "parameters", "bind", "launch"} & set(vars(module))


ARRAYS = {
    "bf16": np.ones((3, 8), BF16),
    "fp32-view": np.zeros((4, 6), np.float32)[1:, 2:],
    "read-only": np.broadcast_to(np.int32(3), (5,)),
    "reversed": np.arange(5)[::-1],
    "no-axis": np.array(7.0),
    "empty": np.zeros((0, 4), np.int32),
}


@pytest.mark.parametrize("array", ARRAYS.values(), ids=ARRAYS)
def test_a_pointer_to_a_host_array_is_its_address(array):
    signature = Signature("k", [Parameter("p", 8, 8)], HOST)
    start = array.__array_interface__["data"][0]
    for offset in (0, array.size, np.int64(array.size)):
        packed = signature.pack([Pointer(array, offset)])
        assert int.from_bytes(packed, sys.byteorder) == start + offset * array.itemsize
    for outside in (-1, array.size + 1):
        with pytest.raises(ValueError, match=f"points to element {outside} of an array of {array.size}"):
            signature.pack([Pointer(array, outside)])
