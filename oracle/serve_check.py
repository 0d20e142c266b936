"""`kvproof serve-check`: a served prompt gives the same bytes however it is served.

The plain run of each prompt, alone, over a contiguous cache and with the prompt read at once, is what all others are
held against: tokens, every layer's output rows, and every layer's cache at the end.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from .serve_controls import controls
from .serve_ground import Ground
from .serve_plan import Request, ServePlan
from .serve_runs import LONG_RUNS, RUNS, Served, ServeFailure, fail
from .serve_trace import Trace, compare_traces

CHECKS = {
    "drafted": "drafted == plain",
    "concurrent": "concurrent == solo",
    "resumed": "resumed == fresh",
    "chunked": "chunked prompt == one-shot",
    "media": "media prompts likewise",
    "paged": "paged == contiguous",
    "page-test": "page test == plain",
}
LONG_CHECKS = {
    "drafted": "paged and drafted == contiguous and plain",
    "resumed": "resumed == fresh",
}
CONTROLS = "controls"
BASELINE = "baseline"


def units(plan: ServePlan, checks: Sequence[str]) -> list[tuple[str, str]]:
    """The runs of the chosen checks, and the planting of their faults, as (check, run)."""
    table = LONG_RUNS if plan.long else RUNS
    return [(check, run) for check in checks for run in (*table[check], CONTROLS)]


def check_names(plan: ServePlan) -> dict[str, str]:
    """The checks of a plan, and what each claims."""
    return LONG_CHECKS if plan.long else CHECKS


def needs_media(checks: Sequence[str]) -> bool:
    """Whether the checks hold prompts with images against their plain runs."""
    return "media" in checks


def serve_plain(ground: Ground, requests: Sequence[Request]) -> dict[str, Trace]:
    """The plain contiguous run of prompts."""
    wants = {}
    for request in requests:
        trace = ground.solo(request)[0]
        trace.places = []  # whose arenas are not needed any more
        wants[request.name] = trace
    return wants


def run_unit(ground: Ground, check: str, run: str, replay: str) -> Served:
    """One run of a check, or its controls."""
    started = time.monotonic()
    ground.replay = replay
    served = Served(check=check, run=run)
    if run == CONTROLS:
        served.controls = list(controls(ground, check))
    else:
        runner = (LONG_RUNS if ground.plan.long else RUNS)[check][run]
        try:
            for request, trace in runner(ground, served):
                _compare(ground, served, request, trace, replay)
        except Exception as error:  # whatever it is, it is not what the plain run gave
            fail(served, f"after {served.prompts} prompts", f"{type(error).__name__}: {error}", replay)
    served.seconds = time.monotonic() - started
    return served


def _compare(ground: Ground, served: Served, request: Request, trace: Trace, replay: str) -> None:
    found = compare_traces(trace, ground.wants[request.name])
    served.prompts += 1
    served.tokens += found.tokens
    served.bytes += found.bytes
    for message in found.differences:
        fail(served, request.name, message, replay)


def unseen(checks: Sequence[Served], replay: str) -> list[ServeFailure]:
    """Checks that prove less than they claim: of three drafts, each of 0 to 3 must have stood in some round."""
    found = []
    for check in ("drafted", "media"):
        runs = [one.accepted for one in checks if one.check == check and one.accepted]
        if not runs:
            continue
        missing = [str(stands) for stands, count in enumerate(np.sum(runs, axis=0)) if not count]
        if missing:
            message = (
                f"no round in which {' or '.join(missing)} of three drafts stood: the check is not effective; serve "
                "more --tokens or --prompts"
            )
            found.append(ServeFailure(check=check, run="all", prompt="all", message=message, replay=replay))
    return found


def as_json(plan: ServePlan, checks: Sequence[Served], facts: dict[str, Any], green: bool) -> dict[str, Any]:
    """What `--json` writes."""
    return {
        "format": "kvproof serve-check",
        "version": 1,
        "green": green,
        "facts": {
            "geometry": plan.geometry.name,
            "layers": plan.geometry.layers,
            "prompts": plan.prompts,
            "tokens": plan.tokens,
            "seed": plan.seed,
            **facts,
        },
        "runs": [asdict(one) for one in checks],
    }
