"""The fault catalogue: mechanisms that gave wrong numbers in public paged-attention code, planted in ours.

Each entry is planted as a small change of kernel text, of a step of the host around the kernels, or of a method of the
program, and run through the contract over drawn examples, or through streams, until the gate that should see it goes
red (`hunt`).

An edit that no longer applies is an error (`KernelSources.edit`): a fault is never skipped in silence.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import numpy as np

from ...fast import Capture, Engine, KernelSources
from ...fast.backend import Launch
from ...reference.geometry import Geometry, Rope, Weights
from ...reference.layout import LayerCache
from ...reference.results import Bf16Array, KeyLists, Partials, Prepared
from ..captured import CAPTURED, Batch
from ..examples import ROWS
from ..operations import Array, Kernels
from ..serving.faults import (
    copy_that_nothing_orders,
    pooled_rows_not_saved,
    pooled_rows_stay_valid,
    restore_clears_every_stream,
    rollback_returns_early,
    scratch_kept_by_shape,
    table_rewritten_before_its_copy,
)

Gate: TypeAlias = Literal["bits", "bound", "memory", "controls", "validation"]
FAULT_GATES: tuple[Gate, ...] = ("bits", "bound", "memory", "controls", "validation")
"""The contract's gates, and the checks of arguments that come before a launch."""

Inputs: TypeAlias = Literal["drawn", "high page", "bad tables", "captured", "streams", "queues"]


@dataclass(frozen=True, kw_only=True)
class Edit:
    """One change of kernel text: in `file`, `old`, which is there once, becomes `new`; `what` says so in words."""

    what: str
    file: str
    old: str
    new: str


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One entry.

    Attributes:
        id: of `faults.md`.
        title, mechanism: what goes wrong, in a few words and in a sentence.
        gate: that should see it, on one of `kernels`; "chunks" stands for its forms too, such as "chunks_ahead".
        edits: of kernel text; `host`: a wrapper of the kernels that changes what they are handed; `method`: replaces
            one of the program's for as long as it is entered. `host_step` says in words what either changes.
        inputs: what it is run on; `shown_by` says which of them show it.
    """

    id: str
    title: str
    mechanism: str
    gate: Gate
    kernels: tuple[str, ...] = ()
    edits: tuple[Edit, ...] = ()
    host: Callable[[Kernels], Kernels] | None = None
    method: Callable[[], AbstractContextManager[None]] | None = None
    host_step: str = ""
    inputs: Inputs = "drawn"
    shown_by: str = ""

    def expects(self, kernel: str) -> bool:
        """Whether the gate should see it on this kernel."""
        return any(kernel == name or kernel.startswith(f"{name}_") for name in self.kernels)

    def sources(self, base: KernelSources | None = None) -> KernelSources:
        """The kernels with the fault in them.

        Raises:
            ValueError: an edit's text is not there once any more.
        """
        sources = base or KernelSources()
        for edit in self.edits:
            sources = sources.edit(edit.file, edit.old, edit.new)
        return sources


# ---- host steps ----


class _Handed:
    """Kernels that are handed another cache than the caller's."""

    def __init__(self, kernels: Kernels, change: Callable[[LayerCache, int | None, int], LayerCache]) -> None:
        self._kernels = kernels
        self._change = change

    def prep(
        self, geometry: Geometry, weights: Weights, cache: LayerCache, projection: Bf16Array, pos0: int, rope: Rope
    ) -> Prepared:
        return self._kernels.prep(
            geometry, weights, self._change(cache, pos0, pos0 + len(projection)), projection, pos0, rope
        )

    def pool(self, geometry: Geometry, weights: Weights, cache: LayerCache, pos0: int, rows: int, rope: Rope) -> None:
        self._kernels.pool(geometry, weights, self._change(cache, pos0, pos0 + rows), pos0, rows, rope)

    def scores(self, geometry: Geometry, cache: LayerCache, iq: Bf16Array, pos0: int) -> Array:
        return self._kernels.scores(geometry, self._change(cache, None, pos0 + len(iq)), iq, pos0)

    def select(self, geometry: Geometry, scores: Array, pos0: int) -> KeyLists:
        return self._kernels.select(geometry, scores, pos0)

    def chunks(self, geometry: Geometry, cache: LayerCache, q: Bf16Array, lists: KeyLists) -> Partials:
        return self._kernels.chunks(geometry, self._change(cache, None, 0), q, lists)

    def chunks_ahead(self, geometry: Geometry, cache: LayerCache, q: Bf16Array, lists: KeyLists) -> Partials:
        return self._kernels.chunks_ahead(geometry, self._change(cache, None, 0), q, lists)

    def merge(self, geometry: Geometry, partials: Partials) -> Bf16Array:
        return self._kernels.merge(geometry, partials)

    def gate(self, geometry: Geometry, out: Bf16Array, projection: Bf16Array) -> Bf16Array:
        return self._kernels.gate(geometry, out, projection)


