"""The norm, rope, attention and elementwise kernels against float64 references; the step engine; the sampler."""

from __future__ import annotations

import ctypes as C
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from native_engine import ENTRIES, Native, build, make_step, poison, rows_step, supported

from tapeout.compiler.kernels import simple
from tapeout.compiler.kernels.toolchain import SOURCES
from tapeout.compiler.stages import KernelEntry
from tapeout.runtime.cpu import Sampling

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
ROWS = (1, 17, 130)
TARGETS = [target for target in ("x86_64_v3", "x86_64_v4") if supported(target)]

# Kernels of the engine's own tests. fill: 0 y i64 [tasks], 1 tasks, 2 work, 3 x i64: y[t] follows from all of x.
TEST_KERNELS = """
#include "tapeout_cpu.h"
static int tasks(const tp_launch *l, const tp_step *s) { (void)s; return (int)l->arg[1]; }
static void mix(const tp_launch *l, const tp_step *s, int task, void *scratch) {
    (void)s;
    volatile uint64_t *memory = scratch;
    uint64_t h = (uint64_t)task + 1;
    const uint64_t *x = TP_PTR(const uint64_t, l, 3);
    for (int64_t i = 0; i < l->arg[4]; i++) h = (h ^ x[i]) * 0x9e3779b97f4a7c15u;
    for (int64_t i = 0; i < l->arg[2]; i++) memory[i & 63] = h = (h ^ (h >> 29)) * 0xbf58476d1ce4e5b9u;
    TP_PTR(uint64_t, l, 0)[task] = h;
}
const tp_kernel tp_kernel_mix = {"mix", tasks, mix};
"""


@pytest.fixture(scope="session")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kernels")
    sources = folder / "cpu"
    shutil.copytree(SOURCES, sources)
    (sources / "mix.c").write_text(TEST_KERNELS)
    entries = [*ENTRIES, KernelEntry("mix", "mix", ("y", "tasks", "work", "x", "words"), "mix.c", ())]
    build(folder, TARGETS, entries, sources)
    return folder


@pytest.fixture(params=TARGETS)
def native(libraries: Path, request: pytest.FixtureRequest) -> Iterator[Native]:
    engine = Native(libraries / f"cpu-{request.param}.so", threads=2)
    yield engine
    engine.close()


def random(*shape: int, seed: int = 0) -> F32:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def close(actual: npt.ArrayLike, expected: npt.ArrayLike, tolerance: float) -> None:
    np.testing.assert_allclose(np.asarray(actual, np.float64), expected, rtol=tolerance, atol=tolerance)


# Norms and quantization


def rmsnorm(x: F32, weight: F32, eps: float) -> F64:
    wide = x.astype(np.float64)
    return wide / np.sqrt((wide**2).mean(axis=-1, keepdims=True) + eps) * weight


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("k", [8, 33, 576, 2047])
def test_rmsnorm_matches_float64(native: Native, rows: int, k: int) -> None:
    wide, weight = random(rows, k + 3), random(k, seed=1)
    y = poison(rows, k)
    native.call("rmsnorm_f32", rows_step(rows), wide, k + 3, weight, y, k, 1e-5)
    expected = rmsnorm(wide[:, :k], weight, 1e-5)
    close(y, expected, 2e-6)
    total = random(rows, k, seed=2)
    before = total.copy()
    native.call("rmsnorm_add", rows_step(rows), wide, k + 3, weight, total, k, 1e-5)
    close(total, before + expected, 2e-6)


