"""A tokenizer in the terms of this package, whichever file described it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


class NotTabled(Exception):
    """Why a tokenizer cannot be held in the compact table; the text goes into the record of decisions."""


def no_merges() -> Ints:
    """An empty [0, 3] array of merges."""
    return np.empty((0, 3), np.int64)


@dataclass(frozen=True)
class TokenizerModel:
    """What the compact table holds, apart from its layout.

    - ``kind``: "byte_level" or "sentencepiece" (see tapeout.runtime.bpe);
    - ``texts``: UTF-8 of each token as it is matched: real bytes for byte-level tokens, U+2581 for spaces in
      SentencePiece ones, plain text for special ones;
    - ``types``: GGUF token types: 1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 byte;
    - ``merges``: byte_level: [count, 3] ids (left, right, joined), in order of rank;
    - ``priorities``: sentencepiece: for each id, 0 for the best score, equal for equal scores, 2**32 - 1 for what
      merging never makes;
    - ``split``: regular expressions that cut the text into words, one after the other, in the syntax of
      tokenizer.json files (``\\p{L}`` and so on);
    - ``whole_words``: a word that is a token is taken whole, whatever merging would give (``ignore_merges``);
    - ``normalize``: a Unicode normalization form that text goes through first, or None.
    """

    kind: str
    texts: Sequence[bytes]
    types: bytes
    merges: Ints = field(default_factory=no_merges)
    priorities: Ints | None = None
    split: tuple[str, ...] = ()
    whole_words: bool = False
    normalize: str | None = None
    add_space_prefix: bool = False
    unknown: int = -1
