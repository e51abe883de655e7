"""What is evaluated, artifacts and the reference: each as something that gives logits for tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tapeout.compiler.checkpoints import open_checkpoint, resolve_source
from tapeout.compiler.verify.reference import Reference
from tapeout.runtime import Model, load
from tapeout.runtime.errors import TapeoutError
from tapeout.runtime.manifest import MANIFEST

Floats = npt.NDArray[np.float32]
READ_BY_TRANSFORMERS = ("safetensors", "gguf")


@dataclass(frozen=True)
class Weights:
    """An artifact's weights: formats of its matrices (most bytes first), bytes on disk, bits a parameter."""

    formats: tuple[str, ...]
    bytes: int
    bits_per_weight: float

    @classmethod
    def of(cls, plan: dict[str, Any]) -> Weights:
        """From a plan; vectors count in the bytes."""
        by_format: dict[str, int] = {}
        for weight in plan["weights"]:
            if len(weight["shape"]) > 1:
                by_format[weight["format"]] = by_format.get(weight["format"], 0) + weight["bytes"]
        stored = sum(weight["bytes"] for weight in plan["weights"])
        elements = sum(prod(weight["shape"]) for weight in plan["weights"])
        return cls(tuple(sorted(by_format, key=lambda name: -by_format[name])), stored, 8 * stored / elements)


@dataclass(frozen=True)
class Subject:
    """A model by name; ``logits`` maps tokens to float32 [tokens, vocab]. ``model`` is an artifact's, else None."""

    name: str
    vocab_size: int
    logits: Callable[[Sequence[int]], Floats]
    model: Model | None = None

    def finite_logits(self, ids: Sequence[int]) -> Floats:
        """Logits of all positions but the last. Raises TapeoutError where one is not finite."""
        logits = self.logits(ids)[:-1]
        bad = next((index for index, row in enumerate(logits) if not np.isfinite(row).all()), None)
        if bad is not None:
            raise TapeoutError(
                f"{self.name}: the logits at position {bad} of a window are not all finite, so it has no perplexity "
                "here; tapeout verify finds the op that breaks them"
            )
        return logits


def open_artifact(path: Path, threads: int | None, stack: ExitStack) -> Subject:
    """Load an artifact until ``stack`` closes. Raises TapeoutError."""
    model = stack.enter_context(load(path, threads=threads))
    return Subject(str(path), model.vocab_size, model.logits, model)


def open_reference(named: str, threads: int | None, stack: ExitStack) -> Subject:
    """An artifact folder, or a checkpoint (as a spec's source names one) in transformers. Raises TapeoutError."""
    if (Path(named) / MANIFEST).is_file():
        return open_artifact(Path(named), threads, stack)
    checkpoint = open_checkpoint(resolve_source(named, Path.cwd()))
    if checkpoint.container not in READ_BY_TRANSFORMERS:
        raise TapeoutError(
            f"{named}: transformers does not read {checkpoint.container}; --against takes an artifact, a safetensors "
            "folder or a GGUF"
        )
    path = checkpoint.path
    if checkpoint.container == "safetensors" and path.is_file():
        path = path.parent
    try:
        reference = Reference.open(path, checkpoint.container)
    except (OSError, ValueError, KeyError) as error:
        if isinstance(error, TapeoutError):
            raise
        why = (str(error).splitlines() or [type(error).__name__])[0]
        raise TapeoutError(f"{named}: transformers cannot load this checkpoint as a reference ({why})") from error
    vocab_size = int(reference.model.get_output_embeddings().weight.shape[0])
    return Subject(
        f"{named} in {reference.name}", vocab_size, lambda ids: reference.run(ids, (), lambda _op, _value: None)
    )


def check_comparable(subjects: Sequence[Subject], text: str) -> list[int]:
    """The tokens that every artifact reads ``text`` as, a begin token included.

    Raises TapeoutError where vocabularies or tokens differ; a checkpoint's tokens are not asked for.
    """
    first = subjects[0]
    ids: list[int] = []
    for subject in subjects:
        if subject.vocab_size != first.vocab_size:
            raise TapeoutError(
                f"{subject.name}: has a vocabulary of {subject.vocab_size:,}, {first.name} one of "
                f"{first.vocab_size:,}; only models of one vocabulary can be compared"
            )
        if subject.model is not None:
            own = list(subject.model.tokenizer.encode(text))
            ids = ids or own
            if own != ids:
                raise TapeoutError(
                    f"{subject.name}: reads the text as other tokens than {first.name} does; only models of one "
                    "tokenizer can be compared"
                )
    return ids
