"""Attention over the same keys by PyTorch's scaled_dot_product_attention on a GPU. Needs torch."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ...reference.geometry import Geometry
from ...reference.results import longest_list
from .bench import ROUNDS, Work, abba

GATHER_PAGE = 16


@dataclass(frozen=True, kw_only=True)
class TorchTiming:
    """One contender at one work: the median of one layer, all streams, in microseconds."""

    work: str
    contender: str
    layers: int
    median_us: float
    fastest_us: float


def sdpa(geometry: Geometry, work: Work, *, layers: int, rounds: int = ROUNDS) -> list[TorchTiming]:
    """Decode rows over as many keys as ours attend, bf16: over keys that lie together, and gathered from pages first.

    The streams are one batch; every layer has keys and values of its own, so that memory answers and no cache.

    Raises:
        ValueError: the work is no decode; its rows would each have other keys.
    """
    if work.rows != 1:
        raise ValueError(f"{work.name} has {work.rows} rows to a stream; only decode is timed with PyTorch")
    keys = longest_list(geometry, work.keys - 1, 1)
    graphs = {name: _captured(step) for name, step in _contenders(geometry, work.streams, keys, layers).items()}
    taken: dict[str, list[float]] = {name: [] for name in graphs}
    for name in abba(tuple(graphs), rounds):
        taken[name].append(_milliseconds(graphs[name].replay))
    return [
        TorchTiming(
            work=work.name,
            contender=name,
            layers=layers,
            median_us=statistics.median(times) / layers * 1e3,
            fastest_us=min(times) / layers * 1e3,
        )
        for name, times in taken.items()
    ]


def _contenders(g: Geometry, streams: int, keys: int, layers: int) -> dict[str, Callable[[], Any]]:
    def normal(*shape: int) -> Any:
        return torch.randn(*shape, dtype=torch.bfloat16, device="cuda")

    q = normal(streams, g.query_heads, 1, g.head_dim)
    together = [[normal(streams, g.kv_heads, keys, g.head_dim) for _ in range(2)] for _ in range(layers)]
    pages = -(-keys // GATHER_PAGE)
    arenas = [[normal(streams * pages, GATHER_PAGE, g.kv_heads, g.head_dim) for _ in range(2)] for _ in range(layers)]
    table = torch.randperm(streams * pages, device="cuda").reshape(streams, pages)

    def attend(k: Any, v: Any) -> Any:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    def gathered(arena: Any) -> Any:
        rows = arena[table].reshape(streams, pages * GATHER_PAGE, g.kv_heads, g.head_dim)
        return rows[:, :keys].transpose(1, 2)

    return {
        "SDPA": lambda: [attend(k, v) for k, v in together],
        f"gather from pages of {GATHER_PAGE}, SDPA": lambda: [attend(gathered(k), gathered(v)) for k, v in arenas],
    }


def _captured(step: Callable[[], Any]) -> Any:
    """The step as a CUDA graph, after runs that let PyTorch choose its kernels."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    graph.replay()
    return graph


def _milliseconds(replay: Callable[[], None]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))
