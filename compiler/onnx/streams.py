"""Hyper-connections as ONNX operators: a residual of several streams, and what mixes it into and out of every block."""

from __future__ import annotations

from tapeout.compiler.onnx.basic import rms
from tapeout.compiler.onnx.writer import OpScope


def repeat(at: OpScope) -> str:
    """x several times side by side."""
    return at("Tile", at.inputs[0], at.integers(1, 1, at.op.integer("times")))


def hyper_weights(at: OpScope) -> str:
    """[pre n | post n | mix n x n] of each row, mix made doubly stochastic; or pre alone."""
    streams, iterations = at.op.integer("streams"), at.op.integer("iterations")
    x, f = at.inputs
    base, scale = at.weights
    inverse = at("Reciprocal", rms(at, x, at.op.number("norm_eps")))
    parts = [0] * streams if not iterations else [0] * streams + [1] * streams + [2] * streams**2
    scaled = at("Mul", at("Mul", f, inverse), at("Gather", scale, at.integers(*parts), axis=0))
    logits, eps = at("Add", scaled, base), at.floats(at.op.number("eps"))
    pre = at("Add", at("Sigmoid", at.slice(logits, 0, streams)), eps)
    if not iterations:
        return pre
    post = at("Mul", at("Sigmoid", at.slice(logits, streams, 2 * streams)), at.floats(2.0))
    mix = at.reshape(at.slice(logits, 2 * streams), 0, 0, streams, streams)
    mix = at("Add", at("Softmax", mix, axis=-1), eps)
    for axis in [-2, *(-1, -2) * (iterations - 1)]:
        mix = at("Div", mix, at("Add", at("ReduceSum", mix, at.integers(axis), keepdims=1), eps))
    return at("Concat", pre, post, at.reshape(mix, 0, 0, streams**2), axis=-1)


def hyper_mix(at: OpScope) -> str:
    """The sum of pre[j] times stream j."""
    streams = at.op.integer("streams")
    pre = at.unsqueeze(at.slice(at.inputs[1], 0, streams), -1)
    weighted = at("Mul", at.reshape(at.inputs[0], 0, 0, streams, -1), pre)
    return at("ReduceSum", weighted, at.integers(2), keepdims=0)


def hyper_join(at: OpScope) -> str:
    """Stream i becomes post[i] y + the sum of mix[j, i] times stream j."""
    streams = at.op.integer("streams")
    post = at.unsqueeze(at.slice(at.inputs[1], streams, 2 * streams), -1)
    mix = at.transpose(at.reshape(at.slice(at.inputs[1], 2 * streams), 0, 0, streams, streams), 0, 1, 3, 2)
    mixed = at("MatMul", mix, at.reshape(at.inputs[0], 0, 0, streams, -1))
    joined = at("Add", at("Mul", post, at.unsqueeze(at.inputs[2], 2)), mixed)
    return at.reshape(joined, 0, 0, at.op.width)
