"""Captured launches: a decode step taken down once and replayed, as a launch list on a CPU, as a CUDA graph on a GPU.

    with capture(engine) as step:
        window = fast.window(geometry, weights, cache, projection, pos0, rope, engine=engine)
    step.replay()  # window.gated now holds the step's result

Nothing runs while a step is captured. What is frozen: the launches, every address, every number (positions and row
counts too) and the page size. What a replay reads afresh: whatever the captured arrays hold then.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ..reference.layout import LayerCache
from .backend import Launch, Recorder

if TYPE_CHECKING:
    from .engine import Engine

_thread = threading.local()


class CaptureError(RuntimeError):
    """A step cannot be captured or replayed like this; the message says why and what to do."""


class Capture:
    """A captured step.

    It keeps alive what its launches read and write: the arrays that it was given, and its outputs, which therefore
    stay where they are and belong to it: every replay overwrites them.
    """

    def __init__(self, engine: Engine, recorder: Recorder) -> None:
        self._engine = engine
        self._recorder = recorder
        self._kept: list[Any] = []
        self._checked: dict[int, tuple[LayerCache, int]] = {}
        self._replay: Launch | None = None

    def replay(self) -> None:
        """Run the step: on a CPU it waits for it, on a GPU it goes to the caller's current stream.

        Raises:
            CaptureError: the step is not captured to its end, or another one is being captured.
            ValueError: a page table on the host now names pages that it may not; nothing ran.
            LaunchError: a kernel failed.
        """
        if active_capture() is not None:
            raise CaptureError("a step is replayed while one is captured; end the capture's `with` block first")
        if self._replay is None:
            raise CaptureError("this step was not captured to its end, so there is nothing to replay; capture it again")
        for cache, end in self._checked.values():
            cache.require(end)
        self._replay()

    def add(self, engine: Engine, launch: Launch, arrays: Any) -> None:
        """Take down a launch of an engine, and keep the arrays that it reads and writes."""
        if engine is not self._engine:
            raise CaptureError(
                "a kernel of another engine was called inside a capture, which would leave it out; pass engine= to "
                "every call in the `with` block"
            )
        self._kept.append(arrays)
        self._recorder.add(launch)

    def keep_cache(self, cache: LayerCache, end: int) -> None:
        """Keep a cache that a launch reads up to position end - 1, unless its page table may move."""
        if cache.table is not None and not cache.table_is_stable:
            raise CaptureError(
                "a captured launch keeps the address of the page table, but nothing says that this table stays there: "
                "a replay would follow a table that is out of date, or freed. Keep one table for the stream, change it "
                "in place, and pass LayerCache(..., table_is_stable=True)"
            )
        self._kept.append(cache)
        if cache.device is None:  # a table on a device could be looked at only by waiting for it
            _, known = self._checked.get(id(cache), (cache, 0))
            self._checked[id(cache)] = (cache, max(known, end))

    def _finish(self) -> None:
        try:
            self._replay = self._recorder.finish()
        except RuntimeError as error:
            raise CaptureError(
                f"what was done inside the capture cannot be captured ({error}): call kernels only, and neither wait "
                "for the device nor copy to or from it"
            ) from error


def active_capture() -> Capture | None:
    """What this thread is capturing."""
    capture: Capture | None = getattr(_thread, "capture", None)
    return capture


@contextlib.contextmanager
def capture(engine: Engine) -> Iterator[Capture]:
    """Capture the engine's launches of a `with` block, in this thread; an exception inside leaves nothing captured.

    Raises:
        CaptureError: a capture is running already, a page table is not stable, or another engine is called inside.
    """
    if active_capture() is not None:
        raise CaptureError("a capture is running in this thread already; captures do not nest")
    step = _thread.capture = Capture(engine, engine.backend.recorder())
    try:
        yield step
    except BaseException:
        step._recorder.discard()
        raise
    finally:
        _thread.capture = None
    step._finish()
