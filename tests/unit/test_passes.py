"""Each pass on a tiny model: what it writes, what it decides, and what it refuses."""

from __future__ import annotations

import itertools

import pytest
from fake_builder import FakeBuilder
from tiny import CONFIG, checkpoint, compile_tiny, shapes

from tapeout.compiler.devices import load_device
from tapeout.compiler.recipes import Concat, Convert, Pack, Read, Recipe
from tapeout.compiler.spec import Quantization, Rule, Serving, Topology
from tapeout.compiler.stages import (
    FusedModel,
    GraphPlan,
    Launch,
    LogicalModel,
    MemoryPlan,
    QuantizedModel,
    SelectedModel,
    Span,
    WeightRef,
)
from tapeout.runtime import TapeoutError

Q, K, V = (f"model.layers.0.self_attn.{name}_proj" for name in "qkv")


def body(selected: SelectedModel) -> tuple[Launch, ...]:
    """The launches of a decode step, without its head."""
    return next(program.launches for program in selected.programs if program.phase == "decode")


def recipe(results_recipes: tuple[tuple[str, Recipe], ...], name: str) -> Recipe:
    return dict(results_recipes)[name]


# -- ingest


def test_every_slot_reads_its_tensor_and_vectors_become_float32() -> None:
    logical = compile_tiny().get(LogicalModel)
    assert recipe(logical.recipes, Q) == Read(f"{Q}.weight", (64, 64), "bf16")
    assert recipe(logical.recipes, "model.norm") == Convert(Read("model.norm.weight", (64,), "bf16"), "f32")
    assert logical.graph.slots[K].axes == ("kv_heads", "hidden")


def test_a_tied_head_shares_the_embedding() -> None:
    graph = compile_tiny().get(LogicalModel).graph
    assert graph.op("lm_head").weights == graph.op("model.embed_tokens").weights == ("model.embed_tokens",)


def test_an_untied_head_that_is_missing_is_refused() -> None:
    with pytest.raises(TapeoutError, match=r"tensor lm_head\.weight is missing; the family llama needs it with shape"):
        compile_tiny(checkpoint(config={**CONFIG, "tie_word_embeddings": False}))


def test_a_tied_head_that_is_shipped_is_ignored_with_a_reason() -> None:
    results = compile_tiny(checkpoint({**shapes(), "lm_head.weight": (128, 64)}))
    assert results.get(LogicalModel).ignored == (("lm_head.weight", "the head is tied to the embedding"),)


def test_a_missing_an_extra_and_a_misshapen_tensor_are_refused() -> None:
    tensors = shapes()
    del tensors[f"{V}.weight"]
    with pytest.raises(TapeoutError, match=r"tensor model\.layers\.0\.self_attn\.v_proj\.weight is missing"):
        compile_tiny(checkpoint(tensors))
    with pytest.raises(TapeoutError, match=r"tensor model\.extra\.weight is not part of the family llama"):
        compile_tiny(checkpoint({**shapes(), "model.extra.weight": (4, 4)}))
    with pytest.raises(TapeoutError, match=r"q_proj\.weight has shape \[64, 32\], but the config says \[64, 64\]"):
        compile_tiny(checkpoint({**shapes(), f"{Q}.weight": (64, 32)}))


def test_two_sources_for_one_slot_are_refused() -> None:
    doubled = {**shapes(), "language_model.model.norm.weight": (64,)}
    with pytest.raises(TapeoutError, match=r"could come from model\.norm\.weight and language_model\.model\."):
        compile_tiny(checkpoint(doubled))


def test_an_unknown_architecture_lists_the_known() -> None:
    with pytest.raises(TapeoutError, match="architecture FooForCausalLM is unknown; known are LlamaForCausalLM, llama"):
        compile_tiny(checkpoint(config={**CONFIG, "architectures": ["FooForCausalLM"]}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": None}, r"hidden_size is missing; it must be a positive integer"),
        ({"num_hidden_layers": -1}, r"num_hidden_layers is -1; it must be a positive integer"),
        ({"hidden_act": "relu"}, r"hidden_act is 'relu'; it must be one of silu"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2}}, r"rope scaling type 'dynamic' is unknown; known are"),
        ({"rope_scaling": {"type": "linear"}}, r"rope scaling: factor is missing; it must be a finite number"),
    ],
)
def test_a_config_that_cannot_be_meant_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(TapeoutError, match=message):
        compile_tiny(checkpoint(config={**CONFIG, **change}))


# -- assign_formats


def test_the_first_rule_that_matches_wins_and_is_recorded() -> None:
    rules = (Rule(match="*.v_proj", format="q8_0"), Rule(match="*.self_attn.*", format="q4_0"))
    quantized = compile_tiny(quantization=Quantization(rules=rules)).get(QuantizedModel)
    assert recipe(quantized.recipes, V).format == "q8_0"
    assert recipe(quantized.recipes, Q).format == "q4_0"
    assert recipe(quantized.recipes, "model.layers.1.mlp.up_proj").format == "bf16"
    conversion = next(c for c in quantized.conversions if c.weight == V)
    assert (conversion.source, conversion.to, conversion.rule) == ("bf16", "q8_0", "rules[0] *.v_proj")


