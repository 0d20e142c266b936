"""The packaged kernels as NVRTC compiles them, and edited ones, each built once for all tests."""

from __future__ import annotations

import functools
import re

from kvproof.fast import KernelSources
from kvproof.fast.engine import GPU_THREADS
from kvproof.fast.nvrtc import COMPILE_OPTIONS
from kvproof.fast.sources import FAMILIES
from kvproof.oracle.compiled.claims import proofs, prove
from kvproof.oracle.compiled.ptx import parse
from kvproof.oracle.compiled.ptx_facts import argument_names
from kvproof.oracle.compiled.records import SMS
from kvproof.oracle.compiled.toolkits import Job, Toolkit, compiled, each, nvrtc_toolkit
from kvproof.reference import FLASH_NEXT

GENERATIONS = ("sm_75", "sm_90", "sm_121")
"""One of each PTX that NVRTC makes: without and with asynchronous copies, and by its newer code generator."""
PAGED = ("prep", "pool", "scores", "chunks")
"""Families that read or write a cache."""
LINES = (*COMPILE_OPTIONS, "-lineinfo")
CONTRACTING = ("--fmad=true", *LINES[1:])


@functools.cache
def toolkit(options=COMPILE_OPTIONS):
    found = nvrtc_toolkit()
    return Toolkit(kind=found.kind, version=found.version, path=found.path, options=options)


@functools.cache
def all_proofs():
    """The proof of each packaged kernel on each SM, by both."""
    return {(proof.kernel, proof.sm): proof for proof in prove(toolkit(), FLASH_NEXT, SMS)}


@functools.cache
def variants():
    """Compile with source lines, and without a page table, in parallel: tests then find both in the cache."""
    base, flat = KernelSources(), contiguous(KernelSources())
    jobs = [job(base, family, virtual(sm), LINES) for family in FAMILIES for sm in GENERATIONS]
    each(compiled, jobs + [job(flat, family, virtual(sm)) for family in PAGED for sm in GENERATIONS])


def virtual(sm):
    """The virtual architecture of an SM: its PTX alone."""
    return sm.replace("sm_", "compute_")


def job(sources, family, arch, options=COMPILE_OPTIONS):
    source = sources.family(family, FLASH_NEXT, threads=GPU_THREADS)
    return Job(toolkit=toolkit(options), source=source, arch=arch, code=True)


def proof(sources, family, arch="sm_90", options=COMPILE_OPTIONS):
    """The proof of a family's first kernel."""
    return proofs(job(sources, family, arch, options))[0]


def ptx(sources, family, arch, options=COMPILE_OPTIONS):
    """A family's PTX."""
    return compiled(job(sources, family, arch, options)).ptx


def entries(sources, family, arch, options=COMPILE_OPTIONS):
    """A family's kernels in PTX, each with the names of its arguments."""
    names = argument_names(sources.family(family, FLASH_NEXT, threads=GPU_THREADS))
    return {name: (entry, names[name]) for name, entry in parse(ptx(sources, family, arch, options)).items()}


def contiguous(sources):
    """These sources without a page table: null where each kernel begins, so that a compiler knows it."""
    begins = re.compile(r"(\bPages pages\b[^);]*\)\s*\{)")
    return KernelSources({name: begins.sub(r"\1 pages.table = nullptr;", text) for name, text in sources.texts.items()})
