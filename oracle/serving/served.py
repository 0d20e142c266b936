"""What a run of a serve-check found, and what it must have done to have found anything."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from .ground import Ground
from .judge import Control
from .plan import Request
from .trace import Trace, compare_traces

CONTROLS = "controls"
"""Name of the run that plants a check's faults."""


@dataclass(frozen=True, kw_only=True)
class ServeFailure:
    """One prompt that was served differently.

    Attributes:
        check, run, prompt: which.
        message: what differs, and where.
        replay: the command line that runs it again.
    """

    check: str
    run: str
    prompt: str
    message: str
    replay: str


@dataclass(kw_only=True)
class Served:
    """What one run of a check found.

    Attributes:
        check, run: which.
        prompts, bytes: compared.
        tokens: generated and compared; those of the prompts are not counted.
        seconds: that it took.
        accepted: how often 0, 1, 2 and 3 drafts of three stood.
        detail: what else is told of it.
        failures: [] where all is equal, and the run was effective.
        controls: faults planted.
    """

    check: str
    run: str
    prompts: int = 0
    tokens: int = 0
    bytes: int = 0
    seconds: float = 0.0
    accepted: tuple[int, ...] = ()
    detail: str = ""
    failures: list[ServeFailure] = field(default_factory=list)
    controls: list[Control] = field(default_factory=list)

    @property
    def green(self) -> bool:
        """Whether all is equal, and every fault was seen where it must be."""
        return not self.failures and all(control.green for control in self.controls)


Requests: TypeAlias = Callable[[Ground], Sequence[Request]]
Serve: TypeAlias = Callable[[Ground, Served, Sequence[Request]], Iterator[tuple[Request, Trace]]]
"""Serves prompts, and gives what each gave; what else it finds it writes down."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One way in which prompts are served.

    Attributes:
        serve: the way.
        requests: the prompts, each of which must be served to its limit.
    """

    serve: Serve
    requests: Requests


def fail(served: Served, prompt: str, message: str, replay: str) -> None:
    """Note a failure."""
    served.failures.append(
        ServeFailure(check=served.check, run=served.run, prompt=prompt, message=message, replay=replay)
    )


def run_all(ground: Ground, served: Served, run: Run) -> None:
    """Serve a run's prompts, and compare each with its plain run."""
    requests = {request.name: request for request in run.requests(ground)}
    left = dict(requests)
    try:
        for request, trace in run.serve(ground, served, tuple(requests.values())):
            _compare(ground, served, requests[request.name], trace)
            left.pop(request.name)
    except Exception as error:  # whatever it is, it is not what the plain run gave
        fail(served, f"after {served.prompts} prompts", f"{type(error).__name__}: {error}", ground.replay)
    if (left or not requests) and not served.failures:
        fail(served, ", ".join(left) or "all", "it was not served", ground.replay)


def _compare(ground: Ground, served: Served, request: Request, trace: Trace) -> None:
    found = compare_traces(trace, ground.wants[request.name], tokens=request.end)
    served.prompts += 1
    served.tokens += len(trace.tokens) - len(request.tokens)
    served.bytes += found.bytes
    for message in found.differences:
        fail(served, request.name, message, ground.replay)


# ---- whether a run proves what it claims ----


def require(ground: Ground, served: Served, held: object, otherwise: str) -> None:
    """Fail the run unless what makes it effective was so."""
    if not held:
        fail(served, "all", f"{otherwise}: the run is not effective; serve more --prompts or --tokens", ground.replay)


def accept(served: Served, accepted: Sequence[int]) -> None:
    """Add to how often 0, 1, 2 and 3 drafts stood."""
    before = served.accepted or (0,) * len(accepted)
    served.accepted = tuple(a + b for a, b in zip(before, accepted, strict=True))


def require_drafts(ground: Ground, served: Served) -> None:
    """There were rounds of three drafts in which one stood, and such in which one was refuted."""
    require(ground, served, sum(served.accepted[1:]), "no round in which one of three drafts stood")
    require(ground, served, sum(served.accepted[:-1]), "no round in which one of three drafts was refuted")


def require_turns(ground: Ground, served: Served) -> None:
    """Each number of three drafts stood in some round."""
    counts = served.accepted or (0,)
    missing = " or ".join(str(stands) for stands, count in enumerate(counts) if not count)
    require(ground, served, not missing, f"no round in which {missing} of three drafts stood")
