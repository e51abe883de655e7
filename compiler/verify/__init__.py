"""`tapeout verify`: an artifact beside an independent reference on the same tokens, op by op and at the logits."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from tapeout.compiler.checkpoints.source import resolve_source
from tapeout.compiler.progress import Progress, SilentProgress
from tapeout.compiler.spec import Model as ModelSection
from tapeout.compiler.verify.compare import Witness, compare_ops
from tapeout.compiler.verify.reference import Reference
from tapeout.compiler.verify.report import LogitsError, OpError, VerifyReport, compare_logits
from tapeout.compiler.verify.written import Floats, collect_written
from tapeout.compiler.views.plan_file import load_plan
from tapeout.runtime import load
from tapeout.runtime.errors import TapeoutError
from tapeout.runtime.model import Model

__all__ = ["LogitsError", "OpError", "VerifyReport", "phases_of", "verify_artifact"]

Phase = Literal["prefill", "decode"]
WITNESSES = ("transformers", "onnx")


def verify_artifact(
    artifact: Path,
    *,
    source: str | Path | None = None,
    witness: str = "transformers",
    positions: int = 512,
    text: str | None = None,
    phase: Phase = "prefill",
    threads: int | None = None,
    target: str | None = None,
    progress: Progress | None = None,
) -> VerifyReport:
    """Run ``positions`` tokens of ``text`` through an artifact and through a reference in float32, and compare.

    ``witness`` is one of WITNESSES: transformers, or ONNX Runtime on the logical program, which shares the reading of
    the checkpoint with the compiler. ``source`` is the checkpoint, by default the one the plan names. ``phase`` says
    which launch lists run: those of prefill, or those of decode, a token a step. Every op is compared twice: with the
    reference's own run (``drift``, which adds up over the layers), and with what the reference makes of the very values
    that the artifact gave that op (``own``, which does not). An op departs when its own error passes its tolerance.
    ``threads`` and ``target`` are those of ``tapeout.runtime.load``. Raises TapeoutError in one sentence.
    """
    if witness not in WITNESSES:
        raise TapeoutError(f"--witness {witness} is not known; witnesses are {' and '.join(WITNESSES)}")
    work = (progress or SilentProgress()).task(f"verifying {phase}", 5)
    with work, load(artifact, threads=threads, target=target) as model:
        ids = _token_ids(model, text, positions)
        reference = _reference(model, source, witness)
        work.advance(1)
        written = collect_written(model, ids, phase)
        work.advance(1)
        traced = next(item.values for item in reversed(written) if item.op == "lm_head")
        logits = model.logits(ids) if phase == "prefill" else traced
        replays = bool((traced == logits).all()) if phase == "prefill" else _decodes(model, ids, traced)
        work.advance(1)
        expected, drift = compare_ops(reference, ids, written, forced=False)
        work.advance(1)
        own = compare_ops(reference, ids, written, forced=True)[1]
        work.advance(1)
        return VerifyReport(
            artifact=str(artifact),
            reference=reference.name,
            phase=phase,
            positions=len(ids),
            ops=tuple(OpError.of(item, own[item.key], drift[item.key]) for item in written if item.key in own),
            unmatched=tuple(item.op for item in written if item.key not in own),
            logits=compare_logits(expected, logits),
            replays=replays,
        )


def phases_of(artifact: Path) -> tuple[Phase, ...]:
    """The phases whose kernels differ: a GPU decodes with others than it reads a prompt with."""
    return ("prefill", "decode") if load_plan(artifact).get("target") == "cuda" else ("prefill",)


def _decodes(model: Model, ids: Sequence[int], traced: Floats) -> bool:
    """Whether real decode steps, fed with ``ids``, choose the best token of the traced logits at every position."""
    sequence = model.pool.open()
    try:
        chosen = [model.decode([sequence], [token])[0] for token in ids]
    finally:
        model.pool.close(sequence)
    return chosen == traced.argmax(-1).tolist()


def _reference(model: Model, source: str | Path | None, witness: str) -> Witness:
    section = model.plan["spec"]["model"]
    path = resolve_source(str(section["source"] if source is None else source), Path.cwd())
    if witness == "transformers":
        return Reference.open(path, model.plan["checkpoint"]["container"])
    from tapeout.compiler.verify.onnx import OnnxReference  # noqa: PLC0415 - it needs onnx, which the other does not

    return OnnxReference.open(path, ModelSection.model_validate(section))


def _token_ids(model: Model, text: str | None, positions: int) -> list[int]:
    """The first ``positions`` tokens of a text; without one, of a module of the standard library."""
    if text is None:
        text = inspect.getsource(argparse)[: 16 * positions]
    ids = model.tokenizer.encode(text)[: min(positions, model.max_context)]
    if len(ids) < min(positions, model.max_context):
        raise TapeoutError(
            f"the text has {len(ids)} tokens, but {positions} positions are to be compared; give a longer text"
        )
    return list(ids)
