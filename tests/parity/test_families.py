"""Every family against transformers in float32: both containers, every position, prefill in chunks, then decode."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import witness
import witness_experts
import witness_latent
import witness_v4
from witness import Witness, kl_divergence, token_ids

from tapeout.compiler.driver import compile_spec
from tapeout.compiler.spec import Model as ModelSection
from tapeout.compiler.spec import Quantization, Serving, Spec
from tapeout.runtime import Model, load

POSITIONS = 150  # longer than any window, several pages and several prefill chunks
TOLERANCE = 2e-5

CASES: dict[str, Callable[[], Witness]] = {
    "llama": witness.llama,
    "llama-tied": lambda: witness.llama(tied=True),
    "llama-biases": lambda: witness.llama(bias=True),
    "llama-linear": lambda: witness.llama(rope="linear"),
    "llama-llama3": lambda: witness.llama(rope="llama3"),
    "llama-yarn": lambda: witness.llama(rope="yarn"),
    "llama-one-kv-head-per-head": lambda: witness.llama(num_key_value_heads=4),
    "llama-one-kv-head": lambda: witness.llama(num_key_value_heads=1),
    "llama-untidy-widths": lambda: witness.llama(hidden_size=72, intermediate_size=100, vocab_size=320),
    "mistral": witness.mistral,
    "mistral-without-window": lambda: witness.mistral(sliding_window=None),
    "mistral-window-over-chunks": lambda: witness.mistral(sliding_window=70),
    "mistral-nemo": lambda: witness.mistral(hidden_size=80, intermediate_size=224, sliding_window=None),
    "mistral-yarn": lambda: witness.mistral(rope="yarn"),
    "qwen2": witness.qwen2,
    "qwen2-tied": lambda: witness.qwen2(tied=True),
    "qwen2-yarn": lambda: witness.qwen2(rope="yarn"),
    "qwen2-windows": lambda: witness.qwen2(use_sliding_window=True, sliding_window=8, max_window_layers=2),
    "qwen2-seven-heads-of-one-kv-head": lambda: witness.qwen2(hidden_size=112, num_attention_heads=14),
    "qwen3": witness.qwen3,
    "qwen3-tied": lambda: witness.qwen3(tied=True),
    "qwen3-biases": lambda: witness.qwen3(bias=True),
    "qwen3-yarn": lambda: witness.qwen3(rope="yarn"),
    "qwen3-windows": lambda: witness.qwen3(use_sliding_window=True, sliding_window=8, max_window_layers=2),
    "mixtral": witness.mixtral,
    "mixtral-window": lambda: witness.mixtral(sliding_window=8),
    "qwen3-moe": witness.qwen3_moe,
    "qwen3-moe-dense-layers": lambda: witness.qwen3_moe(normalize=False, mlp_only_layers=[1]),
    "gpt-oss": witness_experts.gpt_oss,
    "gemma3": witness.gemma3,
    "gemma3-linear": lambda: witness.gemma3(rope="linear"),
    "gemma3-one-kv-head": lambda: witness.gemma3(num_key_value_heads=1),
    "deepseek-v2": witness_latent.deepseek_v2,
    "deepseek-v2-lite": witness_latent.deepseek_v2_lite,
    "deepseek-v3": lambda: witness_latent.deepseek_v3(drafts=True),
    "deepseek-v3-halves": lambda: witness_latent.deepseek_v3(rope_interleave=False, attention_bias=True),
    "kimi-k2.5": witness_latent.kimi,
    "deepseek-v3.2": witness_latent.deepseek_v32,
    "glm-5": lambda: witness_latent.glm_dsa(drafts=True),
    "deepseek-v4": witness_v4.deepseek_v4,
    "deepseek-v4-yarn-long-windows": lambda: witness_v4.deepseek_v4(
        yarn=True, compress_rates={**witness_v4.RATES, "heavily_compressed_attention": 40}, sliding_window=70
    ),
}

# what a GGUF of the architecture cannot say
SAFETENSORS_ONLY = ("qwen3-moe-dense-layers", "deepseek-v4", "deepseek-v4-yarn-long-windows")
SAFETENSORS_ONLY += ("deepseek-v3-halves", "kimi-k2.5")


def build(source: Path, output: Path, quantization: Quantization | None = None, kv: str = "f32") -> Path:
    sizes = {"max_context": 512, "max_sequences": 2, "page_tokens": 16, "prefill_chunk": 64}
    serving = Serving.model_validate({"kv_dtype": kv, **sizes})
    spec = Spec(model=ModelSection(source=str(source)), quantization=quantization or Quantization(), serving=serving)
    compile_spec(spec, output, cache=False)
    return output


def relative_error(ours: np.ndarray, reference: np.ndarray) -> float:
    """Largest difference at any position, against the spread of that position's logits."""
    spread = reference.std(axis=1, keepdims=True)
    return float((np.abs(ours - reference) / spread).max())


