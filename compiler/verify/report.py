"""What verification found, as values and as text."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tapeout.compiler.verify.written import Written

Floats = npt.NDArray[np.float32]
BAR = 32  # characters from 1e-8 to 1


@dataclass(frozen=True)
class OpError:
    """One op: its own error, the drift from the reference's run, and the own error its arithmetic allows."""

    op: str
    launch: int
    graph: str
    kernel: str
    own: float
    drift: float
    tolerance: float

    @classmethod
    def of(cls, item: Written, own: float, drift: float) -> OpError:
        """From a traced value and its two errors."""
        return cls(item.op, item.key[1], item.graph, item.kernel, own, drift, item.tolerance)

    @property
    def departs(self) -> bool:
        """Whether the own error passes the tolerance."""
        return not self.own <= self.tolerance


@dataclass(frozen=True)
class LogitsError:
    """KL(reference ‖ artifact) in nats over positions, and agreement of the best token.

    ``sure`` counts positions whose reference margin exceeds 1, ``sure_wrong`` those of them where the best differs.
    """

    kl_mean: float
    kl_max: float
    top1: float
    sure: int
    sure_wrong: int


@dataclass(frozen=True)
class VerifyReport:
    """The outcome. ``unmatched`` ops have no counterpart in the reference; ``replays``: a whole step gave the same
    logits as launch by launch, bit for bit (in decode: chose the best token of those logits)."""

    artifact: str
    reference: str
    phase: str
    positions: int
    ops: tuple[OpError, ...]
    unmatched: tuple[str, ...]
    logits: LogitsError
    replays: bool

    @property
    def departure(self) -> OpError | None:
        """The first op, in launch order, whose own error passes its tolerance."""
        return next((op for op in self.ops if op.departs), None)

    @property
    def ok(self) -> bool:
        """Whether nothing departs, best tokens hold where the reference is sure, and replay is exact."""
        return self.departure is None and self.logits.sure_wrong == 0 and self.replays and bool(self.ops)

    def verdict(self) -> str:
        """One sentence."""
        first = self.departure
        if first is not None:
            found = "has no finite value everywhere" if math.isinf(first.own) else f"is off by {first.own:.2g}"
            return (
                f"departs at {first.op} (launch {first.launch} of {first.graph}, kernel {first.kernel}): its output "
                f"{found}, where its arithmetic allows {first.tolerance:.2g}"
            )
        if self.logits.sure_wrong:
            return f"departs at the logits: {self.logits.sure_wrong} best tokens differ where the reference is sure"
        if not self.replays:
            return "departs in replay: a whole step does not give what its launches give one by one"
        return f"no op of {len(self.ops)} departs"

    def text(self) -> str:
        """Errors by layer, the logits, and the verdict."""
        logits = self.logits
        return "\n".join(
            [
                f"{self.artifact}, {self.phase}: {self.positions} positions beside {self.reference}",
                "",
                f"{'':18s} {'own error, worst op':44s} drift",
                *(self._row(name, ops) for name, ops in self._sections()),
                "",
                f"KL divergence of the logits: mean {logits.kl_mean:.2e}, max {logits.kl_max:.2e}",
                f"best token equal at {100 * logits.top1:.1f} % of the positions; "
                f"where the reference's margin exceeds 1: {logits.sure - logits.sure_wrong} of {logits.sure}",
                self.verdict(),
            ]
        )

    def _sections(self) -> list[tuple[str, list[OpError]]]:
        sections: dict[str, list[OpError]] = {}
        for op in self.ops:
            layer = re.match(r"model\.layers\.(\d+)", op.op)
            sections.setdefault(f"layer {layer[1]}" if layer else op.op, []).append(op)
        return list(sections.items())

    def _row(self, name: str, ops: Sequence[OpError]) -> str:
        worst = max(ops, key=lambda op: op.own / op.tolerance)
        op = re.sub(r"^model\.layers\.\d+\.?", "", worst.op) or "output"
        mark = "  <- departs" if any(item.departs for item in ops) else ""
        drift = max(op.drift for op in ops)
        return f"{name:18s} {worst.own:8.1e} of {worst.tolerance:7.1e} {op:25s} {drift:8.1e} {_bar(drift)}{mark}"


def _bar(error: float) -> str:
    if not math.isfinite(error):
        return "!" * BAR
    return "#" * round(BAR * min(max((math.log10(error + 1e-8) + 8) / 8, 0), 1))


def compare_logits(expected: Floats, logits: Floats, step: int = 32) -> LogitsError:
    """Over all positions of float32 [positions, vocab], ``step`` positions at a time."""
    divergence: list[float] = []
    same = sure = sure_wrong = 0
    for start in range(0, len(expected), step):
        p, q = expected[start : start + step], logits[start : start + step]
        log_p, log_q = log_softmax(p), log_softmax(q)
        divergence.extend((np.exp(log_p) * (log_p - log_q)).sum(-1).tolist())
        equal = p.argmax(-1) == q.argmax(-1)
        best = np.partition(p, -2, axis=-1)[:, -2:]
        margin = best[:, 1] - best[:, 0] > 1
        same, sure = same + int(equal.sum()), sure + int(margin.sum())
        sure_wrong += int((margin & ~equal).sum())
    kl = np.array(divergence)
    worst = math.nan if np.isnan(kl).any() else float(kl.max())
    return LogitsError(float(kl.mean()), worst, same / len(expected), sure, sure_wrong)


def log_softmax(values: Floats) -> npt.NDArray[np.float64]:
    """Of the last axis, in float64."""
    shifted = values.astype(np.float64) - values.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
