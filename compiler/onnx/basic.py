"""Embedding, products, norms, and what works on single elements, as ONNX operators."""

from __future__ import annotations

from tapeout.compiler.onnx.writer import TOKENS, OpScope, Scope
from tapeout.runtime.errors import TapeoutError

SWIGLU_OAI_SLOPE = 1.702  # gpt-oss: gate * sigmoid(1.702 gate) * (up + 1)


def embed(at: OpScope) -> str:
    """table[token] * scale."""
    rows, scale = at("Gather", at.weights[0], TOKENS, axis=0), at.op.number("scale")
    return rows if scale == 1 else at("Mul", rows, at.floats(scale))


def linear(at: OpScope) -> str:
    """x @ w.T (+ bias)."""
    product = at("MatMul", at.inputs[0], at.transpose(at.weights[0], 1, 0))
    return at("Add", product, at.weights[1]) if len(at.weights) > 1 else product


def head_linear(at: OpScope) -> str:
    """Each head's columns times its own rows of the weight."""
    heads, k = at.op.integer("heads"), at.width(at.inputs[0]) // at.op.integer("heads")
    weights = at.transpose(at.reshape(at.weights[0], heads, -1, k), 0, 2, 1)
    product = at("MatMul", at.reshape(at.inputs[0], 0, 0, heads, 1, k), weights)
    return at.reshape(product, 0, 0, at.op.width)


def rmsnorm(at: OpScope) -> str:
    """x / sqrt(mean(x^2) + eps) * w, over the whole width or over groups of columns."""
    x, group = at.inputs[0], at.op.integer("group")
    if group != at.op.width:
        x = at.reshape(x, 0, 0, -1, group)
    scaled = at("Mul", over_rms(at, x, at.op.number("eps")), at.weights[0])
    return scaled if group == at.op.width else at.reshape(scaled, 0, 0, at.op.width)


def unit_norm(at: OpScope) -> str:
    """x / sqrt(mean(x^2) + eps) over groups of columns."""
    x = at.reshape(at.inputs[0], 0, 0, -1, at.op.integer("group"))
    return at.reshape(over_rms(at, x, at.op.number("eps")), 0, 0, at.op.width)


def layernorm(at: OpScope) -> str:
    """(x - mean) / sqrt(var + eps) * w + bias."""
    x = at("Sub", at.inputs[0], at("ReduceMean", at.inputs[0], at.integers(-1), keepdims=1))
    return at("Add", at("Mul", over_rms(at, x, at.op.number("eps")), at.weights[0]), at.weights[1])


def gated(at: OpScope) -> str:
    """act(gate) * up, both clamped first where there is a limit."""
    gate, up = at.inputs
    act, limit = at.op.attr("act"), at.op.number("limit")
    if limit:
        gate = at("Min", gate, at.floats(limit))
        up = at("Clip", up, at.floats(-limit), at.floats(limit))
    if act == "silu":
        gate = at("Mul", gate, at("Sigmoid", gate))
    elif act == "gelu_tanh":
        gate = at("Gelu", gate, approximate="tanh")
    elif act == "swiglu_oai":
        gate = at("Mul", gate, at("Sigmoid", at("Mul", gate, at.floats(SWIGLU_OAI_SLOPE))))
        up = at("Add", up, at.floats(1.0))
    else:
        raise TapeoutError(f"export-onnx: {at.op.name} applies {act}, which is not written as ONNX yet")
    return at("Mul", gate, up)


def add(at: OpScope) -> str:
    """a + b."""
    return at("Add", *at.inputs)


def select(at: OpScope) -> str:
    """Logits of every position are wanted."""
    return at("Identity", at.inputs[0])


def columns(at: OpScope) -> str:
    """Some columns of every ``period`` of them."""
    period, start = at.op.integer("period"), at.op.integer("start")
    groups = at.width(at.inputs[0]) // period
    kept = at.op.width // groups
    if groups == 1:
        return at.slice(at.inputs[0], start, start + kept)
    return at.reshape(at.slice(at.reshape(at.inputs[0], 0, 0, groups, period), start, start + kept), 0, 0, at.op.width)


def over_rms(at: Scope, x: str, eps: float) -> str:
    """x / sqrt(mean(x^2) + eps) along the last dimension."""
    return at("Div", x, rms(at, x, eps))


def rms(at: Scope, x: str, eps: float) -> str:
    """sqrt(mean(x^2) + eps) along the last dimension."""
    mean = at("ReduceMean", at("Mul", x, x), at.integers(-1), keepdims=1)
    return at("Sqrt", at("Add", mean, at.floats(eps)))