def test_a_default_that_does_not_fit_gives_way_and_a_rule_is_refused() -> None:
    quantized = compile_tiny(quantization=Quantization(default="q4_k")).get(QuantizedModel)
    assert recipe(quantized.recipes, Q).format == "q8_0"
    decision = next(d for d in quantized.decisions if d.subject == "model.layers.*.self_attn.q_proj")
    assert decision.alternatives == (("q4_k", "rows of 64 are not whole blocks of 256"),)
    with pytest.raises(TapeoutError, match=r"asks for q4_k on .*q_proj, but rows of 64 are not whole blocks of 256"):
        compile_tiny(quantization=Quantization(rules=(Rule(match="*.q_proj", format="q4_k"),)))


def test_int4_falls_back_to_smaller_groups() -> None:
    quantized = compile_tiny(quantization=Quantization(default="int4_g128"), device=load_device("h200"),
                             builder=FakeBuilder()).get(QuantizedModel)  # fmt: skip
    assert recipe(quantized.recipes, Q).format == "int4_g64"


def test_a_format_that_no_cpu_kernel_serves_names_the_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tapeout.compiler.lowering.cpu.tile16_holds", lambda format: format != "int4_g64")
    with pytest.raises(TapeoutError, match=r"model\.embed_tokens: no CPU kernel serves int4_g64; .* are f32, f16"):
        compile_tiny(quantization=Quantization(default="int4_g64"))


def test_requantizing_can_be_forbidden() -> None:
    source = checkpoint(formats={f"{Q}.weight": "q4_0"})
    forbidden = Quantization(default="q8_0", allow_requantize=False)
    with pytest.raises(TapeoutError, match=r"q_proj is q4_0 .* asks for q8_0, but quantization\.allow_req"):
        compile_tiny(source, forbidden)


def test_a_rule_that_matches_nothing_is_refused() -> None:
    with pytest.raises(TapeoutError, match=r"rules\[0\] \*\.v_porj matches no weight; weights are model\.embed_tokens"):
        compile_tiny(quantization=Quantization(rules=(Rule(match="*.v_porj", format="q8_0"),)))


# -- fuse_weights


def test_q_k_v_are_one_weight_in_declared_order() -> None:
    fused = compile_tiny().get(FusedModel)
    whole = recipe(fused.recipes, "model.layers.0.self_attn.qkv_proj")
    assert isinstance(whole, Concat)
    assert [read.tensor for read in whole.reads()] == [f"{name}.weight" for name in (Q, K, V)]
    assert fused.graph.op("model.layers.0.self_attn.qkv_proj").parts == ((Q, 64), (K, 32), (V, 32))


def test_the_order_of_tensors_in_the_file_changes_nothing() -> None:
    tensors = shapes()
    backwards = dict(reversed(tensors.items()))
    assert compile_tiny(checkpoint(backwards)).get(GraphPlan) == compile_tiny(checkpoint(tensors)).get(GraphPlan)


def test_parts_of_another_format_stay_apart_with_a_reason() -> None:
    fused = compile_tiny(checkpoint(formats={f"{V}.weight": "q8_0"})).get(FusedModel)
    names = set(fused.graph.slots)
    assert {"model.layers.0.self_attn.qk_proj", V, "model.layers.1.self_attn.qkv_proj"} <= names
    kept = next(d for d in fused.decisions if d.choice == "kept apart: v_proj")
    assert kept.alternatives[0][1] == "their number formats differ, and requantizing one would change its values"


# -- select_kernels


def test_kernels_follow_formats_and_weights_end_in_their_layout() -> None:
    selected = compile_tiny(quantization=Quantization(default="q8_0")).get(SelectedModel)
    names = {kernel.name for kernel in selected.kernels}
    assert {"linear_q8_0", "embed_q8_0", "rmsnorm_x8", "attention_f16"} <= names
    packed = {weight.name: weight for weight in selected.weights}
    assert isinstance(packed["model.embed_tokens"].recipe, Pack)
    assert packed["model.embed_tokens"].layout == "tile16"
    assert packed["model.norm"].layout == "raw"


def test_mixed_formats_of_one_group_share_a_buffer_at_their_declared_columns() -> None:
    selected = compile_tiny(checkpoint(formats={f"{K}.weight": "q8_0"})).get(SelectedModel)
    places = {launch.op: dict(launch.args).get("y") for launch in body(selected)}
    group = "model.layers.0.self_attn.qkv_proj"
    assert (places[Q], places[K], places[V]) == (Span(group), Span(group, 64), Span(group, 96))


def test_gate_and_up_ride_on_one_product_unless_they_carry_biases() -> None:
    plain = compile_tiny().get(SelectedModel)
    assert not any(launch.kernel.startswith("gated_") for launch in body(plain))
    biases = {f"model.layers.{i}.mlp.{name}_proj.bias": (96 if name != "down" else 64,)
              for i, name in itertools.product(range(2), ("gate", "up", "down"))}  # fmt: skip
    source = checkpoint({**shapes(), **biases}, {**CONFIG, "mlp_bias": True})
    biased = compile_tiny(source).get(SelectedModel)
    assert sum(launch.kernel == "gated_silu" for launch in body(biased)) == 2
    up = next(launch for launch in body(biased) if launch.op == "model.layers.0.mlp.gate_up_proj")
    assert dict(up.args)["bias"] == WeightRef("model.layers.0.mlp.gate_up_proj.bias")


