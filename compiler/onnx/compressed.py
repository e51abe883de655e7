"""Compressed attention as ONNX operators: entries that stand for windows of tokens, and attention to both.

The entry of a window stands in the row that ends the window, so an entry is a key like any other that is seen from its
own row on; all other rows of the entries' value are masked.
"""

from __future__ import annotations

import math

from tapeout.compiler.onnx.attention import best_positions, index_scores, mask, named_mask, softmax_with_sinks
from tapeout.compiler.onnx.basic import over_rms
from tapeout.compiler.onnx.rotary import turned_pairs
from tapeout.compiler.onnx.writer import FLOAT, INT64, OpScope, Scope


def compress(at: OpScope) -> str:
    """Entries of every ``ratio`` tokens: a sum weighted by channel, normed, rotated by the window's first position."""
    ratio, rotated, width = at.op.integer("ratio"), at.op.integer("rotated"), at.op.width
    overlap = bool(at.op.integer("overlap"))
    columns = width * (2 if overlap else 1)
    values = _windows(at, at.inputs[0], ratio, columns)
    gates = at("Add", _windows(at, at.inputs[1], ratio, columns), at.reshape(at.weights[0], ratio, columns))
    if overlap:
        values, gates = _overlapping(at, values, width, 0.0), _overlapping(at, gates, width, -math.inf)
    weighted = at("Mul", values, at("Softmax", gates, axis=2))
    entries = at("ReduceSum", weighted, at.integers(2), keepdims=1)  # [batch, windows, 1, width]
    entries = at("Mul", over_rms(at, entries, at.op.number("eps")), at.weights[1])
    turned = turned_pairs(at, at.slice(entries, width - rotated), rotated, _tables(at, ratio))
    entries = at("Concat", at.slice(entries, 0, width - rotated), turned, axis=-1)
    shape = at("Concat", at("Shape", entries, end=2), at.integers(ratio, width), axis=0)
    every = at.reshape(at("Expand", entries, shape), 0, -1, width)
    every = at("Slice", every, at.integers(0), at.reshape(at.length(), 1), at.integers(1))
    return at("Where", at.unsqueeze(_ends(at, ratio), 1), every, at.floats(0.0))


def select_entries(at: OpScope) -> str:
    """The entries that score highest, ascending, then -1."""
    query, weights, entries = at.inputs
    ratio, heads, size = (at.op.integer(key) for key in ("ratio", "heads", "head_dim"))
    scores = at("Add", index_scores(at, (query, entries, weights), heads, size), _entry_mask(at, ratio))
    rows = best_positions(at, scores, at.op.integer("top_k"))
    numbers = at("Where", at("Less", rows, at.integer(0)), rows, at("Div", rows, at.integer(ratio)))
    return at("Cast", numbers, to=FLOAT)


def window_attention(at: OpScope) -> str:
    """Attention to the last tokens, whose keys are their values, and a sink."""
    return _attention(at, at.inputs[1], mask(at, at.op.integer("window")))


def compressed_attention(at: OpScope) -> str:
    """Attention to the last tokens, to all entries whose window has ended, and a sink."""
    return _with_entries(at, _entry_mask(at, at.op.integer("ratio")))


def sparse_compressed_attention(at: OpScope) -> str:
    """The same with the entries that a select_entries names."""
    ratio, numbers = at.op.integer("ratio"), at("Cast", at.inputs[3], to=INT64)
    rows = at("Add", at("Mul", numbers, at.integer(ratio)), at.integer(ratio - 1))  # of -1 it is -1 again
    return _with_entries(at, at.unsqueeze(named_mask(at, rows), 1))


def _with_entries(at: OpScope, entries_seen: str) -> str:
    keys = at("Concat", at.inputs[1], at.inputs[2], axis=1)
    length = at.reshape(at.length(), 1)
    batch = at("Shape", at.inputs[0], start=0, end=1)
    shape = at("Concat", batch, at.integers(1), length, length, axis=0)
    masks = [at("Expand", each, shape) for each in (mask(at, at.op.integer("window")), entries_seen)]
    return _attention(at, keys, at("Concat", *masks, axis=-1))


def _attention(at: OpScope, keys: str, seen: str) -> str:
    heads = at.op.integer("heads")
    query = at.transpose(at.reshape(at.inputs[0], 0, 0, heads, -1), 0, 2, 1, 3)
    scores = at("MatMul", query, at.unsqueeze(at.transpose(keys, 0, 2, 1), 1))
    scores = at("Add", at("Mul", scores, at.floats(at.op.number("scale"))), seen)
    chosen = softmax_with_sinks(at, scores, at.reshape(at.weights[0], heads, 1, 1))
    mixed = at("MatMul", chosen, at.unsqueeze(keys, 1))
    return at.reshape(at.transpose(mixed, 0, 2, 1, 3), 0, 0, at.op.width)


def _windows(at: OpScope, x: str, ratio: int, columns: int) -> str:
    """x [batch, sequence, columns] as [batch, windows, ratio, columns], the last window filled up with zeros."""
    missing = at("Mod", at("Neg", at.reshape(at.length(), 1)), at.integer(ratio))
    padding = at("Concat", at.integers(0, 0, 0, 0), missing, at.integers(0), axis=0)
    return at.reshape(at("Pad", x, padding), 0, -1, ratio, columns)


def _overlapping(at: OpScope, x: str, width: int, nothing: float) -> str:
    """The first columns of the window before (``nothing`` before the first) above the others of this one."""
    ahead = at("Pad", at.slice(x, 0, width), at.integers(0, 1, 0, 0, 0, 0, 0, 0), at.floats(nothing))
    before = at("Slice", ahead, at.integers(0), at.integers(-1), at.integers(1))
    return at("Concat", before, at.slice(x, width), axis=2)


def _tables(at: OpScope, ratio: int) -> tuple[str, str]:
    """cos and sin of the first position of every window, [windows, 1, frequencies]."""
    frequencies = at.weights[2]

    def angles(here: Scope) -> str:
        starts = here("Range", here.integer(0), here.length(), here.integer(ratio))
        return here("Mul", here.unsqueeze(here("Cast", starts, to=FLOAT), 1, 2), frequencies)

    turned = at.writer.shared(f"{frequencies}/windows/{ratio}", angles)
    return at("Cos", turned), at("Sin", turned)


def _ends(at: Scope, ratio: int) -> str:
    """Whether a position ends a window."""

    def make(here: Scope) -> str:
        behind = here("Add", here.positions(), here.integer(1))
        return here("Equal", here("Mod", behind, here.integer(ratio)), here.integer(0))

    return at.writer.shared(f"ends/{ratio}", make)


def _entry_mask(at: OpScope, ratio: int) -> str:
    """[sequence, sequence]: 0 where a position sees the entry that stands in a row, -inf elsewhere."""
    return at.writer.shared(
        f"mask/entries/{ratio}", lambda here: here("Where", _ends(here, ratio), mask(here, 0), here.floats(-math.inf))
    )
