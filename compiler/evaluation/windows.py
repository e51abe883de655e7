"""The text of an evaluation: read, made into tokens, and cut into windows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tapeout.runtime.errors import TapeoutError

DEFAULT_CONTEXT = 512


@dataclass(frozen=True)
class Window:
    """Tokens that run at once, with an empty cache. Each but the first is predicted from those before it.

    ``first`` is the index in the text of the token that ``ids[1]`` is.
    """

    ids: tuple[int, ...]
    first: int

    @property
    def targets(self) -> tuple[int, ...]:
        """The tokens that are predicted."""
        return self.ids[1:]


def read_text(path: Path) -> str:
    """The file's text, line ends as they are. Raises TapeoutError where it cannot be read or is not UTF-8."""
    try:
        return path.read_bytes().decode()
    except OSError as error:
        raise TapeoutError(f"{path}: cannot be read ({error.strerror}); --text takes a file of plain text") from error
    except UnicodeDecodeError as error:
        raise TapeoutError(
            f"{path}: is not UTF-8 (byte {error.start}); --text takes a file of plain text in UTF-8"
        ) from error


def context_of(asked: int | None, longest: int) -> int:
    """Tokens of a window: as asked, else 512 or what fits. Raises TapeoutError unless it lies in 2 .. ``longest``."""
    context = min(DEFAULT_CONTEXT, longest) if asked is None else asked
    if not 2 <= context <= longest:
        raise TapeoutError(
            f"windows of {context} tokens do not fit: they take at least 2 tokens, and at most the {longest} of the "
            "shortest context that an artifact here was planned for"
        )
    return context


def cut(ids: Sequence[int], begin: Sequence[int], context: int, name: str) -> list[Window]:
    """Windows of ``context`` tokens over ``ids``, side by side; the last holds what is left.

    ``begin`` (the begin token, or nothing) starts every window, so that with one every token of the text is predicted.
    Raises TapeoutError where the text, called ``name``, does not fill one window.
    """
    step = context - len(begin)
    if len(ids) < step:
        raise TapeoutError(
            f"{name}: is too short: {len(ids)} tokens, where one window takes {step}; give a longer text or a smaller "
            "--context"
        )
    pieces = ((start, (*begin, *ids[start : start + step])) for start in range(0, len(ids), step))
    return [Window(piece, start + 1 - len(begin)) for start, piece in pieces if len(piece) > 1]
