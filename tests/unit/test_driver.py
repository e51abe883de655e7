"""From a spec to an artifact: the same bytes whatever the way, what is reused, plan-only, force, recorded errors."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import small_model
from safetensors.numpy import load_file

from tapeout.compiler.checkpoints import open_checkpoint
from tapeout.compiler.cli import main
from tapeout.compiler.devices import load_device
from tapeout.compiler.driver import compile_spec, run_passes
from tapeout.compiler.environment import Environment
from tapeout.compiler.lowering.choice import KernelBuilder
from tapeout.compiler.progress import SilentProgress, SilentTask
from tapeout.compiler.spec import Model, Quantization, Serving, Spec
from tapeout.compiler.spec.schema import Rule
from tapeout.runtime import load
from tapeout.runtime.errors import TapeoutError


class Notes(SilentProgress):
    """Remembers what tasks noted."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def task(self, label: str, total: int, unit: str = "") -> SilentTask:
        notes = self.notes

        class Task(SilentTask):
            def note(self, text: str) -> None:
                notes.append(f"{label}: {text}")

        return Task()


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty weight cache; compiled C stays shared."""
    shared, own = Environment.read().cache, tmp_path / "cache"
    own.mkdir()
    for name in ("kernels", "emit"):
        (shared / name).mkdir(parents=True, exist_ok=True)
        (own / name).symlink_to(shared / name)
    monkeypatch.setenv("TAPEOUT_CACHE", str(own))


def spec(source: Path, sequences: int = 1, **quantization: Any) -> Spec:
    return Spec(
        model=Model(source=str(source)),
        quantization=Quantization(**quantization),
        serving=Serving(max_context=256, max_sequences=sequences),
    )


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def permuted(folder: Path) -> None:
    """Lay the tensors of a safetensors file in the opposite order."""
    place = folder / "model.safetensors"
    tensors, header, data = load_file(place), dict[str, Any](), b""
    for name in sorted(tensors, reverse=True):
        begin, data = len(data), data + tensors[name].tobytes()
        header[name] = {"dtype": "F32", "shape": list(tensors[name].shape), "data_offsets": [begin, len(data)]}
    text = json.dumps(header).encode()
    place.write_bytes(len(text).to_bytes(8, "little") + text + data)


@pytest.mark.parametrize("container", ["gguf", "folder"])
def test_same_input_same_bytes(container: str, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    here, there = tmp_path / "model", tmp_path / "elsewhere" / "model"
    if container == "gguf":
        small_model.write_gguf(here)
        small_model.write_gguf(there, dict(reversed(small_model.tensors().items())))
        assert here.read_bytes() != there.read_bytes()
    else:
        small_model.write_folder(here)
        permuted(small_model.write_folder(there))
        assert (here / "model.safetensors").read_bytes() != (there / "model.safetensors").read_bytes()
    rules = (Rule(match="*.down_proj", format="q4_0"), Rule(match="*.o_proj", format="bf16"))
    ways: list[tuple[Path, dict[str, Any]]] = [
        (here, {"cache": False}),
        (here, {"cache": False, "jobs": 1}),
        (here, {"cache": False, "jobs": 2}),
        (here, {}),
        (here, {}),
        (there, {}),
        (there, {"jobs": 1, "base": tmp_path / "elsewhere"}),
    ]
    results: list[dict[str, bytes]] = []
    for number, (source, options) in enumerate(ways):
        given = Path("model") if "base" in options else source
        compile_spec(spec(given, rules=rules), tmp_path / str(number), **options)
        results.append(contents(tmp_path / str(number)))
    assert len(results[0]) == 9
    for number, result in enumerate(results):
        assert [name for name in results[0] if result[name] != results[0][name]] == [], ways[number]


def test_another_max_sequences_builds_no_weight(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, notes = small_model.write_gguf(tmp_path / "model.gguf"), Notes()
    plan = compile_spec(spec(source), tmp_path / "one", progress=notes)
    weights = len(plan["weights"])
    compile_spec(spec(source, sequences=4), tmp_path / "four", progress=notes)
    assert notes.notes == [f"weights: 0 reused, {weights} built", f"weights: {weights} reused, 0 built"]
    one, four = contents(tmp_path / "one"), contents(tmp_path / "four")
    assert {name for name in one if one[name] != four[name]} == {"plan.json", "manifest.json"}
    written = str(small_model.write_spec(tmp_path / "spec.yaml", source, serving={"max_sequences": 2}))
    assert main(["compile", written, "-o", str(tmp_path / "two")]) == 0
    assert re.search(rf"^weights: [\d.]+ KiB \({weights} reused, 0 built\) in ", capsys.readouterr().err, re.MULTILINE)


def test_another_max_sequences_runs_no_pass_about_weights(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(small_model.write_gguf(tmp_path / "model.gguf"))
    device, memo = load_device("cpu"), dict[str, object]()
    first = run_passes(spec(checkpoint.path), device, checkpoint, KernelBuilder(tmp_path), memo, SilentProgress())
    second = run_passes(
        spec(checkpoint.path, sequences=4), device, checkpoint, KernelBuilder(tmp_path), memo, SilentProgress()
    )
    same = run_passes(spec(checkpoint.path), device, checkpoint, KernelBuilder(tmp_path), memo, SilentProgress())
    assert first.reused == () and second.reused == ("ingest", "assign_formats", "partition", "fuse_weights")
    assert len(same.reused) == 8


def test_one_rule_builds_one_kind_of_weight(tmp_path: Path) -> None:
    source, notes = small_model.write_folder(tmp_path / "model"), Notes()
    plan = compile_spec(spec(source), tmp_path / "a")
    rule = Rule(match="*.down_proj", format="q8_0")
    compile_spec(spec(source, rules=(rule,)), tmp_path / "b", progress=notes)
    assert notes.notes == [f"weights: {len(plan['weights']) - 2} reused, 2 built"]


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (Environment.read().cache / "weights").write_text("a file in the way")
    compile_spec(spec(small_model.write_gguf(tmp_path / "model.gguf")), tmp_path / "artifact")
    load(tmp_path / "artifact").close()


# ---- plan only, and force ----------------------------------------------------------------------------------------


def test_plan_only(tmp_path: Path) -> None:
    source = small_model.write_gguf(tmp_path / "model.gguf")
    whole = compile_spec(spec(source), tmp_path / "artifact")
    plan = compile_spec(spec(source), tmp_path / "folder", plan_only=True)
    assert contents(tmp_path / "folder") == {"plan.json": (tmp_path / "artifact" / "plan.json").read_bytes()}
    assert plan == whole
    compile_spec(spec(source), tmp_path / "named.json", plan_only=True)
    assert (tmp_path / "named.json").read_bytes() == (tmp_path / "folder" / "plan.json").read_bytes()


def test_plan_only_reads_headers_alone(tmp_path: Path) -> None:
    source = small_model.write_gguf(tmp_path / "model.gguf")
    checkpoint = open_checkpoint(source)
    start = min(info.offset for info in checkpoint.tensors.values())
    data = source.read_bytes()
    source.write_bytes(data[:start] + b"\xff" * (len(data) - start))
    compile_spec(spec(source), tmp_path / "plan", plan_only=True)
    with pytest.raises(TapeoutError, match="NaN/Inf"):
        compile_spec(spec(source), tmp_path / "artifact")


def test_plan_only_replaces_a_plan_by_force_and_an_artifact_never(tmp_path: Path) -> None:
    source = small_model.write_gguf(tmp_path / "model.gguf")
    compile_spec(spec(source), tmp_path / "plan", plan_only=True)
    place = tmp_path / "plan" / "plan.json"
    with pytest.raises(TapeoutError, match=r"plan\.json: exists already; choose another place or pass --force$"):
        compile_spec(spec(source, sequences=2), tmp_path / "plan", plan_only=True)
    compile_spec(spec(source, sequences=2), tmp_path / "plan", plan_only=True, force=True)
    assert json.loads(place.read_bytes())["spec"]["serving"]["max_sequences"] == 2
    compile_spec(spec(source), tmp_path / "artifact")
    before = contents(tmp_path / "artifact")
    with pytest.raises(TapeoutError, match="is a whole artifact, whose plan is not replaced; choose another folder"):
        compile_spec(spec(source, sequences=2), tmp_path / "artifact", plan_only=True, force=True)
    assert contents(tmp_path / "artifact") == before


def test_force_replaces_an_artifact_as_a_whole(tmp_path: Path) -> None:
    source = small_model.write_gguf(tmp_path / "model.gguf")
    folder = small_model.write_folder(tmp_path / "model")
    (folder / "tokenizer_config.json").write_text("{}")  # without a chat template
    compile_spec(spec(folder), tmp_path / "expected")
    compile_spec(spec(source), tmp_path / "artifact")
    (tmp_path / "link").symlink_to("artifact")
    compile_spec(spec(folder), tmp_path / "link", force=True)
    assert (tmp_path / "link").is_symlink()
    assert contents(tmp_path / "artifact") == contents(tmp_path / "expected")
    compile_spec(spec(folder), tmp_path / "fresh", force=True)
    assert contents(tmp_path / "fresh") == contents(tmp_path / "expected")


def test_an_artifact_can_be_moved(tmp_path: Path) -> None:
    compile_spec(spec(small_model.write_gguf(tmp_path / "model.gguf")), tmp_path / "artifact")
    (tmp_path / "model.gguf").unlink()
    shutil.move(tmp_path / "artifact", tmp_path / "moved")
    assert str(tmp_path).encode() not in b"".join(contents(tmp_path / "moved").values())
    with load(tmp_path / "moved") as model:
        assert [step.token for step in model.generate([5, 6, 7], max_tokens=3)]


# ---- recorded errors ---------------------------------------------------------------------------------------------


def quantization_error(parts: list[np.ndarray[Any, Any]]) -> tuple[float, float]:
    """gguf-py's own Q8_0 on the same values."""
    x = np.concatenate(parts)
    kind = gguf.GGMLQuantizationType.Q8_0
    error = (x - gguf.quants.dequantize(gguf.quants.quantize(x, kind), kind)).astype(np.float64)
    return float(np.sqrt((error**2).sum() / (x.astype(np.float64) ** 2).sum())), float(np.abs(error).max())


