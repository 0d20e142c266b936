"""Proved from the compiled code and counted look-ups, without a GPU; each fact is seen red on kernels that break it."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from compiled import (
    CONTRACTING,
    GENERATIONS,
    LINES,
    PAGED,
    all_proofs,
    contiguous,
    entries,
    job,
    proof,
    ptx,
    variants,
    virtual,
)
from kvproof.fast import KernelSources
from kvproof.fast.engine import GPU_THREADS
from kvproof.fast.sources import FAMILIES
from kvproof.oracle.compiled import cubin
from kvproof.oracle.compiled.claims import KEEPING, READING, broken_claims, proofs
from kvproof.oracle.compiled.cubin import CubinError, Kernel, Resources, Sass
from kvproof.oracle.compiled.flow import Flow, Step
from kvproof.oracle.compiled.lookups import counting, lookups
from kvproof.oracle.compiled.ptx import parse
from kvproof.oracle.compiled.ptx_compare import fma_mismatches, inner_work
from kvproof.oracle.compiled.ptx_facts import ptx_facts
from kvproof.oracle.compiled.records import SMS
from kvproof.oracle.compiled.sass_facts import load_origins, sass_facts
from kvproof.oracle.compiled.toolkits import build, nvcc_toolkit
from kvproof.reference import FLASH_NEXT, TINY

KERNELS = (
    "fn_attn_prep", "fn_attn_prep_media", "fn_qsa_pool", "fn_qsa_pool_media", "fn_qsa_scores", "fn_qsa_select",
    "fn_attn_chunks", "fn_attn_chunks_ahead", "fn_attn_merge", "fn_attn_gate",
)  # fmt: skip


@pytest.mark.parametrize("sm", SMS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_claim_holds(kernel, sm):
    assert all_proofs()[kernel, sm].broken == ()


def test_no_kernel_is_left_out():
    assert {kernel for kernel, _ in all_proofs()} == set(KERNELS)


@pytest.mark.parametrize("kernel", KEEPING)
def test_tiles_are_looked_up_and_loaded_in_loops(kernel):
    for sm in SMS:
        facts = all_proofs()[kernel, sm].ptx
        assert facts.load_loops > 0
        assert facts.kept_reads == facts.table_reads > 0


@pytest.mark.parametrize("sm", SMS)
def test_the_loads_of_the_machine_code_are_those_of_the_ptx(sm):
    """A cross-check of the two ways of following an address back."""
    for kernel in KERNELS:
        facts = all_proofs()[kernel, sm]
        assert set(facts.sass.cache_loads) == set(facts.ptx.cache_loads), kernel


@pytest.mark.skipif(nvcc_toolkit() is None, reason="no nvcc is installed")
@pytest.mark.parametrize("family", PAGED)
def test_every_claim_holds_of_what_nvcc_makes(family):
    """Another toolkit writes other machine code, which has to be read, too."""
    made = proofs(replace(job(KernelSources(), family, "sm_90"), toolkit=nvcc_toolkit()))
    assert [one.broken for one in made] == [()] * len(made)
    assert all(sum(one.sass.cache_loads.values()) > 0 for one in made if one.kernel in READING)
    assert {one.kernel for one in made if one.ptx.cache_loads} == {one.kernel for one in made} & set(READING)


def test_machine_code_that_is_not_read_is_refused(monkeypatch):
    monkeypatch.setattr(cubin, "_INSTRUCTION", re.compile(r"(no)(such)(text)(.)"))
    with pytest.raises(CubinError, match=r"no machine instruction of fn_attn_chunks.* is read"):
        proof(KernelSources(), "chunks")


@pytest.mark.parametrize("kernel", READING)
def test_a_kernel_without_a_load_from_a_cache_is_red(kernel):
    facts = all_proofs()[kernel, "sm_90"]
    unread = replace(facts.sass, cache_loads={})
    assert "no load from a cache is found in SASS" in "; ".join(broken_claims(kernel, facts.ptx, unread))
    unseen = replace(facts.ptx, cache_loads={})
    assert "no load from a cache is found in PTX" in "; ".join(broken_claims(kernel, unseen, facts.sass))
    assert "are none in PTX, 16 bytes in SASS" in "; ".join(broken_claims(kernel, unseen, facts.sass))


@pytest.mark.parametrize("sm", SMS)
def test_shared_memory_is_what_the_ptx_declares(sm):
    for family in ("scores", "select", "chunks"):
        built = build(replace(job(KernelSources(), family, sm), code=False))
        declared = {name: entry.shared_bytes for name, entry in parse(built.ptx).items()}
        assert {name: kernel.resources.shared_bytes for name, kernel in built.kernels.items()} == declared


# ---- FMAs ----


@pytest.mark.parametrize("sm", GENERATIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_fmas_are_where_the_source_names_one(family, sm):
    variants()
    sources, arch = KernelSources(), virtual(sm)
    source = sources.family(family, FLASH_NEXT, threads=GPU_THREADS)
    assert fma_mismatches(ptx(sources, family, arch, LINES), source) == []
    with_lines = entries(sources, family, arch, LINES)
    for name, (entry, _) in entries(sources, family, sm).items():
        assert entry.code == with_lines[name][0].code, "line numbers changed the code"


def test_a_contracted_product_and_sum_is_seen():
    source = KernelSources().family("prep", FLASH_NEXT, threads=GPU_THREADS)
    found = fma_mismatches(ptx(KernelSources(), "prep", "compute_90", CONTRACTING), source)
    assert any("turns[i - half].sin" in line for line in found), found


def test_an_fma_that_is_no_fma_is_seen():
    split = KernelSources().edit("common.cuh", "#pragma once", "#pragma once\n#define fmaf(a, b, c) ((a) * (b) + (c))")
    found = fma_mismatches(
        ptx(split, "merge", "compute_90", LINES), split.family("merge", FLASH_NEXT, threads=GPU_THREADS)
    )
    assert len(found) == 2, found


def test_ptx_without_lines_is_refused():
    with pytest.raises(ValueError, match="compile it with -lineinfo"):
        fma_mismatches(
            ptx(KernelSources(), "gate", "compute_90"), KernelSources().family("gate", FLASH_NEXT, threads=1)
        )


# ---- paged and contiguous ----


@pytest.mark.parametrize("sm", GENERATIONS)
@pytest.mark.parametrize("family", PAGED)
def test_the_paged_form_loads_and_sums_as_the_contiguous_one(family, sm):
    variants()
    flat = entries(contiguous(KernelSources()), family, virtual(sm))
    for name, (entry, names) in entries(KernelSources(), family, sm).items():
        assert ptx_facts(flat[name][0], names).table_reads == 0 < ptx_facts(entry, names).table_reads
        assert inner_work(entry, names) == inner_work(flat[name][0], names), name


def test_work_that_hangs_on_the_page_table_is_seen():
    planted = KernelSources().edit(
        "scores.cu", "score / root", "(pages.table ? fmaf(score, 1.5f, 0.0f) : score) / root"
    )
    flat = entries(contiguous(planted), "scores", "compute_90")["fn_qsa_scores"]
    entry, names = entries(planted, "scores", "compute_90")["fn_qsa_scores"]
    assert inner_work(entry, names) != inner_work(flat[0], names)


# ---- planted breaks ----

LOOK_UP_PER_LOAD = """for (int i = threadIdx.x; i < count * (width / 8); i += KVP_THREADS) {
    const int row = i / (width / 8), column = i % (width / 8) * 8;
    copy8(tile + row * stride + column, pooled + pooled_row(pages, first + row) + column);
  }"""
WORD_BY_WORD = """for (int i = 0; i < 4; ++i)
    reinterpret_cast<unsigned*>(to)[i] = reinterpret_cast<const volatile unsigned*>(from)[i];"""

INDEXED_ARRAY = """float held[40];
    for (int i = 0; i < 40; ++i) held[i * row % 40] = weight[0] + i;
    gated[at + head] = round_bf16(held[head]);
    """

TILE_OVER_AND_OVER = "for (int z = 0; z < tiles_here; ++z) look_up(tile + 1);"

BREAKS = {
    "look-up-in-a-load-loop": (
        "scores",
        ("scores.cu", "stage_rows<width>(tile, pooled, at, count);", LOOK_UP_PER_LOAD),
        "reads of the page table lie in a loop that loads or stores cache rows",
    ),
    "look-up-twice": (
        "scores",
        (
            "scores.cu",
            "at[i] = pooled_row(pages, first + i)",
            "at[i] = (pooled_row(pages, first + i) + pooled_row(pages, first + i + 1)) / 2",
        ),
        "0 give the one offset of a row",
    ),
    "look-up-each-tile-again-and-again": (
        "chunks",
        ("chunks.cu", "    look_up(tile + 1);", "    " + TILE_OVER_AND_OVER),
        "a read of the page table lies in 3 loops, one in the other, not in 2",
    ),
    "look-up-for-each-piece-that-is-stored": (
        "prep",
        (
            "prep.cu",
            "copy_head<KVP_INDEX_DIM>(a.index_keys + index_row(a.pages, position), index_key);",
            "for (int i = threadIdx.x * 8; i < KVP_INDEX_DIM; i += KVP_THREADS * 8)\n"
            "    copy8(a.index_keys + index_row(a.pages, position + (i >> 20)) + i, index_key + i);",
        ),
        "reads of the page table lie in a loop that loads or stores cache rows; "
        "a read of the page table lies in 1 loops, one in the other, not in 0; "
        "the page table is read in 7 places, not in 3",
    ),
    "table-ignored": (
        "scores",
        ("scores.cu", "pooled_row(pages, first + i)", "(first + i) * KVP_INDEX_DIM"),
        "the page table is never read",
    ),
    "narrow-cache-load": (
        "scores",
        (
            "lanes.cuh",
            "*reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);",
            WORD_BY_WORD,
        ),
        "loads from a cache in PTX are 4 bytes wide, not 16; loads from a cache in SASS are 4 bytes wide, not 16",
    ),
    "fast-exp": (
        "merge",
        ("merge.cu", "a = exp_nonpositive(high - top)", "a = __expf(high - top)"),
        "these operations approximate or flush to zero: ex2.approx.f32",
    ),
    "double-precision": (
        "merge",
        ("merge.cu", "b * l[part]", "static_cast<float>(static_cast<double>(b) * l[part] + a)"),
        "2 operations are in double precision",
    ),
    "local-array": (
        "gate",
        ("gate.cu", "KVP_UNROLL for", INDEXED_ARRAY + "KVP_UNROLL for"),
        "instructions use local memory",
    ),
    "one-of-two-pointers": (
        "gate",
        ("gate.cu", "widen8(gates + d)", "widen8(head & row ? out + at + d : gates + d)"),
        "these loads in PTX come from no pointer argument, or from two: ld.global",
    ),
    "pointer-out-of-memory": (
        "gate",
        ("gate.cu", "widen8(gates + d)", "widen8(*reinterpret_cast<const bf16* const*>(gates) + d)"),
        "these loads in SASS come from no pointer argument, or from two: LD",
    ),
}


@pytest.mark.parametrize("name", BREAKS)
def test_a_planted_break_is_red(name):
    family, edit, sentence = BREAKS[name]
    broken = proof(KernelSources().edit(*edit), family).broken
    assert sentence in "; ".join(broken)


def test_a_product_that_may_be_contracted_is_red():
    broken = proof(KernelSources(), "gate", options=CONTRACTING).broken
    assert broken == ("these operations do not say that they round to nearest: add.f32, mul.f32",)


# ---- look-ups, counted ----

POSITIONS, WINDOW = 2063, 17
"""Dense rows, and sparse ones with a whole and an unfinished tail; their lists are of 32 tiles and 33."""


@pytest.mark.parametrize("gpu_split", [True, False], ids=["as-on-a-gpu", "as-on-a-cpu"])
def test_the_table_is_read_once_per_key_per_tile(gpu_split):
    found = lookups(FLASH_NEXT, positions=POSITIONS, rows=WINDOW, gpu_split=gpu_split)
    assert set(found) == {"prep", "pool", "scores", "chunks", "chunks_ahead"}
    for kernel, one in found.items():
        assert one.found.sum() > 0, kernel
        assert one.found.tolist() == one.due.tolist(), kernel


MISCOUNTED = {
    "a-tile-looked-up-twice": ("chunks.cu", "weigh_tile(s, tile);", "weigh_tile(s, tile);\n    look_up(tile);"),
    "each-tile-again-and-again": ("chunks.cu", "look_up(tile + 1);", TILE_OVER_AND_OVER),
    "the-last-key-again": (
        "chunks.cu",
        "if (k >= count) continue;",
        "if (k >= count && (k = count - 1) < 0) continue;",
    ),
    "a-block-looked-up-twice": (
        "scores.cu",
        "at[i] = pooled_row(pages, first + i)",
        "at[i] = (pooled_row(pages, first + i) + pooled_row(pages, first + i)) / 2",
    ),
    "a-row-looked-up-for-each-norm": (
        "pool.cu",
        "mean[d + j] = round_bf16(",
        "mean[d + j + index_row(pages, first) - index_row(pages, first)] = round_bf16(",
    ),
}


@pytest.mark.parametrize("name", MISCOUNTED)
def test_a_look_up_more_or_less_is_seen(name):
    planted = KernelSources().edit(*MISCOUNTED[name])
    found = lookups(FLASH_NEXT, positions=POSITIONS, rows=WINDOW, sources=planted)
    family = MISCOUNTED[name][0].removesuffix(".cu")
    assert {kernel for kernel, one in found.items() if not one.agree} == {
        kernel for kernel in found if kernel.startswith(family)
    }


def test_another_place_that_reads_the_table_is_refused():
    planted = KernelSources().edit("scores.cu", "pooled_row(pages, first + i)", "pages.table[first + i] * 8ll")
    with pytest.raises(ValueError, match=r"use the page table in \{.*'scores.cu': 1.*only 'pages.table\[page\]'"):
        counting(planted)


def test_more_positions_than_counters_are_refused():
    with pytest.raises(ValueError, match="positions is 16385; there are counters for 16384"):
        lookups(TINY, positions=16385, rows=1)


# ---- reading PTX and machine code ----


def ptx_of(body):
    return f".visible .entry k(\n\t.param .u64 k_param_0,\n\t.param .u64 k_param_1\n)\n{{\n{body}\n}}\n"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("call.uni (r), f, (a);", "calls are not followed"),
        ("brx.idx %r1, table;", "jumps through a register"),
        ("mov.u32 %r1, 0;", "control leaves the code"),
        ("?! %r1;", "this line of PTX is not understood"),
        (".unknown 3; ret;", "this line of PTX is not understood"),
    ],
    ids=["call", "indirect", "cut-off", "nonsense", "directive"],
)
def test_ptx_that_is_not_understood_is_refused(body, message):
    with pytest.raises(ValueError, match=message):
        parse(ptx_of(body))


def test_ptx_without_an_entry_is_refused():
    with pytest.raises(ValueError, match="this PTX has no entry"):
        parse(".version 8.8")


def test_a_generic_load_is_followed_too():
    body = "ld.param.u64 %rd1, [k_param_0];\nadd.s64 %rd2, %rd1, 8;\nld.v2.u16 {%rs1, %rs2}, [%rd2+4];\nret;"
    facts = ptx_facts(parse(ptx_of(body))["k"], ("keys", "q"))
    assert facts.cache_loads == {4: 1}


@pytest.mark.parametrize(
    "opcode",
    [
        "add.f32", "add.rz.f32", "cvt.f32.f64", "cvt.rz.f32.s32", "div.full.f32", "mma.sync.f32", "fma.f32x2",
        "mul.bf16x2", "add.bf16", "add.f16", "fma.rz.bf16x2", "cvt.rz.bf16.f32", "cvt.rz.bf16x2.f32",
        "cvt.rna.tf32.f32", "cvt.rz.f16.f32", "cvt.satfinite.e4m3x2.f32", "cvt.rz.satfinite.ue8m0x2.f32",
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32", "mma.sync.aligned.m16n8k16.row.col.bf16.bf16",
    ],
)  # fmt: skip
def test_an_operation_that_does_not_round_to_nearest_is_seen(opcode):
    facts = ptx_facts(parse(ptx_of(f"{opcode} %f1, %f2, %f3;\nret;"))["k"], ("keys", "q"))
    assert facts.unrounded == (opcode,)


@pytest.mark.parametrize("opcode", ["fma.rn.bf16x2", "add.rn.f16", "mul.bf16", "sub.rn.f16x2"])
def test_an_operation_in_less_than_fp32_is_seen(opcode):
    facts = ptx_facts(parse(ptx_of(f"{opcode} %f1, %f2, %f3;\nret;"))["k"], ("keys", "q"))
    assert facts.narrow == (opcode,)
    broken = broken_claims("fn_attn_gate", facts, sass_facts(machine_code("EXIT"), ("keys", "q")))
    assert f"these operations compute in less than fp32: {opcode}" in list(broken)


@pytest.mark.parametrize(
    "opcode",
    [
        "add.rn.f32", "cvt.f64.f32", "cvt.rn.f32.s32", "cvt.rzi.s32.f32", "cvt.rzi.u64.f64", "neg.f32", "selp.f32",
        "fma.rn.f32x2", "cvt.rn.bf16.f32", "cvt.rn.bf16x2.f32", "add.s32", "mul.wide.u32", "cvt.u32.u16",
    ],
)  # fmt: skip
def test_an_operation_that_rounds_to_nearest_or_not_at_all_is_let_pass(opcode):
    facts = ptx_facts(parse(ptx_of(f"{opcode} %f1, %f2, %f3;\nret;"))["k"], ("keys", "q"))
    assert facts.unrounded == ()


def test_loops_are_found_inside_each_other():
    flow = Flow([Step(), Step(), Step((1,)), Step((0,)), Step(falls=False)])
    found = {loop.header: {number for block in loop.blocks for number in flow.blocks[block]} for loop in flow.loops}
    assert found == {0: {0, 1, 2, 3}, 1: {1, 2}}


def test_a_loop_that_is_entered_in_its_middle_is_refused():
    flow = Flow([Step((2,)), Step(), Step((1,)), Step(falls=False)])
    with pytest.raises(ValueError, match="entered in its middle"):
        _ = flow.loops


NOTHING = Resources(registers=1, shared_bytes=0, stack_bytes=0, local_bytes=0, spill_bytes=0, barriers=0, code_bytes=0)


def machine_code(*lines):
    """A kernel of two pointers, "keys" at 0x160 and "q" at 0x168."""
    code = []
    for number, line in enumerate(lines):
        guard, _, rest = line.rpartition("@")[2].partition(" ") if line.startswith("@") else ("", "", line)
        opcode, _, operands = rest.partition(" ")
        code.append(Sass(16 * number, opcode, tuple(x.strip() for x in operands.split(",") if x.strip()), guard))
    return Kernel(resources=NOTHING, arguments=((0x160, 8), (0x168, 8)), code=tuple(code))


KEYS_OR_Q = ("MOV R2, c[0x0][0x160]", "@P0 MOV R2, c[0x0][0x168]")

CODES = {
    "direct": (("IMAD.WIDE R2, R0, R1, c[0x0][0x160]", "LDG.E.128 R4, [R2.64]", "EXIT"), {"keys"}),
    "either": ((*KEYS_OR_Q, "LDG.E R4, [R2.64]", "EXIT"), {"keys", "q"}),
    "same-guard": ((*KEYS_OR_Q, "@P0 LDG.E R4, [R2.64]", "EXIT"), {"q"}),
    "other-guard": ((*KEYS_OR_Q, "@!P0 LDG.E R4, [R2.64]", "EXIT"), {"keys", "q"}),
    "guard-set-anew": (
        (*KEYS_OR_Q, "ISETP.NE.AND P0, PT, R9, RZ, PT", "@P0 LDG.E R4, [R2.64]", "EXIT"),
        {"keys", "q"},
    ),
    "both-guards": (
        ("@P0 MOV R2, c[0x0][0x168]", "@!P0 MOV R2, c[0x0][0x168]", "LDG.E R4, [R2.64]", "EXIT"),
        {"q"},
    ),
    "around-a-loop": (
        ("MOV R2, c[0x0][0x160]", "LDG.E R4, [R2.64]", "MOV R2, c[0x0][0x168]", "@P1 BRA 0x10", "EXIT"),
        {"keys", "q"},
    ),
    "behind-a-branch": ((*KEYS_OR_Q, "@P0 BRA 0x40", "EXIT", "LDG.E R4, [R2.64]", "EXIT"), {"q"}),
    "constants-in-one": (("LDC.128 R4, c[0x0][0x160]", "LDG.E R8, desc[UR4][R6.64+0x10]", "EXIT"), {"q"}),
    "overwritten-high-half": (("MOV R3, c[0x0][0x160]", "DADD R2, R6, R8", "LDG.E R4, [R3.64]", "EXIT"), set()),
    "loaded": (("LDG.E.64 R2, [R8.64]", "LDG.E R4, [R2.64]", "EXIT"), set()),
}


@pytest.mark.parametrize("name", CODES)
def test_an_address_is_followed_through_machine_code(name):
    code, expected = CODES[name]
    assert load_origins(machine_code(*code), ("keys", "q"))[-1][1] == expected


def test_a_jump_through_a_register_is_refused():
    with pytest.raises(ValueError, match="jumps through a register"):
        sass_facts(machine_code("BRX R2, 0x0", "EXIT"), ("keys", "q"))
