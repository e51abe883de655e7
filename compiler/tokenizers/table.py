"""Writes ``tokenizer.bin``: the tables that tapeout.runtime.bpe reads in place."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from zlib import crc32

import numpy as np
import numpy.typing as npt

from tapeout.compiler.tokenizers.charclasses import translate
from tapeout.compiler.tokenizers.model import NotTabled, TokenizerModel
from tapeout.runtime.bpe import BYTE, CONTROL, LOW, MAGIC, NORMAL, PREAMBLE, SPACE, UNKNOWN, USER_DEFINED

Words = npt.NDArray[np.uint32]
Sections = dict[str, npt.NDArray[Any]]
ALIGNMENT = 64
MARK = SPACE.encode()


def write_table(model: TokenizerModel) -> bytes:
    """The bytes of ``tokenizer.bin``. Raises NotTabled for a tokenizer that it cannot hold."""
    lengths = np.fromiter(map(len, model.texts), np.uint32, len(model.texts))
    sections: Sections = {
        "text": np.frombuffer(b"".join(model.texts), np.uint8),
        "offsets": np.concatenate([[0], np.cumsum(lengths)]).astype(np.uint32),
        "types": np.frombuffer(model.types, np.uint8),
        "bytes": _byte_ids(model),
    }
    byte_level = model.kind == "byte_level"
    if byte_level:
        classes = translate(model.split)
        patterns, starts, numbers = classes.patterns, classes.starts, classes.classes
        sections |= _pairs(model)
    else:
        patterns = _words_of(model.texts)
        starts, numbers = np.array([128], np.uint32), np.array([0], np.uint8)
        assert model.priorities is not None
        sections["priorities"] = model.priorities.astype(np.uint32)
    sections |= {"class.starts": starts, "class.classes": numbers}
    if not byte_level or model.whole_words:
        plain = (NORMAL,) if byte_level else tuple(range(256))
        sections |= _index("all", model, plain)
    sections |= _index("special", model, (UNKNOWN, CONTROL, USER_DEFINED))
    header = {
        "kind": model.kind,
        "vocab_size": len(model.texts),
        "split": patterns,
        "normalize": model.normalize,
        "add_space_prefix": model.add_space_prefix,
        "whole_words": model.whole_words,
        "unknown": model.unknown,
        "specials": {
            "control": _specials(model, (UNKNOWN, CONTROL, USER_DEFINED)),
            "user": _specials(model, (USER_DEFINED,)),
        },
    }
    return _pack(header, sections)


def _pack(header: Mapping[str, Any], sections: Sections) -> bytes:
    """Preamble, header and aligned sections; offsets do not depend on how long the header text is."""
    codes = {"uint8": "B", "uint32": "I"}
    places, at = dict[str, list[int | str]](), 0
    for name, values in sections.items():
        places[name] = [at, len(values), codes[values.dtype.name]]
        at += -(-values.nbytes // ALIGNMENT) * ALIGNMENT
    # The header holds offsets from the file's start, whose digits change its own length: reserve room, then fill it.
    draft = json.dumps({**header, "sections": places}, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    room = -(-(PREAMBLE.size + len(draft.encode()) + 16 * len(places)) // ALIGNMENT) * ALIGNMENT
    moved = {name: [room + int(offset), *rest] for name, (offset, *rest) in places.items()}
    text = json.dumps({**header, "sections": moved}, ensure_ascii=False, sort_keys=True, separators=(",", ":")).encode()
    parts = [PREAMBLE.pack(MAGIC, len(text), 0), text, bytes(room - PREAMBLE.size - len(text))]
    for values in sections.values():
        data = values.astype(values.dtype.newbyteorder("<")).tobytes()
        parts += [data, bytes(-len(data) % ALIGNMENT)]
    return b"".join(parts)


def _byte_ids(model: TokenizerModel) -> Words:
    """Id of the token for each single byte; LOW where there is none."""
    ids = np.full(256, LOW, np.uint32)
    for token, (text, kind) in enumerate(zip(model.texts, model.types, strict=True)):
        if model.kind == "byte_level" and len(text) == 1 and kind == NORMAL:
            ids[text[0]] = token
        elif kind == BYTE:
            if re.fullmatch(rb"<0x[0-9A-Fa-f]{2}>", text) is None:
                raise NotTabled(f"the byte token {token} is written {text!r}, not <0xNN>")
            ids[int(text[3:5], 16)] = token
    return ids


def _buckets(hashes: Words) -> tuple[Words, Words]:
    """Order of the entries by hash, and where each leading part of a hash begins: about one entry a bucket."""
    bits = max(1, len(hashes).bit_length() - 1)
    order = np.argsort(hashes, kind="stable").astype(np.uint32)
    edges = (np.arange((1 << bits) + 1, dtype=np.uint64) << np.uint64(32 - bits)).astype(np.uint64)
    return order, np.searchsorted(hashes[order].astype(np.uint64), edges).astype(np.uint32)


def _index(name: str, model: TokenizerModel, kinds: Sequence[int]) -> Sections:
    types = np.frombuffer(model.types, np.uint8)
    ids = np.flatnonzero(np.isin(types, kinds)).astype(np.uint32)
    hashes = np.fromiter((crc32(model.texts[token]) for token in ids.tolist()), np.uint32, len(ids))
    order, buckets = _buckets(hashes)
    return {f"{name}.buckets": buckets, f"{name}.hashes": hashes[order], f"{name}.ids": ids[order]}


def _pairs(model: TokenizerModel) -> Sections:
    lefts, rights, results = (model.merges[:, at].astype(np.uint64) for at in range(3))
    # The same hash as tapeout.runtime.bpe.pair_hash, over all pairs at once.
    hashes = ((lefts * np.uint64(0x9E3779B1) + rights * np.uint64(0x85EBCA77)) & np.uint64(LOW)).astype(np.uint32)
    order, buckets = _buckets(hashes)
    return {
        "pairs.buckets": buckets,
        "pairs.lefts": lefts[order].astype(np.uint32),
        "pairs.rights": rights[order].astype(np.uint32),
        "pairs.ranks": order,
        "pairs.results": results.astype(np.uint32),
    }


def _words_of(texts: Iterable[bytes]) -> list[str]:
    """A pattern that cuts before spaces wherever no token could span the cut, so that words can be merged alone.

    A token with a space inside it, after some character (Gemma has ``>▁</``), forbids cuts after that character.
    """
    joining = {SPACE}
    inside = re.compile(rf"([^{SPACE}]){SPACE}")
    for text in texts:
        if MARK in text[1:]:
            joining |= set(inside.findall(text.decode("utf-8", "replace")))
    if len(joining) > 64:
        return []
    return [f"(?<=[^{''.join(map(re.escape, sorted(joining)))}])(?={SPACE})"]


def _specials(model: TokenizerModel, kinds: Sequence[int]) -> dict[str, Any]:
    """Where a special token may begin, and the lengths to try by the first characters; see TableTokenizer._cut.

    Raises NotTabled when two tokens could overlap in a text: then "leftmost, longest" (the tokenizers library) and
    "longest first" (llama.cpp) disagree, and the table would have to choose.
    """
    texts = [
        text.decode("utf-8", "replace") for text, kind in zip(model.texts, model.types, strict=True) if kind in kinds
    ]
    runs = {text[0]: set[int]() for text in texts}
    for text in texts:
        if text == text[0] * len(text):
            runs[text[0]].add(len(text))
    _refuse_overlaps(texts)
    starts: dict[str, set[int]] = {}
    for text in texts:
        starts.setdefault(text[:2], set()).add(len(text))
    for start, sizes in starts.items():
        sizes.update({1} & starts.get(start[0], set()))
    alternatives: list[str] = []
    lengths: dict[str, list[int]] = {}
    for start in sorted(starts, key=lambda start: (-len(start), start)):
        run = sorted(runs[start[0]])
        plain = start == start[0] * len(start) and len(run) > 1 and run == list(range(run[0], run[-1] + 1))
        if plain and starts[start] <= set(run):
            alternatives.append(f"{re.escape(start[0])}{{{run[0]},{run[-1]}}}")
        else:
            alternatives.append(re.escape(start))
            lengths[start] = sorted(starts[start], reverse=True)
    return {"start": "|".join(dict.fromkeys(alternatives)), "lengths": lengths}


def _refuse_overlaps(texts: Sequence[str]) -> None:
    begun = {text[:size]: text for text in texts for size in range(1, len(text))}
    for text in texts:
        for size in range(1, len(text)):
            other = begun.get(text[len(text) - size :])
            if other is not None and len(set(text + other)) > 1 and other != text:
                raise NotTabled(f"the special tokens {text!r} and {other!r} can overlap in a text")
