"""serve-check: green as it is, red for what it guards, and honest where it proves little."""

from __future__ import annotations

import dataclasses
import json
from itertools import pairwise

import numpy as np
import pytest
from fiber_gpu import fiber_backend
from kvproof.fast import Engine, PageError, PagePool, PoolExhaustedError, Round, Stream, prompt_rows
from kvproof.fast import round as rounds
from kvproof.oracle.cli import app
from kvproof.oracle.serving import controls as serve_controls
from kvproof.oracle.serving import ground as serve_ground
from kvproof.oracle.serving import runs as serve_runs
from kvproof.oracle.serving.audit import GuardedPool, audit
from kvproof.oracle.serving.bench import append_cost, stream_memory
from kvproof.oracle.serving.check import CHECKS, LONG_CHECKS, run_unit, serve_plain, units
from kvproof.oracle.serving.controls import PAGE
from kvproof.oracle.serving.ground import Ground, forced_drafts, left_over, scatter
from kvproof.oracle.serving.judge import Fault, judge
from kvproof.oracle.serving.plan import ServePlan, at_serving, media_requests, shortened, text_requests
from kvproof.oracle.serving.run import Setting, serve_all, steps
from kvproof.oracle.serving.runs import LONG_RUNS, RUNS
from kvproof.oracle.serving.served import CONTROLS, Run, Served, require_drafts, require_turns, run_all
from kvproof.oracle.serving.server import Server
from kvproof.oracle.serving.session import Session
from kvproof.oracle.serving.together import MOST_FUTILE
from kvproof.reference import FLASH_NEXT, TINY
from kvproof.reference.geometry import TEXT
from threadpoolctl import threadpool_limits
from typer.testing import CliRunner

PLAN = ServePlan(geometry=dataclasses.replace(TINY, layers=3), prompts=4, tokens=16, seed=3, edges=(19, 66, 520, 132))
"""Short prompts with which every run is effective: the largest chunk cuts one."""
REPLAY = "kvproof serve-check --only {check}"


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    with threadpool_limits(1):
        yield


@pytest.fixture(scope="module")
def ground(engine):
    made = Ground(PLAN, engine)
    made.wants = serve_plain(made, made.text + made.media)
    return made


UNITS = [(check, run) for check, runs in RUNS.items() for run in runs]


@pytest.mark.parametrize(("check", "run"), UNITS, ids=lambda x: x.replace(" ", "-"))
def test_every_run_is_equal(ground, check, run):
    served = run_unit(ground, check, run, REPLAY)
    assert served.failures == []
    requests = RUNS[check][run].requests(ground)
    assert served.prompts == len(requests) >= PLAN.prompts
    assert served.tokens == sum(request.limit for request in requests)
    assert served.bytes > 10_000


@pytest.mark.parametrize("check", RUNS)
def test_every_planted_fault_is_seen(ground, check):
    served = run_unit(ground, check, CONTROLS, REPLAY)
    assert [control for control in served.controls if not control.green] == []
    assert served.controls
    assert served.green


def test_a_control_that_nothing_sees_is_red(ground, monkeypatch):
    monkeypatch.setattr(serve_controls, "write_table", lambda stream, table: None)
    served = run_unit(ground, "concurrent", CONTROLS, REPLAY)
    assert [(control.seen, control.problem) for control in served.controls] == [((), "seen in nothing")]
    assert not served.green


@pytest.mark.parametrize("check", RUNS)
def test_a_control_does_not_count_where_nothing_can_be_served(ground, check, monkeypatch):
    def exhausted(self, owner, count=1):
        raise PoolExhaustedError(count, 0, self.layout.pages)

    kept = ground.prepared(serve_controls._short(ground), 15, page_size=PAGE)
    monkeypatch.setattr(PagePool, "take", exhausted)
    if check == "resumed":
        served = run_unit(ground, check, CONTROLS, REPLAY)
        assert [failure.message[:20] for failure in served.failures] == ["PoolExhaustedError: "]
        assert not served.green
        monkeypatch.setattr(Ground, "prepared", lambda *args, **options: kept)
    served = run_unit(ground, check, CONTROLS, REPLAY)
    assert served.controls
    for control in served.controls:
        assert not control.green
        assert control.problem.startswith("without the fault: PoolExhaustedError: ")
        assert control.seen == ()


