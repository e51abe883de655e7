"""Mixtures of experts as ONNX operators.

Every expert is computed for every token and the chosen ones are gathered, or read with zeros for the others: products
of whole weights, where gathering the weights of the chosen would copy them for every token.
"""

from __future__ import annotations

import math

from tapeout.compiler.onnx.writer import BOOL, FLOAT, INT64, TOKENS, OpScope
from tapeout.runtime.errors import TapeoutError


def route(at: OpScope) -> str:
    """Ids of the chosen experts in order of falling score, then their weights."""
    scores = _scores(at, at.inputs[0], str(at.op.attr("score")))
    choosing = at("Add", scores, at.weights[0]) if at.weights else scores
    if at.op.integer("groups") > 1:
        choosing = at("Where", _open(at, choosing), choosing, at.floats(-math.inf))
    _, ids = at.top(choosing, at.integers(at.op.integer("top_k")))
    return _routed(at, scores, ids)


def route_by_token(at: OpScope) -> str:
    """The same with the experts that a table names for the token."""
    scores = _scores(at, at.inputs[0], str(at.op.attr("score")))
    table = at.reshape(at.weights[0], -1, at.op.integer("top_k"))
    return _routed(at, scores, at("Cast", at("Gather", table, TOKENS, axis=0), to=INT64))


def expert_linear(at: OpScope) -> str:
    """x through the chosen experts, one after the other."""
    experts, top_k = at.op.integer("experts"), at.op.integer("top_k")
    every = at("MatMul", at.inputs[0], at.transpose(at.weights[0], 1, 0))
    if len(at.weights) > 1:
        every = at("Add", every, at.weights[1])
    every = at.reshape(every, 0, 0, experts, -1)
    ids = at.unsqueeze(_ids(at, top_k), -1)
    width = at.op.width // top_k
    shape = at("Concat", at("Shape", at.inputs[0], end=2), at.integers(top_k, width), axis=0)
    return at.reshape(at("GatherElements", every, at("Expand", ids, shape), axis=2), 0, 0, at.op.width)


def expert_sum(at: OpScope) -> str:
    """The weighted sum over the chosen experts: what they read lies among zeros, so that one product adds them up."""
    experts, top_k = at.op.integer("experts"), at.op.integer("top_k")
    k = at.width(at.inputs[0]) // top_k
    ids, weights = at.unsqueeze(_ids(at, top_k), -1), at.unsqueeze(at.slice(at.inputs[1], top_k), -1)
    spread = _spread(at, ids, at("Mul", at.reshape(at.inputs[0], 0, 0, top_k, k), weights), experts, k)
    stacked = at.transpose(at.reshape(at.weights[0], experts, at.op.width, k), 0, 2, 1)
    total = at("MatMul", at.reshape(spread, 0, 0, experts * k), at.reshape(stacked, experts * k, at.op.width))
    if len(at.weights) > 1:
        shares = at.reshape(_spread(at, ids, weights, experts, 1), 0, 0, experts)
        return at("Add", total, at("MatMul", shares, at.reshape(at.weights[1], experts, at.op.width)))
    return total


def _routed(at: OpScope, scores: str, ids: str) -> str:
    """Ids and the weights of their scores."""
    weights = at("GatherElements", scores, ids, axis=-1)
    if at.op.attr("score") == "softmax_chosen":
        weights = at("Softmax", weights, axis=-1)
    if at.op.integer("normalize"):
        weights = at("Div", weights, at("ReduceSum", weights, at.integers(-1), keepdims=1))
    weights = at("Mul", weights, at.floats(at.op.number("scale")))
    return at("Concat", at("Cast", ids, to=FLOAT), weights, axis=-1)


def _scores(at: OpScope, logits: str, kind: str) -> str:
    if kind == "softmax":
        return at("Softmax", logits, axis=-1)
    if kind == "sigmoid":
        return at("Sigmoid", logits)
    if kind == "sqrt_softplus":
        return at("Sqrt", at("Softplus", logits))
    if kind == "softmax_chosen":
        return logits
    raise TapeoutError(f"export-onnx: {at.op.name} scores experts by {kind}, which is not written as ONNX yet")


def _open(at: OpScope, scores: str) -> str:
    """Whether the group of each expert is one of the best."""
    groups, experts = at.op.integer("groups"), at.width(at.inputs[0])
    grouped = at.reshape(scores, 0, 0, groups, -1)
    judged = 1 if at.op.attr("group_score") == "max" else min(2, experts // groups)
    best, _ = at.top(grouped, at.integers(judged))
    _, chosen = at.top(at("ReduceSum", best, at.integers(-1), keepdims=0), at.integers(at.op.integer("top_groups")))
    shape = at("Concat", at("Shape", scores, end=2), at.integers(groups), axis=0)
    closed = at("Expand", at.integers(0), shape)
    opened = at("ScatterElements", closed, chosen, at("Expand", at.integers(1), at("Shape", chosen)), axis=-1)
    each = at("Expand", at.unsqueeze(opened, -1), at("Shape", grouped))
    return at("Cast", at.reshape(each, 0, 0, experts), to=BOOL)


def _ids(at: OpScope, top_k: int) -> str:
    return at("Cast", at.slice(at.inputs[1], 0, top_k), to=INT64)


def _spread(at: OpScope, ids: str, values: str, experts: int, k: int) -> str:
    """[batch, sequence, experts, k] with what belongs to the chosen experts, zero elsewhere."""
    shape = at("Concat", at("Shape", ids, end=2), at.integers(experts, k), axis=0)
    zeros = at("Expand", at.floats(0.0), shape)
    return at("ScatterElements", zeros, at("Expand", ids, at("Shape", values)), values, axis=2)
