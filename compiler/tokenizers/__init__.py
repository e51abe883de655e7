"""From a checkpoint's tokenizer to the files of an artifact: a compact table, tokenizer.json, the chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tapeout.compiler.checkpoints.base import Checkpoint
from tapeout.compiler.tokenizers.generation import gguf_generation
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


def build_tokenizer(checkpoint: Checkpoint) -> TokenizerFiles:
    """The tokenizer files of an artifact. The same checkpoint gives the same bytes.

    Raises TapeoutError when the checkpoint holds no tokenizer, or one that nothing here can run.
    """
    if checkpoint.container == "gguf":
        return _from_gguf(checkpoint)
    return _from_folder(checkpoint)


def _from_gguf(checkpoint: Checkpoint) -> TokenizerFiles:
    source = GgufTokenizer(checkpoint.config, checkpoint.path)
    template = checkpoint.config.get("tokenizer.chat_template")
    found = gguf_generation(source)
    try:
        model = source.to_model()
        table = write_table(model)
        library = source.to_json() if model.kind == "byte_level" else None
        if library is not None:
            _check(table, library, "byte_level")
    except NotTabled as error:
        raise TapeoutError(f"{checkpoint.path}: its tokenizer cannot be used: {error}") from error
    files = {"tokenizer.bin": table} if library is None else {"tokenizer.bin": table, "tokenizer.json": library}
    why_not = (
        "a SentencePiece file has scores and no merges; making them (hundreds of thousands) and loading them costs "
        "a second and hundreds of MB, and the table needs neither"
    )
    alternatives = [] if library is not None else [{"choice": "tokenizer.json", "why": why_not}]
    return _files(files, found, template if isinstance(template, str) else None, _tabled(model, library, alternatives))


def _from_folder(checkpoint: Checkpoint) -> TokenizerFiles:
    source = HuggingFaceTokenizer(checkpoint)
    found = source.generation(checkpoint)
    files = {"tokenizer.json": source.data}
    try:
        model = source.to_model()
        table = write_table(model)
        _check(table, source.data, source.pieces())
        files["tokenizer.bin"] = table
        decision = _tabled(model, source.data, [])
    except NotTabled as error:
        found["pieces"] = source.pieces()
        decision = {
            "pass": "tokenizer",
            "subject": "tokenizer",
            "choice": "tokenizer.json",
            "reason": RULE,
            "alternatives": [{"choice": "tokenizer.bin", "why": str(error)}],
            "evidence": {},
        }
        LibraryTokenizer(source.data)  # the library must be able to read what it alone will run
    return _files(files, found, source.template(), decision)


def _tabled(model: TokenizerModel, library: bytes | None, alternatives: list[Json]) -> Json:
    checked = {"probes": len(PROBES), "library": "tokenizers"} if library is not None else {}
    if library is not None:
        why = "loading it takes longer and more memory than the table; it lies beside the table for other programs"
        alternatives = [*alternatives, {"choice": "tokenizer.json", "why": why}]
    evidence: Json = {"kind": model.kind, "tokens": len(model.texts), "merges": len(model.merges), **checked}
    return {
        "pass": "tokenizer",
        "subject": "tokenizer",
        "choice": "tokenizer.bin",
        "reason": RULE,
        "alternatives": alternatives,
        "evidence": evidence,
    }


def _files(files: dict[str, bytes], generation: Json, template: str | None, decision: Json) -> TokenizerFiles:
    out = dict(files)
    out["generation.json"] = (json.dumps(generation, ensure_ascii=False, sort_keys=True, indent=1) + "\n").encode()
    decisions = [decision]
    if template is not None:
        out["chat_template.jinja"] = template.encode()
    return TokenizerFiles(dict(sorted(out.items())), generation, decisions)


def _check(table: bytes, library: bytes, pieces: str) -> None:
    """Both must give the same ids for every probe. Raises NotTabled with the first that differs."""
    ours, theirs = TableTokenizer(table), LibraryTokenizer(library, pieces=pieces)
    if ours.vocab_size < theirs.vocab_size:
        raise NotTabled(f"the table has {ours.vocab_size} tokens, the library {theirs.vocab_size}")
    for text in PROBES:
        for special in (False, True):
            if ours.encode(text, special=special) != theirs.encode(text, special=special):
                raise NotTabled(f"the table and the tokenizers library disagree on the text {text!r}")
