"""The inputs of a step in device memory: a mirror on the host knows what is there, and only differences are copied."""

from __future__ import annotations

import ctypes as C
import struct
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from tapeout.runtime.cuda.driver import Driver
from tapeout.runtime.errors import TapeoutError
from tapeout.runtime.sequence import KvSequence

SLOTS = 4  # uploads that may be under way
NEAR = 4096  # bytes between two changes that are cheaper to copy again than to leave out
UNKNOWN = struct.pack("<i", -(2**31))  # a token that only the device knows


class StepState:
    """The step region of the arena. ``layout`` is the plan's memory.step; the region must hold zeros at the start."""

    def __init__(self, driver: Driver, stream: Any, layout: Mapping[str, Any], address: int) -> None:
        self._driver, self._stream, self._address = driver, stream, address
        self._bytes: int = layout["bytes"]
        self.segments, self.max_pages, self.out_rows = layout["segments"], layout["max_pages"], layout["out_rows"]
        self._fields: dict[str, tuple[int, int]] = {name: tuple(place) for name, place in layout["fields"].items()}
        self._mirror = bytearray(self._bytes)
        self._changed: list[tuple[int, int]] = []
        self._unknown = 0  # rows below this may hold a token that only the device knows
        self._owners: list[tuple[KvSequence, int, int] | None] = [None] * self.segments
        self._pinned = driver.host_alloc(SLOTS * self._bytes)
        self._staging = memoryview((C.c_char * (SLOTS * self._bytes)).from_address(self._pinned)).cast("B")
        self._events = [driver.event() for _ in range(SLOTS)]
        self._slot = 0

    def address(self, field: str) -> int:
        """Device address of a field."""
        return self._address + self._fields[field][0]

    def chunk(self, sequence: KvSequence, tokens: Sequence[int], out_rows: Sequence[int], sample: bool) -> None:
        """Consecutive tokens of one sequence, which already holds ``sequence.length`` tokens."""
        count, start = len(tokens), sequence.length
        self._put_tokens(tokens)
        self._put("positions", array("i", range(start, start + count)).tobytes())
        self._put("row_segment", bytes(4 * count))
        self._put("counts", struct.pack("<4i", count, 1, len(out_rows), 0))
        self._put("out_row", array("i", out_rows).tobytes())
        self._table(0, sequence)
        if sample:
            self._sampling([sequence], count)
        self._push()

    def rows(self, sequences: Sequence[KvSequence], tokens: Sequence[int] | None) -> None:
        """The next token of several sequences; None for the tokens that are on the device."""
        count = len(sequences)
        if count > self.segments:
            raise TapeoutError(f"{count} sequences in one step are more than the {self.segments} of the plan")
        if tokens is not None:
            self._put_tokens(tokens)
        order = array("i", range(count)).tobytes()
        self._put("positions", array("i", [sequence.length for sequence in sequences]).tobytes())
        self._put("row_segment", order)
        self._put("counts", struct.pack("<4i", count, count, count, 0))
        self._put("out_row", order)
        for index, sequence in enumerate(sequences):
            self._table(index, sequence)
        self._sampling(sequences, 1)
        self._push()

    def want(self, out_rows: Sequence[int]) -> None:
        """Ask for the logits of these rows."""
        start = self._fields["counts"][0]
        rows, segments = struct.unpack_from("<2i", self._mirror, start)
        self._put("counts", struct.pack("<4i", rows, segments, len(out_rows), 0))
        self._put("out_row", array("i", out_rows).tobytes())
        self._push()

    def advanced(self, sequences: Sequence[KvSequence]) -> None:
        """A decode list was launched: it moves on to the next position and takes the tokens it chooses."""
        count = len(sequences)
        for field, kind, by in (("positions", "i", 1), ("sample_position", "Q", 2)):
            values = array(kind, [sequence.length + by for sequence in sequences])
            self._set(self._fields[field][0], values.tobytes())
        self._set(self._fields["tokens"][0], UNKNOWN * count)
        self._unknown = max(self._unknown, count)

    def forget(self) -> None:
        """A traced decode list may stop anywhere: nothing is known of what it advances."""
        for field in ("tokens", "positions", "sample_position"):
            start, nbytes = self._fields[field]
            self._set(start, UNKNOWN * (nbytes // 4))
        self._unknown = self._fields["tokens"][1] // 4

    def learned(self, tokens: Sequence[int]) -> None:
        """The tokens that ``advanced`` left unknown."""
        self._set(self._fields["tokens"][0], array("i", tokens).tobytes())
        if len(tokens) >= self._unknown:
            self._unknown = 0

    def _put_tokens(self, tokens: Sequence[int]) -> None:
        self._put("tokens", array("i", tokens).tobytes())
        if len(tokens) >= self._unknown:
            self._unknown = 0

    def _sampling(self, sequences: Sequence[KvSequence], rows: int) -> None:
        options = [sequence.sampling for sequence in sequences]
        self._put("temperature", array("f", [each.temperature for each in options]).tobytes())
        self._put("top_p", array("f", [each.top_p for each in options]).tobytes())
        self._put("top_k", array("i", [each.top_k for each in options]).tobytes())
        self._put("seed", array("Q", [each.seed for each in options]).tobytes())
        self._put("sample_position", array("Q", [sequence.length + rows for sequence in sequences]).tobytes())

    def _table(self, segment: int, sequence: KvSequence) -> None:
        """The page table of a segment. Tables only grow, so one that was here is compared from its old end on."""
        owner = self._owners[segment]
        known = owner[1] if owner and owner[0] is sequence and owner[2] == sequence.closings else 0
        if sequence.pages > known:
            start = self._fields["page_table"][0] + 4 * (segment * self.max_pages + known)
            pages = memoryview(sequence.table).cast("B")[4 * known : 4 * sequence.pages]
            self._change(start, bytes(pages))
        self._owners[segment] = (sequence, sequence.pages, sequence.closings)

    def _put(self, field: str, data: bytes) -> None:
        start, room = self._fields[field]
        if len(data) > room:
            raise TapeoutError(f"a step needs {len(data)} bytes of {field}, and plan.json gives it {room}")
        self._change(start, data)

    def _change(self, start: int, data: bytes) -> None:
        if not self._mirror.startswith(data, start):
            self._set(start, data)
            self._changed.append((start, start + len(data)))

    def _set(self, start: int, data: bytes) -> None:
        self._mirror[start : start + len(data)] = data

    def _push(self) -> None:
        """Copy what changed, through a pinned slot whose last copy is done."""
        if not self._changed:
            return
        self._slot = (self._slot + 1) % SLOTS
        event, base = self._events[self._slot], self._slot * self._bytes
        self._driver.wait(event, "an earlier step")
        for start, stop in self._merged():
            self._staging[base + start : base + stop] = self._mirror[start:stop]
            self._driver.upload(self._address + start, self._pinned + base + start, stop - start, self._stream)
        self._driver.record(event, self._stream)
        self._changed.clear()

    def _merged(self) -> list[tuple[int, int]]:
        """The changes in order, near ones made one, but for gaps that hold tokens the mirror does not know."""
        tokens = self._fields["tokens"][0]
        hidden = (tokens, tokens + 4 * self._unknown)
        merged: list[tuple[int, int]] = []
        for start, stop in sorted(self._changed):
            if merged:
                first, last = merged[-1]
                clear = start <= hidden[0] or last >= hidden[1]
                if start - last <= NEAR and clear:
                    merged[-1] = (first, max(last, stop))
                    continue
            merged.append((start, stop))
        return merged
