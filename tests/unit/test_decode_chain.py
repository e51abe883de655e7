"""The kernels of a decode step take half of a multiprocessor, so that the next one's block fits beside each. No GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from tapeout.compiler.devices import CudaDevice, load_device
from tapeout.compiler.kernels.cuda import attention, gemv, toolchain
from tapeout.compiler.kernels.cuda.base import Candidate, Cubin

BLOCK_COST = 1024  # bytes of shared memory that a resident block takes beside its own
# Of an 8B Llama: output columns, K, epilogue (0 store, 1 add, 2 gated), whether the input is normalised on the way
PRODUCTS = ((6144, 4096, 0, True), (4096, 4096, 1, False), (14336, 4096, 2, True), (4096, 14336, 1, False))
PRODUCTS += ((128256, 4096, 0, True),)
ATTENTION = attention.Attention(
    heads=32,
    kv_heads=8,
    head_dim=128,
    page_tokens=32,
    max_pages=256,
    scale=128**-0.5,
    row=6144,
    q_col=0,
    k_col=4096,
    v_col=5120,
)


def product(format: str, n: int, k: int, epilogue: int, norm: bool, device: CudaDevice) -> list[Candidate]:
    """The candidates for one row; what a product passes to the next is bf16."""
    types = {"x": "f32" if norm else "bf16", "y": "bf16" if epilogue == 2 else "f32"}
    rest = {"ldx": k, "ldy": n, "eps": 1e-5, "bias": False, "device": device}
    return gemv.candidates(format, n, k, 1, epilogue=epilogue, norm=norm, **types, **rest)


@pytest.mark.parametrize("format", ["q4_0", "q4_k", "q6_k", "q8_0", "bf16"])
def test_decode_kernels_take_half_a_multiprocessor(format: str, tmp_path: Path) -> None:
    device = load_device("h200")
    assert isinstance(device, CudaDevice)
    launches = [product(format, *shape, device) for shape in PRODUCTS]
    launches.append(attention.decode(ATTENTION, 1, device, 8192, "bf16"))
    kernels = {each.kernel.name: each.kernel for candidates in launches for each in candidates}
    built = toolchain.build(list(kernels.values()), device, tmp_path)
    for candidates in launches:
        kernel = next(each.kernel for each in candidates if isinstance(built[each.kernel.name], Cubin))
        cubin = built[kernel.name]
        assert isinstance(cubin, Cubin)
        taken = cubin.resources
        assert taken.registers * kernel.threads <= device.registers_per_sm // 2, kernel.name
        assert device.shared_per_sm / 3 < taken.shared + BLOCK_COST <= device.shared_per_sm / 2, kernel.name
