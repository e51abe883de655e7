"""Which modules the lists in a quantization_config name, by the rules of the tools that write them."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Sequence


def matches_start(module: str, patterns: Sequence[str]) -> str | None:
    """The first pattern that names a module as in transformers (``should_convert_module``), or None.

    A pattern is a regular expression for the start of the name, up to the end of one of its parts, or, taken as it
    stands, the end of the name. Raises re.error for one that is no regular expression.
    """
    for pattern in patterns:
        if re.match(rf"(?:{pattern})(?:(?<=\.)|(?=\.)|$)", module) or module.endswith(pattern):
            return pattern
    return None


def matches_wildcard(module: str, patterns: Sequence[str]) -> str | None:
    """The first pattern that names a module as in ModelOpt (``exclude_modules``): the whole name, with ``*``."""
    names = spellings(module)
    return next((pattern for pattern in patterns if any(fnmatch.fnmatchcase(name, pattern) for name in names)), None)


def spellings(module: str) -> tuple[str, ...]:
    """A module's name, and the one it has in the text model where that is a part of a multimodal one.

    The text model is quantized before or after it becomes a part, and lists keep the names of that time.
    """
    own = module.removeprefix("language_model.").replace("model.language_model.", "model.", 1)
    return tuple(dict.fromkeys((module, own)))
