"""The protobuf wire format (protobuf.dev, "Encoding"), read where it lies: what is not asked for is skipped unread."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from tapeout.compiler.checkpoints.base import MAX_NAME
from tapeout.runtime.errors import TapeoutError

BLOCK = 1 << 14  # bytes read at once
MAX_FIELDS = 10_000_000  # a graph of a large model has some hundred thousand
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5


@dataclass(frozen=True)
class Field:
    """One field of a message: ``value`` of a varint, or where its bytes lie in the file."""

    number: int
    wire: int
    start: int
    stop: int
    value: int = 0


class ProtobufFile:
    """A file that holds one message. Errors are TapeoutError of one sentence."""

    def __init__(self, path: Path, file: BinaryIO, size: int) -> None:
        self.path, self.size = path, size
        self._file = file
        self._block, self._block_start = b"", 0
        self._fields = 0

    def fields(self, start: int, stop: int) -> Iterator[Field]:
        """The fields of the message that lies in [start, stop), in the file's order."""
        at = start
        while at < stop:
            self._fields += 1
            if self._fields > MAX_FIELDS:
                raise self.damaged(f"describes more than {MAX_FIELDS} things before byte {at}")
            tag, begin = self._varint(at, stop)
            number, wire = tag >> 3, tag & 7
            field = self._field(number, wire, begin, stop)
            yield field
            at = field.stop

    def parts(self, field: Field) -> Iterator[Field]:
        """The fields of the message that a field holds."""
        if field.wire != BYTES:
            raise self.damaged(f"holds a number where a message belongs, before byte {field.stop}")
        return self.fields(field.start, field.stop)

    def text(self, field: Field) -> str:
        """A short string: a name, a key."""
        if field.wire != BYTES or field.stop - field.start > MAX_NAME:
            raise self.damaged(f"has a name of {field.stop - field.start} bytes; names have at most {MAX_NAME}")
        try:
            return self._bytes(field.start, field.stop).decode()
        except UnicodeDecodeError as error:
            raise self.damaged(f"has a name that is not UTF-8 text at byte {field.start}") from error

    def numbers(self, field: Field, most: int) -> Iterator[int]:
        """The varints of one entry of a repeated field, packed or not; at most ``most`` of them."""
        if field.wire == VARINT:
            yield field.value
            return
        at, found = field.start, 0
        while at < field.stop:
            found += 1
            if found > most:
                raise self.damaged(f"lists more than {most} numbers at byte {field.start}")
            value, at = self._varint(at, field.stop)
            yield value

    def damaged(self, what: str) -> TapeoutError:
        """The error for what cannot be."""
        return TapeoutError(f"{self.path}: {what}: the file is damaged, or is not ONNX")

    def _field(self, number: int, wire: int, begin: int, stop: int) -> Field:
        if wire == VARINT:
            value, end = self._varint(begin, stop)
            return Field(number, wire, begin, end, value)
        if wire == BYTES:
            length, begin = self._varint(begin, stop)
        elif wire in (FIXED32, FIXED64):
            length = 4 if wire == FIXED32 else 8
        else:
            raise self.damaged(f"has a field of the unknown kind {wire} before byte {begin}")
        if length > stop - begin:
            raise self.damaged(f"has a field of {length} bytes at byte {begin}, where {stop - begin} are left")
        return Field(number, wire, begin, begin + length)

    def _varint(self, at: int, stop: int) -> tuple[int, int]:
        """The number that starts at a byte, and where it ends."""
        value = 0
        for index, byte in enumerate(self._bytes(at, min(at + 10, stop))):
            value |= (byte & 0x7F) << (7 * index)
            if byte < 0x80:
                return value & 0xFFFF_FFFF_FFFF_FFFF, at + index + 1
        raise self.damaged(f"has a number at byte {at} that does not end")

    def _bytes(self, start: int, stop: int) -> bytes:
        """Some bytes, fewer than a block."""
        first = start - self._block_start
        if first < 0 or stop - self._block_start > len(self._block):
            self._file.seek(start)
            self._block, self._block_start, first = self._file.read(BLOCK), start, 0
        found = self._block[first : first + stop - start]
        if len(found) < stop - start:
            raise self.damaged(f"ends at byte {start + len(found)} and had {self.size} when it was opened")
        return found