def test_decisions_name_rejected_alternatives_and_evidence() -> None:
    selected = compile_tiny(quantization=Quantization(default="q8_0")).get(SelectedModel)
    decision = next(d for d in selected.decisions if d.subject == "model.layers.*.mlp.down_proj")
    assert decision.choice == "linear_q8_0"
    assert [choice for choice, _ in decision.alternatives] == ["linear_bf16", "linear_f32"]
    assert dict(decision.evidence)["weights"] == 2


# -- plan_memory


def test_memory_is_exact() -> None:
    serving = Serving(max_context=100, max_sequences=3, page_tokens=16, kv_dtype="f16")
    memory = compile_tiny(serving=serving).get(MemoryPlan)
    assert memory.pages == 3 * 7
    token = 2 * 2 * 16 * 2  # keys and values, 2 heads of 16, 2 bytes
    layer = -(-21 * 16 * token // 4096) * 4096
    assert memory.cache_offsets == (0, layer)
    assert memory.kv_pool == 2 * layer
    assert memory.weights == sum(place.nbytes for place in memory.places)
    assert [place.offset for place in memory.places[1:]] == [p.offset + p.nbytes for p in memory.places[:-1]]
    assert memory.total == memory.weights + memory.kv_pool + memory.arena + memory.scratch


def test_a_context_that_does_not_fit_says_what_would() -> None:
    config = {**CONFIG, "max_position_embeddings": 1 << 20}
    needed = compile_tiny().get(MemoryPlan)
    room = Topology(memory=needed.total - needed.kv_pool + (8 << 20))
    message = r"max_context 1048576 .* does not fit in memory: .* that fits is \d+"
    with pytest.raises(TapeoutError, match=message) as refused:
        compile_tiny(checkpoint(config=config), serving=Serving(max_context=1 << 20, headroom=0), topology=room)
    fits = int(str(refused.value).rsplit(" ", 1)[1])
    assert compile_tiny(checkpoint(config=config), serving=Serving(max_context=fits, headroom=0), topology=room)
    with pytest.raises(TapeoutError):
        compile_tiny(checkpoint(config=config), serving=Serving(max_context=fits + 128, headroom=0), topology=room)


def test_a_model_that_never_fits_says_so() -> None:
    with pytest.raises(TapeoutError, match=r"does not fit in memory at any context: weights [\d,]+ \+ KV pool"):
        compile_tiny(topology=Topology(memory=300 << 20), serving=Serving(headroom=300 << 20))


def test_ranks_on_a_cpu_share_its_memory() -> None:
    needed = compile_tiny(topology=Topology(count=2)).get(MemoryPlan).total
    serving = Serving(headroom=0)
    assert compile_tiny(topology=Topology(count=2, memory=2 * needed), serving=serving)
    with pytest.raises(TapeoutError, match=f"on each of 2 ranks .* need {needed:,}, but {needed - 1:,} are there"):
        compile_tiny(topology=Topology(count=2, memory=2 * needed - 2), serving=serving)


def test_a_share_that_holds_no_weights_is_no_negative_room() -> None:
    said = r"at serving.memory_fraction 0.001 of 0.01 GiB, which is [\d.]+ GiB too little even without KV; the smallest"
    with pytest.raises(TapeoutError, match=said):
        compile_tiny(topology=Topology(memory=10 << 20), serving=Serving(memory_fraction=0.001))


def test_live_buffers_never_overlap_and_the_stream_has_one_address() -> None:
    memory = compile_tiny(serving=Serving(max_sequences=5)).get(MemoryPlan)
    memory.check()
    addresses = {p.offset for graph in memory.graphs for p in graph.placements if p.buffer == "hidden"}
    assert addresses == {0}
    assert [graph.name for graph in memory.graphs] == [
        "prefill.32", "prefill.256", "decode.1", "decode.2", "decode.4", "decode.5", "head.1", "head.16",
    ]  # fmt: skip


# -- plan_graphs


def test_a_launch_list_is_flat_and_resolved() -> None:
    graphs = compile_tiny().get(GraphPlan)
    decode = next(entry for entry in graphs.lists if entry.name == "decode.1")
    assert decode.launches[0]["kernel"] == "embed_bf16"
    table = ["weight", "model.embed_tokens"]
    assert decode.launches[0]["args"] == {"w": table, "y": ["arena", 0], "k": 64, "scale": 1.0}
    rope = [launch["args"]["kv"] for launch in decode.launches if launch["kernel"] == "rope_kv_f16"]
    assert rope[0] == ["kv", 0]
    assert rope[1][1] > 0
    residual = next(entry for entry in decode.launches if entry["op"] == "model.layers.0.mlp.down_proj")
    assert residual["produces"] == [{"op": "model.layers.0", "columns": [0, 64]}]
    assert residual["output"]["in_place"] is True
