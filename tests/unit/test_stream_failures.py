"""Whatever fails, and wherever, pages, lengths and bytes stay in order, and the same call succeeds when made again.

Every operation that an engine or a pool is asked for can be made to raise, before or after it has been done; the tests
try each in turn, and some of them unless `-m slow` is given.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import random

import numpy as np
import pytest
from kvproof import fast
from kvproof.fast import Engine, HostBackend, LaunchError, Stream
from kvproof.oracle.serving.audit import audit, guarded_pool
from kvproof.oracle.serving.delayed import DelayedBackend, DelayedEngine
from kvproof.reference import TINY
from pools import PAGE, WEIGHTS, extended, grown, page_bits, rows_of
from streams import assert_bits, bits

MOST = 400
"""Operations of one call; there are fewer."""
ALWAYS = MOST
SAMPLES = 2
"""Operations of each kind that a short run lets fail: others for each case, so that together they are most."""


class Injector:
    """Counts operations, and raises at the chosen one."""

    def __init__(self):
        self.disarm()

    def arm(self, number, *, after=False, error=LaunchError, times=1):
        """Raise at this operation, and at the next ones up to so many times."""
        self.left, self.after, self.error, self.times = number, after, error, times
        self.raised, self.names = None, []

    def disarm(self):
        self.left = self.raised = None

    def do(self, name, call, *args):
        if self.left is None:
            return call(*args)
        now = -self.times < self.left <= 0
        self.left -= 1
        self.names.append(name)
        result = call(*args) if self.after or not now else None
        if now:
            self.raised = name
            raise LaunchError(name, None, None, "injected") if self.error is LaunchError else self.error(name)
        return result


class Fence:
    def __init__(self, fence, injector):
        self.done, self._order, self._injector = fence.done, fence.order, injector

    def order(self):
        return self._injector.do("order", self._order)


def failing(kind):
    """A backend whose operations an injector counts."""

    class Failing(kind):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            self.injector = Injector()

        def zero(self, array):
            return self.injector.do("zero", super().zero, array)

        def write(self, array, values):
            return self.injector.do("write", super().write, array, values)

        def fence(self):
            return Fence(self.injector.do("fence", super().fence), self.injector)

        def empty(self, shape, dtype):
            return self.injector.do("empty", super().empty, shape, dtype)

    return Failing


class FailingEngine(Engine):
    def _submit(self, launch, arrays):
        return self.backend.injector.do("launch", lambda: Engine._submit(self, launch, arrays))


class FailingDelayedEngine(DelayedEngine):
    _submit = FailingEngine._submit


HOST = HostBackend(workers=1)
ENGINE = FailingEngine(failing(HostBackend)(workers=1))
DELAYED = FailingDelayedEngine(failing(DelayedBackend)(HOST))


class World:
    """Streams of 9, 20 and 5 positions, and an injector."""

    def __init__(self, engine=ENGINE, page_size=PAGE):
        self.engine = engine
        self.injector = engine.backend.injector
        self.injector.disarm()
        self.pool = guarded_pool(TINY, streams=4, context=24, page_size=page_size, engine=engine)
        self.streams = [grown(self.pool, seed, count)[0] for seed, count in enumerate((9, 20, 5))]
        self.outputs = []
        take = self.pool.take
        self.pool.take = lambda owner, count=1: self.injector.do("take", take, owner, count)

    def facts(self):
        return [(stream.lengths, stream.pages, stream.closed, stream.reserved) for stream in self.streams]

    def held(self):
        """Every byte of the streams' pages, and the windows' outputs; once all of it has run."""
        if self.engine is DELAYED:
            self.engine.backend.synchronize()
        return [page_bits(stream) for stream in self.streams], [bits(window.gated) for window in self.outputs]

    def in_order(self):
        assert audit(self.pool, [stream for stream in self.streams if not stream.closed]) == []
        assert not any(stream.busy for stream in self.streams)


def append(world):
    a, _, c = world.streams
    results = fast.append([(a, rows_of(0, a.length, 9)), (c, rows_of(2, c.length, 7))])
    world.outputs = [window for windows in results for window in windows]


def roll_back(world):
    world.streams[1].roll_back(6)


def roll_back_one_layer(world):
    world.streams[1].roll_back(18, layers=[1])


def reserve(world):
    world.streams[0].reserve(24)


def close(world):
    world.streams[1].close()


def make(world):
    world.streams[3:] = [Stream(world.pool, WEIGHTS)]


CALLS = [append, roll_back, roll_back_one_layer, reserve, close, make]
UNCHANGED = [append, reserve, make]
"""Calls that change nothing where they fail."""


def go_on(world):
    """What comes after the call: every open stream gets some rows."""
    for seed, stream in enumerate(world.streams):
        if not stream.closed and len(set(stream.lengths)) == 1:
            extended(stream, seed, min(3, world.pool.context - stream.length))


@functools.cache
def undisturbed(call, page_size):
    """The pages and outputs of a run without failures."""
    world = World(page_size=page_size)
    call(world)
    done = world.facts(), world.held()
    go_on(world)
    return *done, world.facts(), world.held()


def assert_same(got, want, what):
    __tracebackhide__ = True
    for name, ours, theirs in zip(("pages", "outputs"), got, want, strict=True):
        assert len(ours) == len(theirs)
        for i, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            assert_bits(one, other, f"{what}: {name} of stream or window {i} ")


HOW = {
    "before": {},
    "after": {"after": True},
    "interrupt": {"error": KeyboardInterrupt},
    "interrupt after": {"error": KeyboardInterrupt, "after": True},
    "dead": {"times": ALWAYS},
    "dead after": {"times": ALWAYS, "after": True},
}
SHORT = {f"{count} times": {"times": count} for count in (2, 3)}
"""So that what takes a failure back fails too, and what follows does not."""


@functools.cache
def operations(call, engine, page_size):
    """The names of a call's operations, in order."""
    world = World(engine, page_size)
    world.injector.arm(MOST)
    call(world)
    names = world.injector.names
    world.injector.disarm()
    assert 0 < len(names) < MOST or (call in (reserve, close, make) and world.pool.contiguous)
    return names


