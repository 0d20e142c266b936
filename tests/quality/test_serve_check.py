"""serve-check: green as it is, red for what it guards, and honest where it proves little."""

from __future__ import annotations

import dataclasses
import json
from itertools import pairwise

import numpy as np
import pytest
from kvproof.fast import PagePool, Stream, prompt_rows
from kvproof.oracle import serve_controls, serve_ground, serve_runs
from kvproof.oracle.bench_serve import append_cost, stream_memory
from kvproof.oracle.cli import app
from kvproof.oracle.serve_check import CHECKS, CONTROLS, LONG_CHECKS, run_unit, serve_plain, units, unseen
from kvproof.oracle.serve_ground import Ground, forced_drafts, scatter
from kvproof.oracle.serve_plan import ServePlan, at_serving, media_requests, text_requests
from kvproof.oracle.serve_run import Setting, serve_all, steps
from kvproof.oracle.serve_runs import LONG_RUNS, RUNS, Served
from kvproof.reference import FLASH_NEXT, TINY
from threadpoolctl import threadpool_limits
from typer.testing import CliRunner

PLAN = ServePlan(geometry=dataclasses.replace(TINY, layers=3), prompts=2, tokens=8, seed=3)
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
    assert served.prompts == PLAN.prompts
    assert served.bytes > 10_000


@pytest.mark.parametrize("check", RUNS)
def test_every_planted_fault_is_seen(ground, check):
    served = run_unit(ground, check, CONTROLS, REPLAY)
    assert [control.fault for control in served.controls if control.seen is None] == []
    assert served.controls
    assert served.green


def test_a_control_that_nothing_sees_is_red(ground, monkeypatch):
    monkeypatch.setattr(serve_controls, "write_table", lambda stream, table: None)
    served = run_unit(ground, "concurrent", CONTROLS, REPLAY)
    assert [control.seen for control in served.controls] == [None]
    assert not served.green


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


def test_drafts_that_never_stood_are_told():
    one = Served(check="drafted", run="own head", accepted=(3, 1, 0, 2))
    assert [failure.message for failure in unseen([one], "x")] == [
        "no round in which 2 of three drafts stood: the check is not effective; serve more --tokens or --prompts"
    ]
    assert unseen([one, dataclasses.replace(one, accepted=(0, 0, 1, 0))], "x") == []


def test_a_page_test_that_is_off_is_told(ground, monkeypatch):
    monkeypatch.setattr(serve_ground, "PAGE_TEST", "KVPROOF_NO_SUCH_THING")
    found = failures(ground, "page-test", "page 16")
    assert {failure.message for failure in found} == {"the page test did not page the caches: it is not effective"}


def test_tables_in_order_are_told(ground, monkeypatch):
    monkeypatch.setattr(serve_ground, "scatter", lambda *args: None)
    found = failures(ground, "paged", "page 16")
    assert [failure.message for failure in found] == ["no page table was out of order: the run is not effective"]


def test_pages_are_scattered_and_given_back(ground):
    request = ground.text[1]
    server = ground.server(request, page_size=8, streams=2)
    session = server.open(request.tokens, tokens=4)
    scatter(server, session, np.random.default_rng(0))
    pages = session.live.pages
    assert sorted(pages) != list(pages)
    assert server.pool.free + len(pages) == server.pool.layout.pages
    assert server.pool.audit() == []


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
    monkeypatch.setattr("kvproof.oracle.serve_plan.LONG_PROMPT", 700)
    monkeypatch.setattr(serve_controls, "RESTORED", 650)
    plan = ServePlan(geometry=LONG, prompts=1)
    setting = Setting(plan=plan, checks=tuple(LONG_CHECKS), backend="host", replay=REPLAY, jobs=1)
    found = serve_all(setting, lambda told: None)
    assert [one.failures for one in found if one.failures] == []
    assert all(one.green for one in found)
    assert unseen(found, "x") == []
    assert sum(len(one.controls) for one in found) == 3


# ---- the command ----


def invoke(*words):
    return CliRunner().invoke(app, ["serve-check", *words])


def test_the_command_writes_a_table_and_json(tmp_path):
    file = tmp_path / "out.json"
    words = ("--only", "chunked", "--prompts", "1", "--tokens", "2", "--jobs", "1", "--backend", "host")
    done = invoke(*words, "--json", str(file))
    assert done.exit_code == 0, done.output
    told = json.loads(file.read_text())
    assert told["green"] is True
    assert told["facts"]["prompts"] == 1
    assert {one["check"] for one in told["runs"]} == {"baseline", "chunked"}


def test_the_command_is_red_where_a_run_differs(tmp_path, monkeypatch):
    monkeypatch.setattr(serve_runs, "CHUNKED_TOKENS", 2)
    real = serve_ground.Ground.solo

    def spoiled(self, request, **options):
        trace, session = real(self, request, **options)
        if options.get("chunk") == 64:
            trace.tokens[-1] += 1
        return trace, session

    monkeypatch.setattr(serve_ground.Ground, "solo", spoiled)
    file = tmp_path / "out.json"
    words = ("--only", "chunked", "--prompts", "1", "--tokens", "2", "--jobs", "1", "--backend", "host")
    done = invoke(*words, "--json", str(file))
    assert done.exit_code == 1
    [failure] = [failure for one in json.loads(file.read_text())["runs"] for failure in one["failures"]]
    assert (failure["run"], failure["prompt"]) == ("chunk 64", "text 0")
    assert failure["message"].startswith("tokens: stream 0, position ")
    assert failure["replay"] == (
        "kvproof serve-check --geometry tiny --only chunked --prompts 1 --tokens 2 --backend host --seed 0"
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
        plan = dataclasses.replace(PLAN, prompts=1)
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
    assert unseen(found[1:2], "x") == []
    assert min(found[1].accepted) >= 3


# ---- what streams cost ----


def test_a_stream_takes_less_than_a_kibibyte_of_each_page():
    for size in (4, 64):
        found = stream_memory(size)
        assert found.pages == -(-40_000 // size)
        assert 4 < found.per_page < 1024  # its table's entry, and what a list takes


def test_the_time_beside_the_kernels_is_told(monkeypatch):
    monkeypatch.setattr("kvproof.oracle.bench_serve.CONTEXT", 256)
    cost = append_cost(16, 2, TINY)
    assert cost.kernels_ms > 0
    assert cost.python_ms > 0
    assert cost.least <= cost.share
