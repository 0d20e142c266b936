"""`kvproof serve-check`: a served prompt gives the same bytes however it is served.

The plain run of each prompt, alone, over a contiguous cache and with the prompt read at once, is what all others are
held against: tokens, every layer's output rows, and every layer's cache at the end.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from .controls import controls
from .ground import Ground
from .plan import Request, ServePlan
from .runs import LONG_RUNS, RUNS
from .served import CONTROLS, Served, fail, run_all
from .trace import Trace, shortcomings

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


def serve_plain(ground: Ground, requests: Sequence[Request], served: Served | None = None) -> dict[str, Trace]:
    """The plain contiguous run of prompts; what it lacks by itself is noted in `served`."""
    wants = {}
    for request in requests:
        trace = ground.solo(request)[0]
        trace.places = []  # whose arenas are not needed any more
        wants[request.name] = trace
        if served is not None:
            for _, message in shortcomings(trace, request.end, ground.plan.geometry.layers):
                fail(served, request.name, message, ground.replay)
    return wants


def run_unit(ground: Ground, check: str, run: str, replay: str) -> Served:
    """One run of a check, or its controls."""
    started = time.monotonic()
    ground.replay = replay
    served = Served(check=check, run=run)
    if run == CONTROLS:
        _plant(ground, served)
    else:
        run_all(ground, served, (LONG_RUNS if ground.plan.long else RUNS)[check][run])
    served.seconds = time.monotonic() - started
    return served


def _plant(ground: Ground, served: Served) -> None:
    try:
        served.controls += controls(ground, served.check)
    except Exception as error:  # what the faults need could not be made
        fail(served, CONTROLS, f"{type(error).__name__}: {error}", ground.replay)
    if not served.controls and not served.failures:
        fail(served, CONTROLS, "no fault was planted", ground.replay)


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
