"""Rotary embeddings as ONNX operators: the tables are made from the frequencies, once for all ops that share them."""

from __future__ import annotations

from tapeout.compiler.onnx.writer import FLOAT, OpScope, Scope

Tables = tuple[str, str]


def rope(at: OpScope) -> str:
    """All columns of every head, in halves."""
    size = at.op.integer("head_dim")
    x = at.reshape(at.inputs[0], 0, 0, -1, size)
    cos, sin = _tables(at)
    rotated = at("Concat", *_turned(at, at.slice(x, 0, size // 2), at.slice(x, size // 2), (cos, sin)), axis=-1)
    return at.reshape(rotated, 0, 0, at.op.width)


def rotate(at: OpScope) -> str:
    """Some columns of every ``period``, in halves or in adjacent pairs; a negative sign turns back."""
    period, start, size = (at.op.integer(key) for key in ("period", "start", "rotated"))
    x = at.reshape(at.inputs[0], 0, 0, -1, period)
    cos, sin = _tables(at)
    if at.op.integer("sign") < 0:
        sin = at("Neg", sin)
    turned = at.slice(x, start, start + size)
    if at.op.integer("pairs"):
        turned = turned_pairs(at, turned, size, (cos, sin))
    else:
        halves = at.slice(turned, 0, size // 2), at.slice(turned, size // 2)
        turned = at("Concat", *_turned(at, *halves, (cos, sin)), axis=-1)
    before = [at.slice(x, 0, start)] if start else []
    after = [at.slice(x, start + size)] if start + size < period else []
    return at.reshape(at("Concat", *before, turned, *after, axis=-1), 0, 0, at.op.width)


def turned_pairs(at: Scope, x: str, size: int, tables: Tables) -> str:
    """x [batch, rows, groups, size] with every two neighbours turned."""
    pairs = at.reshape(x, 0, 0, 0, -1, 2)
    first, second = (at("Squeeze", at.slice(pairs, i, i + 1), at.integers(-1)) for i in (0, 1))
    both = [at.unsqueeze(half, -1) for half in _turned(at, first, second, tables)]
    return at.reshape(at("Concat", *both, axis=-1), 0, 0, 0, size)


def _turned(at: Scope, first: str, second: str, tables: Tables) -> tuple[str, str]:
    """The two coordinates of every pair, turned by its angle."""
    cos, sin = tables
    return (
        at("Sub", at("Mul", first, cos), at("Mul", second, sin)),
        at("Add", at("Mul", second, cos), at("Mul", first, sin)),
    )


def _tables(at: OpScope) -> Tables:
    """cos and sin times the factor, [sequence, 1, frequencies]."""
    frequencies, factor = at.weights[0], at.op.number("factor")

    def table(kind: str) -> str:
        def make(here: Scope) -> str:
            turned = here(kind, here.writer.shared(f"{frequencies}/angles", angles))
            return here.unsqueeze(turned if factor == 1 else here("Mul", turned, here.floats(factor)), 1)

        return at.writer.shared(f"{frequencies}/{kind.lower()}/{factor:.9g}", make)

    def angles(here: Scope) -> str:
        return here("Mul", here.unsqueeze(here("Cast", here.positions(), to=FLOAT), 1), frequencies)

    return table("Cos"), table("Sin")
