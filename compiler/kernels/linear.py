"""Matrix products: y = x @ w.T with w in the tile16 layout, one kernel a weight format (linear.c)."""

from __future__ import annotations

from tapeout.compiler.formats import FORMATS
from tapeout.compiler.kernels.base import Cost
from tapeout.compiler.layouts import packed_bytes
from tapeout.compiler.stages import KernelEntry

PARAMS = ("x", "w", "y", "n", "k", "cap", "ldy", "epilogue", "bias", "terms")
STORE, ADD, GATED_SILU, GATED_GELU = range(4)
GATED = {"silu": GATED_SILU, "gelu_tanh": GATED_GELU}
LAYOUT = "tile16"


def kernel(format: str) -> KernelEntry:
    """The kernel for weights of a format; integer codes take x8 activations, floats and e4m3 numbers take float32."""
    return KernelEntry(f"linear_{format}", "linear", PARAMS, "linear.c", (("TP_FORMAT", format),))


def takes_x8(format: str) -> bool:
    """Whether the kernel for a format reads quantized activations."""
    return FORMATS[format].codes is not None


def cost(format: str, n: int, k: int, rows: int) -> Cost:
    """Cost of one product of ``rows`` activations with an [n, k] weight."""
    return Cost(packed_bytes((n, k), format, LAYOUT), 2 * n * k * rows, takes_x8(format))