def test_a_control_must_be_seen_where_it_is_planted(ground, monkeypatch):
    def refuse(stream, table):
        raise PageError("planted")

    with monkeypatch.context() as patch:
        patch.setattr(serve_controls, "write_table", refuse)
        served = run_unit(ground, "concurrent", CONTROLS, REPLAY)
    assert [(c.seen, c.problem, c.green) for c in served.controls] == [(("PageError",), "PageError: planted", False)]
    request = shortened(ground.text[0], 4)
    other = dataclasses.replace(request, tokens=(request.tokens[0] ^ 1, *request.tokens[1:]))

    def judged(expected):
        fault = Fault(words="another prompt", expected=expected, plant=lambda: ground.solo(other)[0])
        [control] = judge(ground, request, lambda: ground.solo(request)[0], [fault])
        return control

    assert judged("tokens").green
    elsewhere = judged("PageError")
    assert not elsewhere.green
    assert elsewhere.problem.startswith("seen in tokens, layer 0 output")


def test_a_check_without_a_fault_is_red(ground, monkeypatch):
    monkeypatch.setitem(serve_controls._CONTROLS, "paged", lambda ground: iter(()))
    served = run_unit(ground, "paged", CONTROLS, REPLAY)
    assert [failure.message for failure in served.failures] == ["no fault was planted"]
    assert not served.green


def test_a_twin_that_differs_counts_no_fault(ground):
    request = shortened(ground.text[0], 4)
    fault = Fault(words="fewer tokens", expected="tokens", plant=lambda: ground.solo(shortened(request, 3))[0])
    [control] = judge(ground, request, fault.plant, [fault])
    assert control.problem.startswith("without the fault: tokens: ")
    assert not control.green


# ---- red for a broken core ----


def failures(ground, check, run):
    return run_unit(ground, check, run, REPLAY).failures


def test_a_rollback_that_zeroes_nothing_is_red(ground, monkeypatch):
    monkeypatch.setattr(Stream, "_zero_past_end", lambda self, layer: None)
    found = failures(ground, "drafted", "0 to 3 in turns, page 16")
    assert "is not zeros, though the layer holds" in found[0].message
    assert found[0].prompt.startswith("text ")
    assert found[0].replay == REPLAY


def test_a_rollback_of_too_few_rows_is_red(ground, monkeypatch):
    roll_back = Stream.roll_back

    def one_less(self, length, *, layers=None):
        return roll_back(self, min(length + 1, min(self.lengths[layer] for layer in layers)), layers=layers)

    monkeypatch.setattr(Stream, "roll_back", one_less)
    found = failures(ground, "drafted", "0 to 3 in turns, page 16")
    assert found[0].message.startswith("StreamError: stream 0 should have lost")
    assert found[0].prompt == "after 0 prompts"


def test_a_pool_that_gives_a_page_twice_is_red(ground, monkeypatch):
    take = PagePool.take

    def shared(self, owner, count=1):
        pages = take(self, owner, count)
        others = [page for page, holder in enumerate(self._holders) if isinstance(holder, Stream) and holder != owner]
        return (*pages[:-1], others[0]) if pages and others else pages

    monkeypatch.setattr(PagePool, "take", shared)
    assert failures(ground, "concurrent", "plain")


def test_a_restore_without_pooled_rows_is_red(ground, monkeypatch):
    write = prompt_rows.write_rows

    def without(stream, layers, positions):
        write(stream, [dataclasses.replace(one, pooled=np.zeros_like(one.pooled)) for one in layers], positions)

    monkeypatch.setattr("kvproof.fast.prompt_cache.write_rows", without)
    found = failures(ground, "resumed", "memory, page 16 to 48")
    assert any("pooled" in failure.message for failure in found)
    assert any("output" in failure.message for failure in found)