def sampled(names, case):
    """Numbers of some operations of each kind, which depend on the case."""
    chosen = set()
    for kind in sorted(set(names)):
        at = [number for number, name in enumerate(names) if name == kind]
        chosen.update(random.Random(f"{case} {kind}").sample(at, min(SAMPLES, len(at))))
    return sorted(chosen)


def cases(calls, hows, layouts, sweeps=(False, True)):
    """Every call, way to fail and layout: some operations of each, and, which is slow, all of them."""
    for every in sweeps:
        for call, (name, how), page_size in itertools.product(calls, hows.items(), layouts):
            if name == "2 times" and not every:  # three times does what twice does, and more
                continue
            ident = f"{call.__name__}, {name}, {page_size}, {'all' if every else 'some'}"
            yield pytest.param(call, how, page_size, every, id=ident, marks=[pytest.mark.slow] * every)


@pytest.mark.parametrize(
    ("call", "how", "page_size", "every"),
    [*cases(CALLS, HOW, [None, PAGE]), *cases(CALLS, SHORT, [None, PAGE], sweeps=(True,))],
)
def test_each_operation_may_fail(call, how, page_size, every):
    facts, held, later, held_later = undisturbed(call, page_size)
    names = operations(call, ENGINE, page_size)
    if call is append:
        assert set(names) == {"launch", "fence", "empty", "order"} | ({"zero", "write", "take"} if page_size else set())
    for number in range(len(names)) if every else sampled(names, how):
        world = World(page_size=page_size)
        before, bytes_before = world.facts(), world.held()
        world.injector.arm(number, **how)
        with contextlib.suppress(LaunchError, KeyboardInterrupt):
            call(world)
        name = world.injector.raised
        world.injector.disarm()
        assert name is not None
        what = f"{call.__name__}, operation {number} ({name}) failed"
        world.in_order()
        check_after_failure(world, call, before, bytes_before, facts, lasting=how.get("times", 1) > 1)
        call(world)
        assert world.facts() == facts, what
        world.in_order()
        assert_same(world.held(), held, what)
        go_on(world)
        assert world.facts() == later, what
        assert_same(world.held(), held_later, what)
        world.in_order()
        assert not any(stream.untidy for stream in world.streams if not stream.closed)


def check_after_failure(world, call, before, bytes_before, facts, *, lasting):
    """Nothing has changed, or for a rollback or a close all of it has."""
    __tracebackhide__ = True
    if call not in UNCHANGED:
        lengths = [stream.lengths for stream in world.streams]
        assert lengths in ([b[0] for b in before], [f[0] for f in facts])
    elif not lasting:
        assert world.facts() == before
        assert_same((world.held()[0], []), (bytes_before[0], []), "what failed changed bytes")
    else:
        assert [stream.lengths for stream in world.streams] == [b[0] for b in before]


