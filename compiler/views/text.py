"""Short text for humans: sizes, differences, names with their layer number taken out, index ranges."""

from __future__ import annotations

import re
from collections.abc import Iterable

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
_STEPS = ("B", "KiB", "MiB", "GiB", "TiB")


def size(count: int) -> str:
    """``92.1 MiB``; bytes below 1 KiB exactly."""
    value, step = float(count), 0
    while abs(value) >= 1024 and step < len(_STEPS) - 1:
        value, step = value / 1024, step + 1
    return f"{value:.1f} {_STEPS[step]}" if step else f"{count} B"


def microseconds(time: float) -> str:
    """``4.0 us``, from a millisecond on ``31.8 ms``."""
    return f"{time:.1f} us" if time < 1000 else f"{time / 1000:.1f} ms"


def change_of_size(before: int, after: int) -> str:
    """``+22.5 MiB (+24 %)``."""
    delta = after - before
    sign = "+" if delta >= 0 else "-"
    percent = f" ({delta / before:+.0%})".replace("%", " %") if before and abs(delta) * 200 >= before else ""
    return f"{sign}{size(abs(delta))}{percent}"


def wildcard(name: str, mark: str = "*") -> str:
    """``model.layers.3.mlp.down_proj`` as ``model.layers.*.mlp.down_proj``."""
    return _NUMBER.sub(mark, name)


def indices(name: str) -> tuple[int, ...]:
    """The numbers that :func:`wildcard` takes out."""
    return tuple(int(number) for number in _NUMBER.findall(name))


def ranges(numbers: Iterable[int]) -> str:
    """``0-4, 6, 8-10``."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def group_label(names: Iterable[str], population: Iterable[str]) -> str:
    """One label for names that share a wildcard: which layers, unless it is all of them in ``population``."""
    names = sorted(set(names), key=lambda name: (indices(name), name))
    if len(names) == 1:
        return names[0]
    glob = wildcard(names[0])
    total = sum(1 for name in set(population) if wildcard(name) == glob)
    if len(names) == total:
        return f"{glob} ({total})"
    where = [indices(name) for name in names]
    which = f": {ranges(index[0] for index in where)}" if all(len(index) == 1 for index in where) else ""
    return f"{glob} ({len(names)} of {total}{which})"