def test_a_table_that_is_not_written_is_red(ground, monkeypatch):
    enter = Stream._enter

    def first_only(self, first, pages):
        if self.pool.contiguous or first == 0:
            enter(self, first, pages)

    monkeypatch.setattr(Stream, "_enter", first_only)
    assert failures(ground, "paged", "page 16")


# ---- honest ----


NOT_EFFECTIVE = ": the run is not effective; serve more --prompts or --tokens"


def told(ground, check, run):
    """What a run lacks to be effective; nothing else may be wrong with it."""
    messages = [failure.message for failure in failures(ground, check, run)]
    assert all(message.endswith(NOT_EFFECTIVE) for message in messages), messages
    return [message.removesuffix(NOT_EFFECTIVE) for message in messages]


@pytest.mark.parametrize(
    ("demand", "accepted", "lacking"),
    [
        (require_turns, (3, 1, 0, 2), ["no round in which 2 of three drafts stood"]),
        (require_turns, (0, 1, 0, 2), ["no round in which 0 or 2 of three drafts stood"]),
        (require_turns, (), ["no round in which 0 of three drafts stood"]),
        (require_turns, (1, 1, 1, 1), []),
        (require_drafts, (0, 0, 0, 2), ["no round in which one of three drafts was refuted"]),
        (require_drafts, (2, 0, 0, 0), ["no round in which one of three drafts stood"]),
        (require_drafts, (0, 0, 1, 0), []),
    ],
)
def test_drafts_that_never_stood_are_told(ground, demand, accepted, lacking):
    one = Served(check="drafted", run="own head", accepted=accepted)
    demand(ground, one)
    assert [failure.message.removesuffix(NOT_EFFECTIVE) for failure in one.failures] == lacking


@pytest.mark.parametrize(
    ("check", "run"),
    [
        ("drafted", "own head"),
        ("concurrent", "drafted, short of pages"),
        ("media", "own head, page 16"),
        ("media", "beside text, drafted, short of pages"),
    ],
)
def test_a_head_that_never_drafts_is_told(ground, check, run, monkeypatch):
    monkeypatch.setattr(Server, "_head_drafts", lambda self, sessions, most: [[] for _ in sessions])
    assert "no round in which one of three drafts stood" in told(ground, check, run)


def test_a_moved_session_that_never_drafts_is_told(ground, monkeypatch):
    monkeypatch.setattr(Server, "_head_drafts", lambda self, sessions, most: [[] for _ in sessions])
    run = "file, page 128 to contiguous, drafted"
    assert told(ground, "resumed", run) == ["no session drafted after it had moved"]


def test_a_page_test_that_is_off_is_told(ground, monkeypatch):
    monkeypatch.setattr(serve_ground, "PAGE_TEST", "KVPROOF_NO_SUCH_THING")
    assert told(ground, "page-test", "page 16") == ["the page test did not page the caches out of order"]


@pytest.mark.parametrize("page", [16, 512])
def test_tables_in_order_are_told(ground, monkeypatch, page):
    monkeypatch.setattr(serve_ground, "scatter", lambda *args: None)
    assert told(ground, "paged", f"page {page}") == ["a page table was in order"]


WHOLE = {"chunk": None}


@pytest.mark.parametrize(("check", "run"), [("chunked", "chunk 512"), ("media", "chunk 17")])
def test_prompts_that_are_read_at_once_are_told(ground, check, run, monkeypatch):
    server = Ground.server
    monkeypatch.setattr(Ground, "server", lambda self, request, **options: server(self, request, **options | WHOLE))
    found = told(ground, check, run)
    assert found[0] == f"no prompt was read in pieces of {run.removeprefix('chunk ')}"
    assert found[1:] == (["no image was cut"] if check == "media" else [])


