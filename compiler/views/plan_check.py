"""What a plan must hold for the views: a damaged one ends in a sentence that names the place, never in a traceback."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from tapeout.compiler.guards import is_list, is_mapping
from tapeout.runtime.errors import TapeoutError

Check = Callable[[Any, str], None]
"""Refuses a value that is not what its place in the plan needs. Raises TapeoutError."""


def _refuse(path: str, value: Any, needed: str) -> TapeoutError:
    return TapeoutError(f"the plan is damaged: {path} is {value!r:.60}, but must be {needed}; compile again")


def _text(value: Any, path: str) -> None:
    if not isinstance(value, str):
        raise _refuse(path, value, "text")


def _count(value: Any, path: str, least: int = 0) -> None:
    if type(value) is not int or value < least:
        raise _refuse(path, value, f"a whole number from {least}")


def _positive(value: Any, path: str) -> None:
    _count(value, path, 1)


def _number(value: Any, path: str) -> None:
    if type(value) not in (int, float) or not 0 <= value < math.inf:
        raise _refuse(path, value, "a number from 0")


def _numeric(value: Any, path: str) -> None:
    if type(value) not in (int, float):
        raise _refuse(path, value, "a number")


def _anything(value: Any, path: str) -> None:
    del value, path


def _maybe(check: Check) -> Check:
    return lambda value, path: None if value is None else check(value, path)


def _any_of(needed: str, *checks: Check) -> Check:
    def any_of(value: Any, path: str) -> None:
        for check in checks:
            try:
                return check(value, path)
            except TapeoutError:
                continue
        raise _refuse(path, value, needed)

    return any_of


def _several(each: Check, least: int = 0) -> Check:
    def several(value: Any, path: str) -> None:
        if not is_list(value) or len(value) < least:
            raise _refuse(path, value, "a list that is not empty" if least else "a list")
        for index, item in enumerate(value):
            each(item, f"{path}[{index}]")

    return several


def _pair(one: Check, other: Check) -> Check:
    def pair(value: Any, path: str) -> None:
        if not is_list(value) or len(value) != 2:
            raise _refuse(path, value, "a pair")
        one(value[0], path)
        other(value[1], path)

    return pair


def _by_name(each: Check) -> Check:
    def by_name(value: Any, path: str) -> None:
        if not is_mapping(value):
            raise _refuse(path, value, "a section with keys")
        for name, item in value.items():
            each(item, f"{path}.{name}")

    return by_name


def _section(needed: Mapping[str, Check], further: Mapping[str, Check] | None = None) -> Check:
    """A section with the keys ``needed``, and perhaps with ``further`` ones; others are left to who knows them."""
    optional = further or {}

    def section(value: Any, path: str) -> None:
        if not is_mapping(value):
            raise _refuse(path, value, "a section with keys")
        dot = f"{path}." if path else ""
        for name, check in needed.items():
            if name not in value:
                raise TapeoutError(f"the plan is damaged: {dot}{name} is missing; compile again")
            check(value[name], dot + name)
        for name, check in optional.items():
            if name in value:
                check(value[name], dot + name)

    return section


_SPEC = _section(
    {
        "model": _section({"source": _maybe(_text)}),
        "topology": _section(
            {"count": _positive, "device": _text},
            {"links": _several(_section({"devices": _several(_count, 1), "gb_s": _number, "latency_us": _number}))},
        ),
        "serving": _section({"max_sequences": _positive}, {"max_context": _maybe(_count)}),
    }
)
_CHECKPOINT = _section(
    {
        "container": _text,
        "tensors": _count,
        "consumed": _count,
        "ignored": _several(_section({"tensor": _text, "reason": _text})),
    }
)
_ERROR = _section({"relative_rms": _number, "max_abs": _number})
_WEIGHT = _section(
    {
        "name": _text,
        "shape": _several(_count, 1),
        "format": _text,
        "layout": _text,
        "offset": _count,
        "bytes": _count,
        "ranks": _several(_count, 1),
    },
    {"axes": _several(_text), "error": _ERROR},
)
_NAME = _any_of("text, or two pieces of text", _text, _several(_text, 2))
_SOURCE = {"shape": _several(_count, 1), "format": _text}
_STEP = _section({"op": _text}, {"parts": _several(_anything), "values": _several(_anything)})
_RECIPES = {"read": _section({"tensor": _NAME} | _SOURCE), "planned": _section({"slot": _text} | _SOURCE)}
_PARAM = _any_of("the name of an argument", _text, _several(_text, 1))
_KERNELS = _section(
    {
        "targets": _several(_text),
        "table": _several(
            _section(
                {"name": _text, "template": _text, "params": _several(_PARAM)},
                {"resources": _by_name(_section({"registers": _count, "shared": _count, "blocks_per_sm": _count}))},
            )
        ),
    },
    {"compilers": _by_name(_text)},
)
_CACHE = _section({"name": _text, "page_bytes": _count, "sequence_bytes": _count})
_BUFFER = _section({"name": _text, "graph": _text, "bytes": _count, "offset": _count, "first": _count, "last": _count})
_MEMORY = _section(
    {
        "weights": _count,
        "kv_pool": _count,
        "arena": _count,
        "scratch": _count,
        "total": _count,
        "capacity": _maybe(_positive),
        "context": _count,
        "max_sequences": _positive,
        "buffers": _several(_BUFFER),
        "kv": _section(
            {
                "dtype": _text,
                "page_tokens": _positive,
                "pages": _count,
                "tokens_that_fit": _count,
                "bytes_per_token": _count,
                "caches": _several(_CACHE),
            }
        ),
    },
    {"comm": _section({"ranks": _positive, "buffer_bytes": _count})},
)
_COLLECTIVE = _section(
    {"kind": _text, "columns": _positive, "count": _positive, "bytes": _count, "algorithm": _text}, {"us": _number}
)
_COMMUNICATION = _section(
    {
        "ranks": _positive,
        "lists": _several(_section({"phase": _text, "rows": _positive, "collectives": _several(_COLLECTIVE)})),
    },
    {"link": _section({"gb_s": _number, "latency_us": _number})},
)
_OFFSET = _any_of("a number, a name or numbers", _numeric, _text, _several(_numeric))
_ARGUMENT = _any_of("a number, or a kind with an offset or a name", _numeric, _pair(_text, _OFFSET))
_LAUNCH = _section({"kernel": _text, "op": _text, "args": _by_name(_ARGUMENT)}, {"grid": _several(_count)})
_GRAPH = _section({"name": _text, "phase": _text, "rows": _positive, "launches": _several(_LAUNCH)})
_DECISION = _section(
    {
        "pass": _text,
        "subject": _text,
        "choice": _text,
        "reason": _text,
        "alternatives": _several(_section({"choice": _text, "why": _text})),
        "evidence": _by_name(_anything),
    }
)
_PLAN = _section(
    {
        "spec": _SPEC,
        "model": _section({"family": _text, "name": _text, "parameters": _count, "vocab_size": _count}),
        "weights": _several(_WEIGHT),
        "recipes": _several(_STEP),
        "kernels": _KERNELS,
        "memory": _MEMORY,
        "communication": _COMMUNICATION,
        "graphs": _several(_GRAPH),
        "decisions": _several(_DECISION),
    },
    {"checkpoint": _CHECKPOINT},
)


def check_plan(plan: Any) -> None:
    """Refuse a plan whose sections are not those of docs/plan.md, or do not agree. Raises TapeoutError."""
    _PLAN(plan, "")
    for index, step in enumerate(plan["recipes"]):
        _RECIPES.get(step["op"], _STEP)(step, f"recipes[{index}]")
        for name, value in step.items():
            if name != "inputs" and (is_mapping(value) or (is_list(value) and any(map(is_mapping, value)))):
                raise _refuse(f"recipes[{index}].{name}", value, "plain, since only inputs are steps themselves")
    _check_ranks(plan)
    _check_sums(plan["memory"], sum(weight["bytes"] for weight in plan["weights"]))


def _check_ranks(plan: Mapping[str, Any]) -> None:
    ranks = plan["spec"]["topology"]["count"]
    if plan["communication"]["ranks"] != ranks:
        raise _refuse("communication.ranks", plan["communication"]["ranks"], f"spec.topology.count, {ranks}")
    for index, weight in enumerate(plan["weights"]):
        if len(weight["ranks"]) != ranks:
            raise _refuse(f"weights[{index}].ranks", weight["ranks"], f"one recipe for each of {ranks} ranks")


def _check_sums(memory: Mapping[str, Any], weights: int) -> None:
    """Sums hold what they are sums of; alignment is the rest."""
    parts = sum(memory[name] for name in ("weights", "kv_pool", "arena", "scratch"))
    kv = memory["kv"]
    caches = sum(c["page_bytes"] * kv["pages"] + c["sequence_bytes"] * memory["max_sequences"] for c in kv["caches"])
    for name, least, what in (
        ("total", parts, "its parts"),
        ("weights", weights, "the weights"),
        ("kv_pool", caches, "its caches"),
    ):
        if memory[name] < least:
            raise _refuse(f"memory.{name}", memory[name], f"at least {least}, what {what} take together")
