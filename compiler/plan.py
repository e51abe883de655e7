"""The plan as canonical JSON: everything the runtime, `diff`, `explain` and `inspect` read, one section a stage."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from tapeout.compiler.devices import Device
from tapeout.compiler.pipeline import Results
from tapeout.compiler.spec import Spec
from tapeout.compiler.stages import (
    FusedModel,
    GraphPlan,
    LogicalModel,
    MemoryPlan,
    QuantizedModel,
    SelectedModel,
)
from tapeout.runtime.manifest import FORMAT_VERSION, RUNTIME_VERSION

Json = dict[str, Any]


class ConversionErrors(Protocol):
    """The error of one converted weight against the original."""

    @property
    def relative_rms(self) -> float:
        """Root mean square of the error over that of the original."""
        ...

    @property
    def max_abs(self) -> float:
        """Largest error of any element."""
        ...


def build_plan(
    spec: Spec, device: Device, results: Results, generation: Mapping[str, Any], decisions: Sequence[Json]
) -> Json:
    """The plan of a finished pipeline run. ``generation`` and ``decisions`` come from the tokenizer."""
    logical, quantized = results.get(LogicalModel), results.get(QuantizedModel)
    fused, selected = results.get(FusedModel), results.get(SelectedModel)
    memory, graphs = results.get(MemoryPlan), results.get(GraphPlan)
    made = [stage.decisions for stage in (quantized, fused, selected, memory, graphs)]
    return {
        "format_version": FORMAT_VERSION,
        "tapeout_version": RUNTIME_VERSION,
        "spec": spec.resolved(),
        "model": _model(logical, memory),
        "checkpoint": {
            "container": logical.container,
            "tensors": logical.tensors,
            "consumed": logical.tensors - len(logical.ignored),
            "ignored": [{"tensor": name, "reason": reason} for name, reason in logical.ignored],
        },
        "quantization": [
            {"weight": c.weight, "from": c.source, "to": c.to, "rule": c.rule} for c in quantized.conversions
        ],
        "weights": _weights(selected, memory),
        "kernels": {
            "targets": list(device.targets),
            "table": [{"name": k.name, "template": k.template, "params": list(k.params)} for k in selected.kernels],
        },
        "memory": _memory(selected, memory, spec),
        "graphs": [
            {"name": entry.name, "phase": entry.phase, "rows": entry.rows, "launches": list(entry.launches)}
            for entry in graphs.lists
        ],
        "generation": dict(generation),
        "decisions": [decision.to_json() for group in made for decision in group] + list(decisions),
    }


def _model(logical: LogicalModel, memory: MemoryPlan) -> Json:
    return {
        "family": logical.family,
        "name": logical.name,
        "config": dict(logical.config),
        "parameters": sum(math.prod(slot.shape) for slot in logical.graph.weights if "rotary" not in slot.name),
        "vocab_size": logical.vocab_size,
        "max_context": memory.max_context,
    }


def _weights(selected: SelectedModel, memory: MemoryPlan) -> list[Json]:
    return [
        {
            "name": weight.name,
            "shape": list(weight.recipe.shape),
            "format": weight.recipe.format,
            "layout": weight.layout,
            "offset": place.offset,
            "bytes": place.nbytes,
            "axes": list(weight.axes),
            "recipe": weight.recipe.to_json(),
        }
        for weight, place in zip(selected.weights, memory.places, strict=True)
    ]


def _memory(selected: SelectedModel, memory: MemoryPlan, spec: Spec) -> Json:
    return {
        "weights": memory.weights,
        "kv_pool": memory.kv_pool,
        "arena": memory.arena,
        "scratch": memory.scratch,
        "total": memory.total,
        "capacity": memory.capacity,
        "max_sequences": memory.max_sequences,
        "kv": {
            "dtype": spec.serving.kv_dtype,
            "page_tokens": memory.page_tokens,
            "pages": memory.pages,
            "bytes_per_token": selected.kv_token_bytes * selected.kv_layers,
        },
        "buffers": [
            {
                "name": p.buffer,
                "graph": graph.name,
                "bytes": p.nbytes,
                "offset": p.offset,
                "first": p.first,
                "last": p.last,
            }
            for graph in memory.graphs
            for p in graph.placements
        ],
    }


def add_errors(plan: Json, errors: Mapping[str, ConversionErrors]) -> Json:
    """The plan with the measured error of every converted weight."""
    weights = [
        weight
        | {"error": {"relative_rms": errors[weight["name"]].relative_rms, "max_abs": errors[weight["name"]].max_abs}}
        if weight["name"] in errors
        else weight
        for weight in plan["weights"]
    ]
    return plan | {"weights": weights}


def canonical(document: Json) -> bytes:
    """Canonical JSON: sorted keys, no spaces, one trailing newline; floats as Python writes them, NaN refused."""
    text = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode() + b"\n"