def test_prompts_that_are_no_longer_than_the_chunk_are_told(ground):
    few = Run(serve=RUNS["chunked"]["chunk 64"].serve, requests=lambda ground: ground.text[:2])
    served = Served(check="chunked", run="chunk 64")
    run_all(ground, served, few)
    assert [failure.message for failure in served.failures] == ["no prompt was read in pieces of 64" + NOT_EFFECTIVE]


@pytest.mark.parametrize("run", RUNS["concurrent"])
def test_prompts_that_never_share_a_round_are_told(ground, run):
    served = Served(check="concurrent", run=run)
    run_all(ground, served, Run(serve=RUNS["concurrent"][run].serve, requests=lambda ground: ground.text[:1]))
    assert [failure.message.removesuffix(NOT_EFFECTIVE) for failure in served.failures][:2] == [
        "no round had several streams",
        "no round had a prompt of one stream beside a decode of another",
    ]


def test_pages_that_suffice_are_told(ground, monkeypatch):
    server = Ground.server
    roomy = {"streams": 8}
    monkeypatch.setattr(Ground, "server", lambda self, request, **options: server(self, request, **options | roomy))
    assert told(ground, "concurrent", "drafted, short of pages")[0] == "pages never ran out"


def test_pages_that_never_suffice_end(ground, monkeypatch):
    def exhausted(self, owner, count=1):
        raise PoolExhaustedError(count, 0, self.layout.pages)

    monkeypatch.setattr(PagePool, "take", exhausted)
    [failure] = failures(ground, "concurrent", "plain")
    assert failure.message.startswith(f"PageError: pages ran out {MOST_FUTILE + 1} times in a row")


ENDING = [("drafted", "own head"), ("concurrent", "plain"), ("paged", "page 16"), ("chunked", "chunk 17")]


@pytest.mark.parametrize(("check", "run"), ENDING, ids=lambda x: x.replace(" ", "-"))
def test_a_session_that_ends_early_is_red(ground, check, run, monkeypatch):
    """All its bytes are those of the plain run's beginning."""
    monkeypatch.setattr(Session, "done", property(lambda session: session.generated >= 1))
    found = failures(ground, check, run)
    prompts = {request.name: len(request.tokens) for request in RUNS[check][run].requests(ground)}
    first = {failure.prompt: failure.message for failure in reversed(found) if failure.prompt in prompts}
    assert first.keys() == prompts.keys()
    assert all(first[name].startswith(f"tokens: {length + 1}, but") for name, length in prompts.items())


def test_a_plain_run_that_ends_early_is_red(ground, monkeypatch):
    monkeypatch.setattr(Session, "done", property(lambda session: session.generated >= 1))
    served = Served(check="baseline", run="plain")
    serve_plain(ground, ground.text[:1], served)
    assert [failure.message[:10] for failure in served.failures] == ["tokens: 21"]


def test_a_plain_run_with_rows_behind_its_last_is_red(ground, monkeypatch):
    end = Server.end

    def spoiled(self, session):
        stream = session.live
        stream.cache(0).write("keys", [stream.length], stream.cache(0).read("keys", [0]))
        return end(self, session)

    monkeypatch.setattr(Server, "end", spoiled)
    served = Served(check="baseline", run="plain")
    serve_plain(ground, ground.text[:1], served)
    [failure] = served.failures
    assert failure.message.startswith("layer 0 keys: row 35 is not zeros")


def test_a_prompt_that_is_not_served_is_told(ground):
    def but_one(ground, served, requests):
        for request in requests[1:]:
            yield request, ground.solo(request)[0]

    served = Served(check="x", run="y")
    run_all(ground, served, Run(serve=but_one, requests=lambda ground: ground.text[:2]))
    assert [(failure.prompt, failure.message) for failure in served.failures] == [("text 0", "it was not served")]
    served = Served(check="x", run="y")
    run_all(ground, served, Run(serve=but_one, requests=lambda ground: []))
    assert [(failure.prompt, failure.message) for failure in served.failures] == [("all", "it was not served")]


# ---- pages ----


class _Gone:
    """Holds a page, and is no stream."""

    length = 0


