"""How a tiny model becomes GPU launches: buckets, what is absorbed, choices, safety of capture. No GPU, no compiler."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
from fake_builder import FakeBuilder
from tiny import CONFIG, checkpoint, compile_tiny

from tapeout.compiler.capture import check_capture
from tapeout.compiler.devices import load_device
from tapeout.compiler.pipeline import Results
from tapeout.compiler.plan import build_plan
from tapeout.compiler.spec import Model, Quantization, Rule, Serving, Spec, Topology
from tapeout.compiler.stages import GraphPlan, Launch, MemoryPlan, SelectedModel
from tapeout.runtime import TapeoutError


def lower(builder: FakeBuilder | None = None, **options: Any) -> Results:
    """The pipeline for an H200 over the tiny checkpoint."""
    options.setdefault("serving", Serving(max_sequences=16, prefill_chunk=256))
    return compile_tiny(device=load_device("h200"), builder=builder or FakeBuilder(), **options)


def launches(results: Results, name: str) -> tuple[Launch, ...]:
    """The launches of one list."""
    programs = {program.name: program for program in results.get(SelectedModel).programs}
    return programs[name].launches


def templates(results: Results, name: str) -> list[str]:
    """The kernel templates that a list launches, in order."""
    known = dict(results.get(GraphPlan).templates)
    return [known[launch.kernel] for launch in launches(results, name)]


def test_there_is_a_list_for_every_bucket() -> None:
    names = [entry.name for entry in lower().get(GraphPlan).lists]
    decode = [f"decode.{rows}" for rows in (1, 2, 4, 8, 16)]
    assert names == ["prefill.32", "prefill.64", "prefill.256", *decode, "head.1", "head.16", "sample.1"]


def test_a_decode_step_of_few_rows_is_five_kernels_a_layer() -> None:
    layer = ["gemv", "attention_decode", "gemv", "gemv", "gemv"]
    assert templates(lower(), "decode.1") == ["embed", *layer, *layer, "gemv", "sample"]


def test_larger_steps_feed_tensor_cores() -> None:
    results = lower()
    layer = ["rmsnorm", "linear", "attention_decode", "linear", "rmsnorm", "linear", "linear"]
    assert templates(results, "decode.16") == ["embed", *layer, *layer, "rmsnorm", "linear", "sample"]
    layer[2:3] = ["rope_kv", "attention_prefill"]
    assert templates(results, "prefill.256") == ["embed", *layer, *layer]
    assert templates(results, "head.16") == ["gather", "rmsnorm", "linear"]


FAMILIES: dict[str, dict[str, Any]] = {
    "MistralForCausalLM": {"sliding_window": 64},
    "Qwen2ForCausalLM": {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1},
    "Qwen3ForCausalLM": {"head_dim": 32, "use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1},
}
WINDOWS = {"MistralForCausalLM": [64, 64], "Qwen2ForCausalLM": [0, 64], "Qwen3ForCausalLM": [0, 64]}


@pytest.mark.parametrize("architecture", FAMILIES)
@pytest.mark.parametrize("default", ["keep", "q4_0"])
def test_norms_of_heads_biases_and_windows_are_within_the_kernels(architecture: str, default: str) -> None:
    config = {**CONFIG, "architectures": [architecture], **FAMILIES[architecture]}
    results = lower(source=checkpoint(config=config), quantization=Quantization(default=default))
    layer = ["gemv", "attention_decode", "gemv", "gemv", "gemv"]
    assert templates(results, "decode.1") == ["embed", *layer, *layer, "gemv", "sample"]
    layer = ["rmsnorm", "linear", "rope_kv", "attention_prefill", "linear", "rmsnorm", "linear", "linear"]
    assert templates(results, "prefill.256") == ["embed", *layer, *layer]
    kernels: Any = results.get(SelectedModel).kernels
    window = {built.kernel.name: dict(built.kernel.defines).get("WINDOW") for built in kernels}
    for name in ("decode.1", "decode.4", "decode.16", "prefill.32", "prefill.256"):
        attention = [launch.kernel for launch in launches(results, name) if "attention" in launch.kernel]
        assert [window[kernel] for kernel in attention] == WINDOWS[architecture]
        text = " ".join(str(launch.args) for launch in launches(results, name))
        for at in ("model.layers.0.self_attn", "model.layers.1.self_attn"):
            assert (f"'{at}.qkv_proj.bias'" in text) == (architecture == "Qwen2ForCausalLM")
            assert (f"'{at}.q_norm'" in text and f"'{at}.k_norm'" in text) == (architecture == "Qwen3ForCausalLM")


# hidden, ffn, heads, kv heads, head size, vocabulary
SHAPES: dict[str, tuple[str, tuple[int, ...]]] = {
    "mistral-7b": ("MistralForCausalLM", (4096, 14336, 32, 8, 128, 32768)),
    "mistral-nemo": ("MistralForCausalLM", (5120, 14336, 32, 8, 128, 131072)),
    "qwen2.5-0.5b": ("Qwen2ForCausalLM", (896, 4864, 14, 2, 64, 151936)),
    "qwen2.5-7b": ("Qwen2ForCausalLM", (3584, 18944, 28, 4, 128, 152064)),
    "qwen3-0.6b": ("Qwen3ForCausalLM", (1024, 3072, 16, 8, 128, 151936)),
    "qwen3-32b": ("Qwen3ForCausalLM", (5120, 25600, 64, 8, 128, 151936)),
}


@pytest.mark.parametrize("name", SHAPES)
def test_every_bucket_of_real_shapes_finds_kernels(name: str) -> None:
    """Seven heads of one KV head, heads wider together than the residual stream, rows of uneven widths."""
    architecture, (hidden, ffn, heads, kv_heads, head_dim, vocab) = SHAPES[name]
    config = {**CONFIG, "architectures": [architecture], "hidden_size": hidden, "intermediate_size": ffn,
              "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim,
              "vocab_size": vocab, "num_hidden_layers": 1}  # fmt: skip
    results = lower(source=checkpoint(config=config))
    assert templates(results, "decode.1").count("attention_decode") == 1
    assert "attention_prefill" in templates(results, "prefill.256")
    built: Any = results.get(SelectedModel).kernels
    room = load_device("h200").shared_per_block
    assert all(each.kernel.shared <= room for each in built)


def test_a_norm_rides_on_the_product_that_reads_it() -> None:
    first = launches(lower(), "decode.1")[1]
    assert "model.layers.0.input_layernorm" in str(dict(first.args)["norm"])
    assert first.reads == ("hidden",)


def test_a_kernel_that_spills_gives_way_with_the_reason() -> None:
    results = lower(FakeBuilder("_s4_", "_d4"))
    chosen = [launch.kernel for program in results.get(SelectedModel).programs for launch in program.launches]
    assert not any("_s4_" in name for name in chosen)
    reasons = {why for decision in results.get(SelectedModel).decisions for _, why in decision.alternatives}
    assert "spills 64 bytes a thread" in reasons


def test_nothing_that_fits_is_an_error_with_every_reason() -> None:
    match = r"model\.embed_tokens: no kernel for prefill\.32 fits h200: embed_bf16_\w+ spills 64 bytes a thread"
    with pytest.raises(TapeoutError, match=match):
        lower(FakeBuilder("embed"))


def test_every_device_of_an_artifact_gets_its_cubins() -> None:
    builder = FakeBuilder()
    results = lower(builder, topology=Topology(device="h200", also=("rtx-pro-6000", "rtx-5090")))
    assert builder.asked.keys() == {"sm_90", "sm_120"}
    kernels: Any = results.get(SelectedModel).kernels
    assert all([arch for arch, _ in kernel.resources] == ["sm_90", "sm_120"] for kernel in kernels)


def test_lists_for_several_devices_fit_the_least_of_them() -> None:
    """Also where two have one architecture, of which one is compiled for."""
    topology = Topology(device="rtx-pro-6000", also=("h200", "rtx-5090"))
    device = load_device("rtx-pro-6000")
    results = compile_tiny(device=device, builder=FakeBuilder(), topology=topology)
    kernels = build_plan(Spec(model=Model(source="tiny"), topology=topology), device, results, {}, [])["kernels"]
    assert (kernels["targets"], kernels["multiprocessors"]) == (["sm_120", "sm_90"], 132)
    assert lower(topology=Topology(device="h200", also=("a100",))).get(SelectedModel).multiprocessors == 108


def test_every_kernel_fits_the_shared_memory_of_every_device() -> None:
    results = lower(topology=Topology(device="h200", also=("rtx-pro-6000",)))
    room = load_device("rtx-pro-6000").shared_per_block
    kernels: Any = results.get(SelectedModel).kernels
    assert all(built.kernel.shared <= room for built in kernels)


def test_a_cpu_shares_no_artifact_with_a_gpu() -> None:
    with pytest.raises(TapeoutError, match=r"topology\.also names cpu, but only GPUs share an artifact"):
        lower(topology=Topology(device="h200", also=("cpu",)))


def test_quantized_matrices_lie_in_planes_and_floats_as_they_are() -> None:
    rules = (Rule(match="*.down_proj", format="q4_0"),)
    weights = lower(quantization=Quantization(rules=rules)).get(SelectedModel).weights
    layouts = {weight.name: weight.layout for weight in weights}
    assert layouts["model.layers.0.mlp.down_proj"] == "planes"
    assert layouts["model.layers.0.mlp.gate_up_proj"] == layouts["model.norm"] == "raw"


def test_weights_start_where_planes_may() -> None:
    places = lower(quantization=Quantization(default="q8_0")).get(MemoryPlan).places
    assert all(place.offset % 256 == 0 for place in places)


def test_a_cache_in_float32_is_refused() -> None:
    with pytest.raises(TapeoutError, match=r"serving\.kv_dtype is f32, but the GPU kernels cache f16; set it to f16"):
        lower(serving=Serving(kv_dtype="f32"))


def test_the_step_holds_every_bucket() -> None:
    step = lower().get(SelectedModel).step
    assert step is not None
    places = step.places()
    assert places["tokens"][1] == 4 * 256 and places["sampled"][1] == 4 * 16
    assert places["page_table"][1] == 4 * 16 * 8
    ends = sorted((offset, offset + size) for offset, size in places.values())
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ends))


def test_a_list_is_safe_to_capture_or_the_compile_fails() -> None:
    graph = lower().get(GraphPlan)
    known = dict(graph.templates)
    entry = next(entry for entry in graph.lists if entry.name == "decode.16")
    check_capture(entry.name, entry.launches, known)
    norm: dict[str, Any] = dict(entry.launches[1])
    for change, message in (
        ({"grid": None}, "has no fixed grid"),
        ({"args": norm["args"] | {"rows": 3}}, "bakes rows = 3 into the graph"),
        ({"args": norm["args"] | {"counts": 0}}, "does not read the live rows"),
    ):
        broken = replace(entry, launches=(entry.launches[0], norm | change))
        with pytest.raises(AssertionError, match=message):
            check_capture(broken.name, broken.launches, known)


def test_a_format_that_no_gpu_kernel_reads_names_the_way_out() -> None:
    with pytest.raises(TapeoutError) as caught:
        lower(quantization=Quantization(rules=(Rule(match="*.mlp.down_proj", format="mxfp4"),)))
    message = str(caught.value)
    assert message.startswith(
        "model.layers.0.mlp.down_proj: no GPU kernel serves mxfp4; quantization.default or a rule can convert it, with "
        "allow_requantize true, best to q8_0; those that it could be are f32, f16, bf16, "
    )
    assert "nvfp4" not in message and "iq4_nl" not in message and "fp8_row" not in message
