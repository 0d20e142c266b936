"""How much of an SM a kernel fills, from the limits that NVIDIA publishes.

Threads, blocks, registers and shared memory of an SM: "Technical Specifications per Compute Capability" in the CUDA C++
Programming Guide. How the last two are handed out (registers by 256 to a warp, in one of four partitions; shared memory
by 128 bytes, 256 before compute capability 8.0): cuda_occupancy.h of the CUDA toolkit. From 8.0 on the system takes
1 KiB of shared memory for each block: the tuning guides of these architectures.
"""

from __future__ import annotations

from dataclasses import dataclass

WARP = 32
REGISTERS = 64 * 1024
"""Registers of an SM."""
PARTITIONS = 4
REGISTER_UNIT = 256


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What an SM has.

    Attributes:
        threads, blocks: resident at a time.
        shared_bytes: of the SM, at the largest setting.
        shared_unit: bytes that shared memory is handed out by.
        reserved_bytes: that the system takes for each block.
    """

    threads: int
    blocks: int
    shared_bytes: int
    shared_unit: int = 128
    reserved_bytes: int = 1024


LIMITS = {
    "sm_75": Limits(threads=1024, blocks=16, shared_bytes=64 * 1024, shared_unit=256, reserved_bytes=0),
    "sm_80": Limits(threads=2048, blocks=32, shared_bytes=164 * 1024),
    "sm_86": Limits(threads=1536, blocks=16, shared_bytes=100 * 1024),
    "sm_89": Limits(threads=1536, blocks=24, shared_bytes=100 * 1024),
    "sm_90": Limits(threads=2048, blocks=32, shared_bytes=228 * 1024),
    "sm_100": Limits(threads=2048, blocks=32, shared_bytes=228 * 1024),
    "sm_120": Limits(threads=1536, blocks=24, shared_bytes=100 * 1024),
    "sm_121": Limits(threads=1536, blocks=24, shared_bytes=100 * 1024),
}


@dataclass(frozen=True, kw_only=True)
class Occupancy:
    """Blocks that an SM holds at a time.

    Attributes:
        blocks: how many.
        fraction: their warps, of the most that the SM can hold.
        limit: what stands against one more: "threads", "blocks", "registers" or "shared memory".
    """

    blocks: int
    fraction: float
    limit: str


def occupancy(arch: str, *, threads: int, registers: int, shared_bytes: int) -> Occupancy:
    """Occupancy of a kernel.

    Args:
        arch: one of `LIMITS`.
        threads: of a block.
        registers: of a thread.
        shared_bytes: static and dynamic, of a block.

    Raises:
        ValueError: the limits of this architecture are not known, or threads or registers are below 1.
    """
    if arch not in LIMITS:
        raise ValueError(f"arch is {arch!r}; limits are known for {', '.join(LIMITS)}")
    if threads < 1 or registers < 1:
        raise ValueError(f"{threads} threads of {registers} registers; both must be at least 1")
    sm = LIMITS[arch]
    warps = _round_up(threads, WARP) // WARP
    warp_registers = _round_up(registers * WARP, REGISTER_UNIT)
    by_limit = {
        "threads": sm.threads // WARP // warps,
        "blocks": sm.blocks,
        "registers": REGISTERS // PARTITIONS // warp_registers * PARTITIONS // warps,
    }
    if taken := _round_up(shared_bytes + sm.reserved_bytes, sm.shared_unit):
        by_limit["shared memory"] = sm.shared_bytes // taken
    limit = min(by_limit, key=lambda name: by_limit[name])
    return Occupancy(blocks=by_limit[limit], fraction=by_limit[limit] * warps * WARP / sm.threads, limit=limit)


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
