"""What the modules of every backend share: entries by name, and the checks of a launch."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Generic, Protocol, TypeVar

from .arguments import Signature
from .backend import Argument, Dim3, Launch, Module, Parameter, Source, as_dim3, check_sizes


class Kernel(Protocol):
    """One entry of a loaded module, with whatever its backend needs to launch it."""

    signature: Signature


K = TypeVar("K", bound=Kernel)


class LoadedModule(Module, Generic[K]):
    """A kernel family on one backend, which adds how a checked and packed launch is run.

    Args:
        source: the family.
        kernels: its entries by name, in order.
    """

    def __init__(self, source: Source, kernels: Mapping[str, K]) -> None:
        self.source = source
        self._kernels = kernels

    @property
    def entries(self) -> tuple[str, ...]:
        """Names that can be launched."""
        return tuple(self._kernels)

    def parameters(self, entry: str) -> tuple[Parameter, ...]:
        """What one of them takes, as far as its compiled code tells."""
        return self._kernels[entry].signature.parameters

    def bind(
        self,
        entry: str,
        *,
        grid: Dim3 | int,
        block: Dim3 | int,
        args: Sequence[Argument],
        shared: int = 0,
    ) -> Launch:
        """Check and pack a launch; see `Module.bind`."""
        kernel = self._kernels.get(entry)
        if kernel is None:
            raise KeyError(f"{self.source.name} has no kernel {entry!r}; it has {', '.join(self._kernels) or 'none'}")
        grid, block = as_dim3(grid), as_dim3(block)
        check_sizes(entry, grid, block, shared)
        return self._prepared(kernel, grid, block, shared, kernel.signature.pack(args))

    @abstractmethod
    def _prepared(self, kernel: K, grid: Dim3, block: Dim3, shared: int, packed: bytes) -> Launch:
        """What runs a launch whose sizes are checked and whose arguments are packed as its signature says.

        Raises:
            ValueError: it needs more than the device has.
        """
