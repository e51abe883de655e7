"""The sequences a step works on: the pages they lie in and how their tokens are chosen."""

from __future__ import annotations

import ctypes as C
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tapeout.runtime.errors import TapeoutError


@dataclass(frozen=True)
class SamplingOptions:
    """How the next token of a sequence is chosen: greedily unless ``temperature`` is positive."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0


GREEDY = SamplingOptions()


class PagePool:
    """The free pages of the KV pool. Pages of a sequence need not be neighbours.

    Where a model keeps state that is not paged, there are ``slots`` for it, and a sequence has one while it has pages.
    """

    def __init__(self, pages: int, page_tokens: int, max_context: int, slots: int = 0) -> None:
        self.page_tokens, self.max_context, self.slots = page_tokens, max_context, slots
        self._free = list(range(pages - 1, -1, -1))
        self._free_slots = list(range(slots - 1, -1, -1))

    @property
    def free(self) -> int:
        """Pages that no sequence has."""
        return len(self._free)

    def grow(self, sequence: KvSequence, length: int) -> None:
        """Give a sequence the pages for ``length`` tokens. Raises TapeoutError beyond the context or the pool."""
        if length > self.max_context:
            raise TapeoutError(f"the sequence would hold {length} tokens, but its context is {self.max_context}")
        if self.slots and sequence.slot is None:
            if not self._free_slots:
                raise TapeoutError(
                    f"all {self.slots} places for the state of a sequence are taken; close a sequence, or compile with "
                    "a larger serving.max_sequences"
                )
            sequence.slot = self._free_slots.pop()
        while sequence.pages * self.page_tokens < length:
            if not self._free:
                raise TapeoutError(
                    f"the KV pool is full: {sequence.pages} pages of this sequence are the last; close a sequence"
                )
            sequence.table[sequence.pages] = self._free.pop()
            sequence.pages += 1

    def open(self, sampling: SamplingOptions = GREEDY) -> KvSequence:
        """A new, empty sequence."""
        slots = -(-self.max_context // self.page_tokens)
        return KvSequence((C.c_int32 * slots)(), sampling)

    def close(self, sequence: KvSequence) -> None:
        """Take back a sequence's pages and its slot."""
        self._free.extend(sequence.table[index] for index in reversed(range(sequence.pages)))
        if sequence.slot is not None:
            self._free_slots.append(sequence.slot)
            sequence.slot = None
        sequence.pages = sequence.length = 0
        sequence.closings += 1


@dataclass(eq=False)
class KvSequence:
    """One sequence: how many tokens it holds, the pages they lie in, and how the next is chosen.

    Pages are only ever added at the end, until the sequence is closed (``closings`` counts that). ``slot`` is where its
    state lies, in models that keep some.
    """

    table: C.Array[C.c_int32]
    sampling: SamplingOptions = GREEDY
    pages: int = 0
    length: int = 0
    closings: int = 0
    slot: int | None = None


def sampling_of(options: Mapping[str, Any]) -> SamplingOptions:
    """Sampling options checked against what sampling means. Raises TapeoutError."""
    temperature, top_p, top_k = float(options["temperature"]), float(options["top_p"]), int(options["top_k"])
    if not 0 <= temperature <= 100:
        raise TapeoutError(f"temperature is {temperature}; it must lie between 0 (greedy) and 100")
    if not 0 < top_p <= 1:
        raise TapeoutError(f"top_p is {top_p}; it must lie above 0 and be at most 1 (1 keeps every token)")
    if top_k < 0:
        raise TapeoutError(f"top_k is {top_k}; it must be 0 (off) or positive")
    return SamplingOptions(temperature, top_p, min(top_k, 2**31 - 1), int(options["seed"]) % 2**64)
