"""What an artifact's launches wrote for a run of tokens, put together over chunks and row groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tapeout.compiler.guards import is_list
from tapeout.runtime.model import Model

Floats = npt.NDArray[np.float32]
Key = tuple[bool, int, str]  # (of the head list, launch index, op)

EXACT = 1e-4  # computed in float32 from values that were seen
F16 = 1e-2  # through the F16 cache: 11 bits of mantissa, in scores that are exponentiated; 2.7e-3 seen
INT8 = 4e-2  # rounded to int8 in groups of 32, to 127th parts of the largest: 1.4e-2 at the worst position seen
BF16 = 2e-2  # tensor cores read activations and dequantized weights as bf16: 8 bits of mantissa
RECODED = 3.0  # times a converted weight's own relative error


@dataclass(frozen=True)
class Written:
    """One op's value as one launch wrote it: float32 [positions, columns].

    ``base`` is what an in-place launch added to. ``tolerance`` is the relative error that its arithmetic allows.
    """

    key: Key
    graph: str
    kernel: str
    values: Floats
    base: Floats | None
    tolerance: float

    @property
    def op(self) -> str:
        """The op's name."""
        return self.key[2]


def collect_written(model: Model, ids: Sequence[int], phase: str = "prefill") -> list[Written]:
    """Trace a run of a phase's launch lists; in launch order, the body before the head."""
    graphs = {graph["name"]: _Graph(model.plan, graph) for graph in model.plan["graphs"]}
    pieces: dict[Key, list[Floats]] = {}
    places: dict[Key, tuple[str, str]] = {}
    for traced in model.trace(ids, phase):
        graph = graphs[traced.graph]
        for op, start, stop in traced.produces:
            key = (graph.head, traced.index, op)
            pieces.setdefault(key, []).append(traced.values[:, start:stop])
            places.setdefault(key, (traced.graph, traced.kernel))
    values = {key: np.concatenate(parts) for key, parts in pieces.items()}
    written: list[Written] = []
    for key in sorted(values, key=lambda key: key[:2]):
        graph = graphs[places[key][0]]
        base = graph.base(key)
        written.append(
            Written(key, *places[key], values[key], None if base is None else values[base], graph.tolerance[key[1]])
        )
    return written


class _Graph:
    """A launch list of the plan, read for what verification needs of it."""

    def __init__(self, plan: Mapping[str, Any], graph: Mapping[str, Any]) -> None:
        self.head: bool = graph["phase"] == "head"
        self.launches: Sequence[Mapping[str, Any]] = graph["launches"]
        converted = {weight["name"]: weight["error"]["relative_rms"] for weight in plan["weights"] if "error" in weight}
        cache = F16 if plan["memory"]["kv"]["dtype"] == "f16" else EXACT
        rounding = _Rounding(plan)
        self.bases: dict[int, Key] = {}
        self.tolerance: list[float] = []
        unseen: dict[int, float] = {}  # arena offsets written by launches whose values are not traced
        owner: dict[int, Key] = {}
        for index, launch in enumerate(self.launches):
            args, output = launch["args"], launch.get("output")
            written_to = output["arg"] if output is not None else "y"
            adds = output is not None and output["in_place"]
            reads = [_offset(value) for name, value in args.items() if name != written_to or adds]
            allowed = max((unseen.get(place, EXACT) for place in reads if place is not None), default=EXACT)
            attends = any(is_list(value) and value[0] == "kv" for value in args.values())
            allowed = max(allowed, rounding.of(launch), cache if attends else EXACT)
            if output is None:
                place = _offset(args.get("y"))
                if place is not None:
                    owner.pop(place, None)
                    unseen[place] = max(allowed, INT8 if launch["kernel"].endswith("x8") else EXACT)
                self.tolerance.append(allowed)
                continue
            place = _offset(args[output["arg"]])
            assert place is not None
            if output["in_place"] and not attends and place in owner:  # a split attention is finished in place
                self.bases[index] = owner[place]
            if output["kind"] != "f32":
                allowed = max(allowed, INT8 if output["kind"] == "x8" else BF16)
            for made in launch["produces"][:1]:
                owner[place] = (self.head, index, made["op"])
            unseen.pop(place, None)
            recoded = [converted.get(value[1], 0.0) for value in args.values() if _is_weight(value)]
            self.tolerance.append(allowed + RECODED * max(recoded, default=0.0))

    def base(self, key: Key) -> Key | None:
        """What the launch of ``key`` added to."""
        return self.bases.get(key[1])


class _Rounding:
    """What GPU kernels round on the way to an output that is float32 itself."""

    def __init__(self, plan: Mapping[str, Any]) -> None:
        is_gpu = plan.get("target") == "cuda"
        self._templates = {k["name"]: k["template"] for k in plan["kernels"]["table"]} if is_gpu else {}
        self._weights = {weight["name"]: weight for weight in plan["weights"]}

    def of(self, launch: Mapping[str, Any]) -> float:
        """Activations of integer formats become int8 in `gemv`; those of tensor cores bf16, unless weights are f32."""
        template = self._templates.get(launch["kernel"])
        if template not in ("gemv", "linear"):
            return EXACT
        weight = self._weights[launch["args"]["w"][1]]
        if template == "gemv":
            return INT8 if weight["layout"] == "planes" else EXACT
        return EXACT if weight["format"] == "f32" else BF16


def _offset(value: Any) -> int | None:
    return int(value[1]) if is_list(value) and value[0] == "arena" else None


def _is_weight(value: Any) -> bool:
    return is_list(value) and value[0] == "weight"
