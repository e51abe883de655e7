"""ONNX out and in: exports beside transformers, and checkpoints held in initializers beside safetensors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import witness
import witness_experts
import witness_latent
import witness_v4
from onnx import TensorProto, helper
from test_families import TOLERANCE, build, relative_error
from witness import Witness, token_ids

from tapeout.compiler.onnx.driver import export_onnx
from tapeout.compiler.spec import Model as ModelSection
from tapeout.compiler.spec import Quantization, Spec
from tapeout.compiler.verify import verify_artifact
from tapeout.runtime import load
from tapeout.runtime.errors import TapeoutError

FAMILIES: dict[str, Callable[[], Witness]] = {
    "llama-biases": lambda: witness.llama(bias=True),
    "llama-llama3": lambda: witness.llama(rope="llama3", tied=True),
    "llama-yarn": lambda: witness.llama(rope="yarn"),
    "mistral-window": witness.mistral,
    "qwen2": witness.qwen2,
    "qwen3": witness.qwen3,
    "gemma3": witness.gemma3,
    "mixtral": witness.mixtral,
    "qwen3-moe": witness.qwen3_moe,
    "gpt-oss": witness_experts.gpt_oss,
    "deepseek-v2": witness_latent.deepseek_v2,
    "deepseek-v3": witness_latent.deepseek_v3,
    "glm-dsa": witness_latent.glm_dsa,
    "deepseek-v4": witness_v4.deepseek_v4,
}
TEXT = "It was the best of times, it was the worst of times. " * 10


def export(source: Path, output: Path, **options: Any) -> Path:
    model = export_onnx(Spec(model=ModelSection(source=str(source))), output, **options)
    onnx.checker.check_model(str(model), full_check=True)
    return model


def session(model: Path) -> Any:
    return onnxruntime.InferenceSession(str(model), providers=["CPUExecutionProvider"])


def onnx_logits(model: Path, *sequences: list[int]) -> np.ndarray:
    return session(model).run(["logits"], {"input_ids": np.array(sequences, np.int64)})[0]


@pytest.mark.parametrize("case", FAMILIES)
def test_an_export_gives_the_logits_of_transformers(case: str, tmp_path: Path) -> None:
    """Two sequences at once, longer than windows and selections, and one that is shorter."""
    reference, ids, others = FAMILIES[case](), token_ids(60), token_ids(60, seed=2)
    model = export(reference.save_hf(tmp_path / "hf"), tmp_path / "onnx")
    for sequences in ([ids, others], [ids[:3]]):
        for logits, sequence in zip(onnx_logits(model, *sequences), sequences, strict=True):
            assert relative_error(logits, reference.logits(sequence)) <= TOLERANCE


def test_external_weights_give_the_same_and_values_bear_the_names_of_ops(tmp_path: Path) -> None:
    source = witness.qwen3().save_hf(tmp_path / "hf")
    inline, external = export(source, tmp_path / "a"), export(source, tmp_path / "b", external=True)
    assert [path.name for path in sorted(external.parent.iterdir())] == ["model.onnx", "model.onnx.data"]
    assert external.stat().st_size < 100_000 < inline.stat().st_size
    assert np.array_equal(onnx_logits(inline, token_ids(20)), onnx_logits(external, token_ids(20)))
    model = onnx.load(external, load_external_data=False)
    names = [node.name for node in model.graph.node]
    assert len(set(names)) == len(names)
    assert {"model.layers.0.self_attn.q_norm", "model.layers.0.mlp.act", "model.layers.1", "lm_head"} < set(names)
    places = [{each.key: each.value for each in tensor.external_data} for tensor in model.graph.initializer]
    assert {int(place["offset"]) % 4096 for place in places if place} == {0}
    metadata = {each.key: each.value for each in model.metadata_props}
    assert metadata["tapeout.family"] == "qwen3" and metadata["tapeout.source"] == "hf"
    assert len(metadata["tapeout.spec_sha256"]) == 64


def test_an_export_holds_the_numbers_of_the_formats_that_the_spec_asks_for(tmp_path: Path) -> None:
    """What a GGUF of the same blocks holds, dequantized by gguf-py."""
    reference, ids = witness.llama(), token_ids(40)
    held = reference.write_gguf(tmp_path / "model.gguf", {"*": "Q8_0"})
    spec = Spec(
        model=ModelSection(source=str(reference.save_hf(tmp_path / "hf"))), quantization=Quantization(default="q8_0")
    )
    assert relative_error(onnx_logits(export_onnx(spec, tmp_path / "onnx"), ids)[0], held.logits(ids)) <= TOLERANCE
    assert relative_error(onnx_logits(export(tmp_path / "model.gguf", tmp_path / "b"), ids)[0], held.logits(ids)) <= (
        TOLERANCE
    )


@pytest.mark.parametrize("case", ["llama-biases", "gemma3", "qwen3-moe", "glm-dsa", "deepseek-v4"])
def test_verify_with_the_onnx_witness(case: str, tmp_path: Path) -> None:
    """It knows every op; transformers, which computes some otherwise, agrees about those that it knows."""
    source = FAMILIES[case]().save_hf(tmp_path / "hf")
    artifact = build(source, tmp_path / "artifact")
    given: dict[str, Any] = {"source": source, "positions": 100, "text": TEXT}
    report, other = (verify_artifact(artifact, witness=name, **given) for name in ("onnx", "transformers"))
    assert report.ok, report.text()
    assert other.ok, other.text()
    assert "ONNX Runtime" in report.reference
    assert not report.unmatched and len(report.ops) > len(other.ops)
    assert max(op.own for op in report.ops) <= 2e-5
    with pytest.raises(TapeoutError, match=r"^--witness torch is not known; witnesses are transformers and onnx$"):
        verify_artifact(artifact, witness="torch", **given)


def test_verify_with_the_onnx_witness_names_a_wrong_op(tmp_path: Path) -> None:
    """Against the checkpoint of the same model with one matrix changed."""
    reference = witness.llama()
    artifact = build(reference.save_hf(tmp_path / "hf"), tmp_path / "artifact")
    with torch.no_grad():
        reference.model.model.layers[1].mlp.down_proj.weight[3] *= 2
    report = verify_artifact(
        artifact, source=reference.save_hf(tmp_path / "other"), witness="onnx", positions=50, text=TEXT
    )
    assert report.departure is not None and report.departure.op == "model.layers.1"


# ---- checkpoints ---------------------------------------------------------------------------------------------------


def write_initializers(folder: Path, state: dict[str, Any], types: dict[Any, int]) -> None:
    """model.onnx of initializers alone, the larger ones in two external files, the others inside."""
    tensors: list[TensorProto] = []
    for number, (name, values) in enumerate(state.items()):
        raw = values.contiguous().view(torch.uint8).numpy().tobytes()
        tensor = TensorProto(name=name, data_type=types[values.dtype], dims=values.shape)
        if len(raw) < 1000:
            tensor.raw_data = raw
        else:
            file = folder / f"data{number % 2}.bin"
            with file.open("ab") as data:
                data.write(bytes(-data.tell() % 64))
                place = {"location": file.name, "offset": data.tell(), "length": len(raw)}
                data.write(raw)
            tensor.data_location = TensorProto.EXTERNAL
            for key, value in place.items():
                tensor.external_data.add(key=key, value=str(value))
        tensors.append(tensor)
    onnx.save(helper.make_model(helper.make_graph([], "weights", [], [], tensors)), folder / "model.onnx")


@pytest.mark.parametrize("kind", ["float32", "float16", "bfloat16"])
def test_initializers_give_the_artifact_of_safetensors(kind: str, tmp_path: Path) -> None:
    reference, ids = witness.llama(num_hidden_layers=2), token_ids(60)
    reference.model.to(getattr(torch, kind))
    whole = build(reference.save_hf(tmp_path / "hf"), tmp_path / "a")
    (tmp_path / "hf/model.safetensors").unlink()
    types = {torch.float32: TensorProto.FLOAT, torch.float16: TensorProto.FLOAT16, torch.bfloat16: TensorProto.BFLOAT16}
    write_initializers(tmp_path / "hf", reference.model.state_dict(), types)
    held = build(tmp_path / "hf", tmp_path / "b")
    assert json.loads((held / "plan.json").read_bytes())["checkpoint"]["container"] == "onnx"
    names = ("weights/rank0.safetensors", "tokenizer.bin")
    assert [(whole / name).read_bytes() for name in names] == [(held / name).read_bytes() for name in names]
    if kind == "float32":
        sentence = "transformers does not read ONNX; name a safetensors folder of the same model, or verify with"
        with pytest.raises(TapeoutError, match=sentence):
            verify_artifact(held, source=tmp_path / "hf", positions=20)
        with load(held) as model:
            assert relative_error(model.logits(ids), reference.logits(ids)) <= TOLERANCE


def test_an_export_of_torch_gives_the_artifact_of_safetensors(tmp_path: Path) -> None:
    """torch.onnx transposes the weights of products and calls them onnx::MatMul_123; square ones are among them."""
    reference = witness.qwen2(num_hidden_layers=2)
    whole = build(reference.save_hf(tmp_path / "hf"), tmp_path / "a")
    (tmp_path / "hf/model.safetensors").unlink()
    run = reference.model.forward
    mask, positions = torch.zeros(1, 1, 3, 3), torch.arange(3)[None]  # it cannot export how transformers makes them

    def forward(ids: Any) -> Any:
        return run(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False).logits

    reference.model.forward = forward
    with pytest.warns(DeprecationWarning):
        torch.onnx.export(reference.model, (torch.tensor([[1, 2, 3]]),), str(tmp_path / "hf/model.onnx"), dynamo=False)
    names = {tensor.name for tensor in onnx.load(tmp_path / "hf/model.onnx").graph.initializer}
    assert any(name.startswith("onnx::MatMul") for name in names)
    held = build(tmp_path / "hf/model.onnx", tmp_path / "b")
    weights = "weights/rank0.safetensors"
    assert (whole / weights).read_bytes() == (held / weights).read_bytes()
