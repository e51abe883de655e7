"""Collectives between the ranks of one machine, over memory that they share (collective.c)."""

from __future__ import annotations

from tapeout.compiler.stages import KernelEntry

_PARAMS = ("x", "ldx", "y", "ldy", "k", "comm")
_TWO_SHOT_BYTES = 64 << 10


def _entry(name: str, *more: str) -> KernelEntry:
    return KernelEntry(name, "collective", (*_PARAMS, *more), "collective.c", ())


ALL_REDUCE = _entry("all_reduce", "add", "two_shot")
ALL_GATHER = _entry("all_gather", "columns")
REDUCE_SCATTER = _entry("reduce_scatter")
ALL_TO_ALL = _entry("all_to_all")


def two_shot_rows(k: int) -> int:
    """Rows of ``k`` floats from which on an all_reduce is a reduce_scatter and an all_gather; the sum is the same bits.

    In one shot every rank reads all operands and meets the others once; in two it reads two operands in all and meets
    them twice, which costs where ranks share cores: there the times cross near 64 KiB
    (tests/benchmarks/bench_collectives.py).
    """
    return -(-_TWO_SHOT_BYTES // (4 * k))


def buffer_bytes(kernel: KernelEntry, ranks: int, rows: int, k: int) -> int:
    """What a rank puts into its buffer; the largest over a plan is what the shared memory holds a rank and turn."""
    scattered = kernel in (REDUCE_SCATTER, ALL_TO_ALL)
    return 4 * rows * k * (ranks if scattered else 1)