@pytest.mark.parametrize(
    ("check", "run"), [("concurrent", "plain"), ("paged", "page 16"), ("resumed", "memory, page 16 to 48")]
)
def test_a_page_that_is_not_given_back_is_red(ground, check, run, monkeypatch):
    give_back = PagePool.give_back

    def but_one(self, owner, pages):
        pages = tuple(pages)
        if pages and isinstance(owner, Stream):
            self._holders[pages[-1]] = _Gone()
            pages = pages[:-1]
        give_back(self, owner, pages)

    monkeypatch.setattr(PagePool, "give_back", but_one)
    found = failures(ground, check, run)
    assert "_Gone object" in found[0].message
    assert "is not an open stream of those given" in found[0].message


def test_prompts_that_share_an_arena_are_audited_on_the_way(ground, monkeypatch):
    seen = []

    def spoiled(pool, streams):
        seen.append(len(streams))
        return ["planted"] if len(streams) > 1 else audit(pool, streams)

    monkeypatch.setattr(serve_runs, "audit", spoiled)
    assert [failure.message for failure in failures(ground, "concurrent", "plain")] == ["PageError: planted"]
    assert seen[-1] > 1


def test_pages_on_a_device_are_counted():
    engine = Engine(fiber_backend(), threads=16)
    pool = PagePool(TINY, streams=1, context=16, page_size=4, engine=engine)
    assert left_over(pool) == []
    taken = pool.take(_Gone(), 3)
    assert left_over(pool) == ["3 of 4 pages were not given back"]
    pool.give_back(pool.holder(taken[0]), taken)
    assert left_over(pool) == []


def test_a_page_that_is_written_when_it_is_free_is_red(ground, monkeypatch):
    give_back = GuardedPool.give_back

    def written(self, owner, pages):
        pages = tuple(pages)
        give_back(self, owner, pages)
        if isinstance(owner, Stream) and pages:
            self.page(pages[0])[5] = 0

    monkeypatch.setattr(GuardedPool, "give_back", written)
    assert "written while the page is free" in failures(ground, "drafted", "own head")[0].message


# ---- images beside text ----


def test_a_round_that_reads_images_as_text_beside_others_is_red(ground, monkeypatch):
    """Alone they are right, so that only prompts that share a round show it."""
    several = []
    attend, window = Round.attend, rounds.window

    def of_several(self, layer, projections):
        several[:] = [len(self.streams) > 1]
        return attend(self, layer, projections)

    def as_text(geometry, weights, cache, projection, pos0, rope, **options):
        spoiled = several[0] and rope.mode == "media"
        return window(geometry, weights, cache, projection, pos0, TEXT if spoiled else rope, **options)

    monkeypatch.setattr(Round, "attend", of_several)
    monkeypatch.setattr(rounds, "window", as_text)
    found = failures(ground, "media", "beside text, drafted, short of pages")
    assert {failure.prompt.split()[0] for failure in found} == {"media"}
    assert any("layer 0 keys" in failure.message for failure in found)
    assert failures(ground, "media", "own head, page 16") == []


def test_a_cut_is_inside_an_image_or_it_is_not(ground):
    request = ground.media[1]
    [image] = [np.flatnonzero(np.diff(request.rope.triples[:, 0]) == 0)]
    first, last = image[0] + 1, image[-1] + 1
    assert [serve_runs._inside_image(request, p) for p in (first - 1, first, last, last + 1)] == [
        False,
        True,
        True,
        False,
    ]
    assert not serve_runs._inside_image(ground.text[0], 5)


def test_images_that_are_served_by_themselves_are_told(ground, monkeypatch):
    served = Served(check="media", run="beside text")
    only = Run(serve=RUNS["media"]["beside text, drafted, short of pages"].serve, requests=lambda ground: ground.media)
    run_all(ground, served, only)
    assert "no round had an image beside text" + NOT_EFFECTIVE in [failure.message for failure in served.failures]


