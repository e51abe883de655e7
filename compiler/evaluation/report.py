"""What an evaluation found, as values, as JSON and as one table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from rich.console import Console

from tapeout.compiler.evaluation.measure import Perplexity
from tapeout.compiler.evaluation.subjects import Weights
from tapeout.compiler.views.tables import console, table
from tapeout.compiler.views.text import size


@dataclass(frozen=True)
class Position:
    """Where a model diverges: the predicted token, its index in the text, and the text right before it."""

    position: int
    token: int
    text: str
    before: str
    kl: float


@dataclass(frozen=True)
class Divergence:
    """KL(reference ‖ artifact) in nats over positions, the share of equal best tokens, and the worst positions."""

    mean: float
    median: float
    p99: float
    max: float
    top1: float
    worst: tuple[Position, ...]


@dataclass(frozen=True)
class Speed:
    """What `tapeout bench` measures, in tokens a second: medians, and every run."""

    threads: int
    prefill_tokens: int
    decode_tokens: int
    prefill_tok_s: float
    decode_tok_s: float
    prefill_tok_s_runs: tuple[float, ...]
    decode_tok_s_runs: tuple[float, ...]

    @classmethod
    def of(cls, runs: Sequence[dict[str, Any]]) -> Speed:
        """From benches of one run each."""
        prefill = tuple(run["prefill_tok_s"] for run in runs)
        decode = tuple(run["decode_tok_s"] for run in runs)
        return cls(
            threads=runs[0]["threads"],
            prefill_tokens=runs[0]["prefill_tokens"],
            decode_tokens=runs[0]["decode_tokens"],
            prefill_tok_s=median(prefill),
            decode_tok_s=median(decode),
            prefill_tok_s_runs=prefill,
            decode_tok_s_runs=decode,
        )


@dataclass(frozen=True)
class Result:
    """One model; only an artifact has weights and speed, and the reference has no divergence."""

    name: str
    weights: Weights | None
    perplexity: Perplexity
    divergence: Divergence | None
    speed: Speed | None = None


@dataclass(frozen=True)
class Evaluation:
    """All models on one text: ``tokens`` long, in windows of ``context``; ``positions`` of them were predicted."""

    text: str
    tokens: int
    context: int
    windows: int
    positions: int
    reference: Result | None
    artifacts: tuple[Result, ...]

    def to_json(self) -> dict[str, Any]:
        """Every number, in plain types."""
        return asdict(self)


def print_evaluation(evaluation: Evaluation, out: Console | None = None) -> None:
    """The table, what it counts, and where each artifact is worst."""
    out = out or console()
    rows = [*([evaluation.reference] if evaluation.reference else []), *evaluation.artifacts]
    columns = [_NAME, *_WEIGHTS, _LOSS, *(_DIVERGENCE if evaluation.reference else ())]
    if any(row.speed for row in rows):
        columns += _SPEED
    cells = [[_cells(row).get(column, "") for column in columns] for row in rows]
    if evaluation.reference:
        cells[0][0] = "reference"
    grid = table(columns, cells, right=range(2, len(columns)))
    for column in grid.columns[1:]:  # where it gets narrow, names are folded and numbers are not
        column.no_wrap = True
    out.print(grid)
    out.print()
    for line in (*_counted(evaluation), *_worst(evaluation.artifacts)):
        out.print(line, style="dim", markup=False)


_NAME, _LOSS = "", "perplexity"
_WEIGHTS = ("formats", "weights", "bits/weight")
_DIVERGENCE = ("KL mean", "median", "99 %", "max", "top-1")
_SPEED = ("prefill", "decode")


def _cells(row: Result) -> dict[str, str]:
    """A row's cells by column, for what the row has."""
    found = {_NAME: row.name, _LOSS: f"{row.perplexity.value:.3f} ± {row.perplexity.standard_error:.3f}"}
    if row.weights is not None:
        bits = f"{row.weights.bits_per_weight:.2f}"
        found |= zip(_WEIGHTS, (", ".join(row.weights.formats), size(row.weights.bytes), bits), strict=True)
    if row.divergence is not None:
        kl = row.divergence
        spread = (f"{value:.2e}" for value in (kl.mean, kl.median, kl.p99, kl.max))
        found |= zip(_DIVERGENCE, (*spread, f"{100 * kl.top1:.1f} %"), strict=True)
    if row.speed is not None:
        rates = (f"{rate:.0f}" for rate in (row.speed.prefill_tok_s, row.speed.decode_tok_s))
        found |= zip(_SPEED, rates, strict=True)
    return found


def _counted(evaluation: Evaluation) -> Iterator[str]:
    windows = "window" if evaluation.windows == 1 else "windows"
    yield (
        f"{evaluation.positions:,} positions of {evaluation.text} ({evaluation.tokens:,} tokens in "
        f"{evaluation.windows} {windows} of up to {evaluation.context}): every token of a window but its first"
    )
    if evaluation.reference:
        yield "KL(reference ‖ artifact) in nats; top-1: the same best token"
        yield f"reference: {evaluation.reference.name}"
    speed = next((row.speed for row in evaluation.artifacts if row.speed), None)
    if speed:
        yield (
            f"prefill of {speed.prefill_tokens} and decode of {speed.decode_tokens} tokens on {speed.threads} threads, "
            f"in tokens a second: medians of {len(speed.decode_tok_s_runs)} rounds over all artifacts"
        )


def _worst(artifacts: Sequence[Result]) -> Iterator[str]:
    for row in artifacts:
        if row.divergence is not None:
            worst = row.divergence.worst[0]
            place = f"token {worst.position:,}, {worst.text!r} after {worst.before!r}"
            yield f"{row.name}: worst at {place}: KL {worst.kl:.2e}"
