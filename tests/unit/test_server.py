"""The small server: windows, drafts, rounds that fail, and sessions that are kept and resumed."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from fiber_gpu import fiber_backend
from kvproof.fast import Engine, HostBackend, LaunchError, PoolExhaustedError
from kvproof.oracle.serving.model import ServeModel
from kvproof.oracle.serving.plan import media_rope
from kvproof.oracle.serving.server import Server
from kvproof.oracle.serving.trace import compare_traces, in_order
from kvproof.reference import TINY
from streams import ODD
from threadpoolctl import threadpool_limits

SERVED = dataclasses.replace(TINY, layers=3)
MODEL = ServeModel(SERVED, seed=4)
PROMPT = np.random.default_rng(0).integers(0, MODEL.vocabulary, 38).tolist()
TOKENS = 12
END = len(PROMPT) + TOKENS


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    with threadpool_limits(1):
        yield


@pytest.fixture(scope="module")
def engine():
    made = Engine(HostBackend(workers=1))
    made.prepare(SERVED)
    return made


@pytest.fixture(scope="module")
def plain(engine):
    return serve(server(engine))


def server(engine, model=MODEL, **options):
    return Server(model, **{"streams": 1, "context": len(PROMPT) + TOKENS, "engine": engine, **options})


def serve(one, prompt=PROMPT, tokens=TOKENS, **options):
    return finish(one, one.open(prompt, tokens=tokens, **options))


def finish(one, session):
    while not session.done:
        one.step([session])
        session.trace.look_behind(session.live)
    return one.end(session)


def equal(got, want, tokens=END):
    found = compare_traces(got, want, tokens=tokens)
    assert found.differences == ()
    assert found.bytes > 0


# ---- drafts ----


@pytest.mark.parametrize("page", [None, 4, 8, 48])
def test_the_heads_drafts_change_nothing(engine, plain, page):
    equal(serve(server(engine, page_size=page, draft="head")), plain)


@pytest.mark.parametrize("stands", [0, 1, 2, 3])
@pytest.mark.parametrize("page", [4, 8])
def test_any_number_of_drafts_may_stand(engine, plain, stands, page):
    def draft(session, count):
        right = plain.tokens[len(session.tokens) :][:count]
        return [t if i < stands else (t + 1) % MODEL.vocabulary for i, t in enumerate(right)]

    one = server(engine, page_size=page, draft=draft)
    session = one.open(PROMPT, tokens=TOKENS)
    equal(finish(one, session), plain)
    assert [i for i, count in enumerate(session.accepted) if count] == [stands]


def test_a_drafter_may_give_fewer_or_more(engine, plain):
    asked = []

    def draft(session, count):
        asked.append(count)
        return plain.tokens[len(session.tokens) :][: len(asked) % 3] + [0] * 9

    equal(serve(server(engine, page_size=4, draft=draft)), plain)
    assert max(asked) == 3


def test_drafts_end_with_the_limit_and_the_context(engine, plain):
    asked = []

    def draft(session, count):
        asked.append((session.generated, count))
        return [0] * count

    equal(serve(server(engine, draft=draft)), plain)
    assert asked[-3:] == [(TOKENS - 4, 3), (TOKENS - 3, 2), (TOKENS - 2, 1)]
    asked.clear()
    tight = serve(server(engine, draft=draft, context=len(PROMPT) + 4, page_size=4), tokens=5)
    assert tight.tokens == plain.tokens[: len(PROMPT) + 5]
    assert asked == [(1, 3), (2, 2), (3, 1)]


def test_the_head_drafts_again_after_each_round(engine, plain):
    """Its first draft is what its own row says, in whatever way the round before went."""
    one = server(engine, page_size=4, draft="head")
    session = one.open(PROMPT, tokens=TOKENS)
    seen = []
    while not session.done:
        one.step([session])
        seen.append(session.draft)
    assert all(0 <= draft < MODEL.vocabulary for draft in seen)
    assert session.live.lengths == (len(session.tokens) - 1,) * SERVED.layers


# ---- prompts ----


@pytest.mark.parametrize("chunk", [1, 3, 16, 37, 38])
def test_chunks_of_a_prompt_change_nothing(engine, plain, chunk):
    equal(serve(server(engine, chunk=chunk, page_size=8)), plain)


def test_a_media_prompt_in_chunks_and_drafted(engine):
    rope = media_rope(len(PROMPT), image=(9, 3, 4))
    want = serve(server(engine), rope=rope)
    equal(serve(server(engine, chunk=7, page_size=8, draft="head"), rope=rope), want)
    as_text = serve(server(engine))
    assert "layer 0 keys" in compare_traces(as_text, want, tokens=len(want.tokens)).tensors


def test_an_image_stands_at_one_time_and_on_its_grid():
    rope = media_rope(9, image=(2, 2, 2))
    assert rope.triples.tolist() == [
        [0, 0, 0],
        [1, 1, 1],
        [2, 2, 2],
        [2, 2, 3],
        [2, 3, 2],
        [2, 3, 3],
        [4, 4, 4],
        [5, 5, 5],
        [6, 6, 6],
    ]
    assert rope.delta == -2


def test_another_geometry(engine):
    model = ServeModel(ODD)
    want = serve(server(engine, model))
    equal(serve(server(engine, model, page_size=8, draft="head", chunk=5)), want)


def test_an_old_page_changes_the_text(engine, plain):
    """Attention matters: values of positions that stand beyond the sparse budget."""
    one = server(engine, page_size=4)
    session = one.open(PROMPT, tokens=TOKENS)
    one.step([session])
    cache = session.live.cache(0)
    cache.write("values", np.arange(8), -4 * cache.read("values", np.arange(8)))
    found = compare_traces(finish(one, session), plain, tokens=len(plain.tokens))
    assert found.tokens_differ
    assert "page 0" in next(words for words in found.differences if words.startswith("layer 0 values"))


# ---- together ----


def test_a_prompts_chunk_shares_a_round_with_drafts(engine, plain):
    other = serve(server(engine), PROMPT[::-1])
    one = server(engine, streams=2, page_size=4, chunk=16, draft="head")
    first = one.open(PROMPT, tokens=TOKENS)
    for _ in range(4):
        one.step([first])
    late = one.open(PROMPT[::-1], tokens=TOKENS, number=1)
    traces = {}
    while len(traces) < 2:
        both = [session for session in (late, first) if session in one.sessions]
        one.step(both)
        traces.update({session.number: one.end(session) for session in both if session.done})
    equal(traces[0], plain)
    equal(traces[1], other)
    assert one.pool.audit() == []
    assert one.pool.free == one.pool.layout.pages


def test_a_round_without_pages_changes_nothing(engine, plain):
    one = server(engine, page_size=4, streams=1)
    first = one.open(PROMPT, tokens=TOKENS)
    one.step([first])
    second = one.open(PROMPT[::-1], tokens=TOKENS, number=1)
    pages, lengths, tokens = first.live.pages, first.live.lengths, list(first.tokens)
    with pytest.raises(PoolExhaustedError):
        one.step([first, second])
    assert (first.live.pages, first.live.lengths, first.tokens) == (pages, lengths, tokens)
    assert second.live.pages == ()
    one.drop(second)
    equal(finish(one, first), plain)


@pytest.mark.parametrize("failing", range(1, 60, 6))
def test_a_launch_that_fails_takes_the_whole_round_back(engine, plain, failing, monkeypatch):
    """In a speculative row, in the main layers, or in the head's layer."""
    one = server(engine, page_size=4, draft="head")
    session = one.open(PROMPT, tokens=TOKENS)
    one.step([session])
    before = session.live.lengths, list(session.tokens), session.draft, session.live.pages
    launch, calls = Engine.launch, []

    def counted(self, *args, **kwargs):
        calls.append(args)
        if len(calls) == failing:
            raise LaunchError("planted", None, None, "it failed")
        launch(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "launch", counted)
        for _ in range(9):
            if len(calls) < failing:
                before = session.live.lengths, list(session.tokens), session.draft, session.live.pages
                try:
                    one.step([session])
                except LaunchError:
                    break
    assert len(calls) == failing
    assert (session.live.lengths, session.tokens, session.draft, session.live.pages) == before
    equal(finish(one, session), plain)
    assert one.pool.audit() == []


