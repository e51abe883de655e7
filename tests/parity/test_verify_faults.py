"""`verify` passes whole artifacts and names the first wrong op of faulty ones: faults are planted in copies."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import witness

from tapeout.compiler.artifact import canonical_json
from tapeout.compiler.driver import compile_spec
from tapeout.compiler.emit.digests import digest_chunks
from tapeout.compiler.spec import Model, Quantization, Serving, Spec
from tapeout.compiler.verify import VerifyReport, verify_artifact

WEIGHTS = "weights/rank0.safetensors"
TEXT = (
    "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness. "
    * 20
)
FORMATS = ["f32", "q8_0"]


def build(source: Path, output: Path, formats: str) -> Path:
    sizes = {"max_context": 640, "max_sequences": 1, "page_tokens": 16, "prefill_chunk": 128}
    serving = Serving.model_validate({"kv_dtype": "f32" if formats == "f32" else "f16", **sizes})
    spec = Spec(model=Model(source=str(source)), quantization=Quantization(default="keep"), serving=serving)
    compile_spec(spec, output, cache=False)
    return output


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """(checkpoint, artifact) by family and format."""
    folder = tmp_path_factory.mktemp("verify")
    result: dict[str, tuple[Path, Path]] = {}
    for name, model in {"llama": witness.llama(), "gemma3": witness.gemma3()}.items():
        for formats in FORMATS:
            source = folder / f"{name}-{formats}.gguf"
            model.write_gguf(source, {} if formats == "f32" else {"*": formats.upper()})
            result[f"{name}-{formats}"] = source, build(source, folder / f"{name}-{formats}", formats)
    return result


def check(source: Path, artifact: Path, positions: int = 140) -> VerifyReport:
    return verify_artifact(artifact, source=source, positions=positions, text=TEXT)


def plant(artifact: Path, output: Path, fault: Callable[[dict[str, Any], np.ndarray], None]) -> Path:
    """A copy with its plan and weights (bytes of the data section) changed, and sealed again."""
    shutil.copytree(artifact, output)
    raw = np.fromfile(output / WEIGHTS, np.uint8)
    start = 8 + int(raw[:8].view("<u8")[0])
    plan = json.loads((output / "plan.json").read_bytes())
    fault(plan, raw[start:])
    raw.tofile(output / WEIGHTS)
    (output / "plan.json").write_bytes(canonical_json(plan))
    manifest = json.loads((output / "manifest.json").read_bytes())
    for entry in manifest["files"]:
        data = (output / entry["path"]).read_bytes()
        entry |= {"bytes": len(data), "sha256": list(digest_chunks(memoryview(data)))}
    (output / "manifest.json").write_bytes(canonical_json(manifest))
    return output


def span(plan: dict[str, Any], data: np.ndarray, name: str) -> np.ndarray:
    """The bytes of a weight."""
    weight = next(entry for entry in plan["weights"] if entry["name"] == name)
    return data[weight["offset"] : weight["offset"] + weight["bytes"]]


def swap_tiles(name: str, first: slice, second: slice) -> Callable[[dict[str, Any], np.ndarray], None]:
    """Exchange tiles of 16 rows, as if a fused weight's parts had come in file order."""

    def fault(plan: dict[str, Any], data: np.ndarray) -> None:
        rows = next(entry["shape"][0] for entry in plan["weights"] if entry["name"] == name)
        tiles = span(plan, data, name).reshape(-(-rows // 16), -1)
        tiles[first], tiles[second] = tiles[second].copy(), tiles[first].copy()

    return fault


def silence(op: str, kernel: str, arg: str) -> Callable[[dict[str, Any], np.ndarray], None]:
    """Give a kernel nothing to do in every list: no columns, no heads."""

    def fault(plan: dict[str, Any], data: np.ndarray) -> None:
        del data
        hits = [
            launch
            for graph in plan["graphs"]
            for launch in graph["launches"]
            if launch["op"] == op and launch["kernel"].startswith(kernel)
        ]
        assert hits, (op, kernel)
        for launch in hits:
            launch["args"][arg] = 0

    return fault


@pytest.mark.parametrize("formats", FORMATS)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_whole_artifacts_pass_over_more_than_512_positions(family: str, formats: str, built: Any) -> None:
    report = check(*built[f"{family}-{formats}"], positions=530)
    assert report.ok, report.text()
    assert report.positions == 530
    assert set(report.unmatched) <= {"select"}
    assert len(report.ops) > 6 * 4
    if formats == "f32":
        assert report.logits.kl_max < 1e-6
        assert max(op.own for op in report.ops) < 1e-4
    assert "no op of" in report.text()


WINDOWED: dict[str, Callable[[], witness.Witness]] = {
    "mistral": witness.mistral,
    "qwen2": lambda: witness.qwen2(use_sliding_window=True, sliding_window=8, max_window_layers=2),
    "qwen3": lambda: witness.qwen3(
        rope="yarn", head_dim=128, use_sliding_window=True, sliding_window=8, max_window_layers=2
    ),  # transformers takes the heads of a Qwen3 GGUF for 128 wide
}


@pytest.mark.parametrize("family", WINDOWED)
@pytest.mark.parametrize("container", ["gguf", "safetensors"])
def test_windows_are_the_references_too(family: str, container: str, tmp_path: Path) -> None:
    """transformers drops the windows of a GGUF; the reference has them nevertheless."""
    model = WINDOWED[family]()
    source = tmp_path / ("model.gguf" if container == "gguf" else "folder")
    if container == "gguf":
        model.write_gguf(source)
    else:
        model.save_hf(source)
    report = check(source, build(source, tmp_path / "artifact", "f32"))
    assert report.ok, report.text()
    assert report.logits.kl_max < 1e-6
    assert max(op.own for op in report.ops) < 1e-4


@pytest.mark.parametrize("formats", FORMATS)
def test_fused_order(formats: str, built: Any, tmp_path: Path) -> None:
    source, artifact = built[f"llama-{formats}"]
    fault = swap_tiles("model.layers.2.self_attn.qkv_proj", slice(4, 6), slice(6, 8))  # k and v of 32 rows each
    report = check(source, plant(artifact, tmp_path / "faulty", fault))
    assert not report.ok
    assert report.departure is not None
    assert report.departure.op == "model.layers.2.self_attn.k_proj"
    assert "departs at model.layers.2.self_attn.k_proj" in report.text()


@pytest.mark.parametrize("formats", FORMATS)
def test_gate_and_up_exchanged(formats: str, built: Any, tmp_path: Path) -> None:
    source, artifact = built[f"gemma3-{formats}"]
    fault = swap_tiles("model.layers.1.mlp.gate_up_proj", slice(0, 6), slice(6, 12))
    report = check(source, plant(artifact, tmp_path / "faulty", fault))
    assert report.departure is not None
    assert report.departure.op == "model.layers.1.mlp.act"


@pytest.mark.parametrize("formats", FORMATS)
@pytest.mark.parametrize("factor", [0.5, 1.02])
def test_rope_frequencies(formats: str, factor: float, built: Any, tmp_path: Path) -> None:
    def fault(plan: dict[str, Any], data: np.ndarray) -> None:
        span(plan, data, "model.rotary_emb").view("<f4")[:] *= np.float32(factor)

    source, artifact = built[f"llama-{formats}"]
    report = check(source, plant(artifact, tmp_path / "faulty", fault))
    assert report.departure is not None
    assert report.departure.op == "model.layers.0.self_attn.attention"


@pytest.mark.parametrize("rope", ["linear", "llama3", "yarn"])
def test_rope_scaling_that_was_ignored(rope: str, tmp_path: Path) -> None:
    source = witness.llama(rope=rope).save_hf(tmp_path / "checkpoint")
    ignorant = Path(shutil.copytree(source, tmp_path / "ignorant"))
    config = json.loads((ignorant / "config.json").read_text())
    theta = config.pop("rope_parameters")["rope_theta"]
    (ignorant / "config.json").write_text(json.dumps(config | {"rope_theta": theta}))
    report = check(source, build(ignorant, tmp_path / "artifact", "f32"))
    assert report.departure is not None
    assert report.departure.op == "model.layers.0.self_attn.attention"
    assert check(source, build(source, tmp_path / "right", "f32")).ok


SILENT = {
    "embedding": ("model.embed_tokens", "embed", "k", "model.embed_tokens"),
    "norm": ("model.layers.1.input_layernorm", "rmsnorm", "k", "model.layers.1.input_layernorm"),
    "qkv": ("model.layers.1.self_attn.qkv_proj", "linear", "n", "model.layers.1.self_attn.q_proj"),
    "cache": ("model.layers.1.self_attn.attention", "rope_kv", "kv_heads", "model.layers.1.self_attn.attention"),
    "gate_up": ("model.layers.1.mlp.gate_up_proj", "linear", "n", "model.layers.1.mlp.act"),
    "down": ("model.layers.1.mlp.down_proj", "linear", "n", "model.layers.1"),
    "head": ("lm_head", "linear", "n", "lm_head"),
}


@pytest.mark.parametrize("formats", FORMATS)
@pytest.mark.parametrize("case", SILENT)
def test_kernel_that_writes_nothing(case: str, formats: str, built: Any, tmp_path: Path) -> None:
    op, kernel, arg, expected = SILENT[case]
    source, artifact = built[f"llama-{formats}"]
    report = check(source, plant(artifact, tmp_path / "faulty", silence(op, kernel, arg)))
    assert report.departure is not None
    assert report.departure.op == expected
