"""The sequences a step works on: their page tables, and the native step structure built once and refilled each step."""

from __future__ import annotations

import ctypes as C
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tapeout.runtime.cpu import Segment, StepStruct
from tapeout.runtime.errors import TapeoutError


class PagePool:
    """The free pages of the KV pool. Pages of a sequence need not be neighbours."""

    def __init__(self, pages: int, page_tokens: int, max_context: int) -> None:
        self.page_tokens, self.max_context = page_tokens, max_context
        self._free = list(range(pages - 1, -1, -1))

    def grow(self, sequence: KvSequence, length: int) -> None:
        """Give a sequence the pages for ``length`` tokens. Raises TapeoutError beyond the context or the pool."""
        if length > self.max_context:
            raise TapeoutError(f"the sequence would hold {length} tokens, but its context is {self.max_context}")
        while sequence.pages * self.page_tokens < length:
            if not self._free:
                raise TapeoutError(
                    f"the KV pool is full: {sequence.pages} pages of this sequence are the last; close a sequence"
                )
            sequence.table[sequence.pages] = self._free.pop()
            sequence.pages += 1

    def open(self) -> KvSequence:
        """A new, empty sequence."""
        slots = -(-self.max_context // self.page_tokens)
        return KvSequence((C.c_int32 * slots)())

    def close(self, sequence: KvSequence) -> None:
        """Take back a sequence's pages."""
        self._free.extend(sequence.table[index] for index in reversed(range(sequence.pages)))
        sequence.pages = sequence.length = 0


@dataclass
class KvSequence:
    """One sequence: how many tokens it holds and the pages they lie in."""

    table: C.Array[C.c_int32]
    pages: int = 0
    length: int = 0


@dataclass
class StepInput:
    """The native step and the arrays it points to, allocated once for the most rows and sequences of the plan."""

    rows: int
    sequences: int
    tokens: C.Array[C.c_int32] = field(init=False)

    def __post_init__(self) -> None:
        self.tokens = (C.c_int32 * self.rows)()
        self.positions = (C.c_int32 * self.rows)()
        self.row_segment = (C.c_int32 * self.rows)()
        self.segment = (Segment * self.sequences)()
        self.out_row = (C.c_int32 * self.rows)()
        self.struct = StepStruct(
            tokens=self.tokens,
            positions=self.positions,
            row_segment=self.row_segment,
            segment=self.segment,
            out_row=self.out_row,
        )

    def one_sequence(self, sequence: KvSequence, tokens: Sequence[int], out_rows: Sequence[int]) -> StepStruct:
        """Consecutive tokens of one sequence, which already holds ``sequence.length`` tokens."""
        count, start = len(tokens), sequence.length
        self.tokens[:count] = tokens
        self.positions[:count] = range(start, start + count)
        self.row_segment[:count] = [0] * count
        self.segment[0] = Segment(0, count, start, 0, C.cast(sequence.table, C.POINTER(C.c_int32)))
        self._finish(count, 1, out_rows)
        return self.struct

    def one_token_each(self, sequences: Sequence[KvSequence], tokens: Sequence[int]) -> StepStruct:
        """The next token of several sequences; every row gets logits."""
        count = len(sequences)
        self.tokens[:count] = tokens
        self.row_segment[:count] = range(count)
        for row, sequence in enumerate(sequences):
            self.positions[row] = sequence.length
            self.segment[row] = Segment(row, 1, sequence.length, 0, C.cast(sequence.table, C.POINTER(C.c_int32)))
        self._finish(count, count, range(count))
        return self.struct

    def _finish(self, rows: int, segments: int, out_rows: Sequence[int]) -> None:
        self.out_row[: len(out_rows)] = out_rows
        self.struct.rows, self.struct.segments, self.struct.out_rows = rows, segments, len(out_rows)


def largest(lists: Sequence[Any], phase: str) -> int:
    """Most rows that any launch list of a phase is planned for."""
    return max(entry.rows for entry in lists if entry.phase == phase)


def sampling_of(options: Mapping[str, Any]) -> dict[str, Any]:
    """Sampling options checked against what sampling means. Raises TapeoutError."""
    temperature, top_p, top_k = float(options["temperature"]), float(options["top_p"]), int(options["top_k"])
    if not 0 <= temperature <= 100:
        raise TapeoutError(f"temperature is {temperature}; it must lie between 0 (greedy) and 100")
    if not 0 < top_p <= 1:
        raise TapeoutError(f"top_p is {top_p}; it must lie above 0 and be at most 1 (1 keeps every token)")
    if top_k < 0:
        raise TapeoutError(f"top_k is {top_k}; it must be 0 (off) or positive")
    return {
        "temperature": temperature,
        "top_p": top_p,
        "top_k": min(top_k, 2**31 - 1),
        "seed": int(options["seed"]) % 2**64,
    }
