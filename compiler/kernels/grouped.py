"""Products of groups of rows with a matrix of their own each: experts and heads (linear_grouped.c)."""

from __future__ import annotations

from tapeout.compiler.stages import KernelEntry

PARAMS = ("x", "w", "y", "n", "k", "cap", "ldy", "epilogue", "bias", "starts", "row_of", "scale", "groups", "extra",
          "terms")  # fmt: skip
STORE, ADD, GATED_SILU, GATED_GELU, GATED_SWIGLU_OAI = range(5)
GATED = {"silu": GATED_SILU, "gelu_tanh": GATED_GELU, "swiglu_oai": GATED_SWIGLU_OAI}


def kernel(format: str) -> KernelEntry:
    """The kernel for weights of a format; it takes the activations that ``linear`` of the format takes."""
    return KernelEntry(f"grouped_{format}", "grouped", PARAMS, "linear_grouped.c", (("TP_FORMAT", format),))
