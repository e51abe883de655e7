"""Byte-pair encoding over the tables of a mapped ``tokenizer.bin``, in plain Python; only pages in use are touched.

The file: 8 bytes of magic, the length of a JSON header (u32) and four zero bytes, the header, then sections of
little-endian integers, each at the place that the header names. Texts are found through hash buckets: entries sorted
by hash, and for each leading part of a hash the place where its entries begin.

Two kinds. ``byte_level``: symbols are tokens, starting from single bytes, and the pair with the lowest rank in the
table of merges is joined first. ``sentencepiece``: symbols are texts, starting from characters, and the pair whose
joined text is the token with the lowest priority number (highest score) is joined first; what is no token becomes
byte tokens. Ties go to the leftmost pair.
"""

from __future__ import annotations

import heapq
import json
import mmap
import re
import struct
from bisect import bisect_right
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeVar
from zlib import crc32

from tapeout.runtime.errors import TapeoutError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

MAGIC = b"tapetok1"
PREAMBLE = struct.Struct("<8sII")
SPACE = "\u2581"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
CACHED_WORDS = 8192
CACHED_LENGTH = 48
LOW = 0xFFFFFFFF

Symbol = TypeVar("Symbol")


def map_table(path: Path) -> mmap.mmap:
    """Map a table file read-only. Raises TapeoutError when it cannot be."""
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise TapeoutError(f"{path}: cannot be mapped ({error}); compile again") from error


def pair_hash(left: int, right: int) -> int:
    """Hash of a pair of token ids, 32 bits, the same in the writer of the table."""
    return (left * 0x9E3779B1 + right * 0x85EBCA77) & LOW


def merge(
    symbols: list[Symbol | None], rank: Callable[[Any, Any], int], join: Callable[[Any, Any, int], Symbol]
) -> list[Symbol]:
    """Join neighbours, lowest rank first and leftmost on ties, until no pair has a rank (-1 stands for none)."""
    count = len(symbols)
    before, after = list(range(-1, count - 1)), list(range(1, count + 1))
    ranks = [rank(left, right) for left, right in pairwise(symbols)]
    ranks.append(-1)
    queue = [each << 32 | at for at, each in enumerate(ranks) if each >= 0]
    heapq.heapify(queue)
    while queue:
        entry = heapq.heappop(queue)
        left, best = entry & LOW, entry >> 32
        if ranks[left] != best:  # a neighbour has been joined since
            continue
        right = after[left]
        joined = symbols[left] = join(symbols[left], symbols[right], best)
        symbols[right], ranks[right] = None, -1
        following = after[left] = after[right]
        if following < count:
            before[following] = left
            ranks[left] = new = rank(joined, symbols[following])
            if new >= 0:
                heapq.heappush(queue, new << 32 | left)
        else:
            ranks[left] = -1
        previous = before[left]
        if previous >= 0:
            ranks[previous] = new = rank(symbols[previous], joined)
            if new >= 0:
                heapq.heappush(queue, new << 32 | previous)
    return [symbol for symbol in symbols if symbol is not None]


class _Tables:
    """The header and the sections of a table file, checked to lie inside it."""

    def __init__(self, data: bytes | mmap.mmap) -> None:
        view = memoryview(data)
        self.header: Mapping[str, Any] = {}
        try:
            magic, size, _ = PREAMBLE.unpack_from(view)
            if magic != MAGIC:
                raise ValueError("it does not begin as a table does")
            self.header = json.loads(bytes(view[PREAMBLE.size : PREAMBLE.size + size]))
            self._sections = {name: self._section(view, *place) for name, place in self.header["sections"].items()}
        except (ValueError, TypeError, KeyError, AttributeError, struct.error) as error:
            raise TapeoutError(f"tokenizer.bin: is damaged ({error}); compile again") from error

    @staticmethod
    def _section(view: memoryview, offset: int, count: int, code: str) -> memoryview:
        nbytes = count * struct.calcsize(code)
        if not 0 <= offset <= offset + nbytes <= len(view):
            raise ValueError("a section lies outside the file")
        return view[offset : offset + nbytes].cast("I" if code == "I" else "B")

    def __getitem__(self, name: str) -> memoryview:
        return self._sections[name]


