"""What ranks hand to one another, by launch list, with the predicted time of each list."""

from __future__ import annotations

from dataclasses import dataclass

from tapeout.compiler.views.inspect import link_text
from tapeout.compiler.views.plan_file import Plan


@dataclass(frozen=True)
class Made:
    """``count`` equal collectives of a list: bytes of the result of one, and its predicted microseconds."""

    kind: str
    count: int
    columns: int
    bytes: int
    algorithm: str
    us: float | None

    @property
    def together(self) -> float | None:
        """Predicted microseconds of all of them."""
        return None if self.us is None else self.us * self.count


@dataclass(frozen=True)
class Exchange:
    """The collectives of one launch list."""

    name: str
    made: tuple[Made, ...]

    @property
    def bytes(self) -> int:
        """Bytes of all results."""
        return sum(made.bytes * made.count for made in self.made)

    @property
    def us(self) -> float | None:
        """Predicted microseconds of the list's collectives, where each has a prediction."""
        times = [made.together for made in self.made]
        return sum(time or 0.0 for time in times) if times and None not in times else None


@dataclass(frozen=True)
class Exchanges:
    """All lists of a plan, and the link that predictions are for, in words; "" where nothing is predicted."""

    lists: tuple[Exchange, ...]
    link: str

    @property
    def largest(self) -> float:
        """The longest predicted time of a list."""
        return max((one.us or 0.0 for one in self.lists), default=0.0)


def exchanges(plan: Plan) -> Exchanges:
    """The collectives of every launch list that has any."""
    communication = plan["communication"]
    lists = tuple(
        Exchange(f"{entry['phase']}.{entry['rows']}", tuple(map(_made, entry["collectives"])))
        for entry in communication["lists"]
        if entry["collectives"]
    )
    return Exchanges(lists, link_text(communication["link"]) if "link" in communication else "")


def _made(entry: Plan) -> Made:
    return Made(
        kind=entry["kind"],
        count=entry["count"],
        columns=entry["columns"],
        bytes=entry["bytes"],
        algorithm=entry["algorithm"],
        us=entry.get("us"),
    )
