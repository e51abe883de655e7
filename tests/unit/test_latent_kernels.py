"""The kernels of latent attention against float64 references: rotation, layer norm, the cache, selection of keys."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from native_engine import Native, build, make_step, poison, rows_step, supported

from tapeout.compiler.kernels import latent, simple
from tapeout.compiler.stages import KernelEntry

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
TARGETS = [target for target in ("x86_64_v3", "x86_64_v4") if supported(target)]
ENTRIES: tuple[KernelEntry, ...] = (
    latent.ROTATE,
    latent.LAYERNORM,
    latent.GATHER_COLUMNS,
    latent.INDEX_MERGE,
    simple.ATTENTION_COMBINE,
    *(
        entry(dtype)
        for dtype in ("f16", "f32")
        for entry in (
            latent.latent_kv,
            latent.latent_attention,
            latent.sparse_latent_attention,
            latent.index_kv,
            latent.index_select,
        )
    ),
)


@pytest.fixture(scope="session")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kernels")
    build(folder, TARGETS, ENTRIES)
    return folder


@pytest.fixture(params=TARGETS)
def native(libraries: Path, request: pytest.FixtureRequest) -> Iterator[Native]:
    engine = Native(libraries / f"cpu-{request.param}.so", threads=2)
    yield engine
    engine.close()


def random(*shape: int, seed: int = 0) -> F32:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


# Parts of heads


@pytest.mark.parametrize("pairs", [True, False])
@pytest.mark.parametrize("sign", [1, -1])
def test_rotate_turns_part_of_every_head(native: Native, pairs: bool, sign: int) -> None:
    rows, heads, period, start, rotated = 11, 3, 24, 12, 8
    x, angle = random(rows, heads * period + 8), random(rows, rotated // 2, seed=1)
    table = np.concatenate([np.cos(angle), np.sin(angle)], axis=1).astype(np.float32)
    expected = x.astype(np.float64)
    part = expected[:, : heads * period].reshape(rows, heads, period)[:, :, start : start + rotated]
    wide = part.copy()
    turn = np.exp(1j * sign * angle.astype(np.float64))[:, None]
    first, second = (wide[..., 0::2], wide[..., 1::2]) if pairs else np.split(wide, 2, axis=-1)
    turned = (first + 1j * second) * turn
    if pairs:
        part[..., 0::2], part[..., 1::2] = turned.real, turned.imag
    else:
        part[...] = np.concatenate([turned.real, turned.imag], axis=-1)
    shape = (heads, period, rotated, int(pairs), sign)
    native.call("rotate", rows_step(rows), x.reshape(-1)[start:], x.shape[1], table, *shape)
    np.testing.assert_allclose(x, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("k", [16, 100, 128])
def test_layernorm(native: Native, k: int) -> None:
    rows = 9
    x, weight, bias, y = random(rows, k + 4) * 3 + 1, random(k, seed=1), random(k, seed=2), poison(rows + 1, k)
    native.call("layernorm", rows_step(rows), x, k + 4, weight, bias, y, k, 1e-6)
    wide = x[:, :k].astype(np.float64)
    expected = (wide - wide.mean(1, keepdims=True)) / np.sqrt(wide.var(1, keepdims=True) + 1e-6) * weight + bias
    np.testing.assert_allclose(y[:rows], expected, rtol=1e-5, atol=2e-6)
    assert np.isnan(y[rows]).all()


def test_gather_columns(native: Native) -> None:
    x, y = random(10, 60), poison(11, 3 * 5)
    native.call("gather_columns", rows_step(10), x.reshape(-1)[4:], 60, y, 3, 20, 5)
    np.testing.assert_array_equal(y[:10].reshape(10, 3, 5), x.reshape(10, 3, 20)[:, :, 4:9])
    assert np.isnan(y[10]).all()


# Attention over one key a token


class Cache:
    """Keys [d] of every position of some sequences, in scattered pages, written by the kernel under test."""

    def __init__(self, native: Native, lengths: list[int], latent_width: int, rope: int, page: int, dtype: str) -> None:
        self.latent, self.rope, self.page, self.dtype = latent_width, rope, page, dtype
        pages = [math.ceil(length / page) for length in lengths]
        order = np.random.default_rng(3).permutation(sum(pages))
        self.tables = [order[sum(pages[:i]) : sum(pages[: i + 1])].tolist() for i in range(len(pages))]
        kind = np.float16 if dtype == "f16" else np.float32
        self.pool = np.full((sum(pages), page, latent_width + rope), np.nan, kind)
        self.keys: list[F64] = []
        for table, length in zip(self.tables, lengths, strict=True):
            c, k = random(length, latent_width + 8, seed=length), random(length, rope + 24, seed=length + 1)
            step = make_step([(0, length, table)])
            strides = (c, latent_width + 8, k.reshape(-1)[16:], rope + 24)
            native.call(f"latent_kv_{dtype}", step, *strides, self.pool, latent_width, rope, page)
            whole = np.concatenate([c[:, :latent_width], k[:, 16 : 16 + rope]], axis=1)
            self.keys.append(whole.astype(kind).astype(np.float64))

    def attend(self, sequence: int, seen: list[int], q: F64, scale: float) -> F64:
        """Float64 attention of q [heads][latent + rope] over the seen positions."""
        keys = self.keys[sequence][seen]
        score = q @ keys.T * scale
        weight = np.exp(score - score.max(axis=1, keepdims=True))
        return weight / weight.sum(axis=1, keepdims=True) @ keys[:, : self.latent]


def check(
    native: Native, cache: Cache, heads: int, segments: list[tuple[int, int]], split: bool, top_k: int = 0
) -> F32:
    """Dense attention, or with ``top_k`` sparse over random positions; answers with what the kernel wrote."""
    step = make_step([(p, n, cache.tables[i]) for i, (p, n) in enumerate(segments)])
    rows, c, r = sum(n for _, n in segments), cache.latent, cache.rope
    scale, period = (c + r) ** -0.5, r + 8
    q, q_rope = random(rows, heads * c, seed=7), random(rows, heads * period, seed=8)
    out = poison(rows + 1, heads * c)
    part = np.full(simple.attention_split_bytes(rows, heads, c), 0xFF, np.uint8) if split else np.zeros(0, np.uint8)
    position = [(i, p) for i, (first, count) in enumerate(segments) for p in range(first, first + count)]
    seen = [list(range(p + 1)) for _, p in position]
    chosen = np.full((rows, max(top_k, 1)), -1, np.float32)
    if top_k:
        rng = np.random.default_rng(5)
        seen = [sorted(rng.permutation(p + 1)[:top_k].tolist()) for _, p in position]
        for row, positions in enumerate(seen):
            chosen[row, : len(positions)] = positions
    shape = (heads, r, c, cache.page, scale, period, part if split else 0, part.nbytes, q_rope.reshape(-1)[8:])
    base, combine = (out, cache.pool), (heads, 1, c, cache.page, scale, 0, part if split else 0, part.nbytes)
    name = f"{'sparse_' if top_k else ''}latent_attention_{cache.dtype}"
    native.call(name, step, q, heads * period, *base, *shape, *((chosen, top_k) if top_k else ()))
    native.call("attention_combine", step, q, heads * c, *base, *combine)
    for row, (sequence, _) in enumerate(position):
        both = (q[row].reshape(heads, c), q_rope[row].reshape(heads, period)[:, 8:])
        expected = cache.attend(sequence, seen[row], np.concatenate(both, axis=1).astype(np.float64), scale)
        np.testing.assert_allclose(out[row].reshape(heads, c), expected, rtol=2e-5, atol=4e-6, err_msg=f"row {row}")
    assert np.isnan(out[rows]).all()
    return out


SHAPES = [(4, 32, 8, 16), (6, 48, 16, 64), (1, 8, 8, 16), (16, 512, 64, 32), (64, 512, 64, 16)]
SEGMENTS = [[(63, 1)], [(31, 2), (300, 1), (0, 5), (127, 1)], [(0, 1)], [(0, 70)]]
CASES = [(*shape, each) for shape in SHAPES for each in (SEGMENTS if shape[1] < 512 else SEGMENTS[:2])]


@pytest.mark.parametrize("dtype", ["f16", "f32"])
@pytest.mark.parametrize(("heads", "width", "rope", "page", "segments"), CASES)
def test_latent_attention(
    native: Native, dtype: str, heads: int, width: int, rope: int, page: int, segments: list[tuple[int, int]]
) -> None:
    cache = Cache(native, [p + n for p, n in segments], width, rope, page, dtype)
    for split in (False, True):
        check(native, cache, heads, segments, split)


@pytest.mark.parametrize(
    ("length", "rows", "heads", "width"), [(127, 1, 16, 512), (129, 4, 16, 512), (2500, 1, 16, 512), (700, 12, 4, 32)]
)
def test_long_contexts_are_split_over_keys(native: Native, length: int, rows: int, heads: int, width: int) -> None:
    segments = [(length - rows, rows), (length // 2, 1)]
    cache = Cache(native, [p + n for p, n in segments], width, 64, 16, "f16")
    whole, split = (check(native, cache, heads, segments, split) for split in (False, True))
    assert not np.array_equal(whole, split) or length < 130


@pytest.mark.parametrize("dtype", ["f16", "f32"])
@pytest.mark.parametrize(("heads", "width", "rope", "page"), SHAPES)
@pytest.mark.parametrize("top_k", [1, 40])
def test_sparse_latent_attention(
    native: Native, dtype: str, heads: int, width: int, rope: int, page: int, top_k: int
) -> None:
    segments = [(0, 3), (60, 2), (399, 1)]
    cache = Cache(native, [p + n for p, n in segments], width, rope, page, dtype)
    for split in (False, True):
        check(native, cache, heads, segments, split, top_k=top_k)


def test_a_nan_query_gives_nan_rows_and_no_others(native: Native) -> None:
    cache = Cache(native, [20], 32, 8, 16, "f32")
    q, q_rope, out = random(20, 64), random(20, 16), np.zeros((20, 64), np.float32)
    q[3, 5] = np.nan
    shape, step = (2, 8, 32, 16, 0.2, 8, 0, 0), make_step([(0, 20, cache.tables[0])])
    native.call("latent_attention_f32", step, q, 16, out, cache.pool, *shape, q_rope)
    bad = np.isnan(out).any(axis=1)
    assert bad.tolist() == [row == 3 for row in range(20)]


# Selection


def best(scores: F64, top_k: int) -> list[int]:
    """The positions of the highest scores, of equal ones the lowest, ascending."""
    return sorted(np.lexsort((np.arange(scores.size), -scores))[:top_k].tolist())


def select(native: Native, dtype: str, keys: F32, q: F32, weights: F32, first: int, top_k: int, page: int,
           split: bool) -> F32:  # fmt: skip
    """What the kernels select for rows at positions ``first`` on, of one sequence that holds ``keys`` [tokens][d]."""
    tokens, d, rows, heads = keys.shape[0], keys.shape[1], q.shape[0], weights.shape[1]
    table = np.random.default_rng(2).permutation(math.ceil(tokens / page)).tolist()
    pool = np.full((len(table), d, page), np.nan, np.float16 if dtype == "f16" else np.float32)
    native.call(f"index_kv_{dtype}", make_step([(0, tokens, table)]), keys, d, pool, d, page)
    out = np.full((rows + 1, top_k), -7, np.float32)
    parts = np.full(latent.index_parts_bytes(rows, top_k), 0xFF, np.uint8) if split else np.zeros(0, np.uint8)
    step = make_step([(first, rows, table)])
    shape = (heads, d, weights, heads, page, top_k, 0.25, parts if split else 0, parts.nbytes)
    arguments = (q, heads * d, out, pool, *shape)
    native.call(f"index_select_{dtype}", step, *arguments)
    native.call("index_merge", step, *arguments)
    assert (out[rows] == -7).all()
    return out[:rows]


@pytest.mark.parametrize("dtype", ["f16", "f32"])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize(("tokens", "rows", "heads", "d", "top_k", "page"), [
    (60, 20, 32, 16, 8, 16), (900, 3, 64, 128, 64, 32), (3000, 2, 5, 24, 700, 64), (2049, 1, 32, 128, 2048, 16),
    (40, 40, 4, 8, 64, 16),
])  # fmt: skip
def test_index_select_finds_the_best_keys(
    native: Native, dtype: str, split: bool, tokens: int, rows: int, heads: int, d: int, top_k: int, page: int
) -> None:
    # small integers: scores are exact, and many are equal, so that the lower position has to win
    rng = np.random.default_rng(1)
    keys, q = (rng.integers(-2, 3, shape).astype(np.float32) for shape in ((tokens, d), (rows, heads * d)))
    weights = rng.integers(-3, 4, (rows, heads)).astype(np.float32)
    found = select(native, dtype, keys, q, weights, tokens - rows, top_k, page, split)
    for row in range(rows):
        seen = keys[: tokens - rows + row + 1].astype(np.float64)
        scores = weights[row] @ np.maximum(q[row].reshape(heads, d).astype(np.float64) @ seen.T, 0)
        expected = best(scores, top_k)
        assert found[row].tolist() == [*expected, *[-1] * (top_k - len(expected))], f"row {row}"


def test_all_scores_equal(native: Native) -> None:
    keys, q, weights = np.zeros((3000, 8), np.float32), random(1, 32), random(1, 4)
    for split in (False, True):
        found = select(native, "f32", keys, q, weights, 2999, 64, 16, split)
        assert found[0].tolist() == list(range(64))


@pytest.mark.parametrize("order", ["ascending", "descending"])
def test_sorted_scores(native: Native, order: str) -> None:
    """The best come last, so that every key displaces another, or first, so that none does."""
    keys = np.zeros((5000, 8), np.float32)
    keys[:, 0] = np.arange(5000) if order == "ascending" else np.arange(5000)[::-1]
    q, weights = np.ones((1, 8), np.float32), np.ones((1, 1), np.float32)
    first = 4900 if order == "ascending" else 0
    for split in (False, True):
        found = select(native, "f32", keys, q, weights, 4999, 100, 64, split)
        assert found[0].tolist() == list(range(first, first + 100))
