"""The tokenizer in the metadata of a GGUF file (``tokenizer.ggml.*``)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from tapeout.compiler.tokenizers.generation import END_TOKENS, Json, end_tokens, generation
from tapeout.compiler.tokenizers.model import Ints, NotTabled, TokenizerModel
from tapeout.compiler.tokenizers.pretokenizers import pre_tokenizer
from tapeout.runtime.bpe import BYTE, CONTROL, LOW, NORMAL, UNKNOWN, USER_DEFINED
from tapeout.runtime.errors import TapeoutError
from tapeout.runtime.tokenizer import byte_alphabet

PREFIX = "tokenizer.ggml."
MODELS = ("gpt2", "llama")
# Texts that some files list as normal tokens and that are control tokens all the same.
ALWAYS_CONTROL = frozenset(
    (*END_TOKENS, "</s>", "<eos>", "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>", "<|fim_repo|>")
)


class GgufTokenizer:
    """The metadata, checked: tokens, types, and the keys around them. Raises TapeoutError for what is missing."""

    def __init__(self, config: Mapping[str, Any], path: Path) -> None:
        self.path, self._config = path, config
        self.model = str(self.get("model", ""))
        if self.model not in MODELS:
            raise TapeoutError(
                f"{path}: the tokenizer kind {self.model!r} of {PREFIX}model is not known here; "
                f"known are gpt2 (byte-level BPE) and llama (SentencePiece BPE)"
            )
        self.pre = pre_tokenizer(str(self.get("pre", "default")), str(path)) if self.model == "gpt2" else None
        self.tokens: Sequence[str] = self._array("tokens")
        if not self.tokens:
            raise TapeoutError(f"{path}: {PREFIX}tokens is empty; a tokenizer needs tokens")
        self.types = self._types()

    def get(self, key: str, default: Any = None) -> Any:
        """The value of ``tokenizer.ggml.<key>``."""
        return self._config.get(PREFIX + key, default)

    def token_id(self, key: str) -> int | None:
        """The id under ``<key>_token_id``, or None where there is none in range."""
        value = self.get(f"{key}_token_id")
        return int(value) if isinstance(value, int) and 0 <= value < len(self.tokens) else None

    @property
    def bos_id(self) -> int | None:
        """The begin token; SentencePiece files without the key mean 1."""
        if self.get("bos_token_id") is None and self.model == "llama" and len(self.tokens) > 1:
            return 1
        return self.token_id("bos")

    @property
    def add_bos(self) -> bool:
        """Whether a text begins with the begin token; files that do not say follow their kind."""
        default = self.pre.add_bos if self.pre is not None else True
        return bool(self.get("add_bos_token", default)) and self.bos_id is not None

    def _array(self, key: str, *, numbers: bool = False) -> Any:
        values = self.get(key)
        if values is None or isinstance(values, str | int | float):
            raise TapeoutError(f"{self.path}: {PREFIX}{key} is missing or no array; a {self.model} tokenizer needs it")
        out = list(values)
        if not set(map(type, out)) <= ({int, float, bool} if numbers else {str}):
            raise TapeoutError(f"{self.path}: {PREFIX}{key} must hold {'numbers' if numbers else 'strings'} only")
        return out

    def _sized(self, key: str) -> Any:
        values = self._array(key, numbers=True)
        if len(values) < len(self.tokens):
            raise TapeoutError(f"{self.path}: {PREFIX}{key} has {len(values)} entries for {len(self.tokens)} tokens")
        return values[: len(self.tokens)]

    def _types(self) -> bytes:
        count = len(self.tokens)
        if self.get("token_type") is None:
            types = bytearray([NORMAL]) * count
        else:
            types = bytearray(kind if 0 <= kind <= BYTE else 0 for kind in map(int, self._sized("token_type")))
        for token, text in enumerate(self.tokens):
            if text[:1] in "<[" and text in ALWAYS_CONTROL:
                types[token] = CONTROL
        return bytes(types)

    @cached_property
    def merges(self) -> Sequence[str]:
        """Merges as "left right", best first."""
        return self._array("merges")

    def scores(self) -> Sequence[float]:
        """SentencePiece scores, one a token."""
        return self._sized("scores")

    @property
    def byte_level(self) -> bool:
        """Whether it is byte-level BPE (else SentencePiece)."""
        return self.pre is not None

    def generation(self) -> Json:
        """Its eos, eot and eom ids, the control tokens known to end a turn, and the begin token."""
        declared = [self.token_id(key) for key in ("eos", "eot", "eom")]
        control = {text: token for token, text in enumerate(self.tokens) if self.types[token] == CONTROL}
        eos = dict.fromkeys([*(token for token in declared if token is not None), *end_tokens(control)])
        if not eos and not self.byte_level:
            eos = {2: None}
        wanted = [token for token in (*eos, self.bos_id) if token is not None and token < len(self.tokens)]
        return generation(
            self.bos_id,
            eos,
            add_bos=self.add_bos,
            pad=self.token_id("padding"),
            texts={token: self.tokens[token] for token in wanted},
        )

    def to_model(self) -> TokenizerModel:
        """In the terms of the table. Raises NotTabled when it cannot be."""
        if len(set(self.tokens)) < len(self.tokens):
            raise NotTabled("two tokens have the same text")
        if self.pre is None:
            return self._sentencepiece()
        texts, types = byte_texts(self.tokens, self.types), self.types
        return TokenizerModel(
            "byte_level", texts, types, merge_ids(self.tokens, self.merges), split=self.pre.split,
            whole_words=self.pre.whole_words,
        )  # fmt: skip

    def _sentencepiece(self) -> TokenizerModel:
        scores = np.array(self.scores(), np.float32)
        if not np.isfinite(scores).all():
            raise TapeoutError(f"{self.path}: {PREFIX}scores holds a value that is not finite")
        _, priorities = np.unique(-scores, return_inverse=True)
        unknown = self.token_id("unknown")
        return TokenizerModel(
            "sentencepiece",
            [text.encode() for text in self.tokens],
            self.types,
            priorities=priorities.astype(np.int64),
            add_space_prefix=bool(self.get("add_space_prefix", True)),
            unknown=-1 if unknown is None else unknown,
        )

    def to_json(self) -> bytes:
        """A byte-level tokenizer as the bytes of a tokenizer.json."""
        assert self.pre is not None
        special = [token for token, kind in enumerate(self.types) if kind in (UNKNOWN, CONTROL, USER_DEFINED)]
        splits = [
            {"type": "Split", "pattern": {"Regex": each}, "behavior": "Isolated", "invert": False}
            for each in self.pre.split
        ]
        level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
        document = {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [
                {
                    "id": token,
                    "content": self.tokens[token],
                    "single_word": False,
                    "lstrip": False,
                    "rstrip": False,
                    "normalized": False,
                    "special": self.types[token] != USER_DEFINED,
                }
                for token in special
            ],
            "normalizer": None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, level]},
            "post_processor": None,
            "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "ignore_merges": self.pre.whole_words,
                "vocab": {text: token for token, text in enumerate(self.tokens)},
                "merges": list(self.merges),
            },
        }
        return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()


def byte_texts(tokens: Sequence[str], types: bytes) -> list[bytes]:
    """Normal tokens as the bytes that GPT-2's alphabet writes; special ones as their text."""
    alphabet = {code: byte for byte, code in enumerate(byte_alphabet())}
    texts: list[bytes] = []
    for text, kind in zip(tokens, types, strict=True):
        mapped = text.translate(alphabet) if kind == NORMAL else None
        try:
            texts.append(text.encode() if mapped is None else mapped.encode("latin-1"))
        except UnicodeEncodeError:
            texts.append(text.encode())
    return texts


def merge_ids(tokens: Sequence[str], merges: Sequence[str] | Sequence[Sequence[str]]) -> Ints:
    """Merges as ids, [count, 3]; of a pair that stands twice the first counts. Raises NotTabled for unknown texts."""
    ids = {text: token for token, text in enumerate(tokens)}
    found: dict[tuple[int, int], int] = {}
    for entry in merges:
        pair = entry.split(" ", 1) if isinstance(entry, str) else entry
        if len(pair) != 2:
            raise NotTabled(f"the merge {entry!r} is not two texts")
        left, right = pair
        try:
            found.setdefault((ids[left], ids[right]), ids[left + right])
        except KeyError as error:
            raise NotTabled(f"the merge {left!r} + {right!r} names {error.args[0]!r}, which is no token") from None
    if len(tokens) >= LOW:
        raise NotTabled("the vocabulary is too large")
    return np.array([(*pair, joined) for pair, joined in found.items()], np.int64).reshape(-1, 3)
