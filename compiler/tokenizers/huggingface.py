"""The tokenizer of a safetensors folder: tokenizer.json and the files beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from tapeout.compiler.checkpoints.base import Checkpoint, load_json, load_json_object
from tapeout.compiler.tokenizers.generation import Json, end_tokens, generation, ids_of
from tapeout.compiler.tokenizers.gguf import byte_texts, merge_ids
from tapeout.compiler.tokenizers.model import Ints, NotTabled, TokenizerModel
from tapeout.compiler.tokenizers.pretokenizers import GPT2
from tapeout.runtime.bpe import BYTE, CONTROL, LOW, NORMAL, SPACE, UNUSED, USER_DEFINED
from tapeout.runtime.errors import TapeoutError

FILE, CONFIG = "tokenizer.json", "tokenizer_config.json"
FLAGS = ("single_word", "lstrip", "rstrip")


class HuggingFaceTokenizer:
    """A tokenizer.json, parsed, with what lies beside it. Raises TapeoutError when there is none or it is no JSON."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.path = checkpoint.path
        files = checkpoint.tokenizer_files
        if FILE not in files:
            raise TapeoutError(
                f"{self.path}: has no {FILE}; a folder checkpoint needs one (transformers writes it when it saves a "
                f"fast tokenizer), or take the model's GGUF file, which holds its tokenizer"
            )
        self.data = files[FILE].read_bytes()
        document = load_json(self.data, str(files[FILE]))
        model = document.get("model") if isinstance(document, dict) else None  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        if not isinstance(model, dict):
            raise TapeoutError(f"{files[FILE]}: has no model section; it must be a tokenizer of the tokenizers library")
        self.document = cast(Json, document)
        self.model = cast(Json, model)
        self.added = cast("list[Json]", self.document.get("added_tokens") or [])
        self.config = load_json_object(files[CONFIG]) if CONFIG in files else {}
        self._template: Path | None = files.get("chat_template.jinja")

    def template(self) -> str | None:
        """The chat template: a file of its own wins over the key, and "default" over other named ones."""
        if self._template is not None:
            return self._template.read_text("utf-8")
        found = self.config.get("chat_template")
        if isinstance(found, list):
            named = {str(entry.get("name")): entry.get("template") for entry in cast("list[Json]", found)}
            found = named.get("default") or next(iter(named.values()), None)
        return found if isinstance(found, str) else None

    def generation(self, checkpoint: Checkpoint) -> Json:
        """The union of the end tokens that config.json, generation_config.json and the tokenizer declare."""
        special = {str(entry["content"]): int(entry["id"]) for entry in self.added if entry.get("special")}
        ids = {str(entry["content"]): int(entry["id"]) for entry in self.added}
        own = {key: ids.get(self._text(f"{key}_token") or "") for key in ("bos", "eos", "pad")}
        sources = (checkpoint.config, checkpoint.generation_config)
        declared = [token for source in sources for token in ids_of(source.get("eos_token_id"))]
        of_tokenizer = [own["eos"]] if own["eos"] is not None else []
        eos = dict.fromkeys([*of_tokenizer, *declared, *end_tokens(special)])
        found: dict[str, int | None] = {}
        for key in ("bos", "pad"):
            others = (token for source in sources for token in ids_of(source.get(f"{key}_token_id")))
            found[key] = next(others, None) if own[key] is None else own[key]
        first = self._first()
        bos = first if found["bos"] is None else found["bos"]
        add_bos = first == bos if first is not None else bool(self.config.get("add_bos_token", False))
        texts = {token: text for text, token in ids.items()}
        return generation(
            bos, eos, add_bos=add_bos, pad=found["pad"], texts=texts, sampling=checkpoint.generation_config
        )

    def pieces(self) -> str:
        """How the text of a token becomes bytes; see LibraryTokenizer."""
        kinds = {entry.get("type") for entry in _sequence(self.document.get("decoder"), "decoders")}
        return "byte_level" if "ByteLevel" in kinds else "sentencepiece" if "ByteFallback" in kinds else "decoded"

    def to_model(self) -> TokenizerModel:
        """In the terms of the table. Raises NotTabled, naming the part, for anything that it does not hold."""
        if self.model.get("type", "BPE") != "BPE" or not isinstance(self.model.get("merges"), list):
            raise NotTabled(f"its model is {self.model.get('type')}, not BPE")
        for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
            if self.model.get(key):
                raise NotTabled(f"its model uses {key}")
        tokens, types = self._tokens()
        merges = cast("list[str] | list[list[str]]", self.model["merges"])
        if self.model.get("byte_fallback"):
            return self._sentencepiece(tokens, types, merge_ids(tokens, merges))
        return TokenizerModel(
            "byte_level", byte_texts(tokens, types), types, merge_ids(tokens, merges), split=self._split(),
            whole_words=bool(self.model.get("ignore_merges")), normalize=self._form(),
        )  # fmt: skip

    def _text(self, key: str) -> str | None:
        value = self.config.get(key)
        return value.get("content") if isinstance(value, dict) else value  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]

    def _first(self) -> int | None:
        """The token that the post-processor puts before a text, if it does."""
        for step in _sequence(self.document.get("post_processor"), "processors"):
            if step.get("type") == "TemplateProcessing":
                single = cast("list[Json]", step.get("single") or [{}])
                first = cast(Json, single[0].get("SpecialToken", {})).get("id")
                ids = cast("dict[Any, Json]", step.get("special_tokens", {})).get(first, {}).get("ids") or [None]
                return ids[0]
        return None

    def _tokens(self) -> tuple[list[str], bytes]:
        vocab: Mapping[str, int] = self.model["vocab"]
        count = max([*vocab.values(), *(int(entry["id"]) for entry in self.added)], default=-1) + 1
        if count > 4 * (len(vocab) + len(self.added)):
            raise NotTabled("its ids leave most of their range unused")
        tokens, types = [""] * count, bytearray([UNUSED]) * count
        for text, token in vocab.items():
            byte = self.model.get("byte_fallback") and len(text) == 6 and text.startswith("<0x") and text[5] == ">"
            tokens[token], types[token] = text, BYTE if byte else NORMAL
        for entry in self.added:
            if any(entry.get(flag) for flag in FLAGS):
                raise NotTabled(f"its added token {entry['content']!r} takes neighbouring spaces or whole words only")
            tokens[entry["id"]] = str(entry["content"])
            types[entry["id"]] = CONTROL if entry.get("special") else USER_DEFINED
        return tokens, bytes(types)

    def _form(self) -> str | None:
        normalizer = self.document.get("normalizer")
        if normalizer is None or normalizer.get("type") in ("NFC", "NFD", "NFKC", "NFKD"):
            return None if normalizer is None else str(normalizer["type"])
        raise NotTabled(f"its normalizer is {normalizer.get('type')}")

    def _split(self) -> tuple[str, ...]:
        """The expressions of a byte-level pre-tokenizer, in order."""
        steps = _sequence(self.document.get("pre_tokenizer"), "pretokenizers")
        if not steps or steps[-1].get("type") != "ByteLevel" or steps[-1].get("add_prefix_space"):
            raise NotTabled("its pre-tokenizer does not end in plain byte level")
        split = [_expression(step) for step in steps[:-1]]
        return (*split, GPT2) if steps[-1].get("use_regex", True) else tuple(split)

    def _sentencepiece(self, tokens: Sequence[str], types: bytes, merges: Ints) -> TokenizerModel:
        normalizers = _sequence(self.document.get("normalizer"), "normalizers")
        replace = [step for step in normalizers if step.get("type") == "Replace"]
        prepend = [step for step in normalizers if step.get("type") == "Prepend"]
        if len(normalizers) != len(replace) + len(prepend) or len(replace) != 1:
            raise NotTabled("its normalizers are not those of SentencePiece BPE")
        if replace[0].get("pattern") != {"String": " "} or replace[0].get("content") != SPACE:
            raise NotTabled("its normalizer replaces something other than spaces")
        for step in _sequence(self.document.get("pre_tokenizer"), "pretokenizers"):
            if step.get("type") != "Split" or step.get("pattern") != {"String": " "}:
                raise NotTabled(f"its pre-tokenizer is {step.get('type')}")
        unknown = self.model.get("unk_token")
        return TokenizerModel(
            "sentencepiece",
            [text.encode() for text in tokens],
            types,
            priorities=_priorities(tokens, merges),
            add_space_prefix=bool(prepend),
            unknown=tokens.index(unknown) if unknown in tokens else -1,
        )


