"""Wrong results that others shipped, as small cases of our own; the docstrings say where each was seen.

Others have their tests elsewhere: order in fused weights and mixed formats (test_passes, test_families, test_driver),
decoders against another implementation (test_formats_gguf), the index as an allow-list (hostile/test_safetensors),
pre-tokenizers (test_tokenizer), rope scaling and kernels that write nothing (test_verify_faults), artifacts of another
version or architecture (hostile).
"""

from __future__ import annotations

import ctypes
import json
import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small_model
import tiny

from tapeout.compiler.driver import compile_spec
from tapeout.compiler.models import gemma3
from tapeout.compiler.spec import Model as ModelSection
from tapeout.compiler.spec import Quantization, Serving, Spec
from tapeout.passes.plan_memory import SCRATCH
from tapeout.runtime import Model, load
from tapeout.runtime.errors import TapeoutError

IDS = np.random.default_rng(3).integers(0, 256, 100).tolist()


def build(source: Path, output: Path, **serving: Any) -> Path:
    held = Serving(**{"max_context": 256, "max_sequences": 3, "page_tokens": 16, "prefill_chunk": 64, **serving})
    compile_spec(
        Spec(model=ModelSection(source=str(source)), quantization=Quantization(), serving=held), output, cache=False
    )
    return output


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("traps")
    return build(small_model.write_gguf(folder / "model.gguf"), folder / "artifact")


@pytest.fixture
def model(artifact: Path) -> Iterator[Model]:
    with load(artifact, threads=2) as loaded:
        yield loaded


def memory_of(piece: Any) -> np.ndarray:
    return np.ctypeslib.as_array((ctypes.c_uint8 * piece.nbytes).from_address(piece.address))


# ---- weights and configuration -----------------------------------------------------------------------------------


def test_more_embedding_rows_than_tokens(tmp_path: Path) -> None:
    """A truncated vocabulary drops trained rows, 262,208 rows and 262,145 tokens (unsloth-zoo#923): rows are kept."""
    config = {**small_model.CONFIG, "vocab_size": 350}
    arrays = small_model.tensors(config)
    arrays["model.embed_tokens.weight"][340] = 3 * arrays["model.embed_tokens.weight"][IDS[-1]]  # a likely answer
    source = small_model.write_folder(tmp_path / "model", arrays, config)
    with load(build(source, tmp_path / "artifact")) as model:
        assert (model.vocab_size, model.tokenizer.vocab_size) == (350, len(small_model.TOKENS))
        logits = model.logits(IDS)
        assert logits.shape == (100, 350) and np.isfinite(logits).all()
        steps = list(model.generate(IDS, max_tokens=3))
        assert steps[0].token == int(logits[-1].argmax())
        assert model.tokenizer.decode([340, 5]) == model.tokenizer.decode([5])
        with pytest.raises(TapeoutError, match="token id 350 is outside the vocabulary of 350"):
            model.logits([350])


@pytest.mark.parametrize(
    ("top", "inner", "tied"),
    [(None, None, True), (False, None, False), (True, None, True), (None, False, False), (False, False, False)],
)
def test_a_tied_flag_at_either_level_of_a_composite_config(top: bool | None, inner: bool | None, tied: bool) -> None:
    """A tied flag is read from the wrong level of a composite config (vllm#51063)."""
    text = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 96}
    config: dict[str, Any] = {"text_config": text | ({} if inner is None else {"tie_word_embeddings": inner})}
    config |= {} if top is None else {"tie_word_embeddings": top}
    assert gemma3.parse_hf(config).tied is tied


def test_tied_flags_that_contradict() -> None:
    """The same trap: a contradiction is named, not guessed."""
    text = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 96}
    with pytest.raises(TapeoutError, match="tie_word_embeddings is False at the top and True in text_config"):
        gemma3.parse_hf({"tie_word_embeddings": False, "text_config": text | {"tie_word_embeddings": True}})


