"""Attention over a whole sequence as ONNX operators: grouped queries, latent keys, and selected positions."""

from __future__ import annotations

import math

from tapeout.compiler.onnx.writer import FLOAT, INT64, OpScope, Scope


def attention(at: OpScope) -> str:
    """Causal attention; query heads that share a key head form a dimension of their own."""
    heads, kv_heads, size = (at.op.integer(key) for key in ("heads", "kv_heads", "head_dim"))
    query = at.transpose(at.reshape(at.inputs[0], 0, 0, kv_heads, heads // kv_heads, size), 0, 2, 3, 1, 4)
    key = at.unsqueeze(at.transpose(at.reshape(at.inputs[1], 0, 0, kv_heads, size), 0, 2, 3, 1), 2)
    value = at.unsqueeze(at.transpose(at.reshape(at.inputs[2], 0, 0, kv_heads, size), 0, 2, 1, 3), 2)
    scores = at("Mul", at("MatMul", query, key), at.floats(at.op.number("scale")))
    scores = at("Add", scores, mask(at, at.op.integer("window")))
    if at.weights:
        chosen = softmax_with_sinks(at, scores, at.reshape(at.weights[0], kv_heads, -1, 1, 1))
    else:
        chosen = at("Softmax", scores, axis=-1)
    mixed = at.transpose(at("MatMul", chosen, value), 0, 3, 1, 2, 4)
    return at.reshape(mixed, 0, 0, at.op.width)


def latent_attention(at: OpScope) -> str:
    """Causal attention of all heads to one key [latent | rope], whose latent part is the value."""
    return _latent(at, mask(at, 0))


def sparse_latent_attention(at: OpScope) -> str:
    """The same over the positions that an index_select names, -1 for none."""
    return _latent(at, at.unsqueeze(named_mask(at, at("Cast", at.inputs[4], to=INT64)), 1))


def index_select(at: OpScope) -> str:
    """The positions whose index keys score highest, ascending, then -1."""
    heads, size = at.op.integer("heads"), at.op.integer("head_dim")
    scores = index_scores(at, at.inputs, heads, size)
    return at("Cast", best_positions(at, at("Add", scores, mask(at, 0)), at.op.integer("top_k")), to=FLOAT)


def index_scores(at: OpScope, inputs: tuple[str, ...], heads: int, size: int) -> str:
    """The sum over heads of w * relu(q k^T) * scale, [batch, queries, keys], of q, k and w."""
    query = at.transpose(at.reshape(inputs[0], 0, 0, heads, size), 0, 2, 1, 3)
    key = at.unsqueeze(at.transpose(inputs[1], 0, 2, 1), 1)
    each = at("Mul", at("Relu", at("MatMul", query, key)), at.unsqueeze(at.transpose(inputs[2], 0, 2, 1), 3))
    return at("Mul", at("ReduceSum", each, at.integers(1), keepdims=0), at.floats(at.op.number("scale")))


def best_positions(at: OpScope, scores: str, top_k: int) -> str:
    """The ``top_k`` keys of each query that score highest and above -inf, ascending, then -1, int64."""
    length = at.reshape(at.length(), 1)
    count = at("Min", length, at.integers(top_k))
    best, places = at.top(scores, count)
    ordered, _ = at.top(at("Where", at("IsInf", best), length, places), count, largest=False)
    named = at("Where", at("Equal", ordered, length), at.integer(-1), ordered)
    padding = at("Concat", at.integers(0, 0, 0, 0, 0), at("Sub", at.integers(top_k), count), axis=0)
    return at("Pad", named, padding, at.integer(-1))


def named_mask(at: OpScope, positions: str) -> str:
    """[batch, queries, keys]: 0 where a key's position is named, -1 naming none, and -inf elsewhere."""
    length = at.reshape(at.length(), 1)
    beyond = at("Where", at("Less", positions, at.integer(0)), length, positions)
    shape = at("Concat", at("Shape", positions, end=2), at("Add", length, at.integers(1)), axis=0)
    closed = at("Expand", at.floats(-math.inf), shape)
    opened = at("Expand", at.floats(0.0), at("Shape", beyond))
    written = at("ScatterElements", closed, beyond, opened, axis=-1)
    return at("Slice", written, at.integers(0), length, at.integers(-1))


def _latent(at: OpScope, seen: str) -> str:
    heads, latent, rope = (at.op.integer(key) for key in ("heads", "latent", "rope"))
    parts = [
        at.transpose(at.reshape(at.inputs[i], 0, 0, heads, size), 0, 2, 1, 3) for i, size in ((0, latent), (1, rope))
    ]
    keys = [at.unsqueeze(at.transpose(at.inputs[i], 0, 2, 1), 1) for i in (2, 3)]
    scores = at("Add", *(at("MatMul", query, key) for query, key in zip(parts, keys, strict=True)))
    scores = at("Add", at("Mul", scores, at.floats(at.op.number("scale"))), seen)
    mixed = at("MatMul", at("Softmax", scores, axis=-1), at.unsqueeze(at.inputs[2], 1))
    return at.reshape(at.transpose(mixed, 0, 2, 1, 3), 0, 0, at.op.width)


def softmax_with_sinks(at: Scope, scores: str, sinks: str) -> str:
    """The softmax with one more logit a head, which has no value."""
    largest = at("Max", at("ReduceMax", scores, at.integers(-1), keepdims=1), sinks)
    each = at("Exp", at("Sub", scores, largest))
    total = at("Add", at("ReduceSum", each, at.integers(-1), keepdims=1), at("Exp", at("Sub", sinks, largest)))
    return at("Div", each, total)


def mask(at: Scope, window: int) -> str:
    """[sequence, sequence]: 0 where a position sees a key, -inf where not; a window of 0 has no end."""

    def make(here: Scope) -> str:
        positions = here.positions()
        back = here("Sub", here.unsqueeze(positions, 1), here.unsqueeze(positions, 0))
        seen = here("GreaterOrEqual", back, here.integer(0))
        if window:
            seen = here("And", seen, here("Less", back, here.integer(window)))
        return here("Where", seen, here.floats(0.0), here.floats(-math.inf))

    return at.writer.shared(f"mask/{window}", make)
