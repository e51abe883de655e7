"""Matrix-vector kernels for decode, run by the host emulation and compared with float64."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cuda_host
import numpy as np
import pytest
from gemv_cases import EPS, Case, arrays_of, error

from tapeout.compiler.devices import CudaDevice, load_device
from tapeout.compiler.formats import FORMATS
from tapeout.compiler.kernels.cuda import gemv, toolchain
from tapeout.compiler.kernels.cuda.base import Candidate, Cubin
from tapeout.compiler.layouts import planes_hold

pytestmark = pytest.mark.skipif(not cuda_host.supported(), reason="the emulation needs AVX2, FMA and F16C")

# few multiprocessors, so that warps go around their rings several times
DEVICE = SimpleNamespace(sm_count=2, shared_per_block=101_376, half_shared=100_000)

SERVED = sorted(name for name, known in FORMATS.items() if known.is_float or planes_hold(name))
CASES = [
    *(Case(name, 20, 768, m=1 + i % 2) for i, name in enumerate(SERVED)),
    *(
        Case(name, 37, 2816, norm=True, tile=(2, 2, 4))
        for name in ("q4_0", "q8_0", "q6_k", "q4_k", "bf16", "fp8_block128")
    ),
    Case("q4_0", 40, 576, m=4, epilogue=1, norm=True, bias=True, pad=4),
    Case("q4_0", 21, 640, epilogue=2, norm=True),
    Case("q5_k", 12, 512, m=2, epilogue=3, bias=True, pad=12, tile=(2, 1, 4)),
    Case("bf16", 33, 1016, m=2, epilogue=2, norm=True, bias=True),
    Case("f16", 5, 8, epilogue=1),
    Case("f32", 7, 4104, m=4, norm=True),
    Case("bf16", 6, 14336, m=4, norm=True, tile=(2, 1, 4)),
    Case("q3_k", 3, 256, m=4, tile=(1, 1, 2)),
    Case("fp8", 130, 1536, m=2, epilogue=3),
    Case("int4_g128_zp", 18, 1536, m=4, epilogue=2, norm=True),
    Case("q4_0", 21, 640, epilogue=2, x="bf16", y="bf16"),
    Case("bf16", 20, 768, m=2, epilogue=3, norm=True, x="f16", y="bf16"),
    Case("q8_0", 20, 768, m=2, epilogue=1, x="bf16"),
    *(
        Case(name, 7, 4352, m=1 + i % 2, norm=True, tile=(1 + i % 2, 4, 2))
        for i, name in enumerate(("q6_k", "q5_k", "q2_k"))
    ),
    *(Case(name, 7, 4416, tile=(2, 4, 2)) for name in ("q4_1", "q8_0", "int4_g64")),
]


def _candidates(case: Case, device: Any) -> list[Candidate]:
    return gemv.candidates(
        case.format,
        case.n,
        case.k,
        case.m,
        ldx=case.k + case.pad,
        ldy=case.n + case.pad,
        epilogue=case.epilogue,
        norm=case.norm,
        eps=EPS,
        bias=case.bias,
        x=case.x,
        y=case.y,
        device=device,
        tiles=[gemv.Tile(*case.tile)] if case.tile else None,
    )


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.format}-n{c.n}-k{c.k}-m{c.m}-e{c.epilogue}-{c.x}")
def test_products_against_float64(case: Case) -> None:
    candidate = _candidates(case, DEVICE)[0]
    arrays = arrays_of(case)
    reference = arrays.pop("reference")
    outside = arrays["y"][:, case.n :].copy()
    given = {name: array for name, array in arrays.items() if getattr(case, name, True)}
    cuda_host.run(candidate.kernel, candidate.grid, {**dict.fromkeys(arrays), **given})
    assert error(case, arrays["y"], reference) < case.tolerance
    assert np.array_equal(arrays["y"][:, case.n :], outside, equal_nan=True), "columns outside were written"


@pytest.mark.parametrize("format", ["q4_0", "q6_k", "int4_g128_zp"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_one_activation_that_is_no_number_shows(format: str, bad: float) -> None:
    case = Case(format, 20, 768)
    candidate, arrays = _candidates(case, DEVICE)[0], arrays_of(case)
    arrays["x"][0, 333] = bad
    given = {name: array for name, array in arrays.items() if name in ("x", "w", "y")}
    cuda_host.run(candidate.kernel, candidate.grid, {**dict.fromkeys(("norm", "bias")), **given})
    assert np.isnan(arrays["y"]).all()


@pytest.mark.parametrize("device", ["h200", "rtx-pro-6000"])
def test_a_real_shape_has_a_tile_that_fits_without_spills(device: str, tmp_path: Path) -> None:
    profile = load_device(device)
    assert isinstance(profile, CudaDevice)
    cases = [Case(name, 4096, 4096, epilogue=2, norm=True) for name in ("bf16", "q4_0", "q4_k", "q6_k")]
    cases += [Case(name, 4096, 14336, epilogue=1) for name in ("q8_0", "int4_g128", "fp8_block128")]
    offered = {case.format: _candidates(case, profile) for case in cases}
    kernels = [candidate.kernel for candidates in offered.values() for candidate in candidates]
    built = toolchain.build(kernels, profile, tmp_path)
    for format, candidates in offered.items():
        fitting = [one for one in candidates if isinstance(built[one.kernel.name], Cubin)]
        assert fitting, (format, [built[one.kernel.name] for one in candidates])
