"""The small CUDA kernels, run by the host emulation, against numpy in float64 and the CPU's sampler; the emulation."""

from __future__ import annotations

import ctypes as C
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from cuda_host import Argument, LaunchError, run, supported

from tapeout.compiler.emit.pack import pack_planes
from tapeout.compiler.formats import FORMATS
from tapeout.compiler.kernels.cuda import small
from tapeout.compiler.kernels.cuda.attention import Attention
from tapeout.compiler.kernels.cuda.base import Candidate, GpuKernel, Param
from tapeout.compiler.kernels.toolchain import Unit, build_libraries
from tapeout.compiler.layouts import planes_hold
from tapeout.runtime.cpu import Sampling

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
Array = npt.NDArray[np.generic]

pytestmark = pytest.mark.skipif(not supported(), reason="the emulation needs AVX2, FMA and F16C")
SEEDS = (0, 7)
OUT_TYPE = {"f32": np.float32, "bf16": np.uint16, "f16": np.float16}
HALF_ULP = {"f32": 2e-6, "bf16": 2**-8, "f16": 2**-11 + 2e-6}


def random(*shape: int, seed: int = 0) -> F32:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def poison(*shape: int, kind: str = "f32") -> Array:
    """What nobody wrote shows: NaN in each of the types."""
    out = np.empty(shape, OUT_TYPE[kind])
    out.view(np.uint8)[...] = 0xFF
    return out