def _pages_of_committed_rows_only(kernels: Kernels) -> Kernels:
    """The table that stores get was made before the window: its entries from there on are what lies behind."""

    def change(cache: LayerCache, pos0: int | None, end: int) -> LayerCache:
        if pos0 is None or cache.table is None:
            return cache
        n = cache.layout.page_size
        reserved, live = -(-pos0 // n), -(-end // n)
        return replace(cache, table=np.concatenate([cache.table[:reserved], cache.table[live:]]))

    return _Handed(kernels, change)


@dataclass(frozen=True, kw_only=True, eq=False)
class _NoUpperBound(LayerCache):
    """A cache whose check of page ids looks at one side only."""

    def require(self, end: int) -> None:
        if self.table is not None:
            live = self.table[: -(-end // self.layout.page_size)]
            if live.min(initial=0) < 0:
                raise ValueError(f"page table names page {live.min()}; a page id must be 0 or more")


def _reads_without_an_upper_bound(kernels: Kernels) -> Kernels:
    """What only reads checks that a page id is not negative, and nothing else."""

    def change(cache: LayerCache, pos0: int | None, end: int) -> LayerCache:
        if pos0 is not None:
            return cache
        return _NoUpperBound(buffer=cache.buffer, layout=cache.layout, layer=cache.layer, table=cache.table)

    return _Handed(kernels, change)


# ---- methods ----


@contextlib.contextmanager
def replaced(owner: type, name: str, method: Callable[..., None]) -> Iterator[None]:
    """Inside the `with` block a class has another method of this name.

    Raises:
        AttributeError: it has none.
    """
    kept = getattr(owner, name)
    setattr(owner, name, method)
    try:
        yield
    finally:
        setattr(owner, name, kept)


def _padding_rows_cleared_in_part() -> AbstractContextManager[None]:
    return replaced(Batch, "clear", _clears_the_first_entry_only)


def _clears_the_first_entry_only(batch: Batch, row: int) -> None:
    batch.tables[row, 0] = batch.scratch[0]


def _captures_of_addresses() -> AbstractContextManager[None]:
    return replaced(Capture, "add", _keeps_addresses_only)


def _keeps_addresses_only(step: Capture, engine: Engine, launch: Launch, arrays: Any) -> None:
    """`Capture.add` that lets go of the arrays; a filling launch holds its array, so it is taken down by address."""
    if isinstance(arrays, np.ndarray) and isinstance(launch, functools.partial):
        launch = functools.partial(
            _fill_at, arrays.ctypes.data, arrays.nbytes, np.full(1, launch.args[1], arrays.dtype)
        )
    step._recorder.add(launch)


def _fill_at(address: int, size: int, value: np.ndarray[Any, Any]) -> None:
    memory = memoryview((ctypes.c_ubyte * size).from_address(address)).cast("B")
    np.frombuffer(memory, value.dtype)[:] = value


# ---- the catalogue ----

_STORES = ("prep", "pool")
_ATTENDS = ("chunks", "dense", ROWS)

STREAMS = "streams"
"""What the code around the kernels is called where a kernel is named."""

CATALOGUE: tuple[Fault, ...] = (
    Fault(
        id="F01",
        title="pooled key over a raw key",
        mechanism="The pooled row is also stored over the raw indexer key of its block's first position, so pooling "
        "the block again pools a pooled key.",
        gate="memory",
        kernels=("pool",),
        edits=(
            Edit(
                what="store the pooled row over the first raw key too",
                file="pool.cu",
                old="  normalise_and_rotate<KVP_INDEX_DIM>(pooled + pooled_row(pages, block), mean,",
                new="  normalise_and_rotate<KVP_INDEX_DIM>(const_cast<bf16*>(keys), mean, pool_scale, inv_freq, rope, "
                "first);\n"
                "  __syncthreads();\n"
                "  normalise_and_rotate<KVP_INDEX_DIM>(pooled + pooled_row(pages, block), mean,",
            ),
        ),
        shown_by="any window that completes a block; drafted == plain will see it too, once there are drafts",
    ),
    Fault(
        id="F02",
        title="candidates of top-k capped",
        mechanism="Blocks that share the coarse bits of the least score taken are kept in a list of 16; those that do "
        "not fit vanish from the next histogram.",
        gate="bound",
        kernels=("select",),
        edits=(
            Edit(
                what="a counter of candidates",
                file="select.cu",
                old="  __shared__ int histogram[256];",
                new="  __shared__ int histogram[256], candidates;",
            ),
            Edit(
                what="which starts at 0",
                file="select.cu",
                old="    for (int i = tid; i < 256; i += KVP_THREADS) histogram[i] = 0;",
                new="    for (int i = tid; i < 256; i += KVP_THREADS) histogram[i] = 0;\n"
                "    if (tid == 0) candidates = 0;",
            ),
            Edit(
                what="and lets the first 16 of them in",
                file="select.cu",
                old="u >> (shift + 8) == known >> (shift + 8)) atomicAdd",
                new="(u >> (shift + 8) == known >> (shift + 8) && atomicAdd(&candidates, 1) < 16)) atomicAdd",
            ),
            Edit(
                what="while the list still gets no more than it has room for",
                file="select.cu",
                old="    if (!take) continue;",
                new="    if (!take || slot >= KVP_TOP_BLOCKS) continue;",
            ),
        ),
        shown_by="streams of several hundred blocks and 4 to take: the list must be the reference's, exactly",
    ),
    Fault(
        id="F03",
        title="pooled rows addressed by block alone",
        mechanism="A pooled row is found by its block number, without the stream's page table, so streams write and "
        "score each other's rows.",
        gate="bits",
        kernels=("pool", "scores"),
        edits=(
            Edit(
                what="a pooled row without the table",
                file="pages.cuh",
                old="  return row_at(pages, block, pages.positions / KVP_BLOCK, KVP_INDEX_DIM);",
                new="  return row_at(Pages{nullptr, 0, 0}, block, pages.positions / KVP_BLOCK, KVP_INDEX_DIM);",
            ),
        ),
        shown_by="two streams in one arena",
    ),
    Fault(
        id="F04",
        title="rollback of half the pooling state",
        mechanism="A rejected draft leaves its raw indexer keys and the pooled row of its block in place, and both "
        "count as valid.",
        gate="bits",
        kernels=(STREAMS,),
        method=pooled_rows_stay_valid,
        host_step="a rollback restores the lengths; a block that was pooled once is not pooled again",
        inputs="streams",
        shown_by="drafts that finish a block and are refuted",
    ),
    Fault(
        id="F05",
        title="blocks cut by position value",
        mechanism="The pooler takes a block's number from its row's t position, which the rows of an image share, "
        "instead of from the row's rank.",
        gate="bound",
        kernels=("pool",),
        edits=(
            Edit(
                what="the block by t position in the pooler",
                file="pool.cu",
                old="  const int block = pos0 / KVP_BLOCK + blockIdx.x, first = block * KVP_BLOCK;",
                new="  const int rank = pos0 / KVP_BLOCK + blockIdx.x;\n"
                "  const bool image = rank * KVP_BLOCK < rope.media_length;\n"
                "  const int block = image ? rope.triples[3 * rank * KVP_BLOCK] / KVP_BLOCK : rank;\n"
                "  const int first = block * KVP_BLOCK;",
            ),
        ),
        shown_by="a window inside a media prompt that completes a block; text rows hide it",
    ),
    Fault(
        id="F06",
        title="restore clears every stream",
        mechanism="Restoring one stream zeroes the pooled rows of all and refills only its own.",
        gate="bits",
        kernels=(STREAMS,),
        method=restore_clears_every_stream,
        host_step="a restore zeroes the pooled rows of every page in use",
        inputs="streams",
        shown_by="a stream with a pooled block while another is restored",
    ),
    Fault(
        id="F07",
        title="pooled rows left out of a saved state",
        mechanism="A saved state holds keys and values but not the indexer's rows, so a resumed stream selects from "
        "stale ones.",
        gate="bits",
        kernels=(STREAMS,),
        method=pooled_rows_not_saved,
        host_step="a saved state holds zeros for pooled rows",
        inputs="streams",
        shown_by="a restored stream with a pooled block",
    ),
    Fault(
        id="F08",
        title="pooled key rotated elsewhere",
        mechanism="The pooled key is rotated at its block's last position: scores are wrong, yet a row that selects "
        "every block stays exact.",
        gate="bound",
        kernels=("pool",),
        edits=(
            Edit(
                what="rotate at the last position",
                file="pool.cu",
                old="mean, pool_scale, inv_freq, rope, first);",
                new="mean, pool_scale, inv_freq, rope, first + KVP_BLOCK - 1);",
            ),
        ),
        shown_by="any window that completes a block: pooled rows have a bound of their own",
    ),
    Fault(
        id="F09",
        title="rows past the end under a zero weight",
        mechanism="Values are loaded past the live length; their weight is exactly 0, and 0 times the NaN of a row "
        "that was never written is NaN.",
        gate="memory",
        kernels=_ATTENDS,
        edits=(
            Edit(
                what="look up the rest of the last block too",
                file="chunks.cu",
                old="      if (k >= count) continue;",
                new="      if (k >= (list ? count : (count + KVP_BLOCK - 1) / KVP_BLOCK * KVP_BLOCK)) continue;",
            ),
            Edit(
                what="and sum its values",
                file="chunks.cu",
                old="    sum_tile(s, values, s.key_at[tile & 1], here, o);",
                new="    const int loaded = list ? here : (here + KVP_BLOCK - 1) / KVP_BLOCK * KVP_BLOCK;\n"
                "    sum_tile(s, values, s.key_at[tile & 1], loaded, o);",
            ),
        ),
        shown_by="poisoned rows past a stream's end, in its last page",
    ),
    Fault(
        id="F10",
        title="a step without a valid key",
        mechanism="The online softmax walks a tile that holds no valid key: maximum and running maximum are -inf, and "
        "exp(-inf + inf) is a NaN that nothing later clears.",
        gate="bound",
        kernels=("dense", ROWS),
        edits=(
            Edit(
                what="walk a tile of a chunk without keys",
                file="chunks.cu",
                old="  const int tiles_here = count > 0 ? ceil_div(count, KVP_TILE) : 0;",
                new="  const int tiles_here = count > 0 ? ceil_div(count, KVP_TILE) : 1;",
            ),
            Edit(
                what="as one of 0 keys",
                file="chunks.cu",
                old="count = left < KVP_CHUNK ? left : KVP_CHUNK;",
                new="count = left < 0 ? 0 : left < KVP_CHUNK ? left : KVP_CHUNK;",
            ),
        ),
        shown_by="a row without keys, or with fewer chunks than its neighbour; our kernel's guard is that it never "
        "walks such a tile",
    ),
    Fault(
        id="F11",
        title="merge of two empty partials",
        mechanism="The merge has no case for an empty partial: of two, it subtracts -inf from -inf.",
        gate="bound",
        kernels=(ROWS,),
        edits=(
            Edit(
                what="no partial is passed over",
                file="merge.cu",
                old="      if (l[part] == 0.0f) continue;\n",
                new="",
            ),
            Edit(
                what="none is taken as it stands",
                file="merge.cu",
                old="      if (normaliser == 0.0f) {",
                new="      if (false) {",
            ),
        ),
        shown_by="a row without keys",
    ),
    Fault(
        id="F12",
        title="an empty chunk writes nothing",
        mechanism="A chunk without keys returns before it stores its partial, so the merge weights what the scratch "
        "held before.",
        gate="bits",
        kernels=("dense", ROWS),
        edits=(
            Edit(
                what="return from an empty chunk",
                file="chunks.cu",
                old="  const int* list = a.sparse[row] ?",
                new="  if (count <= 0) return;\n  const int* list = a.sparse[row] ?",
            ),
        ),
        shown_by="rows with fewer chunks than their neighbours, over scratch that starts poisoned",
    ),
    Fault(
        id="F13",
        title="merge reads another rectangle",
        mechanism="The merge takes the partials for [chunk, row] where they are [row, chunk]: right for one row or one "
        "chunk, wrong for rows of several.",
        gate="bound",
        kernels=("dense", ROWS),
        edits=(
            Edit(
                what="address partials chunk by chunk",
                file="merge.cu",
                old="(static_cast<long long>(row) * chunks + chunk) * KVP_QUERY_HEADS + head;",
                new="(static_cast<long long>(chunk) * gridDim.y + row) * KVP_QUERY_HEADS + head;",
            ),
        ),
        shown_by="several rows of several chunks; ours are never packed, so this is the nearest form",
    ),
    Fault(
        id="F14",
        title="maximum in base 2",
        mechanism="A kernel hands on its maximum in base 2, and the merge weights partials with natural exponentials.",
        gate="bound",
        kernels=_ATTENDS,
        edits=(
            Edit(
                what="store m / ln 2",
                file="chunks.cu",
                old="    out_m[h] = s.highest[tiles_here & 1][h];",
                new="    out_m[h] = s.highest[tiles_here & 1][h] * 1.44269502f;",
            ),
        ),
        shown_by="any row: the partials have bounds of their own",
    ),
    Fault(
        id="F15",
        title="ties taken in another order",
        mechanism="Of blocks whose scores tie at the cut, the higher ids are taken.",
        gate="bound",
        kernels=("select",),
        edits=(
            Edit(
                what="count all ties",
                file="select.cu",
                old='extern "C"',
                new="__device__ int ties_of_all(const int* equal) {\n"
                "  int all = 0;\n  for (int i = 0; i < KVP_THREADS; ++i) all += equal[i];\n  return all;\n}\n\n"
                'extern "C"',
            ),
            Edit(
                what="pass over the lower ones",
                file="select.cu",
                old="tie < wanted ? tie : wanted",
                new="ties_of_all(equal) - wanted < tie ? tie - (ties_of_all(equal) - wanted) : 0",
            ),
            Edit(
                what="and take the higher",
                file="select.cu",
                old="u == least && tie < wanted",
                new="u == least && tie >= ties_of_all(equal) - wanted",
            ),
        ),
        shown_by="streams whose cut falls among equal scores",
    ),
    Fault(
        id="F16",
        title="a barrier is missing",
        mechanism="The score kernel reads keys from shared memory before every thread has staged its own.",
        gate="bits",
        kernels=("scores",),
        edits=(
            Edit(
                what="no barrier behind the staging",
                file="scores.cu",
                old="  stage_rows<width>(tile, pooled, at, count);\n  __syncthreads();",
                new="  stage_rows<width>(tile, pooled, at, count);",
            ),
        ),
        shown_by="other thread orders, over poisoned shared memory",
    ),
    Fault(
        id="F17",
        title="chunks cut by the longest row",
        mechanism="A row's keys are shared out over as many chunks as the longest row of the launch has, so its "
        "summation order depends on its companions.",
        gate="bits",
        kernels=(ROWS,),
        edits=(
            Edit(
                what="chunks of an even share",
                file="chunks.cu",
                old="  const int first = chunk * KVP_CHUNK;\n"
                "  const int left = a.nk[row] - first, count = left < KVP_CHUNK ? left : KVP_CHUNK;",
                new="  const int share = ceil_div(ceil_div(a.nk[row], a.chunks), KVP_TILE) * KVP_TILE;\n"
                "  const int first = chunk * share;\n"
                "  const int left = a.nk[row] - first, count = left < share ? left : share;",
            ),
        ),
        shown_by="a row alone and again beside a longer one",
    ),
    Fault(
        id="F18",
        title="page offset in 32 bits",
        mechanism="Page id times page size is formed in 32 bits and wraps for a high page.",
        gate="bits",
        kernels=("prep", "pool", "scores", *_ATTENDS),
        edits=(
            Edit(
                what="the page's offset as int",
                file="pages.cuh",
                old="  return pages.table[page] * pages.page_elements +",
                new="  return static_cast<int>(pages.table[page] * pages.page_elements) +",
            ),
        ),
        inputs="high page",
        shown_by="an arena of 2**32 elements, of which a few pages are ever touched",
    ),
    Fault(
        id="F19",
        title="page size recomputed",
        mechanism="A page's offset is its id times the rows of this one part, but a page holds other parts and layers "
        "too.",
        gate="bits",
        kernels=("prep", "pool", "scores", *_ATTENDS),
        edits=(
            Edit(
                what="rows * stride for a page",
                file="pages.cuh",
                old="pages.table[page] * pages.page_elements +",
                new="pages.table[page] * static_cast<long long>(rows) * stride +",
            ),
        ),
        shown_by="any arena: its pages hold two layers of four parts",
    ),
    Fault(
        id="F20",
        title="stale rows of a reused table",
        mechanism="When a batch shrinks, its padding rows are cleared in their first table entry only and still name "
        "the last step's pages.",
        gate="memory",
        kernels=(CAPTURED,),
        method=_padding_rows_cleared_in_part,
        host_step="of a row without a stream, the captured batch clears the first table entry only",
        inputs="captured",
        shown_by="a batch that shrinks from 3 streams of 3 pages to 1, while a new stream takes pages of the others",
    ),
    Fault(
        id="F21",
        title="the reserved page read behind the end",
        mechanism="A partly filled tile is loaded whole: rows behind the end come from the page that pads the table, "
        "and 0 times its NaN leaks out.",
        gate="memory",
        kernels=_ATTENDS,
        edits=(
            Edit(
                what="rows behind the end through the table's padding",
                file="chunks.cu",
                old="      if (k >= count) continue;",
                new="      if (k >= count && (list || !a.pages.table)) continue;\n"
                "      if (k >= count) {\n"
                "        const int n = a.pages.positions, behind = (first + count + n - 1) / n * n;\n"
                "        s.key_at[tile & 1][i] = key_row(a.pages, behind + (first + k) % n);\n"
                "        continue;\n"
                "      }",
            ),
            Edit(
                what="whole tiles of values",
                file="chunks.cu",
                old="    sum_tile(s, values, s.key_at[tile & 1], here, o);",
                new="    const int loaded = list || !a.pages.table ? here : KVP_TILE;\n"
                "    sum_tile(s, values, s.key_at[tile & 1], loaded, o);",
            ),
        ),
        shown_by="tables whose padding names a page that holds poison: of a neighbour that ends inside it",
    ),
    Fault(
        id="F22",
        title="pages for the committed rows only",
        mechanism="Pages are reserved for the rows before the window, so its own rows go through table entries that "
        "were never assigned.",
        gate="memory",
        kernels=_STORES,
        host=_pages_of_committed_rows_only,
        host_step="the table handed to prep and pool ends with the committed rows; what lies behind it follows",
        shown_by="a window that crosses into a new page, behind which the table names a neighbour's; where the table "
        "ends, validation refuses it",
    ),
    Fault(
        id="F23",
        title="table rewritten before its copy ran",
        mechanism="The page table is uploaded asynchronously from a buffer that the next step rewrites.",
        gate="bits",
        kernels=(STREAMS,),
        method=table_rewritten_before_its_copy,
        host_step="page tables go through one staging buffer, copied when the queue comes to it",
        inputs="queues",
        shown_by="two streams that take pages before the first copy has run",
    ),
    Fault(
        id="F24",
        title="a stale address in a captured launch",
        mechanism="The selected list is allocated anew for each call, and a captured launch keeps the old address.",
        gate="bits",
        kernels=(CAPTURED,),
        method=_captures_of_addresses,
        host_step="a capture keeps the addresses of its launches' arrays, and not the arrays",
        inputs="captured",
        shown_by="a sparse step captured in two parts, between which a prompt of another shape gets the memory of the "
        "lists; with all freed memory held by others, what the replay stores there shows",
    ),
    Fault(
        id="F25",
        title="scratch shared between device streams",
        mechanism="Scratch is kept by shape and not by stream, so two streams of one shape overwrite each other.",
        gate="bits",
        kernels=(STREAMS,),
        method=scratch_kept_by_shape,
        host_step="fp32 outputs are kept by shape",
        inputs="queues",
        shown_by="streams of equal windows on two queues that take turns",
    ),
    Fault(
        id="F26",
        title="a copy that nothing orders",
        mechanism="Pages are copied out on a queue of their own, with no wait for the kernel that writes them.",
        gate="bits",
        kernels=(STREAMS,),
        method=copy_that_nothing_orders,
        host_step="a save does not wait for the queue that wrote the rows",
        inputs="queues",
        shown_by="a stream that is saved on another queue than it was appended on",
    ),
    Fault(
        id="F27",
        title="causal mask aligned to the upper left",
        mechanism="A dense row's keys are counted by its index in the window, without the positions before it.",
        gate="bound",
        kernels=("select",),
        edits=(
            Edit(
                what="keys up to the row's index",
                file="select.cu",
                old="    nk[row] = dense ? position + 1 :",
                new="    nk[row] = dense ? row + 1 :",
            ),
        ),
        shown_by="a dense window behind cached rows; tests/meta hold the reference against loops of its own",
    ),
    Fault(
        id="F28",
        title="rollback that returns early",
        mechanism="A rollback across a block or page edge returns without an error and removes nothing.",
        gate="validation",
        kernels=(STREAMS,),
        method=rollback_returns_early,
        host_step="a rollback past a block edge returns 0 and removes nothing",
        inputs="streams",
        shown_by="refuted drafts on both sides of a block edge",
    ),
    Fault(
        id="F29",
        title="one head's accumulator at one shape",
        mechanism="At one number of chunks the merge reads head 0's partial for every head; other shapes are right.",
        gate="bound",
        kernels=("dense", ROWS),
        edits=(
            Edit(
                what="head 0's partial where there are 3 chunks",
                file="merge.cu",
                old="load8(o + part * KVP_HEAD_DIM + d)",
                new="load8(o + (chunks == 3 ? part - head : part) * KVP_HEAD_DIM + d)",
            ),
        ),
        shown_by="rows of 3 chunks",
    ),
    Fault(
        id="F30",
        title="page id without an upper bound",
        mechanism="What writes checks page ids on both sides, what reads only that they are not negative.",
        gate="validation",
        kernels=("scores", "chunks"),
        host=_reads_without_an_upper_bound,
        host_step="scores and chunks get a cache that does not check ids from above",
        inputs="bad tables",
        shown_by="a table that names the page behind the arena, where a page of NaN lies",
    ),
)
"""Every entry of `faults.md`, in its order."""


def chosen(ids: Sequence[str]) -> tuple[Fault, ...]:
    """The entries of these ids, all of them when none is given.

    Raises:
        ValueError: there is no such entry.
    """
    known = {fault.id: fault for fault in CATALOGUE}
    for name in ids:
        if name not in known:
            raise ValueError(f"--only is {name!r}; it must be one of {', '.join(known)}")
    return tuple(known[name] for name in ids) or CATALOGUE
