"""The one exception type that users see."""

from __future__ import annotations


class TapeoutError(ValueError):
    """Bad input, said in one sentence: what was wrong, where, the rule, and what would work.

    Everything a user can cause ends in this type; a bare exception of another kind is a bug of ours.
    """
