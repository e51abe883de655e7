"""Kernels around the products of experts: routing, sorting rows by expert, and what happens between products."""

from __future__ import annotations

from tapeout.compiler.stages import KernelEntry


def _entry(name: str, *params: str) -> KernelEntry:
    return KernelEntry(name, "experts", params, "experts.c", ())


SCORES = ("softmax", "sigmoid", "sqrt_softplus", "softmax_chosen")  # numbered as in experts.c
GROUP_SCORES = ("max", "top2")
MOST = 4096  # EXPERTS_MOST of experts.c
FEW_PAIRS = 64  # TP_FEW_PAIRS of tapeout_cpu.h

ROUTE = _entry("route", "x", "ldx", "y", "experts", "top_k", "score", "bias", "groups", "top_groups", "group_score",
               "normalize", "scale")  # fmt: skip
DISPATCH = _entry("dispatch", "route", "top_k", "experts", "starts", "row_of", "weight", "first")
SORT_X8 = _entry("sort_x8", "x", "cap", "y", "cap_y", "k", "row_of", "top_k", "terms")
SORT_F32 = _entry("sort_f32", "x", "ldx", "y", "k", "row_of", "top_k")
PAIRS_X8 = _entry("pairs_x8", "x", "y", "k", "cap", "top_k")
ADD_PAIRS = _entry("add_pairs", "x", "y", "k", "row_of", "starts", "experts")
ZERO_F32 = _entry("zero_f32", "y", "k")


def starts_bytes(experts: int) -> int:
    """Bytes of what ``dispatch`` says of each expert: starts, how many are chosen, and which."""
    return 4 * (2 * experts + 2)