def test_head_size_is_the_configs_and_not_the_quotient() -> None:
    """Head sizes other than hidden / heads (onnxruntime-genai#2062): every shape follows head_dim."""
    config = {**tiny.CONFIG, "head_dim": 24}
    results = tiny.compile_tiny(tiny.checkpoint(tiny.shapes(config), config))
    from tapeout.compiler.stages import GraphPlan, SelectedModel

    shapes = {weight.name: weight.recipe.shape for weight in results.get(SelectedModel).weights}
    assert shapes["model.layers.0.self_attn.qkv_proj"] == (24 * (4 + 2 + 2), 64)
    assert shapes["model.layers.0.self_attn.o_proj"] == (64, 24 * 4)
    kernels = [launch for entry in results.get(GraphPlan).lists for launch in entry.launches]
    assert {launch["args"]["head_dim"] for launch in kernels if "head_dim" in launch["args"]} == {24}


@pytest.mark.parametrize("weight", ["k_proj", "v_proj"])
def test_values_beyond_16_bits_are_refused(weight: str, tmp_path: Path) -> None:
    """A bf16 model run in fp16 overflows and prints "!!!!" (vllm#40290): an error, and float32 pages work."""
    arrays = small_model.tensors()
    arrays[f"model.layers.0.self_attn.{weight}.weight"] *= 1e7
    source = small_model.write_folder(tmp_path / "model", arrays)
    with load(build(source, tmp_path / "f16")) as model, pytest.raises(TapeoutError, match="NaN or infinite values"):
        list(model.generate(IDS, max_tokens=1))
    with load(build(source, tmp_path / "f32", kv_dtype="f32")) as model:
        assert np.isfinite(model.logits(IDS)).all()
        assert len(list(model.generate(IDS, max_tokens=1))) == 1


# ---- shapes, lengths and memory ----------------------------------------------------------------------------------


def test_every_length_and_batch_has_a_launch_list(model: Model) -> None:
    """Warm-up covers too few shapes, compiles happen in mid-serving (vllm#41834): the set of shapes is closed."""
    whole = model.logits(IDS)
    for length in range(1, 100):
        first = next(iter(model.generate(IDS[:length], max_tokens=1)))
        assert first.token == int(whole[length - 1].argmax()), length
    for batch in range(1, model.max_sequences + 1):
        sequences = [model.pool.open() for _ in range(batch)]
        assert len(model.decode(sequences, IDS[:batch])) == batch
        for sequence in sequences:
            model.pool.close(sequence)


def test_only_live_keys_are_read(model: Model) -> None:
    """The graph's width is the maximum context whatever the live length (sglang#40441): nothing else is looked at."""
    expected = model.logits(IDS)
    memory_of(model.backend.kv)[:] = 0xFF  # NaN in every key and value
    memory_of(model.backend.arena)[:] = 0xFF
    assert np.array_equal(model.logits(IDS), expected)


def test_traced_launches_equal_a_whole_step(model: Model) -> None:
    """Replay differs from eager from the second token on (ik_llama.cpp#2136): bit for bit, outputs poisoned before."""
    expected = model.logits(IDS)
    traced = [made.values for made in model.trace(IDS) if any(op == "lm_head" for op, _, _ in made.produces)]
    assert np.array_equal(np.concatenate(traced)[:, : model.vocab_size], expected)


def test_the_process_holds_what_the_plan_says(artifact: Path, model: Model) -> None:
    """Graph memory is unknown when the KV pool is sized (vllm#57475): a plan exact to the byte."""
    memory, backend = model.plan["memory"], model.backend
    assert (backend.arena.nbytes, backend.kv.nbytes) == (memory["arena"], memory["kv_pool"])
    data = (artifact / "weights" / "rank0.safetensors").read_bytes()
    assert len(data) - 8 - int.from_bytes(data[:8], "little") == memory["weights"]
    assert memory["total"] == sum(memory[name] for name in ("weights", "kv_pool", "arena", "scratch"))
    held = Path(__file__).parents[2] / "compiler" / "kernels" / "cpu" / "tapeout_cpu.h"
    assert f"#define TP_SCRATCH ({SCRATCH // 1024} * 1024)" in held.read_text("utf-8")


