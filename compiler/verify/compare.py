"""Relative errors of traced values against the reference, in its own run or fed with the artifact's values."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from tapeout.compiler.verify.reference import Visit
from tapeout.compiler.verify.written import Key, Written

Floats = npt.NDArray[np.float32]


class Witness(Protocol):
    """What an artifact is compared with."""

    name: str

    def knows(self, op: str) -> bool:
        """Whether there is a value of that name."""
        ...

    def run(self, ids: Sequence[int], ops: Iterable[str], visit: Visit) -> Floats:
        """Logits float32 [positions, vocab]; ``visit`` sees every named op's value [positions, columns] in order.

        What ``visit`` answers replaces the value for all that reads it.
        """
        ...


def compare_ops(
    reference: Witness, ids: Sequence[int], written: Sequence[Written], *, forced: bool
) -> tuple[Floats, dict[Key, float]]:
    """The reference's logits and the error of each value it knows, by key.

    ``forced`` hands every value of the artifact to the reference once it is compared, so that an op is judged on the
    inputs it had and one fault is seen once.
    """
    by_op: dict[str, list[Written]] = {}
    for item in written:
        if reference.knows(item.op):
            by_op.setdefault(item.op, []).append(item)
    errors: dict[Key, float] = {}

    def visit(op: str, expected: Floats) -> Floats | None:
        for item in by_op[op]:
            errors[item.key] = relative_error(item.values, expected, item.base if forced else None)
        values = by_op[op][-1].values
        return values if forced and values.shape == expected.shape and np.isfinite(values).all() else None

    return reference.run(ids, by_op, visit), errors


def relative_error(values: Floats, expected: Floats, base: Floats | None = None) -> float:
    """|values - expected| / |expected - base| at the worst position; small ones count as a tenth of the median.

    Infinite where shapes differ or a value is not finite.
    """
    if values.shape != expected.shape or not np.isfinite(values).all():
        return math.inf
    size = np.linalg.norm(expected if base is None else expected - base, axis=-1)
    gap = np.linalg.norm(values - expected, axis=-1)
    return float((gap / np.maximum(size, 0.1 * np.median(size) + 1e-30)).max())
