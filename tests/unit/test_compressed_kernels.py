"""The kernels of DeepSeek-V4 against float64: residual streams, compressed entries, their selection, attention."""

from __future__ import annotations

import ctypes as C
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from native_engine import Native, Step, build, make_step, poison, rows_step, supported

from tapeout.compiler.kernels import compressed, latent

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
TARGETS = [target for target in ("x86_64_v3", "x86_64_v4") if supported(target)]
DTYPES = {"f32": (np.float32, 1e-5), "f16": (np.float16, 2e-3)}
PAGE = 16
ENTRIES = (
    compressed.REPEAT,
    compressed.UNIT_NORM,
    compressed.KEEP_ROWS,
    compressed.HYPER_WEIGHTS,
    compressed.HYPER_MIX,
    compressed.HYPER_JOIN,
    compressed.ROUTE_BY_TOKEN,
    compressed.MERGE,
    *(
        kind(dtype)
        for kind in (compressed.compress, compressed.select_entries, compressed.attention)
        for dtype in DTYPES
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


def close(actual: npt.ArrayLike, expected: npt.ArrayLike, tolerance: float) -> None:
    np.testing.assert_allclose(np.asarray(actual, np.float64), expected, rtol=tolerance, atol=tolerance)


def softmax(x: F64, axis: int) -> F64:
    e = np.exp(x - x.max(axis=axis, keepdims=True))
    return e / e.sum(axis=axis, keepdims=True)


# Residual streams


def sigmoid(x: F64) -> F64:
    return 1 / (1 + np.exp(-x))


def doubly_stochastic(logits: F64, iterations: int, eps: float) -> F64:
    m = softmax(logits, -1) + eps
    m = m / (m.sum(-2, keepdims=True) + eps)
    for _ in range(iterations - 1):
        m = m / (m.sum(-1, keepdims=True) + eps)
        m = m / (m.sum(-2, keepdims=True) + eps)
    return m


@pytest.mark.parametrize("rows", [1, 9])
@pytest.mark.parametrize(("n", "k", "iterations"), [(4, 20, 20), (1, 8, 3), (8, 33, 1), (3, 64, 4)])
def test_streams_are_weighed_mixed_and_joined(native: Native, rows: int, n: int, k: int, iterations: int) -> None:
    width, norm_eps, eps = n * (n + 2), 1e-3, 1e-2
    x, fn, block = random(rows, n * k), random(width, n * k, seed=1) * 0.3, random(rows, k + 3, seed=2)
    base, scale = random(width, seed=3), random(3, seed=4)
    f = np.concatenate([(x @ fn.T), random(rows, 2)], axis=1)
    weights, mixed = poison(rows, width), poison(rows, k)
    step = rows_step(rows)
    args = (x, n * k, f, width + 2, base, scale, weights, n, iterations, norm_eps, eps)
    native.call("hyper_weights", step, *args)
    wide = x.astype(np.float64)
    z = f[:, :width] / np.sqrt((wide**2).mean(-1, keepdims=True) + norm_eps)
    z = z * np.repeat(scale, [n, n, n * n]) + base
    pre, post = sigmoid(z[:, :n]) + eps, 2 * sigmoid(z[:, n : 2 * n])
    mix = doubly_stochastic(z[:, 2 * n :].reshape(rows, n, n), iterations, eps)
    close(weights, np.concatenate([pre, post, mix.reshape(rows, -1)], axis=1), 3e-6)

    native.call("hyper_mix", step, x, weights, width, mixed, k, n)
    streams = wide.reshape(rows, n, k)
    close(mixed, np.einsum("rj,rjk->rk", pre, streams), 3e-6)

    joined = x.copy()
    native.call("hyper_join", step, joined, weights, width, block, k + 3, k, n)
    expected = post[:, :, None] * block[:, None, :k] + np.einsum("rji,rjk->rik", mix, streams)
    close(joined.reshape(rows, n, k), expected, 1e-5)


def test_the_last_sum_of_streams_has_weights_of_its_own(native: Native) -> None:
    n, k, rows = 4, 20, 5
    x, f, base, scale = random(rows, n * k), random(rows, n, seed=1), random(n, seed=2), random(1, seed=3)
    weights = poison(rows, n)
    native.call("hyper_weights", rows_step(rows), x, n * k, f, n, base, scale, weights, n, 0, 1e-3, 1e-2)
    inverse = 1 / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-3)
    close(weights, sigmoid(f * inverse * scale + base) + 1e-2, 3e-6)


def test_a_row_repeats_and_heads_are_normed(native: Native) -> None:
    x, y = random(9, 24), poison(9, 72)
    native.call("repeat_f32", rows_step(9), x, y, 24, 3)
    assert np.array_equal(y, np.tile(x, 3))
    wide = x.astype(np.float64).reshape(9, 3, 8)
    native.call("unit_norm", rows_step(9), x, 24, 24, 8, 1e-3)
    close(x.reshape(9, 3, 8), wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-3), 1e-6)


