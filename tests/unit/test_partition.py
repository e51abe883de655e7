"""How heads are cut over ranks, played through head by head, and what a plan says of the weights of a rank."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import pytest
from tiny import CONFIG, checkpoint, compile_tiny

from tapeout.compiler.partition.axes import Cut
from tapeout.compiler.partition.heads import Steps, heads_over
from tapeout.compiler.spec import Quantization, Rule, Topology
from tapeout.compiler.stages import MemoryPlan, SelectedModel, ShardedModel

ZEROS = -1


def pieces(heads: int, cut: Cut, count: int) -> list[list[int]]:
    """The heads that each rank holds, by number."""
    held = list(range(heads))
    for period, padded in cut.pads:
        groups = [held[start : start + period] for start in range(0, len(held), period)]
        held = [head for group in groups for head in (*group, *[ZEROS] * (padded - period))]
    assert len(held) == cut.padded(heads) and len(held) % cut.pieces == 0
    local = len(held) // cut.pieces
    return [held[cut.piece(rank) * local : (cut.piece(rank) + 1) * local] for rank in range(count)]


@pytest.mark.parametrize("steps", [Steps(), Steps(2, 1), Steps(4, 4), Steps(3, 2)])
@pytest.mark.parametrize("copy", [True, False])
def test_every_head_is_on_one_rank_beside_the_key_head_it_reads(steps: Steps, copy: bool) -> None:
    for kv_heads, group, count in itertools.product(range(1, 9), range(1, 9), range(2, 17)):
        heads, case = kv_heads * group, (kv_heads, group, count)
        cut = heads_over(heads, kv_heads, count, steps=steps, copy=copy)
        found: list[int] = []
        for query, key in zip(pieces(heads, cut.query, count), pieces(kv_heads, cut.key, count), strict=True):
            assert len(query) % steps.query == 0 and len(key) % steps.key == 0, case
            assert len(query) % len(key) == 0, case
            share = len(query) // len(key)
            for index, head in enumerate(query):
                assert head == ZEROS or key[index // share] == head // group, case
            found += [head for head in query if head != ZEROS]
        assert sorted(found) == list(range(heads)), case


QWEN3: Mapping[str, Any] = {**CONFIG, "architectures": ["Qwen3ForCausalLM"], "num_key_value_heads": 1}


@pytest.mark.parametrize("count", [2, 4])
def test_ranks_exchange_sums_and_logits_alone(count: int) -> None:
    """Also where a model has one key head, whose norm is as wide as all of them."""
    graph = compile_tiny(checkpoint(config=QWEN3), topology=Topology(count=count)).get(ShardedModel).graph
    kinds = [op.kind for op in graph.ops if op.kind.startswith("all_")]
    assert kinds == ["all_reduce"] * 2 * CONFIG["num_hidden_layers"] + ["all_gather"]


@pytest.mark.parametrize("count", [1, 2])
def test_a_split_does_not_round_what_one_rank_does_not(count: int) -> None:
    """Inputs of the logits and of q, k and v have two 8-bit terms."""
    selected = compile_tiny(quantization=Quantization(default="q8_0"), topology=Topology(count=count)).get(
        SelectedModel
    )
    launches = {launch.op: dict(launch.args) for program in selected.programs for launch in program.launches}
    terms = {op: args["terms"] for op, args in launches.items() if "terms" in args and "w" in args}
    fine = {op for op, number in terms.items() if number == 2}
    assert fine == {op for op in terms if op == "lm_head" or op.endswith("qkv_proj")} and "lm_head" in fine


@pytest.mark.parametrize("format", ["bf16", "q8_0", "nvfp4"])
def test_what_a_split_costs_is_what_memory_is_planned_for(format: str) -> None:
    """A scale that all blocks of a matrix share (nvfp4) counts once, as it is stored."""
    asked = Quantization(default="f16", rules=(Rule(match="*.mlp.*", format=format),))
    one, two = (compile_tiny(quantization=asked, topology=Topology(count=count)) for count in (1, 2))
    mesh = next(each for each in two.get(ShardedModel).decisions if each.subject == "mesh")
    extra = 2 * two.get(MemoryPlan).weights / one.get(MemoryPlan).weights - 1
    assert dict(mesh.evidence)["padding_and_replication"] == pytest.approx(extra, abs=2e-3)