class _TextIndex:
    """Token id by exact text; ``name`` says which index of the file: all tokens, or the special ones."""

    def __init__(self, tables: _Tables, name: str) -> None:
        self._buckets, self._hashes = tables[f"{name}.buckets"], tables[f"{name}.hashes"]
        self._ids = tables[f"{name}.ids"]
        self._shift = 33 - (len(self._buckets) - 1).bit_length()
        self._text, self._offsets = tables["text"], tables["offsets"]

    def find(self, key: bytes) -> int:
        """Id of the token with this text, or -1."""
        digest = crc32(key)
        bucket = digest >> self._shift
        for at in range(self._buckets[bucket], self._buckets[bucket + 1]):
            if self._hashes[at] == digest:
                token = self._ids[at]
                if bytes(self._text[self._offsets[token] : self._offsets[token + 1]]) == key:
                    return token
        return -1


class _Classes(dict[int, int]):
    """Code point -> the character that stands for its class in the patterns; filled as characters are met."""

    def __init__(self, tables: _Tables) -> None:
        super().__init__((code, code) for code in range(128))
        self._starts, self._classes = tables["class.starts"], tables["class.classes"]

    def __missing__(self, code: int) -> int:
        self[code] = found = 128 + self._classes[bisect_right(self._starts, code) - 1]
        return found


class TableTokenizer:
    """A tokenizer of one of the two kinds over the bytes of a ``tokenizer.bin``; see Tokenizer for the methods.

    Raises TapeoutError when the data are not such a table.
    """

    def __init__(
        self,
        data: bytes | mmap.mmap,
        *,
        bos_id: int | None = None,
        eos_ids: Iterable[int] = (),
        add_bos: bool = False,
    ) -> None:
        tables = _Tables(data)
        header = tables.header
        self._tables = tables
        self._text, self._offsets, self._types = tables["text"], tables["offsets"], tables["types"]
        self._byte_ids = tables["bytes"]
        self._special_index = _TextIndex(tables, "special")
        self._specials = {key: _Specials(header["specials"][key]) for key in ("control", "user")}
        self._patterns = [re.compile(pattern) for pattern in header["split"]]
        self._classes = _Classes(tables)
        self._normalize: str | None = header["normalize"]
        self._byte_level: bool = header["kind"] == "byte_level"
        self._space_prefix: bool = header["add_space_prefix"]
        self._unknown: int = header["unknown"]
        self._model = _BytePairs(tables) if self._byte_level else _Scores(tables, self._unknown)
        self._words: dict[str, list[int]] = {}
        self._add_bos = add_bos
        self.vocab_size: int = header["vocab_size"]
        self.bos_id, self.eos_ids = bos_id, frozenset(eos_ids)

    def encode(self, text: str, *, add_bos: bool = True, special: bool = False) -> list[int]:
        """See Tokenizer."""
        ids = [self.bos_id] if add_bos and self._add_bos and self.bos_id is not None else []
        start = True
        for part in self._cut(text, "control" if special else "user"):
            if isinstance(part, int):
                ids.append(part)
                start = True
            else:
                self._encode_text(part, ids, start)
                start = False
        return ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """See Tokenizer."""
        data = b"".join(self.token_bytes(token) for token in ids if not (skip_special and self.is_special(token)))
        text = data.decode("utf-8", "replace")
        return text.removeprefix(" ") if self._space_prefix else text

    def token_bytes(self, token: int) -> bytes:
        """See Tokenizer."""
        if not 0 <= token < self.vocab_size:
            return b""
        text = bytes(self._text[self._offsets[token] : self._offsets[token + 1]])
        kind = self._types[token]
        if kind == BYTE:
            return bytes([int(text[3:5], 16)])
        if kind == UNUSED:
            return b""
        if kind in (NORMAL, USER_DEFINED) and not self._byte_level:
            return text.replace(SPACE.encode(), b" ")
        return text

    def is_special(self, token: int) -> bool:
        """See Tokenizer."""
        return 0 <= token < self.vocab_size and self._types[token] in (UNKNOWN, CONTROL)

    def control_texts(self, text: str) -> list[str]:
        """See Tokenizer."""
        tokens = [part for part in self._cut(text, "control") if isinstance(part, int)]
        return [self.token_bytes(token).decode() for token in tokens if self.is_special(token)]

    def _cut(self, text: str, which: str) -> Iterator[str | int]:
        """Plain texts and the special tokens between them: leftmost, and of those the longest."""
        specials = self._specials[which]
        begin = search = 0
        while specials.start is not None and (match := specials.start.search(text, search)) is not None:
            at = match.start()
            token, size = self._special_at(text, at, match.group(), specials.lengths, which)
            if token < 0:
                search = at + 1
                continue
            if at > begin:
                yield text[begin:at]
            yield token
            begin = search = at + size
        if begin < len(text):
            yield text[begin:]

    def _special_at(
        self, text: str, at: int, found: str, lengths: Mapping[str, Sequence[int]], which: str
    ) -> tuple[int, int]:
        for size in lengths.get(found, (len(found),)):
            token = self._special_index.find(text[at : at + size].encode("utf-8", "replace"))
            if token >= 0 and (which == "control" or self._types[token] == USER_DEFINED):
                return token, size
        return -1, 0

    def _encode_text(self, text: str, ids: list[int], start: bool) -> None:
        if self._normalize is not None:
            import unicodedata

            text = unicodedata.normalize(self._normalize, text)  # pyright: ignore[reportArgumentType]
        if not self._byte_level:
            prefix = " " if self._space_prefix and start else ""
            text = (prefix + text).replace(" ", SPACE)
        words = self._words
        for word in self._split(text):
            found = words.get(word)
            if found is None:
                found = self._model.encode(word)
                if len(word) <= CACHED_LENGTH:
                    if len(words) >= CACHED_WORDS:
                        words.clear()
                    words[word] = found
            ids += found

    def _split(self, text: str) -> list[str]:
        """The words that merging never crosses; each pattern sees classes of characters and cuts what the last left."""
        plain = text.isascii() or not self._byte_level
        pieces = [text if plain else text.translate(self._classes)]
        for pattern in self._patterns:
            pieces = [word for piece in pieces for word in pattern.split(piece) if word]
        if plain:
            return pieces
        words: list[str] = []
        at = 0
        for piece in pieces:
            words.append(text[at : at + len(piece)])
            at += len(piece)
        return words