def test_pages_are_scattered_and_given_back(ground):
    request = ground.text[1]
    server = ground.server(request, page_size=8, streams=2)
    session = server.open(request.tokens, tokens=4)
    scatter(server, session, np.random.default_rng(0))
    pages = session.live.pages
    assert sorted(pages) != list(pages)
    assert server.pool.free + len(pages) == server.pool.layout.pages
    assert server.pool.audit() == []


@pytest.mark.parametrize("seed", range(6))
def test_a_single_page_is_not_the_first(ground, seed):
    server = ground.server(ground.text[0], page_size=64, streams=2)
    session = server.open(ground.text[0].tokens, tokens=4)
    scatter(server, session, np.random.default_rng(seed))
    assert session.live.pages == (1,)
    alone = ground.server(ground.text[0], page_size=64)
    with pytest.raises(ValueError, match="the pool has 1 free pages; scattering needs at least 2"):
        scatter(alone, alone.open(ground.text[0].tokens, tokens=4), np.random.default_rng(seed))


def test_the_drafts_in_turns_stand_in_turns(ground):
    request = ground.text[0]
    session = ground.solo(request, draft=forced_drafts(ground.model, ground.wants[request.name]))[1]
    assert sum(session.accepted) >= 2


def test_no_text_falls_into_a_short_cycle(ground):
    """Else most faults would leave it as it is."""
    for request in ground.text:
        text = ground.wants[request.name].tokens[len(request.tokens) :]
        assert len(set(pairwise(text))) >= len(text) - 2


# ---- the plan ----


def test_the_prompts_stand_on_every_edge():
    plan = ServePlan(geometry=at_serving(TINY))
    made = Ground(plan, None)
    lengths = [len(request.tokens) for request in made.text]
    budget = TINY.budget + TINY.block - 1
    for edge in (budget, 64, 128, 144, 256, 512, 4 * 512 + TINY.budget):
        assert any(abs(length - edge) <= 2 for length in lengths), edge
    assert len(made.text) == len(made.media) == 8
    assert {request.rope.mode for request in made.text} == {"text", "delta"}
    assert {request.rope.mode for request in made.media} == {"media"}
    assert all((request.rope.triples[:, 1] != request.rope.triples[:, 2]).any() for request in made.media)
    again = text_requests(plan, made.model) + media_requests(plan, made.model)
    assert [request.tokens for request in again] == [request.tokens for request in made.text + made.media]
    assert len({request.tokens for request in again}) == 16


def test_a_large_geometry_is_served_one_long_prompt():
    plan = ServePlan(geometry=at_serving(FLASH_NEXT), prompts=1)
    assert plan.geometry is FLASH_NEXT
    assert [run for run in units(plan, tuple(LONG_CHECKS)) if run[1] != CONTROLS] == [
        (check, run) for check, runs in LONG_RUNS.items() for run in runs
    ]
    assert set(CHECKS) == set(RUNS) == set(serve_controls._CONTROLS)
    assert set(LONG_CHECKS) == set(LONG_RUNS) == set(serve_controls._LONG_CONTROLS)


LONG = dataclasses.replace(TINY, name="long", layers=2, top_blocks=129)


@pytest.mark.slow
def test_the_long_checks_at_a_small_geometry(monkeypatch):
    """Whatever a large geometry runs, with a prompt that is long enough for a budget of 516."""
    monkeypatch.setattr("kvproof.oracle.serving.plan.LONG_PROMPT", 700)
    monkeypatch.setattr(serve_controls, "RESTORED", 650)
    plan = ServePlan(geometry=LONG, prompts=1)
    setting = Setting(plan=plan, checks=tuple(LONG_CHECKS), backend="host", replay=REPLAY, jobs=1)
    found = serve_all(setting, lambda told: None)
    assert [one.failures for one in found if one.failures] == []
    assert all(one.green for one in found)
    assert sum(len(one.controls) for one in found) == 3


# ---- the command ----


def invoke(*words):
    return CliRunner().invoke(app, ["serve-check", *words])


