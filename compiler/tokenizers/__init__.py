"""From a checkpoint's tokenizer to the files of an artifact: a compact table, tokenizer.json, the chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tapeout.compiler.checkpoints.base import Checkpoint
from tapeout.compiler.tokenizers.generation import generation, ids_of
from tapeout.compiler.tokenizers.gguf import GgufTokenizer
from tapeout.compiler.tokenizers.huggingface import HuggingFaceTokenizer
from tapeout.compiler.tokenizers.model import NotTabled, TokenizerModel
from tapeout.compiler.tokenizers.probes import PROBES
from tapeout.compiler.tokenizers.table import write_table
from tapeout.runtime.bpe import TableTokenizer
from tapeout.runtime.errors import TapeoutError
from tapeout.runtime.tokenizer import LibraryTokenizer

__all__ = ["TokenizerFiles", "build_tokenizer"]

Json = dict[str, Any]
RULE = (
    "byte-level BPE with a known pre-tokenizer, and SentencePiece BPE by scores, are read in place from tokenizer.bin; "
    "anything else is run by the tokenizers library"
)


@dataclass(frozen=True)
class TokenizerFiles:
    """``files``: name -> bytes for the artifact; ``generation``: that section of the plan; ``decisions``: of it too."""

    files: Mapping[str, bytes]
    generation: Json
    decisions: Sequence[Json]


@dataclass(frozen=True)
class _Built:
    """The table, where there is one, and the record of why."""

    table: bytes | None
    decision: Json


def build_tokenizer(checkpoint: Checkpoint) -> TokenizerFiles:
    """The tokenizer files of an artifact. The same checkpoint gives the same bytes.

    A checkpoint without a tokenizer makes an artifact that takes and gives token ids alone. Raises TapeoutError for a
    tokenizer that nothing here can run.
    """
    if checkpoint.container == "gguf":
        has_one = checkpoint.config.get("tokenizer.ggml.model", "none") not in ("none", "no_vocab")
        return _from_gguf(checkpoint) if has_one else _without(checkpoint)
    return _from_folder(checkpoint) if checkpoint.tokenizer_files else _without(checkpoint)


def _without(checkpoint: Checkpoint) -> TokenizerFiles:
    prefix = "tokenizer.ggml." if checkpoint.container == "gguf" else ""
    sources = (checkpoint.config, checkpoint.generation_config)
    ids = {
        key: [token for source in sources for token in ids_of(source.get(f"{prefix}{key}_token_id"))]
        for key in ("bos", "eos", "pad")
    }
    first = {key: next(iter(found), None) for key, found in ids.items()}
    section = generation(first["bos"], ids["eos"], add_bos=False, pad=first["pad"], texts={})
    decision: Json = {
        "pass": "tokenizer",
        "subject": "tokenizer",
        "choice": "none",
        "reason": "the checkpoint holds no tokenizer, so the artifact takes and gives token ids alone",
        "alternatives": [],
        "evidence": {},
    }
    return TokenizerFiles({"generation.json": _generation_json(section)}, section, [decision])


def _from_gguf(checkpoint: Checkpoint) -> TokenizerFiles:
    source = GgufTokenizer(checkpoint.config, checkpoint.path)
    template = checkpoint.config.get("tokenizer.chat_template")
    library = source.to_json() if source.byte_level else None
    try:
        built = _table(source.to_model(), library, "byte_level")
    except NotTabled as error:
        if library is None:
            raise TapeoutError(f"{checkpoint.path}: its tokenizer cannot be used: {error}") from error
        built = _library(library, str(error), checkpoint.path)
    return _files(built, library, source.generation(), template if isinstance(template, str) else None, "byte_level")


def _from_folder(checkpoint: Checkpoint) -> TokenizerFiles:
    try:
        return _read_folder(checkpoint)
    except (AttributeError, IndexError, KeyError, TypeError, UnicodeDecodeError) as error:
        raise TapeoutError(
            f"{checkpoint.path}: its tokenizer files are malformed ({error!r:.80}); fetch them again"
        ) from error


def _read_folder(checkpoint: Checkpoint) -> TokenizerFiles:
    source = HuggingFaceTokenizer(checkpoint)
    pieces = source.pieces()
    try:
        built = _table(source.to_model(), source.data, pieces)
    except NotTabled as error:
        built = _library(source.data, str(error), checkpoint.path)
    return _files(built, source.data, source.generation(checkpoint), source.template(), pieces)


def _table(model: TokenizerModel, library: bytes | None, pieces: str) -> _Built:
    """The table, checked against the library where there is a tokenizer.json. Raises NotTabled."""
    table = write_table(model)
    evidence: Json = {"kind": model.kind, "tokens": len(model.texts), "merges": len(model.merges)}
    why = (
        "a SentencePiece file has scores and no merges; making them (hundreds of thousands) and loading them costs "
        "a second and hundreds of MB, and the table needs neither"
    )
    if library is not None:
        _check(table, LibraryTokenizer(library, pieces=pieces))
        evidence |= {"probes": len(PROBES), "checked_against": "tokenizers"}
        why = "loading it takes longer and more memory than the table; it lies beside the table for other programs"
    return _Built(table, _decision("tokenizer.bin", {"choice": "tokenizer.json", "why": why}, evidence))


def _library(library: bytes, why_not: str, where: Path) -> _Built:
    """No table; what runs the tokenizer alone must be able to read it. Raises TapeoutError where it is not."""
    try:
        LibraryTokenizer(library)
    except TapeoutError as error:
        raise TapeoutError(f"{where}: its tokenizer cannot be used: {why_not}; {error}") from error
    return _Built(None, _decision("tokenizer.json", {"choice": "tokenizer.bin", "why": why_not}, {}))


def _decision(choice: str, alternative: Json, evidence: Json) -> Json:
    return {
        "pass": "tokenizer",
        "subject": "tokenizer",
        "choice": choice,
        "reason": RULE,
        "alternatives": [alternative],
        "evidence": evidence,
    }


def _files(built: _Built, library: bytes | None, generation: Json, template: str | None, pieces: str) -> TokenizerFiles:
    """``pieces`` stands in generation.json for the runtime only, where the library runs the tokenizer."""
    stored = generation if built.table is not None else {**generation, "pieces": pieces}
    files = {
        "chat_template.jinja": None if template is None else template.encode(),
        "generation.json": _generation_json(stored),
        "tokenizer.bin": built.table,
        "tokenizer.json": library,
    }
    kept = {name: data for name, data in files.items() if data is not None}
    return TokenizerFiles(kept, generation, [built.decision])


def _generation_json(section: Json) -> bytes:
    return (json.dumps(section, ensure_ascii=False, sort_keys=True, indent=1) + "\n").encode()


def _check(table: bytes, library: LibraryTokenizer) -> None:
    """Both must give the same ids for every probe. Raises NotTabled with the first that differs."""
    ours = TableTokenizer(table)
    if ours.vocab_size < library.vocab_size:
        raise NotTabled(f"the table has {ours.vocab_size} tokens, the library {library.vocab_size}")
    for text in PROBES:
        for special in (False, True):
            if ours.encode(text, special=special) != library.encode(text, special=special):
                raise NotTabled(f"the table and the tokenizers library disagree on the text {text!r}")