# Entries


class Sequences:
    """Page tables of two sequences whose pages take turns, and how far each has come."""

    def __init__(self, tokens: int) -> None:
        self.count = -(-tokens // PAGE)
        self.pages = [list(range(start, 2 * self.count, 2)) for start in (1, 0)]
        self.pool_pages = 2 * self.count
        self.position = [0, 0]

    def step(self, rows: Sequence[int]) -> tuple[Step, list[tuple[int, int]]]:
        """The next rows of each sequence, and (sequence, position) of every row."""
        segments = [(self.position[i], count, self.pages[i]) for i, count in enumerate(rows)]
        owners = [(i, self.position[i] + j) for i, count in enumerate(rows) for j in range(count)]
        self.position = [at + count for at, count in zip(self.position, rows, strict=True)]
        return make_step(segments), owners


# rows that each of two sequences gets in a step: chunks that cut windows, one token, more than a ring holds
STEPS = ((3, 1), (1, 1), (1, 30), (37, 2), (1, 1), (70, 9), (2, 80))
TOKENS = sum(max(each) for each in STEPS)


def entry_places(pages: Sequence[int], count: int, m: int) -> list[tuple[int, int]]:
    """Page and place in it of each entry: behind those whose windows end before in the page."""
    ends = [((w + 1) * m - 1) // PAGE for w in range(count)]
    return [(pages[page], w - ends.index(page)) for w, page in enumerate(ends)]


def entries_of(x: F64, ape: F64, norm: F64, inv: F64, m: int, overlap: bool, eps: float) -> F64:
    """All entries of one sequence x [tokens, c | g], from the definition."""
    half = x.shape[1] // 2
    d = half // 2 if overlap else half
    found: list[F64] = []
    for w in range(len(x) // m):
        rows = x[w * m : (w + 1) * m]
        c, g = rows[:, half - d : half], (rows[:, half:] + ape)[:, half - d :]
        if overlap and w:
            before = x[(w - 1) * m : w * m]
            c, g = np.concatenate([before[:, :d], c]), np.concatenate([(before[:, half:] + ape)[:, :d], g])
        entry = (softmax(g, 0) * c).sum(0)
        entry = entry / np.sqrt((entry**2).mean() + eps) * norm
        angle = w * m * inv
        tail = entry[d - 2 * len(inv) :].reshape(-1, 2)
        a, b = tail[:, 0].copy(), tail[:, 1].copy()
        tail[:, 0], tail[:, 1] = a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)
        found.append(entry)
    return np.array(found)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("m", "overlap", "d"), [(4, True, 16), (8, False, 32), (5, True, 16), (40, False, 16)])
def test_windows_become_entries_across_steps(native: Native, m: int, overlap: bool, d: int, dtype: str) -> None:
    kind, tolerance = DTYPES[dtype]
    width, slots, per_page = d * (1 + overlap), m * (1 + overlap), -(-PAGE // m)
    x = random(2, TOKENS, 2 * width) * 2
    ape, norm, inv = random(m, width, seed=1), random(d, seed=2), np.array([1, 0.3, 0.01, 1e-3], np.float32)
    sequences = Sequences(TOKENS)
    pool = np.full((sequences.pool_pages, per_page, d), np.nan, kind)
    ring = poison(2, slots, 2 * width)
    wide = [x[i].astype(np.float64) for i in range(2)]
    expected = [entries_of(each, ape, norm, inv, m, overlap, 1e-3) for each in wide]
    for rows in STEPS:
        step, owners = sequences.step(rows)
        now = np.stack([x[i, p] for i, p in owners])
        y = poison(len(owners), d)
        args = (now, 2 * width, ape, norm, inv, ring, pool, y, d, m, int(overlap), 8, PAGE, 1e-3)
        native.call(f"compress_{dtype}", step, *args)
        native.call("keep_rows", step, now, 2 * width, 2 * width, ring, slots)
        for row, (i, p) in enumerate(owners):
            ends = (p + 1) % m == 0
            close(y[row], expected[i][p // m] if ends else np.zeros(d), 2e-5)
    for i in range(2):
        for w, place in enumerate(entry_places(sequences.pages[i], sequences.position[i] // m, m)):
            close(pool[place], expected[i][w], max(tolerance, 2e-5))


def filled(sequences: Sequences, entries: Sequence[F32], m: int, kind: type) -> npt.NDArray[np.generic]:
    """A pool that holds these entries of each sequence."""
    pool = np.full((sequences.pool_pages, -(-PAGE // m), entries[0].shape[1]), np.nan, kind)
    for pages, held in zip(sequences.pages, entries, strict=True):
        for w, place in enumerate(entry_places(pages, len(held), m)):
            pool[place] = held[w]
    return pool


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "d", "window", "m", "top_k"),
    [(5, 32, 8, 4, 0), (5, 32, 8, 4, 6), (1, 16, 70, 8, 0), (16, 512, 8, 0, 0), (37, 64, 33, 40, 0)],
)
def test_attention_over_window_entries_and_sinks(
    native: Native, heads: int, d: int, window: int, m: int, top_k: int, dtype: str
) -> None:
    kind, tolerance = DTYPES[dtype]
    scale, sinks = d**-0.5, random(heads, seed=5)
    kv, q_all = random(2, TOKENS, d), random(2, TOKENS, heads * d, seed=1)
    sequences = Sequences(TOKENS)
    entries = [random(TOKENS // m if m else 0, d, seed=7 + i).astype(kind).astype(np.float32) for i in range(2)]
    pool = filled(sequences, entries, m, kind) if m else np.zeros(1, kind)
    ring, rng = poison(2, window, d), np.random.default_rng(3)
    for rows in STEPS:
        step, owners = sequences.step(rows)
        q, now = np.stack([q_all[i, p] for i, p in owners]), np.stack([kv[i, p] for i, p in owners])
        y, chosen = poison(len(owners), heads * d), np.full((len(owners), max(top_k, 1)), -1, np.float32)
        seen = [np.arange((p + 1) // m if m else 0) for _, p in owners]
        if top_k:
            seen = [np.sort(rng.permutation(each)[:top_k]) for each in seen]
            for row, each in enumerate(seen):
                chosen[row, : len(each)] = each
        args = (q, now, d, y, ring, pool, chosen if top_k else 0, top_k, sinks, heads, d, window, m, PAGE, scale)
        native.call(f"compressed_attention_{dtype}", step, *args)
        native.call("keep_rows", step, now, d, d, ring, window)
        for row, (i, p) in enumerate(owners):
            keys = np.concatenate([kv[i, max(0, p - window + 1) : p + 1], entries[i][seen[row]]]).astype(np.float64)
            score = q[row].reshape(heads, d) @ keys.T * scale
            share = softmax(np.concatenate([score, sinks[:, None]], axis=1), 1)[:, :-1]
            close(y[row].reshape(heads, d), share @ keys, max(2e-5, tolerance / 100))


def best(scores: F64, top_k: int) -> list[int]:
    """The highest in ascending order, the lower among equals."""
    return sorted(sorted(range(len(scores)), key=lambda w: (-scores[w], w))[:top_k])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "top_k", "rows"), [(40, 16, 3), (3000, 5, 40), (9000, 64, 2)])
def test_the_best_entries_are_selected(native: Native, tokens: int, top_k: int, rows: int, dtype: str) -> None:
    """The last case splits a row over its entries, where there is room for parts."""
    kind, m, heads, d = DTYPES[dtype][0], 4, 6, 16
    sequences = Sequences(tokens + rows)
    entries = [random((tokens + rows) // m, d, seed=i).astype(kind).astype(np.float32) for i in range(2)]
    entries[0][5] = entries[0][3]  # equal scores
    pool = filled(sequences, entries, m, kind)
    sequences.position = [tokens, max(0, tokens - 3)]
    step, owners = sequences.step([rows, 1])
    q, weights = random(len(owners), heads * d, seed=8), random(len(owners), heads + 2, seed=9)
    nbytes = latent.index_parts_bytes(8, top_k)
    for parts in (np.full(nbytes, 0xFF, np.uint8), None):
        y = poison(len(owners), top_k)
        args = (q, heads * d, y, pool, heads, d, weights, heads + 2, PAGE, top_k, 0.25, parts, nbytes, m)
        native.call(f"select_entries_{dtype}", step, *args)
        native.call("index_merge", step, *args)
        for row, (i, p) in enumerate(owners):
            seen = entries[i][: (p + 1) // m].astype(np.float64)
            scores = weights[row, :heads] @ np.maximum(q[row].reshape(heads, d).astype(np.float64) @ seen.T, 0)
            expected = best(scores, top_k)
            assert y[row, : len(expected)].tolist() == expected
            assert (y[row, len(expected) :] == -1).all()


def test_a_token_chooses_its_experts(native: Native) -> None:
    rows, experts, top_k, vocab = 11, 12, 3, 40
    logits, rng = random(rows, experts + 1) * 8, np.random.default_rng(1)
    table = np.stack([rng.permutation(experts)[:top_k] for _ in range(vocab)]).astype(np.float32)
    tokens = rng.integers(0, vocab, rows).astype(np.int32)
    step, y = rows_step(rows), poison(rows, 2 * top_k)
    step.native.tokens = tokens.ctypes.data_as(C.POINTER(C.c_int32))
    native.call("route_by_token", step, logits, experts + 1, table, y, experts, top_k, 2, 1, 1.5)
    assert np.array_equal(y[:, :top_k], table[tokens])
    scores = np.sqrt(np.logaddexp(0, logits[:, :experts].astype(np.float64)))
    chosen = np.take_along_axis(scores, table[tokens].astype(int), 1)
    close(y[:, top_k:], chosen / chosen.sum(1, keepdims=True) * 1.5, 1e-5)
