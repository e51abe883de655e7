"""Losses and divergences of logits, position by position in float64, and what sums them up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tapeout.compiler.verify.report import log_softmax

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
ROWS = 32  # positions in float64 at a time


@dataclass(frozen=True)
class Perplexity:
    """exp of the mean loss, and its standard error (of the mean, carried through exp to first order)."""

    value: float
    standard_error: float


@dataclass(frozen=True)
class Scores:
    """One model over counted positions: -log p of the token that follows, in nats, float64 [positions].

    ``kl`` is KL(reference ‖ model) in nats and ``same`` whether both rank the same token first; both are empty where
    there is no reference.
    """

    losses: Doubles
    kl: Doubles
    same: npt.NDArray[np.bool_]

    @classmethod
    def join(cls, parts: Sequence[Scores]) -> Scores:
        """Of all windows, in order."""
        return cls(
            np.concatenate([part.losses for part in parts]),
            np.concatenate([part.kl for part in parts]),
            np.concatenate([part.same for part in parts]),
        )


def score(logits: Floats, targets: Sequence[int], reference: Floats | None = None) -> Scores:
    """Compare logits [positions, vocab] with the tokens that follow, [positions], and with a reference's logits."""
    compared = len(targets) if reference is not None else 0
    losses, kl, same = np.empty(len(targets)), np.empty(compared), np.empty(compared, bool)
    for start in range(0, len(targets), ROWS):
        rows = slice(start, start + ROWS)
        log_q = log_softmax(logits[rows])
        losses[rows] = -np.take_along_axis(log_q, np.array(targets[rows])[:, None], axis=-1)[:, 0]
        if reference is not None:
            log_p = log_softmax(reference[rows])
            kl[rows] = np.maximum((np.exp(log_p) * (log_p - log_q)).sum(-1), 0)  # rounding may leave -1e-17
            same[rows] = logits[rows].argmax(-1) == reference[rows].argmax(-1)
    return Scores(losses, kl, same)


def perplexity(losses: Doubles) -> Perplexity:
    """Of losses in nats, at least two."""
    value = float(np.exp(losses.mean()))
    return Perplexity(value, value * float(losses.std(ddof=1)) / len(losses) ** 0.5)
