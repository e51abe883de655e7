"""Sampled tokens on their way back: copied into pinned slots behind each step, waited for when they are asked for."""

from __future__ import annotations

import ctypes as C
from typing import Any

from tapeout.runtime.cuda.driver import Driver
from tapeout.runtime.errors import TapeoutError

SLOTS = 8


class Results:
    """Tokens of steps by ticket. A slot that is needed again is read out first, so no ticket is ever lost."""

    def __init__(self, driver: Driver, stream: Any, sampled: int, rows: int) -> None:
        self._driver, self._stream, self._sampled, self._rows = driver, stream, sampled, rows
        pinned = driver.host_alloc(SLOTS * 4 * rows)
        kind = C.c_int32 * rows
        self._slots = [(pinned + 4 * rows * i, kind.from_address(pinned + 4 * rows * i)) for i in range(SLOTS)]
        self._events = [driver.event() for _ in range(SLOTS)]
        self._waiting: dict[int, tuple[int, str]] = {}  # ticket: rows and the graph that made them
        self._read: dict[int, list[int]] = {}
        self.last = 0

    def fetch(self, rows: int, made_by: str) -> int:
        """Copy the tokens of the step that was just put on the stream; returns its ticket."""
        self.last += 1
        slot = self.last % SLOTS
        self._read_out(self.last - SLOTS)
        self._driver.download(self._slots[slot][0], self._sampled, 4 * rows, self._stream)
        self._driver.record(self._events[slot], self._stream)
        self._waiting[self.last] = (rows, made_by)
        return self.last

    def take(self, ticket: int) -> list[int]:
        """Wait for the tokens of a step. Raises TapeoutError when a row's logits were not finite."""
        self._read_out(ticket)
        tokens = self._read.pop(ticket)
        if min(tokens, default=0) < 0:
            raise TapeoutError("the step failed: the logits hold NaN or infinite values")
        return tokens

    def drop(self, ticket: int) -> None:
        """Forget a step; its slot is free at once, since later copies into it come after its own."""
        self._waiting.pop(ticket, None)
        self._read.pop(ticket, None)

    def _read_out(self, ticket: int) -> None:
        if ticket not in self._waiting:
            return
        rows, made_by = self._waiting[ticket]
        self._driver.wait(self._events[ticket % SLOTS], made_by)
        del self._waiting[ticket]
        self._read[ticket] = self._slots[ticket % SLOTS][1][:rows]