# ---- kept and resumed ----


@pytest.mark.parametrize("positions", [1, 3, 4, 16, 37])
def test_a_prompts_beginning_is_restored(engine, plain, positions):
    here = server(engine, page_size=8, chunk=20)
    session = here.open(PROMPT, tokens=1)
    while not session.done:
        here.step([session])
    kept = here.keep(session, positions)
    there = server(engine, page_size=4, draft="head")
    resumed = there.open(PROMPT, tokens=TOKENS, kept=kept)
    assert resumed.live.lengths == (positions,) * SERVED.layers
    trace = finish(there, resumed)
    assert trace.first == positions
    equal(trace, plain)


def test_a_session_goes_on_in_another_pool_at_any_moment(engine, plain):
    places = [server(engine, page_size=4, draft="head", chunk=11), server(engine, draft="head", chunk=5)]
    session = places[0].open(PROMPT, tokens=TOKENS)
    for turn in range(99):
        here, there = places[turn % 2], places[1 - turn % 2]
        here.step([session])
        if session.done:
            break
        kept = here.suspend(session)
        assert here.pool.free == here.pool.layout.pages
        there.resume(session, kept)
    equal(here.end(session), plain)


def test_a_state_of_another_text_is_refused(engine):
    one = server(engine, page_size=4, streams=2)
    session = one.open(PROMPT, tokens=TOKENS)
    one.step([session])
    kept = one.keep(session, 20)
    with pytest.raises(ValueError, match="does not begin with the 21 tokens that were kept"):
        one.open([*PROMPT[:20], PROMPT[20] ^ 1], tokens=1, kept=kept)
    assert one.sessions == [session]
    with pytest.raises(ValueError, match="session 0 has a stream; suspend it first"):
        one.resume(session, kept)
    one.suspend(session)
    with pytest.raises(ValueError, match=r"has run 38 positions; .* but this one has 20"):
        one.resume(session, kept)
    with pytest.raises(ValueError, match="session 0 is kept away; resume it first"):
        one.step([session])
    assert one.pool.free == one.pool.layout.pages