def test_the_command_writes_a_table_and_json(tmp_path):
    file = tmp_path / "out.json"
    words = ("--only", "paged", "--prompts", "1", "--tokens", "2", "--jobs", "1", "--backend", "host")
    done = invoke(*words, "--json", str(file))
    assert done.exit_code == 0, done.output
    told = json.loads(file.read_text())
    assert told["green"] is True
    assert told["facts"]["prompts"] == 1
    assert {one["check"] for one in told["runs"]} == {"baseline", "paged"}
    assert [one["tokens"] for one in told["runs"]] == [2] * 6 + [0]
    assert [control["expected"] for control in told["runs"][-1]["controls"]] == ["layer 0 output"] * 2
    assert "GREEN" in done.output


def test_the_command_is_red_where_a_run_differs(tmp_path, monkeypatch):
    real = serve_ground.Ground.solo

    def spoiled(self, request, **options):
        trace, session = real(self, request, **options)
        if options.get("page_size") == 48:
            trace.tokens[-1] += 1
        return trace, session

    monkeypatch.setattr(serve_ground.Ground, "solo", spoiled)
    file = tmp_path / "out.json"
    words = ("--only", "paged", "--prompts", "1", "--tokens", "2", "--jobs", "1", "--backend", "host")
    done = invoke(*words, "--json", str(file))
    assert done.exit_code == 1
    [failure] = [failure for one in json.loads(file.read_text())["runs"] for failure in one["failures"]]
    assert (failure["run"], failure["prompt"]) == ("page 48", "text 0")
    assert failure["message"].startswith("tokens: stream 0, position ")
    assert failure["replay"] == (
        "kvproof serve-check --geometry tiny --only paged --prompts 1 --tokens 2 --backend host --seed 0"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--only", "nothing"), "--only is 'nothing'; it must be one of drafted, concurrent, resumed, chunked, media"),
        (("--geometry", "flash_next", "--only", "media"), "--only is 'media'; it must be one of drafted, resumed"),
        (("--prompts", "0"), "--prompts is 0; it must be at least 1"),
        (("--tokens", "1"), "--tokens is 1; it must be at least 2"),
        (("--seed", "-1"), "--seed is -1; it must be at least 0"),
        (("--jobs", "0"), "--jobs is 0; it must be at least 1"),
        (("--json", "/no/such/folder/x"), "there is no folder /no/such/folder"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, tuple) else "",
)
def test_misuse_says_what_is_allowed(words, message):
    done = invoke(*words)
    assert isinstance(done.exception, ValueError)
    assert message in str(done.exception)


@pytest.mark.slow
def test_processes_find_what_one_finds():
    def found(jobs):
        plan = dataclasses.replace(PLAN, prompts=3)
        setting = Setting(plan=plan, checks=("drafted", "chunked"), backend="host", replay=REPLAY, jobs=jobs)
        told = []
        served = serve_all(setting, told.append)
        assert len(told) == steps(setting)
        return [dataclasses.replace(one, seconds=0.0) for one in served]

    assert found(2) == found(1)


@pytest.mark.slow
def test_the_default_plan_is_green_and_its_head_is_right_now_and_then(engine):
    plan = ServePlan(geometry=at_serving(TINY))
    setting = Setting(plan=plan, checks=("drafted",), backend="host", replay=REPLAY, jobs=2)
    found = serve_all(setting, lambda told: None)
    assert all(one.green for one in found)
    assert min(found[1].accepted) >= 3


# ---- what streams cost ----


def test_a_stream_takes_less_than_a_kibibyte_of_each_page():
    for size in (4, 64):
        found = stream_memory(size)
        assert found.pages == -(-40_000 // size)
        assert 4 < found.per_page < 1024  # its table's entry, and what a list takes


def test_the_time_beside_the_kernels_is_told(monkeypatch):
    monkeypatch.setattr("kvproof.oracle.serving.bench.CONTEXT", 256)
    cost = append_cost(16, 2, TINY)
    assert cost.kernels_ms > 0
    assert cost.python_ms > 0
    assert cost.least <= cost.share
