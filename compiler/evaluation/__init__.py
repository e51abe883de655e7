"""`tapeout eval`: what an artifact's number formats cost, as perplexity on a text and divergence from a reference."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tapeout.compiler.evaluation.measure import Scores, perplexity, score
from tapeout.compiler.evaluation.report import Divergence, Evaluation, Position, Result, Speed, print_evaluation
from tapeout.compiler.evaluation.subjects import Subject, Weights, check_comparable, open_artifact, open_reference
from tapeout.compiler.evaluation.windows import Window, context_of, cut, read_text
from tapeout.compiler.progress import Progress, SilentProgress
from tapeout.runtime import load
from tapeout.runtime.bench import bench_model
from tapeout.runtime.tokenizer import Tokenizer

__all__ = ["Divergence", "Evaluation", "Position", "Result", "Speed", "evaluate", "print_evaluation"]

WORST = 3  # positions named
SHOWN_BEFORE = 8  # tokens in front of each
ROUNDS = 5  # of measuring speed


def evaluate(
    artifacts: Sequence[Path],
    text: Path,
    *,
    against: str | None = None,
    context: int | None = None,
    threads: int | None = None,
    speed: bool = False,
    progress: Progress | None = None,
) -> Evaluation:
    """Perplexity of artifacts on a text, and divergence of their logits from those of ``against``.

    The text is cut into windows of ``context`` tokens side by side, each run with an empty cache; a model with a begin
    token gets it at the start of each. Every token of a window counts but its first. ``against`` is an artifact folder
    or a checkpoint that transformers opens. All artifacts are open at once; logits are held a window at a time, those
    of the reference and of one artifact. ``speed`` benches each artifact afterwards, open alone. Raises TapeoutError.
    """
    progress = progress or SilentProgress()
    content = read_text(text)
    with ExitStack() as stack:
        subjects = [open_artifact(path, threads, stack) for path in artifacts]
        reference = None if against is None else open_reference(against, threads, stack)
        everyone = [*subjects, *([reference] if reference else [])]
        ids = check_comparable(everyone, content)
        models = [subject.model for subject in everyone if subject.model is not None]
        size = context_of(context, min(model.max_context for model in models))
        begin = models[0].tokenizer.encode("")
        windows = cut(ids[len(begin) :], begin, size, str(text))
        scores = _run(subjects, reference, windows, progress)
        results = [_result(subject, each, windows) for subject, each in zip(everyone, scores, strict=True)]
        folders = [None if subject.model is None else subject.model.folder for subject in everyone]
    if speed:
        rates = _speed(folders, threads, progress)
        results = [replace(result, speed=rate) for result, rate in zip(results, rates, strict=True)]
    return Evaluation(
        text=str(text),
        tokens=len(ids) - len(begin),
        context=size,
        windows=len(windows),
        positions=sum(len(window.targets) for window in windows),
        reference=results[-1] if reference else None,
        artifacts=tuple(results[: len(subjects)]),
    )


def _run(
    subjects: Sequence[Subject], reference: Subject | None, windows: Sequence[Window], progress: Progress
) -> list[Scores]:
    """Of each artifact, and of the reference if there is one."""
    parts: list[list[Scores]] = []
    with progress.task("evaluating", len(windows) * (len(subjects) + (reference is not None))) as task:
        for window in windows:
            row: list[Scores] = []
            expected = None
            if reference is not None:
                expected = reference.finite_logits(window.ids)
                task.advance(1)
            for subject in subjects:
                row.append(score(subject.finite_logits(window.ids), window.targets, expected))
                task.advance(1)
            parts.append(row if expected is None else [*row, score(expected, window.targets)])
    return [Scores.join(each) for each in zip(*parts, strict=True)]


def _result(subject: Subject, scores: Scores, windows: Sequence[Window]) -> Result:
    return Result(
        name=subject.name,
        weights=None if subject.model is None else Weights.of(subject.model.plan),
        perplexity=perplexity(scores.losses),
        divergence=_divergence(subject, scores, windows) if len(scores.kl) else None,
    )


def _divergence(subject: Subject, scores: Scores, windows: Sequence[Window]) -> Divergence:
    assert subject.model is not None
    places = [(window, index) for window in windows for index in range(1, len(window.ids))]
    worst: list[int] = scores.kl.argsort()[::-1][:WORST].tolist()
    return Divergence(
        mean=float(scores.kl.mean()),
        median=float(np.median(scores.kl)),
        p99=float(np.percentile(scores.kl, 99)),
        max=float(scores.kl.max()),
        top1=float(scores.same.mean()),
        worst=tuple(_position(places[at], float(scores.kl[at]), subject.model.tokenizer) for at in worst),
    )


def _position(place: tuple[Window, int], kl: float, tokenizer: Tokenizer) -> Position:
    window, index = place
    before = tokenizer.decode(window.ids[max(0, index - SHOWN_BEFORE) : index])
    token = window.ids[index]
    text = tokenizer.token_bytes(token).decode(errors="replace")
    return Position(position=window.first + index - 1, token=token, text=text, before=before, kl=kl)


def _speed(folders: Sequence[Path | None], threads: int | None, progress: Progress) -> list[Speed | None]:
    """Of each artifact, open alone: medians of rounds over all, so that slow spells hit all of them."""
    rounds: list[list[dict[str, Any]]] = [[] for _ in folders]
    with progress.task("measuring speed", ROUNDS * len(folders)) as task:
        for _ in range(ROUNDS):
            for folder, runs in zip(folders, rounds, strict=True):
                if folder is not None:
                    with load(folder, threads=threads) as model:
                        longest = model.max_context
                        runs.append(bench_model(model, min(512, longest), min(128, longest - 1), repeats=1))
                task.advance(1)
    return [Speed.of(runs) if runs else None for runs in rounds]