def read_x8(
    buffer: npt.NDArray[np.uint8], rows: int, k: int, cap: int
) -> tuple[npt.NDArray[np.int8], F32, npt.NDArray[np.int32]]:
    """Codes [rows][groups][32], scales [rows][groups] and sums [rows][groups][2] of an x8 buffer."""
    groups = -(-k // 32)
    codes = buffer[: groups * cap * 32].view(np.int8).reshape(groups, cap, 32)[:, :rows].transpose(1, 0, 2)
    scale = buffer[groups * cap * 32 : groups * cap * 36].view(np.float32).reshape(groups, cap)[:, :rows].T
    sums = (
        buffer[groups * cap * 36 : groups * cap * 44]
        .view(np.int32)
        .reshape(groups, cap, 2)[:, :rows]
        .transpose(1, 0, 2)
    )
    return codes, scale, sums


def check_x8(buffer: npt.NDArray[np.uint8], x: F64, cap: int, slack: float) -> None:
    rows, k = x.shape
    codes, scale, sums = read_x8(buffer, rows, k, cap)
    padded = np.zeros((rows, codes.shape[1] * 32))
    padded[:, :k] = x
    groups = padded.reshape(rows, -1, 32)
    close(scale, np.abs(groups).max(axis=-1) / 127, 1e-5)
    assert np.abs(codes.astype(int)).max() <= 127
    error = np.abs(codes * scale[..., None].astype(np.float64) - groups)
    assert (error <= scale[..., None] * (0.5 + slack) + 1e-30).all()
    assert (codes.reshape(rows, -1)[:, k:] == 0).all()
    np.testing.assert_array_equal(sums, codes.astype(np.int32).reshape(rows, -1, 2, 16).sum(axis=-1))


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("k", [32, 40, 576, 1537])
def test_activations_are_quantized_to_nearest(native: Native, rows: int, k: int) -> None:
    cap, groups = rows + 5, -(-k // 32)
    x = random(rows, k + 1) * 10
    x[0, :32] = 0
    buffer = np.full(groups * cap * 44, 0xFF, np.uint8)
    native.call("quantize_x8", rows_step(rows), x, k + 1, buffer, k, cap)
    check_x8(buffer, x[:, :k].astype(np.float64), cap, 1e-4)
    weight = random(k, seed=1)
    buffer[:] = 0xFF
    native.call("rmsnorm_x8", rows_step(rows), x, k + 1, weight, buffer, k, 1e-6, cap)
    check_x8(buffer, rmsnorm(x[:, :k], weight, 1e-6), cap, 1e-3)


def test_ties_go_to_even_and_extremes_stay_in_range(native: Native) -> None:
    x = np.zeros((3, 32), np.float32)
    x[0, :6] = [127, 0.5, 1.5, 2.5, -0.5, -1.5]
    x[1, :2] = [3e38, -3e38]
    x[2, :2] = [1e-39, -1e-40]
    buffer = np.full(3 * 44, 0xFF, np.uint8)
    native.call("quantize_x8", rows_step(3), x, 32, buffer, 32, 3)
    codes, scale, _ = read_x8(buffer, 3, 32, 3)
    assert codes[0, 0, :6].tolist() == [127, 0, 2, 2, 0, -2]
    assert codes[1, 0, :2].tolist() == [127, -127]
    assert np.isfinite(scale).all() and (np.abs(codes[2]) <= 127).all()


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 9, 31])
def test_a_nan_reaches_the_scale(native: Native, bad: float, place: int) -> None:
    x = random(1, 64)
    x[0, place] = bad
    buffer = np.zeros(2 * 44, np.uint8)
    native.call("quantize_x8", rows_step(1), x, 64, buffer, 64, 1)
    _, scale, _ = read_x8(buffer, 1, 64, 1)
    assert np.isnan(scale[0, 0]) and np.isfinite(scale[0, 1])


# Elementwise


@pytest.mark.parametrize(("rows", "pairs"), [(1, 1), (130, 1), (17, 4)])
@pytest.mark.parametrize("k", [1, 30, 1536])
@pytest.mark.parametrize("limit", [0.0, 2.5])
def test_gated_activations_match_torch(native: Native, rows: int, pairs: int, k: int, limit: float) -> None:
    torch = pytest.importorskip("torch")
    x = random(rows * pairs, 2 * k + 4) * 4
    gate, up = torch.from_numpy(x[:, :k]).double(), torch.from_numpy(x[:, k : 2 * k]).double()
    if limit:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    expected = {
        "gated_silu": torch.nn.functional.silu(gate) * up,
        "gated_gelu": torch.nn.functional.gelu(gate, approximate="tanh") * up,
        "gated_swiglu_oai": gate * torch.sigmoid(1.702 * gate) * (up + 1),
    }
    for name, values in expected.items():
        y = poison(rows * pairs + 1, k)
        native.call(name, rows_step(rows), x, 2 * k + 4, y, k, limit, pairs)
        np.testing.assert_allclose(y[:-1], values.numpy(), rtol=3e-6, atol=1e-6)
        assert np.isnan(y[-1]).all()