def test_misuse_is_refused(engine):
    with pytest.raises(ValueError, match="chunk is 0; it must be at least 1 row"):
        server(engine, chunk=0)
    one = server(engine)
    with pytest.raises(ValueError, match="a prompt of 0 tokens, and 1 to generate; both must be at least 1"):
        one.open([], tokens=1)
    session = one.open(PROMPT, tokens=1)
    one.step([session])
    with pytest.raises(ValueError, match="session 0 has its 1 tokens; end it"):
        one.step([session])


# ---- comparison ----


def test_a_difference_names_tensor_position_and_page(engine, plain):
    one = server(engine, page_size=4)
    session = one.open(PROMPT, tokens=TOKENS)
    while not session.done:
        one.step([session])
    page = session.live.pages[2]
    session.live.cache(1).write("index_keys", [9], -session.live.cache(1).read("index_keys", [9]))
    found = compare_traces(one.end(session), plain, tokens=len(plain.tokens))
    assert found.tensors == ("layer 1 index_keys",)
    assert f"position 9 (page {page}, table entry 2, row 1 of the page)" in found.differences[0]


def test_rows_behind_the_last_and_missing_rows_are_seen(engine, plain):
    one = server(engine, page_size=16)
    session = one.open(PROMPT, tokens=TOKENS)
    while not session.done:
        one.step([session])
    end = session.live.length
    session.live.cache(2).write("keys", [end], session.live.cache(2).read("keys", [0]))
    trace = one.end(session)
    found = compare_traces(trace, plain, tokens=len(plain.tokens))
    assert found.tensors == ("rows behind the last",)
    assert found.differences[0].startswith(f"layer 2 keys: row {end} is not zeros, though the layer holds {end}")
    trace.stale.clear()
    trace.outputs[1] = [trace.output(1)[:-1]]
    assert compare_traces(trace, plain, tokens=len(plain.tokens)).tensors == ("layer 1 output",)


def test_what_ends_early_is_not_equal(engine, plain):
    """Its tokens, outputs and caches are those of the plain run's beginning."""
    trace = serve(server(engine), tokens=TOKENS - 2)
    equal(trace, plain, len(PROMPT) + TOKENS - 2)
    found = compare_traces(trace, plain, tokens=len(plain.tokens))
    assert found.differences == (f"tokens: {len(PROMPT) + 10}, but the prompt and what it was to generate are 50",)
    assert found.tokens_differ


def test_a_trace_without_its_caches_is_not_equal(engine, plain):
    trace = serve(server(engine))
    trace.caches = trace.caches[:-1]
    found = compare_traces(trace, plain, tokens=len(plain.tokens))
    assert found.differences == ("outputs of 3 and caches of 2 layers of 3",)
    assert found.tensors == ("layers",)


def test_a_table_is_in_order_or_it_is_not(engine):
    assert in_order([3, 5, 5, 8])
    assert not in_order([3, 5, 4, 8])
    assert in_order([0])
    assert not in_order([2])
    one = server(engine, page_size=16, streams=2)
    assert not serve(one).scattered
    assert not serve(server(engine)).scattered
    first, second = one.open(PROMPT, tokens=1), one.open(PROMPT, tokens=TOKENS)
    one.step([first, second])
    one.drop(first)
    assert finish(one, second).scattered  # its last page is one that the first gave back


def test_a_device_that_is_never_waited_for_serves_the_same(plain):
    device = Engine(fiber_backend(), threads=16)
    one = server(device, page_size=8, draft="head", chunk=30)
    equal(serve(one, tokens=4), plain, len(PROMPT) + 4)