def decoded_logits(model: Model, ids: list[int], prefilled: int = 0) -> np.ndarray:
    """Logits of every position behind the ``prefilled`` ones, token by token through the cache."""
    sequence, rows = model.pool.open(), list[np.ndarray]()
    head = model.bucket("head", 1)
    if prefilled:
        model.prefill(sequence, ids[:prefilled])
    for token in ids[prefilled:]:
        model.decode([sequence], [token])
        logits = (ctypes.c_float * model.vocab_size).from_address(model.backend.logits_address(head))
        rows.append(np.array(logits, np.float32))
    model.pool.close(sequence)
    return np.stack(rows)


@pytest.mark.parametrize(
    ("case", "container"),
    [(case, kind) for case in CASES for kind in ("safetensors", "gguf")[: 1 if case in SAFETENSORS_ONLY else 2]],
)
def test_logits_equal_transformers_at_every_position(case: str, container: str, tmp_path: Path) -> None:
    reference = CASES[case]()
    ids = token_ids(POSITIONS)
    if container == "gguf":
        source = tmp_path / "model.gguf"
        reference.write_gguf(source)
    else:
        source = reference.save_hf(tmp_path / "hf")
    expected = reference.logits(ids)
    with load(build(source, tmp_path / "artifact")) as model:
        prefilled = model.logits(ids)
        assert relative_error(prefilled, expected) <= TOLERANCE
        assert relative_error(decoded_logits(model, ids), expected) <= TOLERANCE
        assert relative_error(decoded_logits(model, ids, 100), expected[100:]) <= TOLERANCE
        assert [step.token for step in model.generate(ids[:20], max_tokens=12)] == until_eos(reference, ids[:20], model)


def until_eos(reference: Witness, ids: list[int], model: Model) -> list[int]:
    out: list[int] = []
    for token in reference.greedy(ids, 12):
        out.append(token)
        if token in model.eos_ids:
            break
    return out


@pytest.mark.parametrize("case", ["llama", "qwen2", "qwen3"])
def test_a_sharded_folder_gives_the_same_bytes_as_a_whole_one(case: str, tmp_path: Path) -> None:
    reference = CASES[case]()
    whole = build(reference.save_hf(tmp_path / "whole"), tmp_path / "a")
    sharded = build(reference.save_hf(tmp_path / "sharded", sharded=True), tmp_path / "b")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 1
    names = ("weights/rank0.safetensors", "tokenizer.bin")
    assert [(whole / name).read_bytes() for name in names] == [(sharded / name).read_bytes() for name in names]


@pytest.mark.parametrize("case", ["llama", "mistral", "qwen2-windows", "qwen3-windows", "gemma3"])
def test_both_containers_of_one_model_give_the_same_logits(case: str, tmp_path: Path) -> None:
    reference, ids = CASES[case](), token_ids(60)
    reference.write_gguf(tmp_path / "model.gguf")
    logits: list[np.ndarray] = []
    for number, source in enumerate((tmp_path / "model.gguf", reference.save_hf(tmp_path / "hf"))):
        with load(build(source, tmp_path / str(number))) as model:
            logits.append(model.logits(ids))
    assert np.array_equal(*logits)


# A quantized weight is multiplied with 8-bit activations: the bound is what rounding x to max|x|/127 may cost.
FORMATS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "F16", "BF16")


@pytest.mark.parametrize("kind", FORMATS)
def test_quantized_files_follow_the_dequantized_reference(kind: str, tmp_path: Path) -> None:
    reference, ids = witness.llama(), token_ids(80)
    held = reference.write_gguf(tmp_path / "model.gguf", {"*": kind})
    with load(build(tmp_path / "model.gguf", tmp_path / "artifact", kv="f16")) as model:
        both = (model.logits(ids), decoded_logits(model, ids))
        divergences = [kl_divergence(held.logits(ids), logits).mean() for logits in both]
    assert max(divergences) <= (1e-5 if kind in ("F16", "BF16") else 5e-3)


