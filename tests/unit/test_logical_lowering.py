"""Plans of programs without kernels: a launch an op, values alive from producer to last reader, no artifact."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small_model
from tiny import CONFIG, compile_tiny

from tapeout.compiler.checkpoints.config import written_config
from tapeout.compiler.cli import main
from tapeout.compiler.devices import Device, load_device
from tapeout.compiler.driver import compile_spec
from tapeout.compiler.lowering.logical import layout_of, lower_logical
from tapeout.compiler.pipeline import Results
from tapeout.compiler.spec import Model, Serving, Spec, Topology
from tapeout.compiler.stages import FusedModel, GraphMemory, KernelEntry, SelectedModel
from tapeout.passes.plan_memory import plan_memory
from tapeout.runtime.errors import TapeoutError

MIXTRAL = {**CONFIG, "architectures": ["MixtralForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2}
LATENT = {
    **{"architectures": ["DeepseekV3ForCausalLM"], "hidden_size": 64, "intermediate_size": 128},
    **{"moe_intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4},
    **{"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    **{"q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16},
    **{"vocab_size": 128, "max_position_embeddings": 256},
}
V4 = {
    **{"architectures": ["DeepseekV4ForCausalLM"], "hidden_size": 64, "moe_intermediate_size": 32},
    **{"num_hidden_layers": 3, "num_attention_heads": 4, "head_dim": 32, "qk_rope_head_dim": 16, "q_lora_rank": 32},
    **{"n_routed_experts": 8, "num_experts_per_tok": 2, "num_hash_layers": 1, "sliding_window": 16},
    **{"compress_ratios": [0, 4, 128], "o_groups": 2, "o_lora_rank": 16, "index_n_heads": 4, "index_head_dim": 32},
    **{"index_topk": 8, "vocab_size": 128, "max_position_embeddings": 256},
}
FAMILIES = {"mixtral": MIXTRAL, "latent": LATENT, "v4": V4}
SERVING = Serving(max_context=128, prefill_chunk=64, max_sequences=2)


def fused(config: Any, count: int = 1) -> FusedModel:
    results: Results = compile_tiny(written_config(config), serving=SERVING, topology=Topology(count=count))
    return results.get(FusedModel)


def lowered(config: Any, device: Device, count: int = 1) -> SelectedModel:
    selected = lower_logical(fused(config, count), device, SERVING, "because")
    selected.check()
    return selected


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("device", ["h200", "cpu"])
def test_a_launch_an_op_of_a_kernel_that_does_not_exist(family: str, count: int, device: str) -> None:
    selected = lowered(FAMILIES[family], load_device(device), count)
    ops = [op for op in selected.fused.graph.ops if op.kind != "columns"]  # those are views
    first = next(index for index, op in enumerate(ops) if op.kind == "select")
    body, head = ops[:first], ops[first:]
    for program in selected.programs:
        whole = program.phase == "decode" and device != "cpu"
        wanted = head if program.phase == "head" else ops if whole else body
        assert [(launch.op, launch.kernel) for launch in program.launches] == [(op.name, op.kind) for op in wanted]
        for launch, op in zip(program.launches, wanted, strict=True):
            assert [(p.op, p.stop - p.start) for p in launch.produces] == list(op.outputs)
            named = [getattr(arg, "weight", None) for _, arg in launch.args]
            assert [name for name in named if name] == list(op.weights)
    assert {kernel.template for kernel in selected.kernels if isinstance(kernel, KernelEntry)} == {"none"}
    assert sorted(k.name for k in selected.kernels if isinstance(k, KernelEntry)) == sorted({op.kind for op in ops})


def lives(selected: SelectedModel, phase: str) -> dict[str, tuple[int, int]]:
    """For each op of a list: the places of its launch and of the last that reads it, through views of any depth."""
    graph = selected.fused.graph
    source: dict[str, str] = {}
    for op in graph.ops:
        for name, _ in op.outputs:
            source[name] = source[op.inputs[0]] if op.kind == "columns" else op.name
    launched = [op for op in graph.ops if op.kind != "columns"]
    first = next(index for index, op in enumerate(launched) if op.kind == "select")
    listed = {"prefill": launched[:first], "head": launched[first:], "decode": launched}[phase]
    found: dict[str, tuple[int, int]] = {}
    for place, op in enumerate(listed):
        found[op.name] = (place, place)
        for name in op.inputs:
            begin, _ = found.get(source[name], (0, 0))
            found[source[name]] = (begin, place)
    return found


def graph_of(memory: tuple[GraphMemory, ...], name: str) -> GraphMemory:
    return next(graph for graph in memory if graph.name == name)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("count", [1, 2])
def test_values_live_from_producer_to_last_reader(family: str, count: int) -> None:
    selected, device = lowered(FAMILIES[family], load_device("h200"), count), load_device("h200")
    plan = plan_memory(selected, device, Topology(device="h200", count=count), SERVING)
    pinned = {buffer.name for buffer in selected.buffers if buffer.pinned}
    assert len(pinned) == 1  # what the head selects rows from
    widths = {op.name: sum(width for _, width in op.outputs) for op in selected.fused.graph.ops}
    for name, phase, rows in (("prefill.64", "prefill", 64), ("decode.2", "decode", 2), ("head.16", "head", 16)):
        graph, expected = graph_of(plan.graphs, name), lives(selected, phase)
        found = {place.buffer: (place.first, place.last) for place in graph.placements}
        last = max(end for _, end in expected.values())
        if phase == "head":
            expected[selected.logits] = (expected[selected.logits][0], last + 1)
        for buffer in pinned & expected.keys():
            expected[buffer] = (0, last + 1)
        assert found == expected, name
        for place in graph.placements:
            if place.buffer not in pinned:  # those hold as many rows as the largest list
                value = 4 if place.buffer == selected.logits else 2
                assert place.nbytes == -(-rows * widths[place.buffer] * value // 64) * 64


def test_layouts_are_those_of_kernels_that_would_be() -> None:
    served = {name: layout_of(name) for name in ("bf16", "f32", "q4_k", "int4_g32", "fp8_block128", "nvfp4", "mxfp4")}
    assert served == {"bf16": "raw", "f32": "raw", "q4_k": "planes", "int4_g32": "planes", "fp8_block128": "planes",
                      "nvfp4": "tile16", "mxfp4": "tile16"}  # fmt: skip


# -- plans and artifacts


def arrays() -> small_model.Arrays:
    """Random weights of the small Mixtral, under the names of the hub."""
    shapes = small_model.shapes(CONFIG)
    found = {name: shape for name, shape in shapes.items() if ".mlp." not in name}
    for layer, expert in ((layer, expert) for layer in range(2) for expert in range(4)):
        at = f"model.layers.{layer}.block_sparse_moe"
        found[f"{at}.gate.weight"] = (4, 64)
        found |= {f"{at}.experts.{expert}.w{n}.weight": (64, 96) if n == 2 else (96, 64) for n in (1, 2, 3)}
    return {name: np.ones(shape, np.float32) for name, shape in found.items()}


def test_a_plan_says_why_and_an_artifact_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small_model.write_folder(tmp_path / "model", arrays(), MIXTRAL)
    file = tmp_path / "spec.yaml"
    file.write_text(json.dumps({"model": {"source": "model"}, "topology": {"device": "h200"}}))
    reason = (
        "model.layers.0.mlp.route: no GPU kernel serves this route yet; topology.device cpu does, and GPUs serve the "
        "dense families without attention sinks"
    )
    assert main(["compile", str(file), "-o", str(tmp_path / "artifact")]) == 2
    assert capsys.readouterr().err == f"error: {reason}\n"
    assert not (tmp_path / "artifact").exists()
    assert main(["compile", str(file), "-o", str(tmp_path / "plan.json"), "--plan-only"]) == 0
    plan = json.loads((tmp_path / "plan.json").read_bytes())
    (decision,) = (made for made in plan["decisions"] if made["subject"] == "program")
    assert decision == {
        "pass": "select_kernels",
        "subject": "program",
        "choice": "one launch an op, of no kernel",
        "reason": "a plan without kernels",
        "alternatives": [{"choice": "kernels of the device", "why": reason}],
        "evidence": {},
    }
    assert {kernel["template"] for kernel in plan["kernels"]["table"]} == {"none"}
    assert plan["kernels"]["targets"] == ["sm_90"]
    assert plan["checkpoint"]["container"] == "safetensors"  # its weights are read, unlike those of a config alone
    assert "planned" not in {node["op"] for node in plan["recipes"]}


def test_the_same_plan_from_the_config_and_from_the_checkpoint(tmp_path: Path) -> None:
    """What a config alone says of shapes, memory and launches is what its checkpoint says."""
    small_model.write_folder(tmp_path / "model", arrays(), MIXTRAL)
    topology = Topology(device="h200", count=2)
    written = Spec.model_validate({"model": {"config": MIXTRAL, "stored": {"default": "f32"}, "name": "x"}})
    there = Spec(model=Model(source=str(tmp_path / "model"), name="x"))
    plans = [
        compile_spec(spec.model_copy(update={"topology": topology}), tmp_path / f"{at}.json", plan_only=True)
        for at, spec in enumerate((written, there))
    ]
    for section in ("memory", "graphs", "communication", "kernels", "model"):
        assert plans[0][section] == plans[1][section], section
    keys = ("name", "shape", "format", "layout", "offset", "bytes", "axes")
    assert [[weight[key] for key in keys] for weight in plans[0]["weights"]] == [
        [weight[key] for key in keys] for weight in plans[1]["weights"]
    ]


def test_several_gpus_make_no_artifact(tmp_path: Path) -> None:
    small_model.write_folder(tmp_path / "model", arrays(), MIXTRAL)
    spec = Spec(model=Model(source=str(tmp_path / "model")), topology=Topology(device="h200", count=2))
    with pytest.raises(TapeoutError) as refused:
        compile_spec(spec, tmp_path / "artifact")
    assert re.sub(r"\s+", " ", str(refused.value)) == (
        "topology.count is 2, but ranks run on CPUs alone so far; set topology.count to 1, or topology.device to cpu, "
        "or pass --plan-only for the plan alone"
    )