def test_activations_at_the_ends_of_the_range(native: Native) -> None:
    gate = np.array([-1e4, -100, -88, -20, -0.0, 0, 20, 100, 1e4, np.nan], np.float32)
    x = np.concatenate([gate, np.ones_like(gate)])[None]
    for name, factor in (("gated_silu", 1), ("gated_gelu", 1), ("gated_swiglu_oai", 2)):
        for limit in (0.0, 20.0):
            y = poison(1, 10)
            native.call(name, rows_step(1), x, 20, y, 10, limit, 1)
            close(y[0, :9], factor * np.clip(gate[:9], 0, limit or np.inf), 1e-7)
            assert np.isnan(y[0, 9])


def test_a_limit_keeps_a_nan_on_either_side(native: Native) -> None:
    x = np.array([[np.nan, 1, 9, np.nan]], np.float32)
    for name in ("gated_silu", "gated_swiglu_oai"):
        y = poison(1, 2)
        y[:] = 0
        native.call(name, rows_step(1), x, 4, y, 2, 7.0, 1)
        assert np.isnan(y).all()


@pytest.mark.parametrize("rows", ROWS)
def test_add_softcap_and_gather(native: Native, rows: int) -> None:
    k = 77
    x, y = random(rows, k), random(rows, k, seed=1)
    total = y.copy()
    native.call("add_f32", rows_step(rows), x, total, k)
    np.testing.assert_array_equal(total, x + y)
    capped = x * 40
    native.call("softcap_f32", rows_step(rows), capped, k, 30.0)
    close(capped, 30 * np.tanh((x * 40).astype(np.float64) / 30), 5e-6)
    wanted = sorted({0, rows // 2, rows - 1})
    out = poison(len(wanted) + 1, k)
    native.call("gather_f32", rows_step(rows, wanted), x, out, k)
    np.testing.assert_array_equal(out[:-1], x[wanted])
    assert np.isnan(out[-1]).all()


# Rope and the cache


def inverse_frequencies(d: int, base: float) -> F32:
    return (1.0 / base ** (np.arange(0, d, 2) / d)).astype(np.float32)


@pytest.mark.parametrize("position", [0, 8191, 131072 - 17, 999_983])
def test_rope_table_is_exact_to_float32_at_far_positions(native: Native, position: int) -> None:
    d, rows, factor = 64, 17, 1.25
    frequency = inverse_frequencies(d, 10000.0)
    out = poison(rows, d)
    native.call("rope_table", make_step([(position, rows, [])]), frequency, out, d, factor)
    angles = (np.arange(position, position + rows, dtype=np.float32)[:, None] * frequency).astype(np.float64)
    expected = np.concatenate([np.cos(angles), np.sin(angles)], axis=1)
    np.testing.assert_allclose(out, expected * factor, atol=1.5e-7)


class Cache:
    """A paged pool of one layer and the keys and values [sequence][position][kv_head][d] that belong in it."""

    def __init__(self, lengths: list[int], kv_heads: int, d: int, page_tokens: int, dtype: str, seed: int = 0) -> None:
        self.kv_heads, self.d, self.page_tokens, self.dtype = kv_heads, d, page_tokens, np.dtype(dtype)
        counts = [-(-length // page_tokens) for length in lengths]
        order = np.random.default_rng(seed).permutation(sum(counts) + 1)
        self.tables = [order[sum(counts[:i]) : sum(counts[: i + 1])].tolist() for i in range(len(lengths))]
        self.pool = np.full((len(order), 2, kv_heads * d * page_tokens), np.nan, self.dtype)
        self.keys = [random(n, kv_heads, d, seed=seed + 2 * i).astype(dtype) for i, n in enumerate(lengths)]
        self.values = [random(n, kv_heads, d, seed=seed + 2 * i + 1).astype(dtype) for i, n in enumerate(lengths)]

    def entry(
        self, sequence: int, position: int, kv_head: int
    ) -> tuple[npt.NDArray[np.generic], npt.NDArray[np.generic]]:
        """Views of one key and one value."""
        page = self.pool[self.tables[sequence][position // self.page_tokens]]
        slot = position % self.page_tokens
        key = page[0].reshape(self.kv_heads, self.d, self.page_tokens)[kv_head, :, slot]
        return key, page[1].reshape(self.kv_heads, self.page_tokens, self.d)[kv_head, slot]

    def fill(self) -> None:
        for sequence, keys in enumerate(self.keys):
            for position, head in np.ndindex(keys.shape[:2]):
                key, value = self.entry(sequence, position, head)
                key[:], value[:] = keys[position, head], self.values[sequence][position, head]


@pytest.mark.parametrize("dtype", ["f16", "f32"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "d", "page"), [(3, 1, 64, 16), (4, 2, 80, 32), (2, 2, 256, 64), (1, 1, 16, 16)]
)
@pytest.mark.parametrize("normed", [False, True])
def test_rope_kv(native: Native, dtype: str, heads: int, kv_heads: int, d: int, page: int, normed: bool) -> None:
    segments, numpy_type = [(5, 20), (0, 1), (130, 3)], "float16" if dtype == "f16" else "float32"
    rows = sum(count for _, count in segments)
    cache = Cache([position + count for position, count in segments], kv_heads, d, page, numpy_type)
    step = make_step([(p, n, cache.tables[i]) for i, (p, n) in enumerate(segments)])
    width = (heads + 2 * kv_heads) * d + 8
    qkv = random(rows, width)
    before = qkv.astype(np.float64)
    weights = (random(d, seed=3), random(d, seed=4)) if normed else (None, None)
    table = poison(rows, d)
    native.call("rope_table", step, inverse_frequencies(d, 10000.0), table, d, 1.0)
    k, v = qkv[:, heads * d :], qkv[:, (heads + kv_heads) * d :]
    native.call(
        f"rope_kv_{dtype}",
        step,
        qkv,
        width,
        k,
        width,
        v,
        width,
        table,
        cache.pool,
        heads,
        kv_heads,
        d,
        page,
        *weights,
        1e-6,
    )

    def rotated(x: F64, weight: F32 | None) -> F64:
        x = x.reshape(rows, -1, d)
        if weight is not None:
            x = x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-6) * weight
        a, b = x[..., : d // 2], x[..., d // 2 :]
        cos, sin = table[:, None, : d // 2], table[:, None, d // 2 :]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    close(qkv[:, : heads * d].reshape(rows, heads, d), rotated(before[:, : heads * d], weights[0]), 3e-6)
    keys = rotated(before[:, heads * d : (heads + kv_heads) * d], weights[1])
    values = before[:, (heads + kv_heads) * d : (heads + 2 * kv_heads) * d].reshape(rows, kv_heads, d)
    written, row = np.zeros(cache.pool.shape, bool), 0
    for sequence, (position, count) in enumerate(segments):
        for p in range(position, position + count):
            for head in range(kv_heads):
                key, value = cache.entry(sequence, p, head)
                close(key, keys[row, head], 1e-3 if dtype == "f16" else 3e-6)
                np.testing.assert_array_equal(value, values[row, head].astype(numpy_type))
            row += 1
    written = np.isfinite(cache.pool).sum()
    assert written == rows * kv_heads * d * 2


# Attention


def attend(
    cache: Cache, sequence: int, position: int, q: F32, scale: float, window: int, sinks: F32 | None = None
) -> F64:
    """Float64 attention of q [heads][d] at a position; a sink is a logit whose value is 0."""
    first = max(0, position - window + 1) if window else 0
    share = q.shape[0] // cache.kv_heads
    keys = cache.keys[sequence][first : position + 1].astype(np.float64).repeat(share, axis=1)
    values = cache.values[sequence][first : position + 1].astype(np.float64).repeat(share, axis=1)
    score = np.einsum("hd,thd->ht", q.astype(np.float64), keys) * scale
    if sinks is not None:
        score = np.concatenate([score, sinks[:, None].astype(np.float64)], axis=1)
        values = np.concatenate([values, np.zeros_like(values[:1])])
    weight = np.exp(score - score.max(axis=1, keepdims=True))
    return np.einsum("ht,thd->hd", weight / weight.sum(axis=1, keepdims=True), values)


def check_attention(
    native: Native,
    cache: Cache,
    heads: int,
    segments: list[tuple[int, int]],
    window: int,
    split: bool,
    sinks: F32 | None = None,
) -> None:
    step = make_step([(p, n, cache.tables[i]) for i, (p, n) in enumerate(segments)])
    rows, width, d = sum(n for _, n in segments), heads * cache.d + 16, cache.d
    q, out = random(rows, width, seed=7), poison(rows + 1, heads * d)
    part = np.full(simple.attention_split_bytes(rows, heads, d), 0xFF, np.uint8) if split else np.zeros(0, np.uint8)
    scale = d**-0.5
    name = "attention_f16" if cache.dtype == np.float16 else "attention_f32"
    shape = (heads, cache.kv_heads, d, cache.page_tokens, scale, window)
    arguments = (q, width, out, cache.pool, *shape, part if split else 0, part.nbytes)
    native.call(name, step, *arguments, sinks)
    native.call("attention_combine", step, *arguments)
    row = 0
    for sequence, (position, count) in enumerate(segments):
        for p in range(position, position + count):
            expected = attend(cache, sequence, p, q[row, : heads * d].reshape(heads, d), scale, window, sinks)
            np.testing.assert_allclose(out[row].reshape(heads, d), expected, rtol=1e-5, atol=2e-6, err_msg=f"row {row}")
            row += 1
    assert np.isnan(out[rows]).all()


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "d", "page"),
    [
        (9, 3, 64, 32),
        (4, 1, 256, 32),
        (3, 3, 16, 16),
        (8, 1, 80, 64),
        (4, 2, 96, 16),
        (2, 1, 128, 64),
        (1, 1, 512, 64),
        (64, 1, 32, 16),
    ],
)
@pytest.mark.parametrize(
    "segments", [[(0, 1)], [(0, 130)], [(63, 1)], [(64, 17)], [(31, 2), (300, 1), (0, 5), (127, 1)]]
)
def test_attention(
    native: Native, dtype: str, heads: int, kv_heads: int, d: int, page: int, segments: list[tuple[int, int]]
) -> None:
    cache = Cache([p + n for p, n in segments], kv_heads, d, page, dtype)
    cache.fill()
    for window in (0, 24, 100):
        check_attention(native, cache, heads, segments, window, split=False)
        check_attention(native, cache, heads, segments, window, split=True)


@pytest.mark.parametrize("length", [127, 128, 129, 511, 512, 513, 2500])
@pytest.mark.parametrize("rows", [1, 4])
def test_long_contexts_are_split_over_keys(native: Native, length: int, rows: int) -> None:
    segments = [(length - rows, rows), (length // 2, 1)]
    cache = Cache([p + n for p, n in segments], 3, 64, 16, "float16")
    cache.fill()
    for window in (0, 300):
        check_attention(native, cache, 9, segments, window, split=True)
        check_attention(native, cache, 9, segments, window, split=False)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize(("heads", "kv_heads", "d"), [(8, 1, 64), (4, 4, 16), (64, 1, 32)])
@pytest.mark.parametrize("segments", [[(0, 1)], [(0, 130)], [(31, 2), (300, 1), (2500, 1)]])
def test_attention_with_sinks(
    native: Native, dtype: str, heads: int, kv_heads: int, d: int, segments: list[tuple[int, int]]
) -> None:
    """Sinks of each head count once, however a context is split over keys; one above and one below all scores too."""
    cache = Cache([p + n for p, n in segments], kv_heads, d, 16, dtype)
    cache.fill()
    sinks = random(heads, seed=9) * 3
    sinks[:2] = 60, -60
    for window in (0, 24, 128, 700):
        for split in (False, True):
            check_attention(native, cache, heads, segments, window, split, sinks)


def test_large_scores_do_not_overflow(native: Native) -> None:
    cache = Cache([40], 1, 32, 16, "float32")
    cache.keys[0] *= 300
    cache.fill()
    check_attention(native, cache, 2, [(0, 40)], 0, split=False)
    check_attention(native, cache, 2, [(39, 1)], 0, split=True)


def test_a_nan_query_gives_a_nan_row_and_no_other(native: Native) -> None:
    cache = Cache([20], 1, 32, 16, "float32")
    cache.fill()
    q, out = random(20, 64), np.zeros((20, 64), np.float32)
    q[3, 5] = np.nan
    step = make_step([(0, 20, cache.tables[0])])
    native.call("attention_f32", step, q, 64, out, cache.pool, 2, 1, 32, 16, 0.2, 0, 0, 0)
    bad = np.isnan(out).all(axis=1)
    assert np.isnan(out[3, :32]).all() and not bad[np.arange(20) != 3].any()


# The engine


def chain(native: Native, buffers: list[npt.NDArray[np.uint64]], counts: list[int], work: int) -> list[object]:
    """Launches in which every task reads all that the launch before wrote."""
    return [
        native.launch("mix", buffers[i + 1], counts[i + 1], work, buffers[i], counts[i]) for i in range(len(counts) - 1)
    ]


def expected_chain(counts: list[int], work: int) -> list[int]:
    mask, x = (1 << 64) - 1, [0] * counts[0]
    for count in counts[1:]:
        out = []
        for task in range(count):
            h = task + 1
            for word in x:
                h = (h ^ word) * 0x9E3779B97F4A7C15 & mask
            for _ in range(work):
                h = (h ^ (h >> 29)) * 0xBF58476D1CE4E5B9 & mask
            out.append(h)
        x = out
    return x


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
def test_every_launch_sees_all_of_the_one_before(libraries: Path, threads: int) -> None:
    native = Native(libraries / f"cpu-{TARGETS[-1]}.so", threads)
    rng = np.random.default_rng(0)
    counts = [4, *rng.choice([0, 1, 1, 2, 3, 7, 40], 400).tolist(), 5]
    counts = [c for c in counts if c]
    buffers = [np.zeros(c, np.uint64) for c in counts]
    launches = chain(native, buffers, counts, 3)
    expected = expected_chain(counts, 3)
    for _ in range(25):  # 10^4 launches
        for buffer in buffers[1:]:
            buffer[:] = 0
        assert native.run(rows_step(1), launches) == 0
        assert buffers[-1].tolist() == expected
    native.close()


@pytest.mark.parametrize("target", TARGETS)
def test_results_do_not_depend_on_threads(libraries: Path, target: str) -> None:
    results = set()
    segments = [(200, 1), (77, 30), (0, 3)]
    cache = Cache([p + n for p, n in segments], 3, 64, 16, "float16")
    cache.fill()
    rows = sum(n for _, n in segments)
    q = random(rows, 576)
    part = np.zeros(simple.attention_split_bytes(rows, 9, 64), np.uint8)
    step = make_step([(p, n, cache.tables[i]) for i, (p, n) in enumerate(segments)])
    for threads in (1, 2, 3):
        native = Native(libraries / f"cpu-{target}.so", threads)
        for _ in range(5):
            out, x8 = poison(rows, 576), np.zeros(18 * rows * 44, np.uint8)
            shape = (9, 3, 64, 16, 0.125, 0)
            attention = (q, 576, out, cache.pool, *shape, part, part.nbytes)
            launches = [native.launch(name, *attention) for name in ("attention_f16", "attention_combine")]
            launches.append(native.launch("quantize_x8", out, 576, x8, 576, rows))
            assert native.run(step, launches) == 0
            results.add((out.tobytes(), x8.tobytes()))
        native.close()
    assert len(results) == 1


def test_targets_give_the_same_bits(libraries: Path) -> None:
    if len(TARGETS) < 2:
        pytest.skip("this machine runs one target only")
    cache = Cache([300], 1, 96, 32, "float16")
    cache.fill()
    results = set()
    for target in TARGETS:
        native = Native(libraries / f"cpu-{target}.so", 2)
        for segment in ((0, 300), (299, 1)):
            out = poison(segment[1], 384)
            q = random(segment[1], 384)
            step = make_step([(*segment, cache.tables[0])])
            native.call("attention_f16", step, q, 384, out, cache.pool, 4, 1, 96, 32, 0.1, 0, 0, 0)
            results.add((segment, out.tobytes()))
        native.close()
    assert len(results) == 2


def test_the_head_works_on_the_wanted_rows(native: Native) -> None:
    x, hidden, logits = random(6, 40), poison(2, 40), poison(2, 40)
    body = [native.launch("add_f32", x, x, 40)]
    head = [
        native.launch("gather_f32", x, hidden, 40),
        native.launch("rmsnorm_f32", hidden, 40, np.ones(40, np.float32), logits, 40, 1e-6),
    ]
    before = x.copy()
    sampling = (Sampling * 2)()
    weight = np.ones(40, np.float32)
    head[1] = native.launch("rmsnorm_f32", hidden, 40, weight, logits, 40, 1e-6)
    assert native.run(rows_step(6, [2, 5]), body, head, logits, sampling) == 0
    np.testing.assert_array_equal(hidden, 2 * before[[2, 5]])
    assert [s.token for s in sampling] == logits.argmax(axis=1).tolist()
    hidden[:] = np.nan
    assert native.run(rows_step(6), body, head) == 0
    assert np.isnan(hidden).all()


def test_errors_are_codes(native: Native) -> None:
    launch = native.launch("add_f32")
    launch.kernel = 10_000
    assert native.run(rows_step(1), [launch]) == 2
    logits = np.array([[0, np.nan, 1]], np.float32)
    assert native.run(rows_step(1, [0]), [], [], logits, (Sampling * 1)()) == 1


def test_engines_live_side_by_side_and_close(libraries: Path) -> None:
    def threads() -> int:
        return len(os.listdir("/proc/self/task"))

    before = threads()
    engines = [Native(libraries / f"cpu-{TARGETS[0]}.so", 3) for _ in range(2)]
    assert threads() == before + 4
    counts = [3] * 200
    expected = expected_chain(counts, 1)

    def work(native: Native, results: list[list[int]]) -> None:
        buffers = [np.zeros(3, np.uint64) for _ in counts]
        for _ in range(20):
            native.run(rows_step(1), chain(native, buffers, counts, 1))
            results.append(buffers[-1].tolist())

    results: list[list[int]] = []
    runners = [threading.Thread(target=work, args=(native, results)) for native in engines]
    for runner in runners:
        runner.start()
    for runner in runners:
        runner.join()
    assert len(results) == 40 and all(result == expected for result in results)
    for native in engines:
        native.close()
    deadline = time.monotonic() + 5  # a joined thread may stay listed for a moment
    while threads() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threads() == before


def test_an_idle_engine_uses_no_processor_time_and_a_fork_can_use_and_close_it(libraries: Path) -> None:
    code = f"""
import os, sys, time
sys.path.insert(0, {str(Path(__file__).parent)!r})
from native_engine import *
native = Native(Path({str(libraries / f"cpu-{TARGETS[0]}.so")!r}), 3)
x = poison(30, 8) * 0
native.call("add_f32", rows_step(30), x, x, 8)
time.sleep(0.05)
before = time.process_time()
time.sleep(0.5)
assert time.process_time() - before < 0.02, time.process_time() - before
child = os.fork()
if child == 0:
    native.call("add_f32", rows_step(30), x, x, 8)
    native.close()
    os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
native.close()
print("done")
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert result.stdout == "done\n", result.stderr


# The sampler


def softmax(logits: F32, temperature: float = 1.0) -> F64:
    scaled = logits.astype(np.float64) / temperature
    weight = np.exp(scaled - scaled.max())
    return weight / weight.sum()


def restricted(logits: F32, temperature: float, top_k: int, top_p: float) -> F64:
    """Sort, cut at k, cut at the first running sum that reaches p: the textbook way."""
    p = softmax(logits, temperature)
    order = np.lexsort((np.arange(p.size), -logits))
    keep = order[: top_k or None]
    share = p[keep] / p[keep].sum()
    count = int(np.searchsorted(np.cumsum(share), top_p * (1 - 1e-12)) + 1) if top_p < 1 else keep.size
    out = np.zeros_like(p)
    out[keep[:count]] = p[keep[:count]]
    return out / out.sum()


def test_greedy_takes_the_first_of_equals(native: Native) -> None:
    for size in (1, 7, 32, 33, 1000, 49152):
        logits = random(size)
        for places in ([0], [size - 1], sorted({size // 3, size // 2, size - 1})):
            tied = logits.copy()
            tied[places] = 9.0
            assert native.sample(tied).token == places[0]
    assert native.sample(np.array([-np.inf, -5, -np.inf], np.float32)).token == 1


@pytest.mark.parametrize("bad", [[np.nan, 1], [1, np.nan], [np.inf, 0], [-np.inf, -np.inf]])
@pytest.mark.parametrize("pad", [0, 30, 97])
def test_logits_without_a_finite_maximum_are_refused(native: Native, bad: list[float], pad: int) -> None:
    logits = np.array([*([-np.inf] * pad), *bad], np.float32)
    sampling = Sampling(temperature=0.0, top_p=1.0)
    assert native.library.tp_sample(logits.ctypes.data, logits.size, C.byref(sampling)) == 1


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, 0, 1.0), (0.7, 0, 1.0), (1.0, 5, 1.0), (1.0, 0, 0.8), (1.5, 9, 0.6), (1.0, 1, 1.0), (1.0, 0, 1e-9)],
)
def test_samples_follow_the_distribution(native: Native, temperature: float, top_k: int, top_p: float) -> None:
    logits, draws = random(41) * 2, 20_000
    logits[[3, 4, 5]] = logits[3]
    expected = restricted(logits, temperature, top_k, top_p) * draws
    counts = np.zeros(41)
    for position in range(draws):
        settings = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": 11, "position": position}
        counts[native.sample(logits, **settings).token] += 1
    assert counts[expected == 0].sum() == 0
    live = expected > 0
    chi_square = ((counts - expected)[live] ** 2 / expected[live]).sum()
    freedom = live.sum() - 1
    assert chi_square <= freedom + 4 * np.sqrt(2 * freedom) + 1e-9  # about 1 in 10^4


@pytest.mark.parametrize("vocab", [1000, 49152])
def test_the_kept_set_is_the_textbook_one(native: Native, vocab: int) -> None:
    logits = (random(vocab, seed=5) * 3).round(1)  # many ties
    for top_k, top_p in ((40, 1.0), (0, 0.5), (100, 0.9), (7, 0.3)):
        allowed = restricted(logits, 1.0, top_k, top_p) > 0
        tokens = {
            native.sample(logits, temperature=1.0, top_k=top_k, top_p=top_p, seed=s, position=s * s).token
            for s in range(300)
        }
        assert allowed[list(tokens)].all()


def test_the_same_seed_and_position_give_the_same_token(native: Native) -> None:
    logits = np.zeros(1000, np.float32)
    tokens = [native.sample(logits, temperature=1.0, seed=s, position=p).token for s in range(20) for p in range(20)]
    again = [native.sample(logits, temperature=1.0, seed=s, position=p).token for s in range(20) for p in range(20)]
    assert tokens == again
    assert len(set(tokens)) > 300


def test_masked_tokens_are_never_drawn_and_small_temperatures_are_greedy(native: Native) -> None:
    logits = np.full(64, -np.inf, np.float32)
    logits[[7, 9]] = [1.0, 2.0]
    assert {native.sample(logits, temperature=2.0, seed=1, position=p).token for p in range(200)} == {7, 9}
    assert {native.sample(logits, temperature=1e-40, seed=1, position=p).token for p in range(50)} == {9}


def test_logprob_is_of_the_whole_distribution(native: Native) -> None:
    logits = random(50_000) * 3
    expected = np.log(softmax(logits))
    for settings in ({}, {"temperature": 0.8, "top_k": 5, "seed": 3}):
        sampling = native.sample(logits, want_logprob=1, **settings)
        assert sampling.logprob == pytest.approx(expected[sampling.token], abs=1e-5)
