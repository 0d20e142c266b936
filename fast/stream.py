"""A stream: its pages, its page table, the positions that each layer holds, and its media positions."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from types import TracebackType

from ..reference.geometry import TEXT, Rope, Weights
from ..reference.layout import LayerCache
from ..reference.results import Bf16Array, Window
from .page_pool import PagePool
from .page_sizes import as_count, as_integer
from .stream_pages import StreamPages, tidy_after_error
from .stream_rules import StreamError as StreamError
from .stream_rules import chosen_layers, require_no_capture, require_weights


class Stream(StreamPages):
    """One stream of a pool; close it, or use it in a `with` block, to give its pages back.

    Its page table is one array for as long as it lives, changed in place only, so that captured launches may read it.
    Rows past a layer's length are zeros in every page that it holds, as if they had never been written. Each call runs
    behind the ones before, whatever queue is current; a round's own calls must all go to one queue.

    Args:
        pool: where its pages come from.
        weights: of each layer, in the engine's memory.
        rope: rotary positions of all its rows: those of a media prompt are told here.

    Attributes:
        lengths: positions that each layer holds; a draft head's may differ from the others'.
        busy: whether a round, or a `work` block, is at work on it.
        unfinished: whether a failure has interrupted its tidying, so that it may hold more pages than it needs.

    Raises:
        TypeError: an argument is of another kind.
        ValueError: the weights are not one for each layer, or do not fit the geometry.
        CaptureError: a step is being captured.
    """

    def __init__(self, pool: PagePool, weights: Sequence[Weights], *, rope: Rope = TEXT) -> None:
        require_no_capture("a stream is made")
        if not isinstance(rope, Rope):
            raise TypeError(f"rope is a {type(rope).__name__}; it must be a Rope, for example geometry.TEXT")
        require_weights(weights, pool.geometry, pool.engine.place)
        rope.require(pool.engine.place)
        self.weights = tuple(weights)
        self.rope = rope
        super().__init__(pool, [rope, *weights])

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def cache(self, layer: int) -> LayerCache:
        """One layer of its cache, for the functions of `kvproof.fast`; a contiguous stream has one once it has a page.

        Use it in a `work` block.

        Raises:
            StreamError: it is closed, or contiguous and without a page.
        """
        self.require_open()
        self.require_layers([layer])
        if not self._caches:
            raise StreamError(f"{self} is contiguous and holds no page yet; reserve one (Stream.reserve)")
        return self._caches[layer]

    def append(self, projections: Sequence[Bf16Array]) -> list[Window]:
        """Append a window to every layer; see `append`, which takes several streams."""
        from .round import append  # which knows streams

        return append([(self, projections)])[0]

    @contextlib.contextmanager
    def work(self, positions: int | None = None, *, layers: Sequence[int] | None = None) -> Iterator[None]:
        """Count what a `with` block submits as this stream's work: replays of captured steps, functions over `cache`.

        It runs behind the stream's last work, and the stream's next call, a rollback or `close` too, runs behind it,
        whatever queues they go to. Outside such a block nobody would know of it, and pages that it still writes could
        be another stream's. All of it must go to one queue.

        Args:
            positions: that these layers hold once the block has ended: it takes the pages, and what raises inside takes
                the rows back. None where no row is written that a layer does not hold already.
            layers: which; all when None.

        Raises:
            StreamError: the stream is closed or at work already, a layer does not exist or is named twice, or holds
                more positions; nothing was changed.
            TypeError: a number is no integer.
            PoolExhaustedError: the pages do not suffice.
            CaptureError: a step is being captured.
            LaunchError: the backend has failed; the rows are taken back.
        """
        self.require_idle()
        require_no_capture(f"work on {self} begins")
        chosen = self.require_layers(layers)
        end = self._require_end(positions, chosen)
        try:
            if self.untidy:
                self.tidy()
            self.order()
            self.grow(end)
            for layer in chosen if positions is not None else ():
                self.begin_writing(layer, end)
            self.busy = True
            yield
            self.mark()
        except BaseException:
            self.busy = False
            tidy_after_error([self])
            raise
        self.busy = False
        if positions is not None:
            self.advance(chosen, end)

    def reserve(self, positions: int) -> None:
        """Take the pages that `positions` positions need, and keep them until it is rolled back or closed.

        Raises:
            StreamError: that is more than a stream of this pool may hold.
            PoolExhaustedError: the pool has not enough free pages; nothing was taken.
            CaptureError: a step is being captured.
        """
        self.grow(positions)
        self._reserved = max(self._reserved, int(positions))

    def roll_back(self, length: int, *, layers: Sequence[int] | None = None) -> tuple[int, ...]:
        """Forget the positions from `length` on, and the pooled rows of blocks that are no longer complete.

        An error of the backend shows when the positions are forgotten already: what is left to be zeroed or given back
        then is at the next call.

        Args:
            layers: on which; all when None.

        Returns:
            Positions forgotten on each of these layers.

        Raises:
            StreamError: a layer holds fewer, so that it cannot be what the caller thinks, or there is no such layer, or
                it is named twice; nothing was changed.
            TypeError: the length or a layer is no integer; nothing was changed.
            CaptureError: a step is being captured; nothing was changed.
        """
        self.require_idle()
        require_no_capture(f"{self} is rolled back")
        length = as_integer("length", length)
        chosen = self.require_layers(layers)
        for layer in chosen:
            if not 0 <= length <= self._lengths[layer]:
                raise StreamError(
                    f"{self} cannot be rolled back to {length} positions: layer {layer} holds {self._lengths[layer]}; "
                    "nothing was rolled back"
                )
        removed = tuple(self._lengths[layer] - length for layer in chosen)
        for layer in chosen:
            self._lengths[layer] = length
        self._reserved = 0
        self.tidy()
        return removed

    def close(self) -> None:
        """Give all pages back; closing again does nothing.

        Raises:
            StreamError: a round is at work on it.
            CaptureError: a step is being captured.
        """
        if self.closed:
            return
        self.require_idle()
        require_no_capture(f"{self} is closed")
        self.order()  # the pages' next owner runs behind this queue, which may not be the stream's last
        self.pool.give_back(self, self.pool.pages_of(self))
        self._pages, self.closed = [], True
        self._lengths = [0] * len(self._lengths)
        self._written = [0] * len(self._lengths)
        self._reserved = 0
        self._leave()
        self._disown()
        self._caches = ()

    def require_layers(self, layers: Sequence[int] | None) -> tuple[int, ...]:
        """Layers of the geometry, each named once; all when None.

        Raises:
            StreamError: there is none, no such one, or one is named twice.
            TypeError: one is no integer.
        """
        return chosen_layers(str(self), len(self._lengths), layers)

    def require_idle(self) -> None:
        """Raise StreamError if it is closed, or a round or a `work` block is at work on it."""
        self.require_open()
        if self.busy:
            raise StreamError(f"a round or a `work` block is at work on {self}; end its `with` block first")

    def _require_end(self, positions: int | None, layers: Sequence[int]) -> int:
        """Where rows that a block writes end."""
        if positions is None:
            return 0
        end = as_count("positions", positions)
        for layer in layers:
            if self._lengths[layer] > end:
                raise StreamError(
                    f"{self} cannot hold {end} positions behind this work: layer {layer} holds {self._lengths[layer]} "
                    "already; roll it back before"
                )
        return end
