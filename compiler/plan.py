"""The plan as canonical JSON: everything the runtime, `diff`, `explain` and `inspect` read, one section a stage."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Protocol

from tapeout.compiler.collector import collector_paused
from tapeout.compiler.devices import CpuDevice, CudaDevice, Device
from tapeout.compiler.kernels.cuda.base import Resources
from tapeout.compiler.kernels.cuda.toolchain import compiler_versions
from tapeout.compiler.pipeline import Results
from tapeout.compiler.recipes_table import RecipeTable
from tapeout.compiler.spec import Spec
from tapeout.compiler.stages import (
    BuiltKernel,
    Collective,
    CommunicationPlan,
    FusedModel,
    GraphPlan,
    KernelEntry,
    LogicalModel,
    MemoryPlan,
    QuantizedModel,
    SelectedModel,
    ShardedModel,
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
    sharded, communication = results.get(ShardedModel), results.get(CommunicationPlan)
    made = [stage.decisions for stage in (logical, quantized, sharded, fused, communication, selected, memory, graphs)]
    target = {} if isinstance(device, CpuDevice) else {"target": "cuda"}
    return target | {
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
        **_weights(selected, memory),
        "kernels": _kernels(device, selected),
        "memory": _memory(selected, memory, spec),
        "communication": _communication(communication),
        "graphs": [
            {"name": entry.name, "phase": entry.phase, "rows": entry.rows, "launches": list(entry.launches)}
            for entry in graphs.lists
        ],
        "generation": dict(generation),
        "decisions": [decision.to_json() for group in made for decision in group] + list(decisions),
    }


def _kernels(device: Device, selected: SelectedModel) -> Json:
    """The kernels, and the architectures there is code for: instruction sets of a CPU, or those of the GPU kernels."""
    table = [_kernel(kernel) for kernel in selected.kernels]
    if isinstance(device, CpuDevice):
        return {"targets": list(device.targets), "table": table}
    built = [kernel for kernel in selected.kernels if isinstance(kernel, BuiltKernel)]
    if not built:
        assert isinstance(device, CudaDevice)
        return {"targets": [device.arch], "table": table}
    versions = compiler_versions({kernel.kernel.language for kernel in built})
    targets = [arch for arch, _ in built[0].resources]
    needed = {"multiprocessors": selected.multiprocessors, "compilers": versions}
    return {"targets": targets, **needed, "table": table}


def _kernel(kernel: KernelEntry | BuiltKernel) -> Json:
    if isinstance(kernel, KernelEntry):
        return {"name": kernel.name, "template": kernel.template, "params": list(kernel.params)}
    code = kernel.kernel
    return {
        "name": code.name,
        "template": code.template,
        "language": code.language,
        "params": [[param.name, param.type] for param in code.params],
        "threads": code.threads,
        "pdl": code.pdl,
        "resources": {arch: _resources(taken, code.language) for arch, taken in kernel.resources},
    }


def _resources(taken: Resources, language: str) -> Json:
    """Triton's kernels take two more pointers, to scratch memory that ours do without."""
    return asdict(taken) | {"extra_ptrs": 2 if language == "triton" else 0}


def _model(logical: LogicalModel, memory: MemoryPlan) -> Json:
    return {
        "family": logical.family,
        "name": logical.name,
        "config": dict(logical.config),
        "parameters": sum(math.prod(slot.shape) for slot in logical.graph.weights if "rotary" not in slot.name),
        "vocab_size": logical.vocab_size,
        "max_context": memory.max_context,
    }


@collector_paused()
def _weights(selected: SelectedModel, memory: MemoryPlan) -> Json:
    """The weights, and the table of their recipes, in which each has one place a rank."""
    table = RecipeTable()
    weights = [
        {
            "name": weight.name,
            "shape": list(weight.recipe.shape),
            "format": weight.recipe.format,
            "layout": weight.layout,
            "offset": place.offset,
            "bytes": place.nbytes,
            "axes": list(weight.axes),
            "ranks": [table.add(recipe) for recipe in (weight.recipe, *weight.further)],
        }
        for weight, place in zip(selected.weights, memory.places, strict=True)
    ]
    return {"weights": weights, "recipes": table.nodes}


def _memory(selected: SelectedModel, memory: MemoryPlan, spec: Spec) -> Json:
    return ({} if memory.step_offset is None else {"step": _step(selected, memory.step_offset)}) | {
        "weights": memory.weights,
        "kv_pool": memory.kv_pool,
        "arena": memory.arena,
        "scratch": memory.scratch,
        "total": memory.total,
        "context": memory.context,
        "capacity": memory.capacity,
        "max_sequences": memory.max_sequences,
        **_comm(selected, memory),
        "kv": {
            "dtype": spec.serving.kv_dtype,
            "page_tokens": memory.page_tokens,
            "pages": memory.pages,
            "tokens_that_fit": memory.tokens_that_fit,
            "bytes_per_token": selected.token_bytes(memory.page_tokens),
            "caches": [
                {"name": c.name, "offset": offset, "page_bytes": c.page_bytes, "sequence_bytes": c.sequence_bytes}
                for c, offset in zip(selected.caches, memory.cache_offsets, strict=True)
            ],
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


def _step(selected: SelectedModel, offset: int) -> Json:
    step = selected.step
    assert step is not None
    fields = {name: [place, size] for name, (place, size) in step.places().items()}
    return {
        "offset": offset,
        "bytes": step.nbytes,
        "rows": step.rows,
        "segments": step.segments,
        "out_rows": step.out_rows,
        "max_pages": step.max_pages,
        "fields": fields,
    }


def _comm(selected: SelectedModel, memory: MemoryPlan) -> Json:
    """How many ranks there are, and what each needs to exchange values; nothing for one."""
    ranks = selected.fused.sharded.mesh.count
    return {"comm": {"ranks": ranks, "buffer_bytes": memory.comm_buffer}} if ranks > 1 else {}


def _communication(plan: CommunicationPlan) -> Json:
    """The collectives of every launch list; there are none for one rank."""
    link = {"link": {"gb_s": plan.link.gb_s, "latency_us": plan.link.latency_us}} if plan.link else {}
    lists = [
        {"phase": exchange.phase, "rows": exchange.rows, "collectives": list(map(_collective, exchange.collectives))}
        for exchange in plan.exchanges
    ]
    return {"ranks": plan.ranks, **link, "lists": lists}


def _collective(made: Collective) -> Json:
    said = {"kind": made.kind, "columns": made.columns, "count": made.count, "bytes": made.nbytes}
    return said | {"algorithm": made.algorithm} | ({} if made.us is None else {"us": round(made.us, 3)})


def add_errors(plan: Json, ranks: Sequence[Mapping[str, ConversionErrors]]) -> Json:
    """The plan with the measured error of every converted weight: the largest of any rank's piece."""
    weights: list[Json] = []
    for weight in plan["weights"]:
        found = [errors[weight["name"]] for errors in ranks if weight["name"] in errors]
        error = {key: max(getattr(each, key) for each in found) for key in ("relative_rms", "max_abs") if found}
        weights.append(weight | ({"error": error} if found else {}))
    return plan | {"weights": weights}


def canonical(document: Json) -> bytes:
    """Canonical JSON: sorted keys, no spaces, one trailing newline; floats as Python writes them, NaN refused."""
    text = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode() + b"\n"
