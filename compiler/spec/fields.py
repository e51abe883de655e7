"""Field types that specs and device profiles share: byte sizes and names of number formats."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, WithJsonSchema

_UNITS = {
    "B": 1,
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
_SIZE = re.compile(r"^(\d+(?:\.\d+)?) ?(" + "|".join(_UNITS) + r")$")
_SIZE_RULE = "a size is a number of bytes or text such as 8GiB (units: " + ", ".join(_UNITS) + ")"


class Section(BaseModel):
    """A part of a spec or profile: immutable, and it refuses keys that it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


def parse_size(value: Any) -> int:
    """Bytes of ``8GiB``, ``1.5 GB`` or a plain integer. Raises ValueError with the rule for anything else."""
    if isinstance(value, int) and not isinstance(value, bool):
        if value < 0:
            raise ValueError(f"{value} is negative; {_SIZE_RULE}")
        return value
    match = _SIZE.match(value) if isinstance(value, str) else None
    if match is None:
        raise ValueError(f"{value!r} is not a size; {_SIZE_RULE}")
    return round(float(match[1]) * _UNITS[match[2]])


Size = Annotated[
    int,
    BeforeValidator(parse_size),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 0}, {"type": "string", "pattern": _SIZE.pattern}]}),
]


def writable_formats() -> list[str]:
    """Names of the number formats that weights can be converted to, in registry order."""
    from tapeout.compiler.formats import FORMATS  # noqa: PLC0415 - numpy is not needed to print a schema's help

    return [name for name, known in FORMATS.items() if known.encode is not None]


def _format_choice(value: Any) -> Any:
    legal = ["keep", *writable_formats()]
    if isinstance(value, str) and value not in legal:
        raise ValueError(f"{value!r} is not a format that can be written; use one of: {', '.join(legal)}")
    return value


FormatChoice = Annotated[str, BeforeValidator(_format_choice)]


def _stored_format(value: Any) -> Any:
    from tapeout.compiler.formats import FORMATS  # noqa: PLC0415 - as above

    if isinstance(value, str) and value not in FORMATS:
        raise ValueError(f"{value!r} is no number format; use one of: {', '.join(FORMATS)}")
    return value


StoredFormat = Annotated[str, BeforeValidator(_stored_format)]