def floats(array: Array) -> F64:
    """An output's values; uint16 holds bfloat16."""
    if array.dtype == np.uint16:
        return (array.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return array.astype(np.float64)


def counts(rows: int, out_rows: int = 0) -> npt.NDArray[np.int32]:
    return np.array([rows, 1, out_rows, 0], np.int32)


def launch(candidate: Candidate, threads: int = 0, **arguments: Argument) -> None:
    """Launch with the parameters by name; ``threads`` seeds the order of the threads."""
    run(candidate.kernel, candidate.grid, arguments, threads)


def close(actual: Array, expected: F64, tolerance: float) -> None:
    np.testing.assert_allclose(floats(actual), expected, rtol=tolerance, atol=tolerance)


# Embedding


@pytest.mark.parametrize("format", [name for name, known in FORMATS.items() if known.is_float or planes_hold(name)])
def test_embed_gives_the_values_of_the_file(format: str) -> None:
    vocab, k, bucket = 40, 768, 6
    known = FORMATS[format]
    if known.tiles or known.is_float:
        assert known.encode is not None
        data = known.encode(random(vocab, k))
    else:
        data = np.random.default_rng(3).integers(0, 256, (vocab, known.row_bytes(k)), dtype=np.uint8)
    packed = data if known.is_float else pack_planes(format, data, k)
    tokens = np.array([39, 0, 17, -1, 40, 3], np.int32)
    y = poison(bucket, k)
    scale = np.float32(1.7)
    launch(small.embed(format, vocab, k, float(scale), bucket), tokens=tokens, w=packed, y=y, counts=counts(5))
    with np.errstate(invalid="ignore", over="ignore"):
        expected = known.decode(data) * scale
    np.testing.assert_array_equal(y[:3], expected[tokens[:3]])
    assert np.isnan(y[3:]).all()  # no such tokens, and a row that is not live


@pytest.mark.parametrize(("k", "rows"), [(33, 3), (5000, 2), (1024, 40)])
def test_embed_of_odd_widths(k: int, rows: int) -> None:
    data = FORMATS["bf16"].encode
    assert data is not None
    w = data(random(9, k))
    tokens = np.arange(rows, dtype=np.int32) % 9
    y = poison(rows, k)
    launch(small.embed("bf16", 9, k, 1.0, rows), tokens=tokens, w=w, y=y, counts=counts(rows))
    np.testing.assert_array_equal(y, FORMATS["bf16"].decode(w)[tokens])


# Norms


def rmsnorm(x: F32, weight: F32, eps: float) -> F64:
    wide = x.astype(np.float64)
    return wide / np.sqrt((wide**2).mean(axis=-1, keepdims=True) + eps) * weight


@pytest.mark.parametrize("k", [8, 33, 576, 2047, 4096, 5120])
@pytest.mark.parametrize("rows", [1, 19])
@pytest.mark.parametrize("out", ["f32", "bf16", "f16"])
def test_rmsnorm_matches_float64(k: int, rows: int, out: str) -> None:
    ldx = k + 4
    x, weight = random(rows, ldx), random(k, seed=1)
    y = poison(rows + 1, k, kind=out)
    kernel = small.rmsnorm(k, ldx, 1e-5, out, rows + 1, 2)
    launch(kernel, x=x, weight=weight, y=y, counts=counts(0, rows))
    close(y[:rows], rmsnorm(x[:, :k], weight, 1e-5), HALF_ULP[out])
    assert np.isnan(floats(y[rows:])).all()


@pytest.mark.parametrize("k", [33, 1152])
def test_rmsnorm_add_adds(k: int) -> None:
    rows = 17
    x, weight, total = random(rows, k), random(k, seed=1), random(rows, k, seed=2)
    expected = total + rmsnorm(x, weight, 1e-6)
    launch(small.rmsnorm_add(k, k, 1e-6, rows), x=x, weight=weight, y=total, counts=counts(rows))
    close(total, expected, 2e-6)


@pytest.mark.parametrize("seed", [1, 2])
def test_the_order_of_threads_does_not_matter(seed: int) -> None:
    x, weight = random(3, 4096), random(4096, seed=1)
    y, other = poison(3, 4096), poison(3, 4096)
    kernel = small.rmsnorm(4096, 4096, 1e-5, "f32", 3)
    launch(kernel, x=x, weight=weight, y=y, counts=counts(3))
    launch(kernel, seed, x=x, weight=weight, y=other, counts=counts(3))
    np.testing.assert_array_equal(y, other)


# Elementwise


@pytest.mark.parametrize(("k", "rows"), [(33, 5), (1024, 1), (1100, 20)])
def test_gather_takes_the_wanted_rows(k: int, rows: int) -> None:
    x, wanted = random(30, k), np.random.default_rng(0).integers(0, 30, rows + 2).astype(np.int32)
    y = poison(rows + 2, k)
    launch(small.gather(k, rows + 2), x=x, out_row=wanted, y=y, counts=counts(30, rows))
    np.testing.assert_array_equal(y[:rows], x[wanted[:rows]])
    assert np.isnan(y[rows:]).all()


@pytest.mark.parametrize(("k", "rows"), [(33, 3), (1100, 1), (2048, 20)])
@pytest.mark.parametrize("act", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("out", ["f32", "bf16"])
def test_gated_matches_float64(k: int, rows: int, act: str, out: str) -> None:
    x = random(rows, 2 * k + 4) * 4
    x[0, :4] = [-100, 100, 0, -20]
    y = poison(rows, k, kind=out)
    launch(small.gated(act, k, 2 * k + 4, out, rows), x=x, y=y, counts=counts(rows))
    gate, up = x[:, :k].astype(np.float64), x[:, k : 2 * k].astype(np.float64)
    u = gate if act == "silu" else 2 * np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)
    with np.errstate(over="ignore"):
        close(y, gate / (1 + np.exp(-u)) * up, HALF_ULP[out] * 2)


@pytest.mark.parametrize(("k", "rows"), [(33, 3), (2048, 20)])
def test_add_and_cast(k: int, rows: int) -> None:
    x, y = random(rows, k), random(rows, k, seed=1)
    expected = x + y
    launch(small.add(k, rows), x=x, y=y, counts=counts(rows))
    np.testing.assert_array_equal(y, expected)
    for kind in ("bf16", "f16"):
        out = poison(rows, k, kind=kind)
        wide = random(rows, k + 8)
        launch(small.cast(k, k + 8, kind, rows), x=wide, y=out, counts=counts(rows))
        close(out, wide[:, :k].astype(np.float64), HALF_ULP[kind])


# Rotation and the cache


def rotated(x: F64, angle: F64, factor: float) -> F64:
    half = x.shape[-1] // 2
    a, b = x[..., :half], x[..., half:]
    cosine, sine = np.cos(angle)[:, None] * factor, np.sin(angle)[:, None] * factor
    return np.concatenate([a * cosine - b * sine, b * cosine + a * sine], axis=-1)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "d", "norm", "rope", "pad"),
    [(4, 2, 64, False, True, 0), (3, 1, 256, True, True, 6), (2, 2, 80, True, True, 1), (9, 3, 128, False, False, 0)],
)
def test_rope_kv_matches_float64(heads: int, kv_heads: int, d: int, norm: bool, rope: bool, pad: int) -> None:
    tokens, max_pages, rows = 16, 9000, 7
    width = (heads + 2 * kv_heads) * d
    shape = Attention(
        *(heads, kv_heads, d, tokens, max_pages, 1.0, width + pad, pad, pad + heads * d, pad + (heads + kv_heads) * d),
        rope=rope,
        factor=1.25,
        qk_norm=norm,
    )
    positions = np.array([0, 15, 16, 4095, 131071, 100_000, 17], np.int32)
    segment = np.array([0, 0, 1, 0, 1, 1, 0], np.int32)
    table = np.zeros((2, max_pages), np.int32)
    pages = np.random.default_rng(1).permutation(40).astype(np.int32)
    for i in range(rows):
        table[segment[i], positions[i] // tokens] = pages[i]
    table[0, 1] = pages[6]
    inv_freq = (10000.0 ** -(np.arange(d // 2) / (d // 2))).astype(np.float32)
    qkv = random(rows, width + pad)
    weights = [random(d, seed=i) for i in (1, 2)] if norm else [None, None]
    kv, q_out = poison(40, 2, kv_heads, tokens, d, kind="f16"), poison(rows + 1, heads, d, kind="f16")
    launch(
        small.rope_kv(shape, rows + 1),
        qkv=qkv,
        positions=positions,
        row_segment=segment,
        page_table=table,
        inv_freq=inv_freq if rope else None,
        q_norm=weights[0],
        k_norm=weights[1],
        kv=kv,
        q_out=q_out,
        counts=counts(rows),
    )
    parts = qkv[:, pad:].astype(np.float64).reshape(rows, heads + 2 * kv_heads, d)
    q, k, v = np.split(parts, [heads, heads + kv_heads], axis=1)
    if norm:
        scale = [x / np.sqrt((x**2).mean(-1, keepdims=True) + shape.eps) for x in (q, k)]
        q, k = scale[0] * weights[0], scale[1] * weights[1]
    if rope:
        angle = (positions[:, None].astype(np.float32) * inv_freq).astype(np.float64)
        q, k = rotated(q, angle, 1.25), rotated(k, angle, 1.25)
    close(q_out[:rows], q, HALF_ULP["f16"])
    assert np.isnan(q_out[rows:]).all()
    for i in range(rows):
        page, slot = table[segment[i], positions[i] // tokens], positions[i] % tokens
        close(kv[page, 0, :, slot], k[i], HALF_ULP["f16"])
        close(kv[page, 1, :, slot], v[i], HALF_ULP["f16"])
    assert np.isfinite(kv).sum() == rows * 2 * kv_heads * d


# Sampling


@pytest.fixture(scope="module")
def cpu(tmp_path_factory: pytest.TempPathFactory) -> C.CDLL:
    folder = tmp_path_factory.mktemp("sampler")
    data = build_libraries([Unit("engine.c"), Unit("sample.c")], [], ["x86_64_v3"], folder)
    (folder / "sampler.so").write_bytes(data["x86_64_v3"])
    library = C.CDLL(str(folder / "sampler.so"))
    library.tp_sample.argtypes = [C.c_void_p, C.c_int, C.c_void_p]
    return library


def on_cpu(cpu: C.CDLL, logits: F32, **settings: float) -> tuple[int, float]:
    sampling = Sampling(**{"top_p": 1.0, "want_logprob": 1, **settings})
    code = cpu.tp_sample(logits.ctypes.data, logits.size, C.byref(sampling))
    return (sampling.token, sampling.logprob) if code == 0 else (-1, 0.0)


class Step:
    """The sampling arrays of a step, one setting a row."""

    def __init__(self, settings: list[dict[str, float]], bucket: int) -> None:
        rows = len(settings)

        def field(name: str, kind: type, default: float) -> Array:
            return np.array([s.get(name, default) for s in settings] + [default] * (bucket - rows), kind)

        self.arrays: dict[str, Array] = {
            "temperature": field("temperature", np.float32, 0),
            "top_p": field("top_p", np.float32, 1),
            "top_k": field("top_k", np.int32, 0),
            "seed": field("seed", np.uint64, 0),
            "sample_position": field("position", np.uint64, 0),
            "counts": np.array([rows, rows, rows, 0], np.int32),
            "sampled": np.full(bucket, -7, np.int32),
            "logprob": poison(bucket),
            "tokens": np.full(bucket, -7, np.int32),
            "positions": np.arange(bucket, dtype=np.int32),
        }


def sample(logits: F32, settings: list[dict[str, float]], seed: int = 0, advance: bool = False) -> dict[str, Array]:
    """Launch the kernel in a bucket that is a row too large, and check what must not change."""
    rows, vocab = logits.shape
    step = Step(settings, rows + 1)
    padded = np.concatenate([logits, np.full((1, vocab), np.nan, np.float32)])
    candidate = small.sample(vocab, rows + 1, advance)
    arguments = {"logits": padded, **step.arrays}
    run(candidate.kernel, candidate.grid, arguments, seed, cluster=candidate.grid[0])
    assert step.arrays["sampled"][-1] == -7
    assert step.arrays["tokens"][-1] == -7
    return step.arrays


def test_greedy_takes_the_first_of_equals(cpu: C.CDLL) -> None:
    for size in (1, 7, 4095, 4097, 9000):
        rows = []
        for places in ([0], [size - 1], sorted({size // 3, size // 2, size - 1})):
            rows.append(random(size))
            rows[-1][places] = 9.0
        logits = np.stack(rows)
        result = sample(logits, [{}] * 3, seed=size)
        expected = [on_cpu(cpu, row) for row in logits]
        assert result["sampled"][:3].tolist() == [token for token, _ in expected]
        close(result["logprob"][:3], np.array([p for _, p in expected]), 1e-6)
    zeros = np.array([[-1, -0.0, 0.0]], np.float32)
    assert sample(zeros, [{}])["sampled"][0] == on_cpu(cpu, zeros[0])[0] == 1


@pytest.mark.parametrize("bad", [[np.nan, 1], [1, np.nan], [1, -np.nan], [np.inf, 0], [-np.inf, -np.inf]])
def test_logits_without_a_finite_maximum_give_no_token(cpu: C.CDLL, bad: list[float]) -> None:
    logits = np.full((2, 4100), -np.inf, np.float32)
    logits[0, [5, 4099]] = bad
    logits[1, 4099] = 3.0
    for settings in ({}, {"temperature": 1.0, "top_k": 2, "top_p": 0.5}):
        result = sample(logits, [settings] * 2)
        assert result["sampled"][:2].tolist() == [-1, 4099]
        assert on_cpu(cpu, logits[0])[0] == -1


GRID = [
    {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": 11 + i, "position": 3 * i + j}
    for i, temperature in enumerate((0.3, 1.0, 2.5))
    for j, (top_k, top_p) in enumerate([(0, 1.0), (1, 1.0), (50, 1.0), (0, 0.9), (0, 0.2), (300, 0.7), (40, 1e-9)])
]


@pytest.mark.parametrize(
    ("vocab", "kind"),
    [
        *[(1000, "normal"), (1000, "rounded"), (1000, "equal"), (1000, "few")],
        *[(9001, "normal"), (9001, "rounded"), (9001, "equal"), (9001, "masked"), (9001, "few")],
    ],
)
def test_draws_equal_those_of_the_cpu(cpu: C.CDLL, vocab: int, kind: str) -> None:
    logits = random(len(GRID), vocab, seed=vocab) * 3
    if kind == "rounded":
        logits = logits.round(0)  # a top-k that ends among equals
    elif kind == "equal":
        logits[:] = 0.5
    elif kind == "few":
        logits[:, 7:] = -np.inf  # fewer than top-k
    elif kind == "masked":
        logits[:, ::3] = -np.inf
    for seed in SEEDS:
        result = sample(logits, GRID, seed)
        expected = [on_cpu(cpu, row, **settings) for row, settings in zip(logits, GRID, strict=True)]
        assert result["sampled"][: len(GRID)].tolist() == [token for token, _ in expected]
        close(result["logprob"][: len(GRID)], np.array([p for _, p in expected]), 2e-6)


def test_extreme_settings_draw_as_on_the_cpu(cpu: C.CDLL) -> None:
    settings: list[dict[str, float]] = [
        {"temperature": 1e-40, "seed": 1},
        {"temperature": 1e30, "seed": 2},
        {"temperature": 100.0, "top_k": 999, "top_p": 0.999, "seed": 3},
        {"temperature": 1.0, "top_p": 0.0, "seed": 4},
        {"temperature": 1.0, "top_p": -1.0, "seed": 5, "top_k": 5000},
        {"temperature": 0.7, "top_p": 1.5, "top_k": -1, "seed": 2**64 - 1, "position": 2**63},
    ]
    for shift in (0.0, 1e4):
        logits = random(len(settings), 1000) * 20 + np.float32(shift)
        result = sample(logits, settings)
        expected = [on_cpu(cpu, row, **each)[0] for row, each in zip(logits, settings, strict=True)]
        assert result["sampled"][: len(settings)].tolist() == expected


def test_many_draws_of_one_row_equal_those_of_the_cpu(cpu: C.CDLL) -> None:
    settings: list[dict[str, float]] = [
        {"temperature": 0.8, "top_p": 0.95, "seed": 5, "position": i} for i in range(100)
    ]
    logits = np.repeat(random(1, 5000) * 2, 100, axis=0)
    result = sample(logits, settings)
    assert result["sampled"][:100].tolist() == [on_cpu(cpu, logits[0], **each)[0] for each in settings]
    assert len(set(result["sampled"][:100].tolist())) > 20


@pytest.mark.parametrize(("vocab", "rows"), [(1, 3), (31, 64), (1000, 1), (49_152, 3), (128_256, 3), (262_144, 1)])
def test_vocabularies_and_rows(cpu: C.CDLL, vocab: int, rows: int) -> None:
    settings = [{}, *GRID[3::5]] * 11
    for seed, spread in ((0, 1), (5, 4)):
        logits = random(rows, vocab, seed=seed) * np.float32(spread)
        mine = [settings[(seed + i) % len(settings)] for i in range(rows)]
        result = sample(logits, mine, seed)
        expected = [on_cpu(cpu, row, **each) for row, each in zip(logits, mine, strict=True)]
        assert result["sampled"][:rows].tolist() == [token for token, _ in expected]
        close(result["logprob"][:rows], np.array([p for _, p in expected]), 2e-6)


@pytest.mark.parametrize("kind", ["equal", "rounded", "tail", "masked"])
def test_more_candidates_than_a_block_lists(cpu: C.CDLL, kind: str) -> None:
    """All blocks of the cluster then search together, and ties end in the middle of one."""
    vocab = 40_003
    settings: list[dict[str, float]] = [
        {"temperature": 1.0, "top_k": 30_000, "seed": 1},
        {"temperature": 1.0, "top_p": 0.6, "seed": 2},
        {"temperature": 2.0, "top_k": 20_011, "top_p": 0.7, "seed": 3},
        {"temperature": 0.5, "top_k": 39_999, "top_p": 0.999999, "seed": 4, "position": 8},
    ]
    logits = random(len(settings), vocab)
    if kind == "equal":
        logits[:] = -3.25
    elif kind == "rounded":
        logits = logits.round(0)
    elif kind == "tail":
        logits[:, 77] = 60.0  # all others are in the last bin
    else:
        logits[:, 5000:] = -np.inf
    result = sample(logits, settings, 3)
    expected = [on_cpu(cpu, row, **each) for row, each in zip(logits, settings, strict=True)]
    assert result["sampled"][: len(settings)].tolist() == [token for token, _ in expected]


def test_logits_that_do_not_fit_are_read_again(cpu: C.CDLL) -> None:
    """A vocabulary whose slices shared memory holds in part, and rows that do not start on 16 bytes."""
    settings: list[dict[str, float]] = [{"temperature": 1.0, "top_k": 5000, "top_p": 0.9, "seed": s} for s in range(4)]
    logits = random(len(settings), 9001)
    candidate = small.sample(9001, len(settings), False, shared=small.SAMPLE_WORKSPACE + 4096)
    assert dict(candidate.kernel.defines)["HELD"] == 1024
    step = Step(settings, len(settings))
    run(candidate.kernel, candidate.grid, {"logits": logits, **step.arrays}, 1, cluster=candidate.grid[0])
    expected = [on_cpu(cpu, row, **each)[0] for row, each in zip(logits, settings, strict=True)]
    assert step.arrays["sampled"].tolist() == expected


def test_advance_makes_the_next_steps_inputs() -> None:
    logits = random(3, 500)
    logits[1, 7] = np.nan
    settings: list[dict[str, float]] = [{"position": 9}, {}, {"temperature": 1.0, "seed": 1, "position": 4}]
    after = sample(logits, settings, advance=True)
    assert after["tokens"][:3].tolist() == after["sampled"][:3].tolist()
    assert after["sampled"][1] == -1
    assert after["positions"].tolist() == [1, 2, 3, 3]
    assert after["sample_position"].tolist() == [10, 1, 5, 0]
    before = sample(logits, settings)
    assert before["positions"].tolist() == [0, 1, 2, 3]


def test_examples_have_names_of_their_own() -> None:
    kernels = small.examples()
    assert len({kernel.name for kernel in kernels}) == len(kernels)


# The emulation itself

FAULTS = """
#include "tapeout.cuh"
extern "C" __global__ void TP_KERNEL(const float *x, float *y, int n) {
    __shared__ float sums[2];
    float early = FAULT == 1 ? x[0] : 0.0f;
    if (FAULT != 2 || threadIdx.x) tp_wait();
    float sum = tp_warp_sum(x[threadIdx.x]) + early;
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
    if (FAULT != 3) __syncthreads();
    if (threadIdx.x == 0) y[FAULT == 4 ? n : 0] = sums[0] + sums[1];
    if (FAULT == 5 && threadIdx.x < 3) __syncwarp(0xf);
    if (FAULT == 6) *(volatile int *)8 = 1;
}
"""


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (0, ""),
        (1, "nan"),
        (2, r"block \(0, 0, 0\), thread 0: ended without tp_wait\(\)"),
        (3, "nan"),
        (4, "wrote past the array y of 4 bytes"),
        (5, "deadlock|lane 3, which has ended"),
        (6, "bad access"),
    ],
)
def test_the_emulation_shows_faults(tmp_path: Path, fault: int, message: str) -> None:
    (tmp_path / "fault.cu").write_text(FAULTS)
    (tmp_path / "tapeout.cuh").write_text((Path(small.__file__).parent / "src" / "tapeout.cuh").read_text())
    params = (Param("x"), Param("y"), Param("n", "i32"))
    kernel = GpuKernel("fault", "fault", "cuda", "fault.cu", params, (("FAULT", fault),), 64)
    x, y = random(64), poison(1)
    if message in ("", "nan"):
        run(kernel, 1, {"x": x, "y": y, "n": 1}, sources=tmp_path)
        assert np.isnan(y[0]) == (message == "nan")
        assert message or abs(y[0] - x.sum(dtype=np.float64)) < 1e-5
        return
    with pytest.raises(LaunchError, match=message):
        run(kernel, 1, {"x": x, "y": y, "n": 1}, sources=tmp_path)


def test_the_emulation_checks_the_parameters() -> None:
    kernel = small.add(64, 1).kernel
    x = random(64)
    with pytest.raises(LaunchError, match="takes x, y, counts, given are x, y"):
        run(kernel, 1, {"x": x, "y": x})
    other = GpuKernel(kernel.name, "add", "cuda", kernel.source, kernel.params[:2], kernel.defines, kernel.threads)
    with pytest.raises(LaunchError, match="the source has parameters 'ppp', its descriptor 'pp'"):
        run(other, 1, {"x": x, "y": x})