def test_requantizing_records_the_error_of_every_tensor(tmp_path: Path) -> None:
    source, held = small_model.write_folder(tmp_path / "model"), small_model.tensors()
    keep = Rule(match="*.o_proj", format="keep")
    for turn in range(2):  # built, then from the cache
        plan = compile_spec(spec(source, default="q8_0", rules=(keep,)), tmp_path / str(turn))
        weights = {weight["name"]: weight for weight in plan["weights"]}
        converted = {name for name, weight in weights.items() if "error" in weight}
        assert converted == {name for name, weight in weights.items() if weight["format"] == "q8_0"}
        at = "model.layers.1.self_attn"
        parts = [held[f"{at}.{name}_proj.weight"] for name in "qkv"]
        relative, largest = quantization_error(parts)
        assert weights[f"{at}.qkv_proj"]["error"]["relative_rms"] == pytest.approx(relative, rel=1e-6)
        assert weights[f"{at}.qkv_proj"]["error"]["max_abs"] == pytest.approx(largest, rel=1e-6)
        assert json.loads((tmp_path / str(turn) / "plan.json").read_bytes()) == plan
    changed = {(entry["weight"], entry["from"], entry["to"], entry["rule"]) for entry in plan["quantization"]}
    assert (f"{at}.q_proj", "f32", "q8_0", "default") in changed and len(changed) == 13
