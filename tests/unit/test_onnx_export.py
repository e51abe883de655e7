"""`tapeout export-onnx` as a command: what it takes, what it refuses, and that it leaves nothing behind."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
import small_model
from onnx import numpy_helper

from tapeout.compiler import cli
from tapeout.compiler.onnx import driver, weights


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    folder = small_model.write_folder(tmp_path / "model")
    return small_model.write_spec(tmp_path / "spec.yaml", folder, quantization={"default": "bf16"})


def export(*words: object) -> int:
    return cli.main(["export-onnx", *map(str, words)])


def initializers(path: Path) -> dict[str, np.ndarray]:
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load(path).graph.initializer}


def test_weights_are_those_of_the_spec(spec: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert export(spec, "-o", tmp_path / "a", "--set", "quantization.default=keep") == 0
    assert capsys.readouterr().out == f"wrote {tmp_path / 'a' / 'model.onnx'}\n"
    held, source = initializers(tmp_path / "a/model.onnx"), small_model.tensors()
    name = "model.layers.1.mlp.down_proj"
    assert np.array_equal(held[f"{name}.weight"], source[f"{name}.weight"])
    assert export(spec, "-o", tmp_path / "b", "--external") == 0
    rounded = initializers(tmp_path / "b/model.onnx")[f"{name}.weight"]
    assert not (rounded.view(np.uint32) & 0xFFFF).any()
    assert np.allclose(rounded, source[f"{name}.weight"], rtol=2**-8, atol=0)


def test_the_same_spec_gives_the_same_bytes(spec: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert export(spec, "-o", tmp_path / "a") == 0
    monkeypatch.setattr(weights, "STRIP_VALUES", 1000)
    assert export(spec, "-o", tmp_path / "b") == 0
    assert (tmp_path / "a/model.onnx").read_bytes() == (tmp_path / "b/model.onnx").read_bytes()


def test_large_weights_lie_beside_the_model(spec: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "MAX_INLINE", 100_000)
    assert export(spec, "-o", tmp_path / "a") == 0
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["model.onnx", "model.onnx.data"]


def test_an_artifact_names_its_spec(spec: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["compile", str(spec), "-o", str(tmp_path / "artifact"), "--no-cache"]) == 0
    assert export(spec, "-o", tmp_path / "a") == 0
    assert export(tmp_path / "artifact", "-o", tmp_path / "b", "--source", tmp_path / "model") == 0
    assert (tmp_path / "a/model.onnx").read_bytes() == (tmp_path / "b/model.onnx").read_bytes()
    capsys.readouterr()
    assert export(tmp_path / "artifact", "-o", tmp_path / "c", "--set", "quantization.default=keep") == 2
    assert capsys.readouterr().err == (
        f"error: {tmp_path / 'artifact'}: is an artifact, whose spec is settled; --set goes with a spec file\n"
    )


def test_refusals(
    spec: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "there").mkdir()
    assert export(spec, "-o", tmp_path / "there") == 2
    assert capsys.readouterr().err == (
        f"error: {tmp_path / 'there'}: exists already; choose another folder for the ONNX model\n"
    )
    (tmp_path / "file").touch()
    assert export(spec, "-o", tmp_path / "file/deeper") == 2
    assert capsys.readouterr().err == (
        f"error: {tmp_path / 'file/deeper'}: cannot be written (a part of the path is a file); choose another folder\n"
    )
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=100_000))
    assert export(spec, "-o", tmp_path / "full", "--external") == 2
    assert capsys.readouterr().err == (
        f"error: {tmp_path}: the ONNX model needs 0.4 MB and 0.1 MB are free there; "
        "free some space or choose another folder\n"
    )


def test_a_failure_leaves_nothing(spec: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = small_model.tensors()
    values["model.layers.1.mlp.down_proj.weight"][3, 5] = np.nan
    small_model.write_folder(tmp_path / "model", values)
    before = sorted(tmp_path.iterdir())
    assert export(spec, "-o", tmp_path / "onnx", "--external") == 2
    assert "has NaN/Inf weights in row 3" in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == before