GUARD = 1 << 16


def test_nothing_is_written_outside_the_plan(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A buffer that the plan does not hold is stale in the graph (TensorRT-LLM#16290): every write has its place."""
    from tapeout.runtime import cpu

    class Guarded(mmap.mmap):
        def __new__(cls, fileno: int, length: int, **options: Any) -> mmap.mmap:
            return super().__new__(cls, fileno, length + (GUARD if fileno == -1 else 0), **options)

    monkeypatch.setattr(cpu.mmap, "mmap", Guarded)
    with load(artifact, threads=2) as model:
        arena, kv = memory_of(model.backend.arena), memory_of(model.backend.kv)
        assert arena.size == model.plan["memory"]["arena"] + GUARD
        for entry in model.backend.lists:
            covered = np.zeros(arena.size, bool)
            for buffer in model.plan["memory"]["buffers"]:
                if buffer["graph"] == entry.name:
                    covered[buffer["offset"] : buffer["offset"] + buffer["bytes"]] = True
            arena[:] = kv[:] = 0xA5
            sequences = [model.pool.open() for _ in range(entry.rows if entry.phase == "decode" else 1)]
            if entry.phase == "decode":
                for sequence in sequences:
                    model.pool.grow(sequence, 1)
                step = model.backend.step.one_token_each(sequences, IDS[: entry.rows])
            else:
                model.pool.grow(sequences[0], entry.rows)
                step = model.backend.step.one_sequence(sequences[0], IDS[: entry.rows], range(min(entry.rows, 16)))
            if entry.phase == "head":
                arena[:] = 0
                model.backend.run(None, entry, step, None)
                assert not arena[~covered].any(), entry.name
            else:
                model.backend.run(entry, None, step, None)
                assert (arena[~covered] == 0xA5).all(), entry.name
                pages = [sequence.table[index] for sequence in sequences for index in range(sequence.pages)]
                assert written_pages(model, kv) == set(pages), entry.name
            assert (kv[-GUARD:] == 0xA5).all()
            for sequence in sequences:
                model.pool.close(sequence)


def written_pages(model: Model, kv: np.ndarray) -> set[int]:
    """Pages of any layer that hold anything but the guard's pattern."""
    held = model.plan["memory"]["kv"]
    layers = model.plan["model"]["config"]["layers"]
    layer = model.plan["memory"]["kv_pool"] // layers
    page = held["page_tokens"] * held["bytes_per_token"] // layers
    found: set[int] = set()
    for at in range(layers):
        used = kv[at * layer : at * layer + held["pages"] * page].reshape(held["pages"], page)
        found |= set(np.flatnonzero((used != 0xA5).any(axis=1)).tolist())
    return found


def test_no_more_tokens_than_the_context(model: Model) -> None:
    """A sequence ends at the planned context, whoever drives it."""
    sequence = model.pool.open()
    sequence.length = model.max_context
    with pytest.raises(TapeoutError, match="the sequence would hold 257 tokens, but its context is 256"):
        model.decode([sequence], [5])


def test_pages_go_back_when_a_generation_ends(model: Model) -> None:
    """The pool is the plan's and nothing more: a generation that ends, is closed or is dropped gives its pages back."""

    def free() -> int:
        sequence = model.pool.open()
        try:
            model.pool.grow(sequence, model.max_context)
            return sequence.pages
        finally:
            model.pool.close(sequence)

    for _ in range(2 * model.max_sequences):
        generation = model.generate(IDS, max_tokens=20)
        next(generation)
        generation.close()
        for _ in model.generate(IDS, max_tokens=20):
            break
        next(model.generate(IDS, max_tokens=20))
        list(model.generate(IDS * 2, max_tokens=200))
        model.logits(IDS)
        list(zip(range(3), model.trace(IDS), strict=False))
    assert free() == model.max_context // 16
    plan = json.loads((model.folder / "plan.json").read_bytes())
    assert plan["memory"]["kv"]["pages"] == model.max_sequences * model.max_context // 16