def _sequence(step: Json | None, key: str) -> list[Json]:
    """The steps of a component, which may be absent, one, or a sequence."""
    if step is None:
        return []
    return [inner for each in step[key] for inner in _sequence(each, key)] if step.get("type") == "Sequence" else [step]


def _expression(step: Json) -> str:
    if step.get("type") == "Digits":
        return r"\p{N}" if step.get("individual_digits") else r"\p{N}+"
    pattern = step.get("pattern", {})
    if step.get("type") == "Split" and step.get("behavior") == "Isolated" and not step.get("invert"):
        return str(pattern["Regex"]) if "Regex" in pattern else _literal(str(pattern.get("String")))
    raise NotTabled(f"its pre-tokenizer has a step {step.get('type')} ({step.get('behavior')})")


def _literal(text: str) -> str:
    return "".join(f"\\{char}" if char.isascii() and not char.isalnum() else char for char in text)


def _priorities(tokens: Sequence[str], merges: Ints) -> Ints:
    """Priority by token where the list of merges is one that scores of tokens make. Raises NotTabled where it is not.

    It is when the merges of each token stand together and no split of a token into two tokens is left out.
    """
    results = merges[:, 2]
    changes = np.flatnonzero(np.diff(results, prepend=-1))
    if len(np.unique(results[changes])) < len(changes):
        raise NotTabled("its merges of one token do not stand together, so no scores of tokens explain them")
    counts = np.bincount(results, minlength=len(tokens))
    known = set(tokens)
    made: list[int] = np.unique(results).tolist()
    unknown = {char for token in made for char in tokens[token]} - known
    if unknown:
        raise NotTabled(f"its merges use the character {min(unknown)!r}, which is no token")
    for token in made:
        text = tokens[token]
        splits = sum(text[:at] in known and text[at:] in known for at in range(1, len(text)))
        if splits != counts[token]:
            raise NotTabled(f"its merges leave out a way to make {text!r}, so no scores of tokens explain them")
    priorities = np.full(len(tokens), LOW, np.int64)
    priorities[results[changes]] = np.arange(len(changes))
    return priorities
