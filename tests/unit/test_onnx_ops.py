"""Single ops as ONNX operators, run by ONNX Runtime, beside the maths in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
import pytest

from tapeout.compiler.ir import OP_KINDS, Builder, Graph, Op
from tapeout.compiler.onnx.model import op_model
from tapeout.compiler.onnx.table import WRITERS
from tapeout.runtime.errors import TapeoutError

BATCH, ROWS = 2, 7
Array = npt.NDArray[np.float64]
RNG = np.random.default_rng(0)


class Case:
    """One op over inputs of given widths; values and weights are random, float32 at heart."""

    def __init__(self, make: Callable[[Builder, list[str]], str], *widths: int) -> None:
        builder = Builder()
        names = [builder.embed(f"x{i}", 3, width) for i, width in enumerate(widths)]
        self.graph = builder.graph(make(builder, names))
        self.op = self.graph.op(self.graph.output)
        self.values = {name: noise(BATCH, ROWS, width) for name, width in zip(names, widths, strict=True)}
        self.weights = {name: noise(*self.graph.slots[name].shape) for name in self.op.weights}

    @property
    def inputs(self) -> list[Array]:
        return [self.values[name] for name in self.op.inputs]

    def check(self, expected: Array, atol: float = 2e-6) -> None:
        model, writer = op_model(self.graph, self.op)
        onnx.checker.check_model(model, full_check=True)
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        session: Any = onnxruntime.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        given: dict[str, Any] = {"input_ids": np.zeros((BATCH, ROWS), np.int64)}
        given |= {name: self.values[name].astype(np.float32) for name in self.op.inputs}
        given |= {writer.weight(name): values.astype(np.float32) for name, values in self.weights.items()}
        (found,) = session.run([self.op.name], given)
        assert found.shape == (BATCH, ROWS, self.op.width) == expected.shape
        np.testing.assert_allclose(found, expected, rtol=2e-5, atol=atol)


def noise(*shape: int) -> Array:
    return RNG.standard_normal(shape).astype(np.float32).astype(np.float64)


def softmax(x: Array) -> Array:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def causal(scores: Array) -> Array:
    """[..., queries, keys] without the keys behind each query."""
    return np.where(np.tri(ROWS, dtype=bool), scores, -np.inf)


def test_layernorm() -> None:
    case = Case(lambda b, x: b.layernorm("y", x[0], 1e-3), 12)
    (x,), (w, bias) = case.inputs, case.weights.values()
    case.check((x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-3) * w + bias)


def test_columns() -> None:
    case = Case(lambda b, x: b.columns("y", x[0], 3, 8, period=10), 40)
    case.check(np.concatenate([case.inputs[0][..., at + 3 : at + 8] for at in range(0, 40, 10)], -1))
    case = Case(lambda b, x: b.columns("y", x[0], 4, 9), 9)
    case.check(case.inputs[0][..., 4:])


def test_head_linear() -> None:
    case = Case(lambda b, x: b.head_linear("y", x[0], 3, 5, ("heads", "rank")), 12)
    (x,), (w,) = case.inputs, case.weights.values()
    heads = [x[..., 4 * h : 4 * h + 4] @ w[5 * h : 5 * h + 5].T for h in range(3)]
    case.check(np.concatenate(heads, -1))


@pytest.mark.parametrize("pairs", [True, False])
@pytest.mark.parametrize("sign", [1, -1])
def test_rotate(pairs: bool, sign: int) -> None:
    """As complex numbers: every pair times e^(i position frequency)."""
    case = Case(
        lambda b, x: b.rotate("y", x[0], "f", rotated=6, start=1, period=10, factor=1.5, pairs=pairs, sign=sign), 20
    )
    (x,), (f,) = case.inputs, case.weights.values()
    expected = x.copy()
    turn = 1.5 * np.exp(1j * sign * np.arange(ROWS)[:, None] * f)
    for at in (1, 11):
        first, second = (
            (slice(at, at + 6, 2), slice(at + 1, at + 6, 2)) if pairs else (slice(at, at + 3), slice(at + 3, at + 6))
        )
        turned = (x[..., first] + 1j * x[..., second]) * turn
        expected[..., first], expected[..., second] = turned.real, turned.imag
    case.check(expected)


@pytest.mark.parametrize(("act", "limit"), [("silu", 0.0), ("swiglu_oai", 0.7), ("silu", 0.5)])
def test_gated(act: str, limit: float) -> None:
    case = Case(lambda b, x: b.gated("y", x[0], x[1], act, limit), 16, 16)
    gate, up = case.inputs
    if limit:
        gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    case.check(gate * sigmoid(1.702 * gate) * (up + 1) if act == "swiglu_oai" else gate * sigmoid(gate) * up)


@pytest.mark.parametrize("window", [0, 3])
def test_attention_with_sinks(window: int) -> None:
    case = Case(
        lambda b, x: b.attention("a.y", (x[0], x[1], x[2]), layer=0, head_dim=4, scale=0.5, window=window, sinks=True),
        16, 8, 8,
    )  # fmt: skip
    (q, k, v), (sinks,) = (np.split(x, x.shape[-1] // 4, -1) for x in case.inputs), case.weights.values()
    out: list[Array] = []
    for head in range(4):
        scores = causal(q[head] @ k[head // 2].swapaxes(1, 2) * 0.5)
        if window:
            scores = np.where(np.tri(ROWS, k=-window, dtype=bool), -np.inf, scores)
        with_sink = softmax(np.concatenate([scores, np.full((BATCH, ROWS, 1), sinks[head])], -1))
        out.append(with_sink[..., :-1] @ v[head // 2])
    case.check(np.concatenate(out, -1))


def latent(b: Builder, x: list[str]) -> str:
    selection = x[4] if len(x) > 4 else ""
    return b.latent_attention("y", (x[0], x[1]), (x[2], x[3]), selection, layer=0, heads=3, scale=0.3)


def latent_expected(inputs: list[Array], seen: npt.NDArray[np.bool_]) -> Array:
    q, q_rope, key, key_rope = inputs[:4]
    out: list[Array] = []
    for head in range(3):
        own, turned = q[..., 8 * head : 8 * head + 8], q_rope[..., 4 * head : 4 * head + 4]
        scores = (own @ key.swapaxes(1, 2) + turned @ key_rope.swapaxes(1, 2)) * 0.3
        out.append(softmax(np.where(seen, scores, -np.inf)) @ key)
    return np.concatenate(out, -1)


def test_latent_attention() -> None:
    case = Case(latent, 24, 12, 8, 4)
    case.check(latent_expected(case.inputs, np.tri(ROWS, dtype=bool)))


@pytest.mark.parametrize("top_k", [3, 12])
def test_index_select_and_sparse_attention(top_k: int) -> None:
    """Also with fewer positions than are to be selected."""
    case = Case(lambda b, x: b.index_select("y", *x, layer=0, top_k=top_k, scale=0.7), 20, 5, 4)
    q, k, w = case.inputs
    scores = sum(
        w[..., h : h + 1] * np.maximum(q[..., 5 * h : 5 * h + 5] @ k.swapaxes(1, 2), 0) * 0.7 for h in range(4)
    )
    named, seen = np.full((BATCH, ROWS, top_k), -1.0), np.zeros((BATCH, ROWS, ROWS), bool)
    for batch in range(BATCH):
        for row in range(ROWS):
            best = np.sort(np.argsort(-np.asarray(scores)[batch, row, : row + 1])[:top_k])
            named[batch, row, : len(best)] = best
            seen[batch, row, best] = True
    case.check(named)
    sparse = Case(latent, 24, 12, 8, 4, top_k)
    sparse.values["x4"] = named
    sparse.check(latent_expected(sparse.inputs, seen))


ROUTES: dict[str, dict[str, Any]] = {
    "softmax": {"score": "softmax", "normalize": True},
    "softmax-as-it-is": {"score": "softmax", "normalize": False, "scale": 2.5},
    "softmax-chosen": {"score": "softmax_chosen", "normalize": False},
    "sqrt-softplus": {"score": "sqrt_softplus", "normalize": True, "bias": True, "scale": 1.5},
    "groups-of-max": {"score": "softmax", "normalize": False, "groups": 4, "top_groups": 2},
    "groups-of-two": {"score": "sigmoid", "normalize": True, "bias": True, "groups": 4, "top_groups": 2,
                      "group_score": "top2", "scale": 2.0},
}  # fmt: skip


@pytest.mark.parametrize("name", ROUTES)
def test_route(name: str) -> None:
    options, experts, top_k = ROUTES[name], 12, 3
    case = Case(lambda b, x: b.route("y", x[0], top_k=top_k, **options), experts)
    x = case.inputs[0]
    kinds = {"softmax": softmax, "sigmoid": sigmoid, "sqrt_softplus": lambda v: np.sqrt(np.log1p(np.exp(v))),
             "softmax_chosen": lambda v: v}  # fmt: skip
    scores = kinds[options["score"]](x)
    choice = scores + sum(case.weights.values())
    groups = options.get("groups", 1)
    if groups > 1:
        of_group = np.sort(choice.reshape(BATCH, ROWS, groups, -1), -1)[..., -2:]
        worth = of_group[..., -1] if options.get("group_score", "max") == "max" else of_group.sum(-1)
        cut = np.sort(worth, -1)[..., -options["top_groups"], None]
        choice = np.where(np.repeat(worth >= cut, experts // groups, -1), choice, -np.inf)
    ids = np.argsort(-choice, -1)[..., :top_k]
    weights = np.take_along_axis(scores, ids, -1)
    if options["score"] == "softmax_chosen":
        weights = softmax(weights)
    if options["normalize"]:
        weights = weights / weights.sum(-1, keepdims=True)
    case.check(np.concatenate([ids.astype(np.float64), weights * options.get("scale", 1.0)], -1))


def routed(top_k: int, experts: int) -> Array:
    """Random routing, experts in no order."""
    ids = np.argsort(RNG.random((BATCH, ROWS, experts)), -1)[..., :top_k].astype(np.float64)
    return np.concatenate([ids, RNG.random((BATCH, ROWS, top_k)).astype(np.float32)], -1)


@pytest.mark.parametrize("bias", [False, True])
def test_experts(bias: bool) -> None:
    experts, top_k = 6, 2
    axes = ("ffn", "hidden")
    up = Case(lambda b, x: b.expert_linear("y", x[0], x[1], experts, 5, axes, bias=bias), 8, 2 * top_k)
    down = Case(lambda b, x: b.expert_sum("y", x[0], x[1], experts, 8, axes, bias=bias), 5 * top_k, 2 * top_k)
    up.values["x1"] = down.values["x1"] = routed(top_k, experts)
    x, route = up.inputs
    h = down.inputs[0].reshape(BATCH, ROWS, top_k, 5)
    w_up, w_down = (case.weights["y"].reshape(experts, -1, k) for case, k in ((up, 8), (down, 5)))
    bias_up, bias_down = (
        case.weights["y.bias"].reshape(experts, -1) if bias else np.zeros((experts, width))
        for case, width in ((up, 5), (down, 8))
    )
    found, total = np.zeros((BATCH, ROWS, top_k, 5)), np.zeros((BATCH, ROWS, 8))
    for batch, row, slot in np.ndindex(BATCH, ROWS, top_k):
        expert, weight = int(route[batch, row, slot]), route[batch, row, top_k + slot]
        found[batch, row, slot] = w_up[expert] @ x[batch, row] + bias_up[expert]
        total[batch, row] += weight * (w_down[expert] @ h[batch, row, slot] + bias_down[expert])
    up.check(found.reshape(BATCH, ROWS, -1))
    down.check(total)


def test_a_kind_that_is_not_written_is_refused() -> None:
    assert WRITERS.keys() <= OP_KINDS.keys()
    op = Op("fourier", "model.layers.3.mix", (), (), 4)
    with pytest.raises(TapeoutError) as caught:
        op_model(Graph((op,), (), op.name), op)
    assert str(caught.value).startswith(
        "export-onnx: model.layers.3.mix is of the kind fourier, which is not written as ONNX yet; "
        "those that are: embed, "
    )