def on_two_queues(call, number, how):
    """The call fails on queue 0, where its work stays pending; it is made again on queue 1, which runs first."""
    world = World(DELAYED)
    backend = world.engine.backend
    backend.synchronize()
    world.injector.arm(number, **how)
    with contextlib.suppress(LaunchError):
        call(world)
    assert world.injector.raised is not None
    world.injector.disarm()
    with backend.queue(1):
        call(world)
        newcomer = Stream(world.pool, WEIGHTS)
        count = min(24, world.pool.free * PAGE)
        window = newcomer.append(rows_of(7, 0, count))
        go_on(world)
    backend.run(1)
    backend.synchronize()
    world.streams.append(newcomer)
    return world, [bits(result.gated) for result in window]


def newcomer_first(call, number, how):
    """As `on_two_queues`, but another stream takes pages on queue 1 before the call is made again."""
    world = World(DELAYED)
    backend = world.engine.backend
    backend.synchronize()
    world.injector.arm(number, **how)
    with contextlib.suppress(LaunchError):
        call(world)
    world.injector.disarm()
    with backend.queue(1):
        newcomer = Stream(world.pool, WEIGHTS)
        window = newcomer.append(rows_of(7, 0, min(24, world.pool.free * PAGE)))
        backend.run(1)
    backend.synchronize()
    return world, newcomer, [bits(result.gated) for result in window]


QUEUED = [append, roll_back, reserve, close]
QUEUED_HOW = {name: HOW[name] for name in ("before", "after", "dead", "dead after")} | SHORT


@functools.cache
def alone(count):
    """The pages and outputs of a newcomer's window."""
    stream, want = grown(guarded_pool(TINY, streams=1, context=24, page_size=PAGE, engine=ENGINE), 7, count)
    return page_bits(stream), np.array([bits(rows) for rows in want])


@pytest.mark.parametrize(("call", "how", "page_size", "every"), list(cases(QUEUED, QUEUED_HOW, [PAGE])))
def test_what_failed_on_one_queue_harms_nothing_on_another(call, how, page_size, every):
    *_, later, held_later = undisturbed(call, page_size)
    names = operations(call, DELAYED, page_size)
    for number in range(len(names)) if every else sampled(names, how):
        world, outputs = on_two_queues(call, number, how)
        newcomer = world.streams.pop()
        pages, want = alone(newcomer.length)
        what = f"{call.__name__}, operation {number} ({names[number]}) failed"
        assert [stream.lengths for stream in world.streams] == [facts[0] for facts in later], what
        assert_same(world.held(), held_later, what)
        assert_bits(page_bits(newcomer), pages, f"{what}: pages of another stream")
        assert_bits(np.array(outputs), want, f"{what}: outputs of another stream")
        assert audit(world.pool, [*world.streams, newcomer]) == [], what


@pytest.mark.parametrize(("call", "how", "page_size", "every"), list(cases(QUEUED, QUEUED_HOW, [PAGE])))
def test_what_failed_on_one_queue_harms_no_newcomer_on_another(call, how, page_size, every):
    names = operations(call, DELAYED, page_size)
    for number in range(len(names)) if every else sampled(names, how):
        world, newcomer, outputs = newcomer_first(call, number, how)
        pages, want = alone(newcomer.length)
        what = f"{call.__name__}, operation {number} ({names[number]}) failed"
        assert_bits(page_bits(newcomer), pages, f"{what}: pages of another stream")
        assert_bits(np.array(outputs), want, f"{what}: outputs of another stream")
        assert audit(world.pool, [newcomer, *(s for s in world.streams if not s.closed)]) == [], what


def test_the_injector_fails_where_it_is_told():
    injector = Injector()
    seen = []
    injector.arm(1)
    injector.do("a", seen.append, 1)
    with pytest.raises(LaunchError, match="kernel b"):
        injector.do("b", seen.append, 2)
    injector.do("c", seen.append, 3)
    assert (seen, injector.raised) == ([1, 3], "b")
    injector.arm(0, after=True, times=2, error=KeyboardInterrupt)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            injector.do("d", seen.append, 4)
    injector.do("e", seen.append, 5)
    assert (seen, injector.names) == ([1, 3, 4, 4, 5], ["d", "d", "e"])
