"""grouped_<format> and the kernels around experts, on both CPU targets, against float64."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cpu_kernels as ck
import native_engine as ne
import numpy as np
import numpy.typing as npt
import pytest
import tile16_reference as tr
import torch

from tapeout.compiler.kernels import experts as ek
from tapeout.compiler.kernels import simple
from tapeout.runtime.bench import bytes_per_token

F64 = npt.NDArray[np.float64]
FORMATS = ("bf16", "q4_0", "q4_k", "q6_k")
STORE, ADD, SILU, GELU, SWIGLU_OAI = range(5)
Libraries = dict[str, Path]


@pytest.fixture(scope="session")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Libraries:
    """The grouped kernels compiled for every target, runnable here or not."""
    sources = [("linear_grouped", name) for name in FORMATS]
    built = {target: ck.build(sources, target, tmp_path_factory.mktemp(target)) for target in ck.TARGETS}
    return {target: library for target, library in built.items() if ck.supported(target)}


class Experts:
    """Random matrices [groups, n, k] of a format and rows of x sorted by group; ``counts`` says how many of each."""

    def __init__(self, name: str, counts: list[int], n: int, k: int, columns: int = 0) -> None:
        rng, groups = np.random.default_rng([len(counts), n, k]), len(counts)
        raw = tr.random_rows(name, groups * n, k, rng)
        self.name, self.groups, self.n, self.k, self.rows = name, groups, n, k, sum(counts)
        self.w, self.cap = ck.aligned(tr.pack(name, raw)), self.rows + 3
        self.w_exact: F64 = tr.dequantize(name, raw).astype(np.float64).reshape(groups, n, k)
        x = rng.standard_normal((self.rows, columns or k)).astype(np.float32)
        self.x_exact: F64 = x.astype(np.float64)
        if name in tr.QUANTIZED:
            x, self.x_exact = tr.quantize_x8(x, self.cap)
        self.x = ck.aligned(x)
        chosen = [group for group, count in enumerate(counts) if count]
        listed = [*np.cumsum([0, *counts]), len(chosen), *chosen]
        self.starts = np.array([*listed, *[-1] * (groups - len(chosen))], np.int32)
        self.group_of = np.repeat(np.arange(groups), counts)
        self.scale = rng.uniform(0.1, 1, self.rows).astype(np.float32)

    def products(self) -> F64:
        """Each row of x times the matrix of its group, [rows, n]."""
        return np.stack([self.w_exact[g] @ x for g, x in zip(self.group_of, self.x_exact, strict=True)])

    def run(self, library: Path, y: npt.NDArray, rows: int, epilogue: int, *, n: int = 0, starts: bool = True,
            bias: npt.NDArray | None = None, row_of: npt.NDArray | None = None, scaled: bool = False,
            extra: float | npt.NDArray = 0.0) -> None:  # fmt: skip
        call = ck.launch(self.x, self.w, y, n or self.n, self.k, self.cap, y.shape[1], epilogue, bias,
                         self.starts if starts else None, row_of, self.scale if scaled else None, self.groups, extra,
                         1)  # fmt: skip
        ck.run(ck.load(library, f"grouped_{self.name}"), call, ck.Step(rows=rows), shuffled=epilogue != ADD)


def close(ours: npt.NDArray, expected: F64, tolerance: float = 2e-5) -> bool:
    return bool(np.abs(ours - expected).max() <= tolerance * np.abs(expected).max())


COUNTS = {"decode": [0, 1, 0, 0, 2, 1], "prefill": [70, 0, 3, 16, 130, 1]}


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("name", FORMATS)
def test_each_group_of_rows_meets_its_own_matrix(libraries: Libraries, name: str, counts: list[int]) -> None:
    for n, k in ((48, 256), (16, 2304)):
        e = Experts(name, counts, n, k)
        bias = np.random.default_rng(1).standard_normal(e.groups * n).astype(np.float32)
        for library in libraries.values():
            y = np.full((e.rows, n + 5), np.nan, np.float32)
            e.run(library, y, rows=1, epilogue=STORE, bias=bias)
            assert close(y[:, :n], e.products() + bias.reshape(e.groups, n)[e.group_of])
            assert np.isnan(y[:, n:]).all(), "columns beyond n were written"


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("name", FORMATS)
def test_weighted_results_add_up_in_the_rows_they_belong_to(libraries: Libraries, name: str, counts: list[int]) -> None:
    e = Experts(name, counts, 80, 512)
    rng, rows = np.random.default_rng(2), 1 + e.rows // 2
    row_of = rng.integers(0, rows, e.rows).astype(np.int32)
    before = rng.standard_normal((rows, e.n)).astype(np.float32)
    bias = rng.standard_normal(e.groups * e.n).astype(np.float32)
    expected = before.astype(np.float64)
    products = e.products() + bias.reshape(e.groups, e.n)[e.group_of]
    np.add.at(expected, row_of, e.scale[:, None] * products)
    for library in libraries.values():
        y = before.copy()
        e.run(library, y, rows, ADD, bias=bias, row_of=row_of, scaled=True)
        assert close(y, expected)
        apart, parts = before.copy(), np.full((e.rows, e.n), np.nan, np.float32)
        e.run(library, apart, rows, ADD, bias=bias, row_of=row_of, scaled=True, extra=parts)
        for row, part in zip(row_of, parts, strict=True):  # what add_pairs does with those of few rows
            apart[row] += 0 if e.rows > ek.FEW_PAIRS else part
        assert np.array_equal(apart, y), "parts add up in another order"


def silu(gate: F64, up: F64) -> F64:
    return gate / (1 + np.exp(-gate.clip(-700))) * up


def swiglu_oai(gate: F64, up: F64) -> F64:
    gate, up = gate.clip(max=7), up.clip(-7, 7)
    return (up + 1) * gate / (1 + np.exp(-1.702 * gate.clip(-400)))


@pytest.mark.parametrize(("epilogue", "limit", "act"), [(SILU, 0.0, silu), (SWIGLU_OAI, 7.0, swiglu_oai)])
@pytest.mark.parametrize("name", FORMATS)
def test_gate_and_up_of_an_expert_become_one_value(
    libraries: Libraries, name: str, epilogue: int, limit: float, act: Callable[[F64, F64], F64]
) -> None:
    n = 32
    for counts in COUNTS.values():
        e = Experts(name, counts, 2 * n, 256)
        bias = np.random.default_rng(3).uniform(-9, 9, e.groups * 2 * n).astype(np.float32)
        gate, up = np.hsplit(e.products() + bias.reshape(e.groups, 2 * n)[e.group_of], 2)
        for library in libraries.values():
            y = np.full((e.rows, n), np.nan, np.float32)
            e.run(library, y, 1, epilogue, n=n, bias=bias, extra=limit)
            assert close(y, act(gate, up))


@pytest.mark.parametrize("rows", [1, 5, 70])
@pytest.mark.parametrize("name", FORMATS)
def test_heads_multiply_columns_of_every_row(libraries: Libraries, name: str, rows: int) -> None:
    heads, n, k = 3, 48, 256
    e = Experts(name, [rows, 0, 0], n, k, columns=heads * k)
    expected = np.einsum("hnk,rhk->rhn", e.w_exact, e.x_exact.reshape(rows, heads, k)).reshape(rows, -1)
    for library in libraries.values():
        y = np.full((rows, heads * n), np.nan, np.float32)
        e.run(library, y, rows, STORE, starts=False)
        assert close(y, expected)


# -- routing and sorting, built by the real toolchain


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ne.Native]:
    """The kernels of experts.c, which are compiled once for all targets."""
    folder = tmp_path_factory.mktemp("experts")
    entries = (ek.ROUTE, ek.DISPATCH, ek.SORT_X8, ek.SORT_F32, ek.PAIRS_X8, ek.ADD_PAIRS, ek.ZERO_F32)
    ne.build(folder, ["x86_64_v3"], (*entries, simple.QUANTIZE_X8))
    engine = ne.Native(folder / "cpu-x86_64_v3.so", threads=2)
    yield engine
    engine.close()


def config_of(family: str, **fields: Any) -> Any:
    """A config of transformers with 24 experts, 4 of them chosen, that score their own input."""
    kind = getattr(importlib.import_module("transformers"), f"{family}Config")
    sizes = {"hidden_size": 24, "num_attention_heads": 4, "num_local_experts": 24, "num_experts_per_tok": 4}
    return kind(**sizes, **fields)


# what `route` is told, and whose router it is to be
ROUTERS: dict[str, tuple[dict[str, Any], str, str, dict[str, Any]]] = {
    "normalised": ({"normalize": 1}, "qwen3_moe", "Qwen3MoeTopKRouter", {"norm_topk_prob": True}),
    "softmax": ({}, "qwen3_moe", "Qwen3MoeTopKRouter", {"norm_topk_prob": False}),
    "mixtral": ({"normalize": 1}, "mixtral", "MixtralTopKRouter", {}),
    "chosen": ({"score": "softmax_chosen"}, "gpt_oss", "GptOssTopKRouter", {}),
    "groups": (
        {"groups": 6, "top_groups": 2, "scale": 16.0},
        "deepseek_v2",
        "DeepseekV2TopkRouter",
        {"n_routed_experts": 24, "topk_method": "group_limited_greedy", "n_group": 6, "topk_group": 2,
         "routed_scaling_factor": 16.0},
    ),
    "biased groups": (
        {"score": "sigmoid", "groups": 6, "top_groups": 3, "group_score": "top2", "normalize": 1, "scale": 2.5,
         "bias": True},
        "deepseek_v3",
        "DeepseekV3TopkRouter",
        {"n_group": 6, "topk_group": 3, "routed_scaling_factor": 2.5, "norm_topk_prob": True},
    ),
    "sqrt softplus": (
        {"score": "sqrt_softplus", "normalize": 1, "scale": 1.5, "bias": True},
        "deepseek_v4",
        "DeepseekV4TopKRouter",
        {"routed_scaling_factor": 1.5, "scoring_func": "sqrtsoftplus"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", ROUTERS)
def test_routes_are_those_of_transformers(native: ne.Native, case: str) -> None:
    said, module, name, fields = ROUTERS[case]
    modeling = importlib.import_module(f"transformers.models.{module}.modeling_{module}")
    router = getattr(modeling, name)(config_of(name.replace("TopKRouter", "").replace("TopkRouter", ""), **fields))
    rng, rows, experts, top_k = np.random.default_rng(5), 37, 24, 4
    logits = (3 * rng.standard_normal((rows, experts))).astype(np.float32)
    logits[1] *= 30  # scores that end in 0 and 1
    bias = (0.5 * rng.standard_normal(experts)).astype(np.float32) if said.get("bias") else None
    with torch.no_grad():
        router.weight.copy_(torch.eye(experts))
        if hasattr(router, "bias"):
            router.bias.zero_()
        if bias is not None:
            router.e_score_correction_bias.copy_(torch.from_numpy(bias))
        _, weights, ids = (part.float().numpy() for part in router(torch.from_numpy(logits)))
    y = ne.poison(rows, 2 * top_k)
    x = np.hstack([logits, ne.poison(rows, 3)])
    score = ek.SCORES.index(said.get("score", "softmax"))
    grouped = (said.get("groups", 1), said.get("top_groups", 1), ek.GROUP_SCORES.index(said.get("group_score", "max")))
    native.call("route", ne.rows_step(rows), x, experts + 3, y, experts, top_k, score, bias, *grouped,
                said.get("normalize", 0), float(said.get("scale", 1.0)))  # fmt: skip
    expected = [dict(zip(i.tolist(), w.tolist(), strict=True)) for i, w in zip(ids, weights, strict=True)]
    for row, (chosen, values) in enumerate(zip(y[:, :top_k].astype(int), y[:, top_k:], strict=True)):
        assert sorted(chosen) == sorted(expected[row]), row
        np.testing.assert_allclose(values, [expected[row][e] for e in chosen], rtol=3e-6, atol=1e-30)
        if bias is None:
            assert all(np.diff(logits[row][chosen]) <= 0)


@pytest.mark.parametrize("score", range(len(ek.SCORES)), ids=ek.SCORES)
def test_equal_and_unusable_scores_still_choose_experts(native: ne.Native, score: int) -> None:
    x = np.zeros((2, 16), np.float32)
    x[1] = np.nan
    y = ne.poison(2, 8)
    native.call("route", ne.rows_step(2), x, 16, y, 16, 4, score, None, 1, 1, 0, 1, 1.0)
    assert y[0].tolist() == [0, 1, 2, 3, 0.25, 0.25, 0.25, 0.25]
    assert sorted(y[1, :4]) == [0, 1, 2, 3]
    assert np.isnan(y[1, 4:]).all()


@pytest.mark.parametrize("rows", [1, 50])
def test_pairs_are_sorted_by_expert(native: ne.Native, rows: int) -> None:
    rng, experts, top_k, k = np.random.default_rng(rows), 9, 3, 80
    ids = np.stack([rng.permutation(experts)[:top_k] for _ in range(rows)])
    route = np.hstack([ids, rng.random((rows, top_k))]).astype(np.float32)
    starts, row_of = np.full(2 * experts + 2, -1, np.int32), np.full(rows * top_k, -1, np.int32)
    weight, step = ne.poison(rows * top_k), ne.rows_step(rows)
    native.call("dispatch", step, route, top_k, experts, starts, row_of, weight, 0)
    order = np.argsort(ids.reshape(-1), kind="stable")
    assert row_of.tolist() == (order // top_k).tolist()
    assert weight.tolist() == route[:, top_k:].reshape(-1)[order].tolist()
    counts = np.bincount(ids.reshape(-1), minlength=experts)
    assert starts[: experts + 1].tolist() == [0, *np.cumsum(counts)]
    chosen = np.flatnonzero(counts).tolist()
    assert starts[experts + 1 : experts + 2 + len(chosen)].tolist() == [len(chosen), *chosen]

    x = rng.standard_normal((rows, k)).astype(np.float32)
    y = ne.poison(rows * top_k, k)
    native.call("sort_f32", step, x, k, y, k, row_of, top_k)
    assert np.array_equal(y, x[row_of])
    for terms in (1, 2):
        cap, cap_y = (rows + 2) * terms, rows * top_k * terms
        whole, sorted_x8, expected = (np.zeros(3 * n * 44, np.uint8) for n in (cap, cap_y, cap_y))
        native.call("quantize_x8", step, x, k, whole, k, cap, terms)
        native.call("sort_x8", step, whole, cap, sorted_x8, cap_y, k, row_of, top_k, terms)
        native.call("quantize_x8", ne.rows_step(rows * top_k), y, k, expected, k, cap_y, terms)
        assert np.array_equal(sorted_x8, expected)
    native.call("pairs_x8", step, y, whole_pairs := np.zeros(3 * cap_y * 44, np.uint8), k, rows * top_k, top_k)
    native.call("quantize_x8", ne.rows_step(rows * top_k), y, k, expected, k, rows * top_k, 1)
    assert np.array_equal(whole_pairs[: 3 * rows * top_k * 44], expected[: 3 * rows * top_k * 44])


@pytest.mark.parametrize("rows", [4, 22])
def test_parts_of_few_rows_are_added_in_order(native: ne.Native, rows: int) -> None:
    rng, top_k, k = np.random.default_rng(rows), 3, 1100
    x, y = rng.standard_normal((rows * top_k, k)).astype(np.float32), rng.standard_normal((rows, k)).astype(np.float32)
    row_of, expected = rng.permutation(np.repeat(np.arange(rows), top_k)).astype(np.int32), y.copy()
    for row, part in zip(row_of, x, strict=True):
        expected[row] += part if rows * top_k <= ek.FEW_PAIRS else 0
    starts = np.array([0, rows * top_k], np.int32)  # of one expert
    native.call("add_pairs", ne.rows_step(rows), x, y, k, row_of, starts, 1)
    assert np.array_equal(y, expected)


def test_dispatch_leaves_the_experts_of_other_ranks_out(native: ne.Native) -> None:
    ids = np.array([[0, 5], [4, 7], [6, 1]])
    route = np.hstack([ids, [[0.1, 0.2], [0.3, 0.4], [0.5, 0.6]]]).astype(np.float32)
    starts, row_of, weight = np.full(10, -1, np.int32), np.full(6, -1, np.int32), ne.poison(6)
    native.call("dispatch", ne.rows_step(3), route, 2, 4, starts, row_of, weight, 4)  # experts 4 to 7
    assert starts.tolist() == [0, 1, 2, 3, 4, 4, 0, 1, 2, 3]
    assert (row_of[:4].tolist(), weight[:4].tolist()) == ([1, 0, 2, 1], np.float32([0.3, 0.2, 0.5, 0.4]).tolist())
    assert set(row_of[4:]) == {0}, "rows behind the last pair must be rows of the step"


def test_zero(native: ne.Native) -> None:
    y = ne.poison(20, 24)
    native.call("zero_f32", ne.rows_step(19), y, 24)
    assert not y[:19].any()
    assert np.isnan(y[19]).all()


def test_a_decode_step_reads_the_experts_of_a_row() -> None:
    def launch(kernel: str, **args: Any) -> dict[str, Any]:
        return {"kernel": kernel, "args": args}

    launches = [
        launch("embed_bf16", w=["weight", "table"]),
        launch("linear_bf16", w=["weight", "router"]),
        launch("dispatch", top_k=2, experts=8),
        launch("grouped_bf16", w=["weight", "experts"], starts=["arena", 64]),
        launch("grouped_bf16", w=["weight", "heads"], starts=0),
    ]
    sizes = {"table": 1000, "router": 100, "experts": 80, "heads": 3}
    weights = [{"name": name, "bytes": size} for name, size in sizes.items()]
    plan = {"graphs": [{"phase": "decode", "launches": launches}], "weights": weights}
    assert bytes_per_token(plan) == 100 + 80 * 2 // 8 + 3
