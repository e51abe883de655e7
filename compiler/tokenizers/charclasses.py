"""Regular expressions over Unicode classes, turned into ones for Python's ``re`` over a few representatives.

Python's ``re`` knows no ``\\p{L}``. All sets that the expressions of one tokenizer name cut the code points into a
handful of classes; text is translated to one character a class (ASCII stands for itself), and the expressions name
those. The result is small, fast, and the same whatever Unicode version Python has.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from tapeout.compiler.tokenizers.model import NotTabled

Mask = npt.NDArray[np.bool_]
WHITESPACE = (
    *range(0x9, 0xE),
    0x20,
    0x85,
    0xA0,
    0x1680,
    *range(0x2000, 0x200B),
    0x2028,
    0x2029,
    0x202F,
    0x205F,
    0x3000,
)
# Assigned between Unicode 14 (Python 3.11) and 16 (the tokenizers library, llama.cpp): general category and range.
LATER = """
Mn:897 Mc:CF3 Mn:ECE Po:1B4E-1B4F Po:1B7F Lu:1C89 Ll:1C8A So:2427-2429 So:2FFC-2FFF So:31E4-31E5 So:31EF Lu:A7CB-A7CC
Ll:A7CD Lu:A7DA Ll:A7DB Lu:A7DC Lo:105C0-105F3 Nd:10D40-10D49 Lo:10D4A-10D4D Lm:10D4E Lo:10D4F Lu:10D50-10D65
Mn:10D69-10D6D Pd:10D6E Lm:10D6F Ll:10D70-10D85 Sm:10D8E-10D8F Lo:10EC2-10EC4 Mn:10EFC-10EFF Lo:1123F-11240 Mn:11241
Lo:11380-11389 Lo:1138B Lo:1138E Lo:11390-113B5 Lo:113B7 Mc:113B8-113BA Mn:113BB-113C0 Mc:113C2 Mc:113C5
Mc:113C7-113CA Mc:113CC-113CD Mn:113CE Mc:113CF Mn:113D0 Lo:113D1 Mn:113D2 Lo:113D3 Po:113D4-113D5 Po:113D7-113D8
Mn:113E1-113E2 Nd:116D0-116E3 Po:11B00-11B09 Lo:11BC0-11BE0 Po:11BE1 Nd:11BF0-11BF9 Mn:11F00-11F01 Lo:11F02 Mc:11F03
Lo:11F04-11F10 Lo:11F12-11F33 Mc:11F34-11F35 Mn:11F36-11F3A Mc:11F3E-11F3F Mn:11F40 Mc:11F41 Mn:11F42 Po:11F43-11F4F
Nd:11F50-11F59 Mn:11F5A Lo:1342F Mn:13440 Lo:13441-13446 Mn:13447-13455 Lo:13460-143FA Lo:16100-1611D Mn:1611E-16129
Mc:1612A-1612C Mn:1612D-1612F Nd:16130-16139 Lm:16D40-16D42 Lo:16D43-16D6A Lm:16D6B-16D6C Po:16D6D-16D6F
Nd:16D70-16D79 Lo:18CFF Lo:1B132 Lo:1B155 So:1CC00-1CCEF Nd:1CCF0-1CCF9 So:1CD00-1CEB3 No:1D2C0-1D2D3 Ll:1DF25-1DF2A
Lm:1E030-1E06D Mn:1E08F Lo:1E4D0-1E4EA Lm:1E4EB Mn:1E4EC-1E4EF Nd:1E4F0-1E4F9 Lo:1E5D0-1E5ED Mn:1E5EE-1E5EF Lo:1E5F0
Nd:1E5F1-1E5FA Po:1E5FF So:1F6DC So:1F774-1F776 So:1F77B-1F77F So:1F7D9 So:1F8B2-1F8BB So:1F8C0-1F8C1 So:1FA75-1FA77
So:1FA87-1FA89 So:1FA8F So:1FAAD-1FAAF So:1FABB-1FABF So:1FAC6 So:1FACE-1FACF So:1FADA-1FADC So:1FADF So:1FAE8-1FAE9
So:1FAF7-1FAF8 So:1FBCB-1FBEF Lo:2B739 Lo:2EBF0-2EE5D Lo:31350-323AF
"""


# Code points that can be assigned: planes 0 to 3 and the start of plane 14; private use is of class Co by itself.
PROBED = (
    range(0x40000),
    range(0xE0000, 0xE0200),
    range(0xF0000, 0xF0001),
    range(0xFFFFE, 0x100001),
    range(0x10FFFE, 0x110000),
)


@dataclass(frozen=True)
class Classes:
    """``patterns`` for ``re``, each one group; code points from ``starts[i]`` on are of ``classes[i]``."""

    patterns: tuple[str, ...]
    starts: npt.NDArray[np.uint32]
    classes: npt.NDArray[np.uint8]


@dataclass(frozen=True)
class CharSet:
    """The union of ranges of code points (ends included) and of sets by category ("L", "Nd"), perhaps negated."""

    ranges: tuple[tuple[int, int], ...] = ()
    categories: tuple[str, ...] = ()
    parts: tuple[CharSet, ...] = ()
    negated: bool = False

    def edges(self) -> set[int]:
        """Code points where membership by range may change."""
        inner = (part.edges() for part in self.parts)
        return {0, *(low for low, _ in self.ranges), *(high + 1 for _, high in self.ranges)}.union(*inner)

    def contains(self, codes: npt.NDArray[np.int64], categories: npt.NDArray[np.str_]) -> Mask:
        """Which of the code points, of these general categories, are members."""
        mask = np.zeros(len(codes), np.bool_)
        for low, high in self.ranges:
            mask |= (codes >= low) & (codes <= high)
        for name in self.categories:
            mask |= categories.astype(f"U{len(name)}") == name
        for part in self.parts:
            mask |= part.contains(codes, categories)
        return ~mask if self.negated else mask


Item: TypeAlias = str | CharSet
SPACES = CharSet(tuple((code, code) for code in WHITESPACE))


def translate(patterns: Sequence[str]) -> Classes:
    """Patterns over representatives, and the table that maps text onto them. Raises NotTabled for other syntax."""
    parsed = [_parse(pattern) for pattern in patterns]
    sets = list(dict.fromkeys(item for items in parsed for item in items if isinstance(item, CharSet)))
    changes = _category_changes()
    edges = sorted({*range(129), *changes, *(edge for each in sets for edge in each.edges())} - {0x110000})
    codes = np.array(edges, np.int64)
    known = np.array(sorted(changes), np.int64)
    names = np.array([changes[int(code)] for code in known])
    categories = names[np.searchsorted(known, codes, "right") - 1]
    member = np.array([each.contains(codes, categories) for each in sets], np.bool_).reshape(len(sets), len(codes))
    _, numbers = np.unique(member[:, 128:], axis=1, return_inverse=True)
    numbers = numbers.reshape(-1)
    if numbers.max() >= 128:
        raise NotTabled("the pre-tokenizer tells more than 128 classes of characters apart")
    kept = np.concatenate([[True], np.diff(numbers) != 0])
    emitted = {each: _emit(row, numbers) for each, row in zip(sets, member, strict=True)}
    texts = ["".join(item if isinstance(item, str) else emitted[item] for item in items) for items in parsed]
    for text in texts:
        if re.compile(text).groups:
            raise NotTabled("the pre-tokenizer's expression has a capturing group")
    return Classes(
        tuple(f"({text})" for text in texts), codes[128:][kept].astype(np.uint32), numbers[kept].astype(np.uint8)
    )


def _category_changes() -> dict[int, str]:
    """General category by the code point where it begins, up to the next one."""
    changes: dict[int, str] = {}
    for probed in PROBED:
        code = probed.start
        for category, run in groupby(map(unicodedata.category, map(chr, probed))):
            changes[code] = category
            code += sum(1 for _ in run)
    for first, last, name in _later():
        if unicodedata.category(chr(first)) == "Cn":
            changes[first] = name
            if unicodedata.category(chr(last + 1)) == "Cn":
                changes.setdefault(last + 1, "Cn")
    return changes


def _later() -> Iterator[tuple[int, int, str]]:
    for entry in LATER.split():
        name, _, span = entry.partition(":")
        first, _, last = span.partition("-")
        yield int(first, 16), int(last or first, 16), name


ESCAPES = {"r": 0xD, "n": 0xA, "t": 0x9, "f": 0xC, "v": 0xB}
VERBATIM = re.compile(r"\(\?(?:[:!=]|<[!=])|[()|?*+]|\{\d+(?:,\d*)?\}")


def _parse(pattern: str) -> list[Item]:
    """The pattern as verbatim syntax and sets of code points."""
    items: list[Item] = []
    at = 0
    while at < len(pattern):
        if pattern[at] in "^.":
            raise NotTabled(f"the pre-tokenizer's expression uses {pattern[at]!r}")
        if pattern[at] == "$":
            items.append(r"\Z")
            at += 1
        elif (syntax := VERBATIM.match(pattern, at)) is not None:
            items.append(syntax.group())
            at = syntax.end()
        else:
            found, at = _set(pattern, at) if pattern[at] == "[" else _single(pattern, at)
            items.append(found)
    return items


def _single(pattern: str, at: int) -> tuple[CharSet, int]:
    """One character, escape or property at ``at``, and where it ends."""
    char = pattern[at]
    if char != "\\":
        return CharSet(((ord(char), ord(char)),)), at + 1
    name = pattern[at + 1 : at + 2]
    if name in ("p", "P"):
        end = pattern.index("}", at)
        return CharSet(categories=(pattern[at + 3 : end],), negated=name == "P"), end + 1
    if name in ("s", "S"):
        return CharSet(parts=(SPACES,), negated=name == "S"), at + 2
    if name == "d":
        return CharSet(categories=("Nd",)), at + 2
    if name.isalnum() and name not in ESCAPES:
        raise NotTabled(f"the pre-tokenizer's expression uses \\{name}")
    code = ESCAPES.get(name) or ord(name)
    return CharSet(((code, code),)), at + 2


def _set(pattern: str, at: int) -> tuple[CharSet, int]:
    """A bracketed set that begins at ``at``, and where it ends."""
    negated = pattern.startswith("[^", at)
    at += 2 if negated else 1
    parts: list[CharSet] = []
    while not (pattern[at] == "]" and parts):
        part, at = _single(pattern, at)
        if part.ranges and pattern.startswith("-", at) and not pattern.startswith("]", at + 1):
            end, at = _single(pattern, at + 1)
            part = CharSet(((part.ranges[0][0], end.ranges[0][1]),))
        parts.append(part)
    return CharSet(parts=tuple(parts), negated=negated), at + 1


def _emit(member: Mask, numbers: npt.NDArray[np.int64]) -> str:
    """A set for ``re``: its ASCII members, and the representative 128 + class of each class inside it."""
    classes = np.unique(numbers[member[128:]]) + 128
    codes = [*np.flatnonzero(member[:128]).tolist(), *classes.tolist()]
    if not codes:
        return "(?!)"
    if len(codes) == 1:
        return re.escape(chr(codes[0]))
    ranges: list[list[int]] = []
    for code in codes:
        if ranges and ranges[-1][1] == code - 1:
            ranges[-1][1] = code
        else:
            ranges.append([code, code])
    return "[" + "".join(f"\\x{low:02x}" + (f"-\\x{high:02x}" if high > low else "") for low, high in ranges) + "]"
