"""The tokenizer of an artifact: the compact table where the compiler wrote one, else the ``tokenizers`` library."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from tapeout.runtime.errors import TapeoutError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

TABLE = "tokenizer.bin"
LIBRARY = "tokenizer.json"
GENERATION = "generation.json"


class Tokenizer(Protocol):
    """Text to token ids and back.

    ``bos_id`` is None for a model without one; ``eos_ids`` are all ids that end a generation; ids of the model that
    the tokenizer does not have (padding rows of an embedding) are never encoded and decode to nothing.
    """

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included."""
        ...

    @property
    def bos_id(self) -> int | None:
        """Id of the token that begins a text."""
        ...

    @property
    def eos_ids(self) -> frozenset[int]:
        """Ids that end a generation: the union of what the files of the model declare."""
        ...

    def encode(self, text: str, *, add_bos: bool = True, special: bool = False) -> list[int]:
        """Token ids of ``text``.

        ``add_bos`` prepends the begin token where the model wants one. ``special`` reads the texts of control tokens
        as those tokens (for rendered chat templates); without it they are plain text.
        """
        ...

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of ``ids``; control tokens are left out unless ``skip_special`` is false."""
        ...

    def token_bytes(self, token: int) -> bytes:
        """Bytes that one token stands for; empty for an id that the tokenizer does not have."""
        ...

    def is_special(self, token: int) -> bool:
        """Whether the token is a control token, which text output leaves out."""
        ...

    def control_texts(self, text: str) -> list[str]:
        """The texts of control tokens that stand in ``text``, which ``encode(special=True)`` would read as tokens."""
        ...


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer in an artifact folder, or one without tokens. Raises TapeoutError when it is damaged."""
    generation = _generation(folder / GENERATION)
    bos, eos, add_bos = generation["bos_token_id"], frozenset(generation["eos_token_ids"]), generation["add_bos"]
    if (folder / TABLE).is_file():
        from tapeout.runtime.bpe import TableTokenizer, map_table

        try:
            return TableTokenizer(map_table(folder / TABLE), bos_id=bos, eos_ids=eos, add_bos=add_bos)
        except (KeyError, TypeError, IndexError, re.error) as error:
            raise TapeoutError(f"{folder / TABLE}: is damaged ({error!r}); compile again") from error
    if (folder / LIBRARY).is_file():
        return LibraryTokenizer(
            (folder / LIBRARY).read_bytes(), bos_id=bos, eos_ids=eos, add_bos=add_bos, pieces=generation["pieces"]
        )
    return NoTokenizer(folder, bos, eos)


def _generation(path: Path) -> Mapping[str, Any]:
    defaults: dict[str, Any] = {"bos_token_id": None, "eos_token_ids": [], "add_bos": False, "pieces": "decoded"}
    try:
        return {**defaults, **json.loads(path.read_bytes())}
    except FileNotFoundError:
        raise TapeoutError(f"{path}: is missing; an artifact has it beside its tokenizer, so compile again") from None
    except (OSError, ValueError, TypeError) as error:
        raise TapeoutError(f"{path}: is not the JSON object it should be ({error}); compile again") from error


def byte_alphabet() -> list[int]:
    """Code points that GPT-2's byte-level BPE writes the bytes 0 to 255 as: printable ones as themselves."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [byte if byte in printable else next(others) for byte in range(256)]


class NoTokenizer:
    """Stands in where the checkpoint had no tokenizer: token ids work, text does not."""

    vocab_size = 0

    def __init__(self, folder: Path, bos_id: int | None, eos_ids: frozenset[int]) -> None:
        self._folder, self.bos_id, self.eos_ids = folder, bos_id, eos_ids

    def encode(self, text: str, *, add_bos: bool = True, special: bool = False) -> list[int]:
        """Always raises TapeoutError."""
        del text, add_bos, special
        raise TapeoutError(
            f"{self._folder}: the checkpoint had no tokenizer, so the artifact takes token ids and no text; "
            "compile from a checkpoint with a tokenizer"
        )

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """No text."""
        del ids, skip_special
        return ""

    def token_bytes(self, token: int) -> bytes:
        """No bytes."""
        del token
        return b""

    def is_special(self, token: int) -> bool:
        """Never."""
        del token
        return False

    def control_texts(self, text: str) -> list[str]:
        """None."""
        del text
        return []


class LibraryTokenizer:
    """A tokenizer.json run by the ``tokenizers`` library, for kinds that the table does not hold.

    ``pieces`` says how the text of a token becomes bytes: "byte_level" (GPT-2's alphabet), "sentencepiece" (spaces as
    U+2581, bytes as <0xNN>) or "decoded" (whatever the library decodes the token alone to).
    """

    def __init__(
        self,
        data: bytes,
        *,
        bos_id: int | None = None,
        eos_ids: Iterable[int] = (),
        add_bos: bool = False,
        pieces: str = "decoded",
    ) -> None:
        from tokenizers import Tokenizer as Library

        try:
            self._library: Any = Library.from_str(data.decode())
        except Exception as error:
            raise TapeoutError(f"{LIBRARY}: the tokenizers library cannot read it ({error})") from error
        added: Mapping[int, Any] = self._library.get_added_tokens_decoder()
        self._special = frozenset(token for token, entry in added.items() if entry.special)
        self._added: dict[int, bytes] = {token: entry.content.encode() for token, entry in added.items()}
        self._bytes = {code: byte for byte, code in enumerate(byte_alphabet())} if pieces == "byte_level" else {}
        self._pieces, self._add_bos = pieces, add_bos
        self.vocab_size: int = self._library.get_vocab_size(with_added_tokens=True)
        self.bos_id, self.eos_ids = bos_id, frozenset(eos_ids)

    def encode(self, text: str, *, add_bos: bool = True, special: bool = False) -> list[int]:
        """See Tokenizer."""
        self._library.encode_special_tokens = not special
        start = [self.bos_id] if add_bos and self._add_bos and self.bos_id is not None else []
        ids: list[int] = self._library.encode(text, add_special_tokens=False).ids
        return start + ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """See Tokenizer."""
        known = [token for token in ids if self._library.id_to_token(token) is not None]
        text: str = self._library.decode(known, skip_special_tokens=skip_special)
        return text

    def token_bytes(self, token: int) -> bytes:
        """See Tokenizer."""
        if token in self._added and (self._pieces != "sentencepiece" or token in self._special):
            return self._added[token]
        text: str | None = self._library.id_to_token(token) if token >= 0 else None
        if text is None:
            return b""
        if self._pieces == "byte_level" and all(ord(char) in self._bytes for char in text):
            return bytes(self._bytes[ord(char)] for char in text)
        if self._pieces == "sentencepiece":
            if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
                return bytes([int(text[3:5], 16)])
            return text.replace("\u2581", " ").encode()
        return str(self._library.decode([token], skip_special_tokens=False)).encode()

    def is_special(self, token: int) -> bool:
        """See Tokenizer."""
        return token in self._special

    def control_texts(self, text: str) -> list[str]:
        """See Tokenizer."""
        self._library.encode_special_tokens = False
        ids: list[int] = self._library.encode(text, add_special_tokens=False).ids
        return [self._added[token].decode() for token in ids if token in self._special]
