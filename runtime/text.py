"""Text as it streams: whole characters out of tokens, and stop strings that are never shown in part."""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tapeout.runtime.tokenizer import Tokenizer


class StreamDecoder:
    """Turns token ids into text one by one; a character whose bytes span tokens comes out with its last byte.

    Bytes that can never become a character come out as U+FFFD. The pieces joined are the text of the ids as a
    continuation: a leading space of the first token is kept.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        """The text that this token completes, often empty for a token that ends inside a character."""
        if self._skip_special and self._tokenizer.is_special(token):
            return ""
        return self._utf8.decode(self._tokenizer.token_bytes(token))

    def flush(self) -> str:
        """What is left at the end: U+FFFD for a character that was never finished."""
        return self._utf8.decode(b"", final=True)


class StopStrings:
    """Watches streamed text for any of some strings; text that may begin one is held back until that is settled."""

    def __init__(self, stops: Iterable[str] = ()) -> None:
        self._stops: tuple[str, ...] = tuple(dict.fromkeys(stop for stop in stops if stop))
        self._longest = max(map(len, self._stops), default=0)
        self._held: str = ""
        self.matched: str | None = None

    @property
    def stopped(self) -> bool:
        """Whether a stop string has been met."""
        return self.matched is not None

    def push(self, text: str) -> str:
        """The text that may be shown now. After a match (``matched`` is set) nothing more ever is."""
        if self.matched is not None or not self._stops:
            return "" if self.matched is not None else text
        text = self._held + text
        found = min(((at, -len(stop), stop) for stop in self._stops if (at := text.find(stop)) >= 0), default=None)
        if found is not None:
            self.matched, self._held = found[2], ""
            return text[: found[0]]
        keep = self._begun(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """The text held back when the stream ends without a match."""
        held, self._held = self._held, ""
        return held

    def _begun(self, text: str) -> int:
        """Length of the longest end of ``text`` that some stop string begins with."""
        for size in range(min(self._longest - 1, len(text)), 0, -1):
            end = text[len(text) - size :]
            if any(stop.startswith(end) for stop in self._stops):
                return size
        return 0