class _Specials:
    """Where a special token may begin, and the lengths to try there, longest first."""

    def __init__(self, header: Mapping[str, Any]) -> None:
        self.start = re.compile(header["start"]) if header["start"] else None
        self.lengths: Mapping[str, Sequence[int]] = header["lengths"]


class _BytePairs:
    """Byte-level BPE: words to ids by ranked pairs of ids."""

    def __init__(self, tables: _Tables) -> None:
        self._bytes = list(tables["bytes"])
        self._buckets, self._ranks = tables["pairs.buckets"], tables["pairs.ranks"]
        self._lefts, self._rights = tables["pairs.lefts"], tables["pairs.rights"]
        self._results = tables["pairs.results"]
        self._shift = 33 - (len(self._buckets) - 1).bit_length()
        self._whole = _TextIndex(tables, "all") if tables.header["whole_words"] else None

    def encode(self, word: str) -> list[int]:
        """Ids of one word."""
        data = word.encode("utf-8", "replace")
        if self._whole is not None and (token := self._whole.find(data)) >= 0:
            return [token]
        symbols: list[int | None] = [self._bytes[byte] for byte in data]
        return [token for token in merge(symbols, self._rank, self._join) if token != LOW]

    def _rank(self, left: int, right: int) -> int:
        bucket = pair_hash(left, right) >> self._shift
        for at in range(self._buckets[bucket], self._buckets[bucket + 1]):
            if self._lefts[at] == left and self._rights[at] == right:
                return self._ranks[at]
        return -1

    def _join(self, _left: int, _right: int, rank: int) -> int:
        return self._results[rank]


class _Scores:
    """SentencePiece BPE: words to ids by the scores of joined texts, bytes for what is no token."""

    def __init__(self, tables: _Tables, unknown: int) -> None:
        self._index = _TextIndex(tables, "all")
        self._priorities = tables["priorities"]
        self._bytes = tables["bytes"]
        self._unknown = unknown

    def encode(self, word: str) -> list[int]:
        """Ids of one word, spaces already written as U+2581."""
        symbols: list[bytes | None] = [char.encode("utf-8", "replace") for char in word]
        ids: list[int] = []
        for symbol in merge(symbols, self._rank, self._join):
            token = self._index.find(symbol)
            if token >= 0:
                ids.append(token)
            else:
                ids += self._fallback(symbol)
        return ids

    def _fallback(self, symbol: bytes) -> list[int]:
        ids = [self._bytes[byte] for byte in symbol]
        if LOW not in ids:
            return ids
        return [self._unknown] if self._unknown >= 0 else []

    def _rank(self, left: bytes, right: bytes) -> int:
        token = self._index.find(left + right)
        priority = self._priorities[token] if token >= 0 else LOW
        return priority if priority != LOW else -1

    def _join(self, left: bytes, right: bytes, _rank: int) -> bytes:
        return left + right