# Routers stay F32, as converters keep them; gate and up of an expert in one format are one matrix, in two they are not.
# Models whose choices of experts are seldom so close that rounding turns them, which is no error of a kernel.
EXPERTS: dict[str, tuple[Callable[[], Witness], dict[str, str]]] = {
    "mixtral": (lambda: witness.mixtral(seed=1), {"*ffn_gate_inp*": "F32", "*": "Q8_0"}),
    "qwen3-moe": (witness.qwen3_moe, {"*ffn_gate_inp*": "F32", "*ffn_gate_exps*": "Q5_0", "*": "Q4_0"}),
    "gpt-oss": (
        lambda: witness_experts.gpt_oss(num_experts_per_tok=5),
        {"*ffn_gate_inp*": "F32", "*ffn_up_exps*": "Q8_0", "*_exps*": "MXFP4", "*": "Q8_0"},
    ),
}


@pytest.mark.parametrize("case", EXPERTS)
def test_quantized_experts_follow_the_dequantized_reference(case: str, tmp_path: Path) -> None:
    (make, formats), ids = EXPERTS[case], token_ids(80)
    reference = make()
    held = reference.write_gguf(tmp_path / "model.gguf", formats)
    with load(build(tmp_path / "model.gguf", tmp_path / "artifact", kv="f16")) as model:
        both = (model.logits(ids), decoded_logits(model, ids))
        assert max(kl_divergence(held.logits(ids), logits).mean() for logits in both) <= 5e-3
    exact = build(tmp_path / "model.gguf", tmp_path / "exact", Quantization(activations="f32"))
    with load(exact) as model:
        assert relative_error(model.logits(ids), held.logits(ids)) <= TOLERANCE


@pytest.mark.parametrize("case", ["llama", "qwen2", "qwen3"])
def test_mixed_formats_in_one_fused_layer(case: str, tmp_path: Path) -> None:
    """With biases and norms of heads too, which go with their part (vllm-gguf-plugin#107)."""
    reference, ids = CASES[case](), token_ids(80)
    parts = {"*attn_q.weight": "Q5_0", "*attn_k.weight": "Q4_1", "*attn_v.weight": "Q8_0", "*ffn_up*": "Q4_0"}
    formats = {**parts, "*": "Q8_0"}
    held = reference.write_gguf(tmp_path / "model.gguf", formats)
    with load(build(tmp_path / "model.gguf", tmp_path / "artifact", kv="f16")) as model:
        assert kl_divergence(held.logits(ids), model.logits(ids)).mean() <= 5e-3
    exact = build(tmp_path / "model.gguf", tmp_path / "exact", Quantization(activations="f32"))
    with load(exact) as model:
        assert relative_error(model.logits(ids), held.logits(ids)) <= TOLERANCE


@pytest.mark.parametrize("case", ["llama", "qwen3-moe", "glm-5"])
def test_sequences_decoded_together_equal_each_alone(case: str, tmp_path: Path) -> None:
    reference = CASES[case]()
    prompts = [token_ids(37, seed=3), token_ids(70, seed=4)]
    with load(build(reference.save_hf(tmp_path / "hf"), tmp_path / "artifact")) as model:
        alone = [[step.token for step in model.generate(ids, max_tokens=10)] for ids in prompts]
        sequences = [model.pool.open() for _ in prompts]
        pairs = zip(sequences, prompts, strict=True)
        together: list[list[int]] = [[model.prefill(sequence, ids)] for sequence, ids in pairs]
        for _ in range(9):
            for row, token in enumerate(model.decode(sequences, [tokens[-1] for tokens in together])):
                together[row].append(token)
    assert all(each[: len(one)] == one for each, one in zip(together, alone, strict=True))


@pytest.mark.parametrize("target", ["x86_64_v3", "x86_64_v4"])
@pytest.mark.parametrize(("case", "threads"), [("gemma3", 1), ("gemma3", 2), ("gemma3", 3), ("qwen3-moe", 2)])
def test_results_do_not_depend_on_threads(case: str, threads: int, target: str, tmp_path: Path) -> None:
    from tapeout.runtime.host import host_targets

    if target not in host_targets():
        pytest.skip(f"this CPU does not run {target}")
    reference, ids = CASES[case](), token_ids(100)
    held = reference.write_gguf(tmp_path / "model.gguf", {"*ffn_gate_inp*": "F32", "*": "Q4_0"})
    artifact = build(tmp_path / "model.gguf", tmp_path / "artifact", kv="f16")
    with load(artifact, threads=threads, target=target) as model, load(artifact, threads=1, target=target) as one:
        assert np.array_equal(model.logits(ids), one.logits(ids))
        assert kl_divergence(held.logits(ids), model.logits(ids)).mean() <= 5e-3
