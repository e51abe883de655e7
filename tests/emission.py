"""Weights files written outside of an artifact, each with a journal beside it for as long as it is written."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tapeout.compiler.checkpoints import Checkpoint
from tapeout.compiler.emit.executors import Threads
from tapeout.compiler.emit.jobs import Journal
from tapeout.compiler.emit.native import Native
from tapeout.compiler.emit.pieces import WeightEntry
from tapeout.compiler.emit.weights import EmissionReport, emission_key, emit_weights, plan_emission


def emit_files(
    entries: Sequence[WeightEntry], checkpoint: Checkpoint, paths: Sequence[Path], native: Native, **options: Any
) -> list[EmissionReport]:
    """One file a rank. ``jobs`` are threads; other options are those of ``emit_weights``."""
    emission = plan_emission(entries, checkpoint)
    place = paths[0].with_name(f"{paths[0].name}.journal")
    options.setdefault("executor", Threads(options.pop("jobs", None)))
    reports = emit_weights(emission, paths, native, Journal(place, emission_key(emission)), **options)
    place.unlink()
    return reports


def emit_file(
    entries: Sequence[WeightEntry], checkpoint: Checkpoint, path: Path, native: Native, **options: Any
) -> EmissionReport:
    """The file of one rank."""
    (report,) = emit_files(entries, checkpoint, [path], native, **options)
    return report
