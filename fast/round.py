"""A round: one step of several streams, each with a window of its own, layer by layer.

    with Round([(a, 1), (b, 64)]) as step:
        for layer in step.layers:
            windows = step.attend(layer, [projection_a, projection_b])

All windows get their pages or none does. What raises inside takes every window of the round back. A round's calls all
go to one queue of the device; the next may go to another.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Literal

from ..reference.arrays import shape_of
from ..reference.results import Bf16Array, Window, require_window
from .capture import CaptureError, active_capture
from .page_sizes import as_integer
from .stream import Stream
from .stream_pages import tidy_after_error
from .stream_rules import StreamError, require_no_capture
from .window import window


class Round:
    """One step.

    Args:
        windows: streams and the rows of their windows, which start where each stream's layers end.
        layers: the layers that the step runs, once each; all when None.

    Attributes:
        layers: as given.
        streams, rows: of the windows.
        positions: of each window's first row, as of when the `with` block is entered.

    Raises:
        StreamError: a stream is named twice, closed, in another round or of another pool than the first, a window has
            no row, or the step's layers do not exist, are named twice or hold different numbers of positions.
        TypeError: a number of rows or a layer is no integer.
        PoolExhaustedError: the pages do not suffice; when the `with` block is entered.
        CaptureError: a step is being captured; when the `with` block is entered.
    """

    def __init__(self, windows: Sequence[tuple[Stream, int]], *, layers: Sequence[int] | None = None) -> None:
        if not windows:
            raise StreamError("a round of no stream; give at least one (stream, rows)")
        self.streams = [stream for stream, _ in windows]
        self.rows = [as_integer("rows of a window", rows) for _, rows in windows]
        for i, stream in enumerate(self.streams):
            if stream in self.streams[:i]:
                raise StreamError(f"{stream} is in the round twice; give it one window")
            if stream.pool is not self.streams[0].pool:
                raise StreamError(f"{stream} is of another pool than {self.streams[0]}; make a round for each pool")
            if self.rows[i] < 1:
                raise StreamError(f"the window of {stream} has {self.rows[i]} rows; it must have at least one")
        self.layers = self.streams[0].require_layers(layers)
        self.positions = [_first_position(stream, self.layers) for stream in self.streams]
        self._left = list(self.layers)
        self._state: Literal["new", "entered", "over"] = "new"

    def __enter__(self) -> Round:
        require_no_capture("a round is entered")
        if self._state != "new":
            raise StreamError(
                "this round has been entered before; make another, which starts where its streams end now"
            )
        for stream in self.streams:
            stream.require_idle()
        self.positions = [_first_position(stream, self.layers) for stream in self.streams]
        reserved: list[Stream] = []
        try:
            for stream, pos0, rows in zip(self.streams, self.positions, self.rows, strict=True):
                reserved.append(stream)
                if stream.untidy:
                    stream.tidy()
                stream.order()
                stream.grow(pos0 + rows)
        except BaseException:
            tidy_after_error(reserved)
            raise
        for stream in self.streams:
            stream.busy = True
        self._state = "entered"
        return self

    def attend(self, layer: int, projections: Sequence[Bf16Array]) -> list[Window]:
        """Run one layer: each stream's window over its projection, bf16 [rows, projection_width].

        Returns:
            What the kernels gave, for each stream.

        Raises:
            StreamError: the layer is not of this step, or has been run.
            ValueError: there is not one projection for each stream, or one does not fit; no kernel has run.
            CaptureError: a step is being captured; the round would count rows that nobody has written.
            LaunchError: a kernel failed.
        """
        if active_capture() is not None:
            raise CaptureError(
                "a round runs a layer inside a capture, where no kernel runs, so that it would count rows that nobody "
                "has written; capture `fast.window` over Stream.cache, and replay it in a Stream.work block"
            )
        if self._state != "entered":
            raise StreamError("this round is not entered, or is over; use it in a `with` block")
        layer = as_integer("layer", layer)
        if layer not in self._left:
            known = "run already" if layer in self.layers else f"not of this round, whose layers are {self.layers}"
            raise StreamError(f"layer {layer} is {known}")
        self._require(layer, projections)
        results = []
        for stream, projection, pos0, rows in zip(self.streams, projections, self.positions, self.rows, strict=True):
            pool = stream.pool
            stream.begin_writing(layer, pos0 + rows)
            results.append(
                window(
                    pool.geometry,
                    stream.weights[layer],
                    stream.cache(layer),
                    projection,
                    pos0,
                    stream.rope,
                    engine=pool.engine,
                )
            )
        self._left.remove(layer)
        return results

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._state = "over"
        for stream in self.streams:
            stream.busy = False
        if kind is not None:
            tidy_after_error(self.streams)
            return
        if self._left:
            tidy_after_error(self.streams)
            raise StreamError(f"layers {self._left} of the round were not run; its windows are taken back")
        try:
            for stream in self.streams:
                stream.mark()
        except BaseException:
            tidy_after_error(self.streams)
            raise
        for stream, pos0, rows in zip(self.streams, self.positions, self.rows, strict=True):
            stream.advance(self.layers, pos0 + rows)

    def _require(self, layer: int, projections: Sequence[Bf16Array]) -> None:
        """Every argument of every window, before any kernel runs."""
        if len(projections) != len(self.streams):
            raise ValueError(f"{len(projections)} projections are given; the round has {len(self.streams)} streams")
        for stream, projection, pos0, rows in zip(self.streams, projections, self.positions, self.rows, strict=True):
            pool = stream.pool
            given = require_window(
                pool.geometry,
                stream.weights[layer],
                stream.cache(layer),
                projection,
                pos0,
                stream.rope,
                pool.engine.place,
            )
            if given != rows:
                raise ValueError(f"the projection of {stream} has {given} rows; its window has {rows}")


def append(windows: Sequence[tuple[Stream, Sequence[Bf16Array]]]) -> list[list[Window]]:
    """Append a window to each of several streams, on all their layers.

    Args:
        windows: streams, and for each the projection of every layer, bf16 [rows, projection_width].

    Returns:
        For each stream what the kernels gave, layer by layer.

    Raises:
        StreamError, PoolExhaustedError, ValueError, LaunchError: as `Round`; no stream was changed.
    """
    for stream, projections in windows:
        layers = stream.pool.geometry.layers
        if len(projections) != layers:
            raise ValueError(f"projections of {len(projections)} layers are given for {stream}, which has {layers}")
    rows = [next(iter(shape_of(projections[0])), 0) for _, projections in windows]
    with Round([(stream, count) for (stream, _), count in zip(windows, rows, strict=True)]) as step:
        by_layer = [step.attend(layer, [projections[layer] for _, projections in windows]) for layer in step.layers]
    return [list(results) for results in zip(*by_layer, strict=True)]


def _first_position(stream: Stream, layers: Sequence[int]) -> int:
    stream.require_open()
    lengths = {layer: stream.lengths[layer] for layer in layers}
    if len(set(lengths.values())) > 1:
        raise StreamError(
            f"the round's layers of {stream} hold different numbers of positions ({lengths}); run those that agree in "
            "a round of their own, or roll back"
        )
    return lengths[layers[0]]
