"""What must hold of the compiled kernels, without a GPU: in each kernel's PTX, and in its machine code for each SM."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ...reference.geometry import Geometry
from .cubin import Resources
from .ptx import parse
from .ptx_facts import PtxFacts, argument_names, ptx_facts
from .records import jobs_of
from .sass_facts import SassFacts, sass_facts
from .toolkits import Job, Toolkit, build, each

DOUBLE = ("fn_attn_prep", "fn_attn_prep_media", "fn_qsa_pool", "fn_qsa_pool_media")
"""Kernels whose source computes in double precision: sin and cos of the rotary angles."""

STAGING_READS = {"fn_attn_prep": 3, "fn_attn_prep_media": 3, "fn_qsa_pool": 2, "fn_qsa_pool_media": 2}
"""Reads of the page table in kernels where a block looks up its one row of each cache part, outside of all loops."""

READ_DEPTH = {"fn_qsa_scores": 1, "fn_attn_chunks": 2, "fn_attn_chunks_ahead": 2}
"""Loops that a read of the page table may lie in: over a tile's rows, and in chunks over the tiles; elsewhere none."""

READING = ("fn_qsa_pool", "fn_qsa_pool_media", "fn_qsa_scores", "fn_attn_chunks", "fn_attn_chunks_ahead")
"""Kernels that load cache rows."""

KEEPING = ("fn_qsa_scores", "fn_attn_chunks", "fn_attn_chunks_ahead")
"""Kernels that look a tile's rows up in the page table and keep the offsets in shared memory."""

CACHE_LOAD_BYTES = 16
"""Width of every load from a cache."""


@dataclass(frozen=True, kw_only=True)
class Proof:
    """The facts of one kernel on one SM, and the claims that they break.

    Attributes:
        kernel, sm: which.
        resources: what it takes.
        ptx, sass: the facts.
        broken: sentences; none where everything holds.
    """

    kernel: str
    sm: str
    resources: Resources
    ptx: PtxFacts
    sass: SassFacts
    broken: tuple[str, ...]


def prove(
    toolkit: Toolkit, geometry: Geometry, sms: Sequence[str], progress: Callable[[str], None] | None = None
) -> list[Proof]:
    """The facts of every packaged kernel on these SMs.

    Machine code is read of the families that take a page table, which takes most of the time; of the others, which read
    no cache, only where a kernel uses local memory.

    Raises:
        CompileError: the compiler refused a source.
        CubinError: its machine code could not be read.
        ValueError: its PTX or machine code is not understood.
    """
    jobs = [replace(job, code="Pages" in job.source.text) for job in jobs_of(toolkit, geometry, sms)]
    found = each(proofs, jobs, progress)
    return [proof for family in found for proof in family]


def proofs(job: Job) -> list[Proof]:
    """The facts of the kernels of one family; errors as of `prove`."""
    built = build(job)
    names = argument_names(job.source)
    entries = parse(built.ptx)
    found = []
    for name, kernel in sorted(built.kernels.items()):
        ptx, sass = ptx_facts(entries[name], names[name]), sass_facts(kernel, names[name])
        broken = tuple(broken_claims(name, ptx, sass))
        found.append(Proof(kernel=name, sm=job.arch, resources=kernel.resources, ptx=ptx, sass=sass, broken=broken))
    return found


def broken_claims(kernel: str, ptx: PtxFacts, sass: SassFacts) -> Iterator[str]:
    """What does not hold of a kernel, in sentences."""
    yield from _broken_arithmetic(kernel, ptx)
    yield from _broken_table(kernel, ptx)
    yield from _broken_loads(kernel, ptx, sass)


def _broken_arithmetic(kernel: str, ptx: PtxFacts) -> Iterator[str]:
    if ptx.unrounded:
        yield f"these operations do not say that they round to nearest: {', '.join(ptx.unrounded)}"
    if ptx.narrow:
        yield f"these operations compute in less than fp32: {', '.join(ptx.narrow)}"
    if ptx.approximate:
        yield f"these operations approximate or flush to zero: {', '.join(ptx.approximate)}"
    if ptx.double and kernel not in DOUBLE:
        yield f"{ptx.double} operations are in double precision, which the source does not ask for"


def _broken_table(kernel: str, ptx: PtxFacts) -> Iterator[str]:
    if ptx.looping_reads:
        yield f"{ptx.looping_reads} reads of the page table lie in a loop that loads or stores cache rows"
    if ptx.read_depth > (allowed := READ_DEPTH.get(kernel, 0)):
        yield f"a read of the page table lies in {ptx.read_depth} loops, one in the other, not in {allowed}"
    if ptx.table_reads != (known := STAGING_READS.get(kernel, ptx.table_reads)):
        yield f"the page table is read in {ptx.table_reads} places, not in {known}"
    if kernel in KEEPING and ptx.kept_reads != ptx.table_reads:
        yield f"of {ptx.table_reads} reads of the page table {ptx.kept_reads} give the one offset of a row"
    if kernel in KEEPING and not ptx.table_reads:
        yield "the page table is never read"


def _broken_loads(kernel: str, ptx: PtxFacts, sass: SassFacts) -> Iterator[str]:
    for form, loads in (("PTX", ptx.cache_loads), ("SASS", sass.cache_loads)):
        if kernel in READING and not loads:
            yield f"no load from a cache is found in {form}"
        if other := sorted(set(loads) - {CACHE_LOAD_BYTES}):
            yield f"loads from a cache in {form} are {', '.join(map(str, other))} bytes wide, not {CACHE_LOAD_BYTES}"
    if set(ptx.cache_loads) != set(sass.cache_loads):
        yield f"loads from a cache are {_widths(ptx.cache_loads)} in PTX, {_widths(sass.cache_loads)} in SASS"
    for form, untraced in (("PTX", ptx.untraced), ("SASS", sass.untraced)):
        if untraced:
            yield f"these loads in {form} come from no pointer argument, or from two: {', '.join(untraced)}"
    if sass.local:
        yield f"{sass.local} instructions use local memory"


def _widths(loads: Mapping[int, int]) -> str:
    return " and ".join(f"{width} bytes" for width in sorted(loads)) or "none"
