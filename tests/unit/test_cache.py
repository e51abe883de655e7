"""The build cache: what is reused, what is built again, and that the bytes never depend on it."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from emission import emit_file
from safetensors.numpy import save_file

from tapeout.compiler import cache as cache_module
from tapeout.compiler.cache import WeightCache, weight_key
from tapeout.compiler.checkpoints import Checkpoint, open_checkpoint
from tapeout.compiler.emit.native import Native, load_native
from tapeout.compiler.emit.pieces import WeightEntry
from tapeout.compiler.emit.weights import EmissionReport
from tapeout.compiler.environment import Environment
from tapeout.compiler.layouts import packed_bytes, plan_offsets
from tapeout.compiler.recipes import Convert, Pack, Read

SHAPES = {"a": (64, 64), "b": (32, 128), "c": (160, 1024)}


@pytest.fixture(scope="session")
def native() -> Native:
    return load_native(Environment.read().cache / "emit")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    return checkpoint_at(tmp_path / "model")


def checkpoint_at(folder: Path) -> Checkpoint:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    rng = np.random.default_rng(0)
    tensors: dict[str, Any] = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}
    save_file(tensors, folder / "model.safetensors")
    return open_checkpoint(folder)


def emit(
    native: Native, checkpoint: Checkpoint, path: Path, cache: WeightCache, to: str = "q8_0", names: str = "abc"
) -> EmissionReport:
    """Emit the tensors in this order and record them."""
    recipes = {name: Pack(Convert(Read(name, SHAPES[name], "f32"), to), "tile16") for name in names}
    spans = plan_offsets([packed_bytes(recipe.shape, recipe.format, "tile16") for recipe in recipes.values()])
    entries = [WeightEntry(name, recipe, *span) for (name, recipe), span in zip(recipes.items(), spans, strict=True)]
    report = emit_file(entries, checkpoint, path, native, cache=cache)
    cache.record(path, report.chunk_bytes, report.sha256, report.spans)
    return report


def test_second_compile_builds_nothing(native: Native, checkpoint: Checkpoint, tmp_path: Path) -> None:
    cache = WeightCache(tmp_path / "cache")
    first = emit(native, checkpoint, tmp_path / "1", cache)
    second = emit(native, checkpoint, tmp_path / "2", cache)
    assert (first.built, first.reused, second.built, second.reused) == (3, 0, 0, 3)
    assert (tmp_path / "1").read_bytes() == (tmp_path / "2").read_bytes()
    assert second.errors == first.errors and second.sha256 == first.sha256


def test_weights_move_and_mix(native: Native, checkpoint: Checkpoint, tmp_path: Path) -> None:
    cache = WeightCache(tmp_path / "cache")
    emit(native, checkpoint, tmp_path / "1", cache, names="ab")
    mixed = emit(native, checkpoint, tmp_path / "2", cache, names="cba")
    plain = emit(native, checkpoint, tmp_path / "3", WeightCache(tmp_path / "empty"), names="cba")
    assert (mixed.built, mixed.reused, plain.reused) == (1, 2, 0)
    assert (tmp_path / "2").read_bytes() == (tmp_path / "3").read_bytes() and mixed.errors == plain.errors


def test_another_format_or_source_is_built(native: Native, checkpoint: Checkpoint, tmp_path: Path) -> None:
    cache = WeightCache(tmp_path / "cache")
    emit(native, checkpoint, tmp_path / "1", cache)
    assert emit(native, checkpoint, tmp_path / "2", cache, to="q4_0").reused == 0
    source = tmp_path / "model" / "model.safetensors"
    os.utime(source, ns=(1, 1))
    assert emit(native, open_checkpoint(tmp_path / "model"), tmp_path / "3", cache).reused == 0


def test_key_follows_the_code(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = Read("a", (64, 64), "f32")
    before = weight_key(recipe, checkpoint)
    assert (
        before
        == weight_key(Read("a", (64, 64), "f32"), checkpoint)
        != weight_key(Read("b", (32, 128), "f32"), checkpoint)
    )
    monkeypatch.setattr(cache_module, "code_digest", lambda: "changed")
    assert weight_key(recipe, checkpoint) != before


@pytest.mark.parametrize("fault", ["gone", "cut", "flipped", "flipped in secret"])
def test_damaged_artifacts_are_built_again(native: Native, checkpoint: Checkpoint, tmp_path: Path, fault: str) -> None:
    cache = WeightCache(tmp_path / "cache")
    emit(native, checkpoint, tmp_path / "1", cache)
    whole, status = (tmp_path / "1").read_bytes(), (tmp_path / "1").stat()
    if fault == "gone":
        (tmp_path / "1").unlink()
    elif fault == "cut":
        os.truncate(tmp_path / "1", 9000)
    else:
        with (tmp_path / "1").open("r+b") as file:
            file.seek(9000)
            file.write(bytes([whole[9000] ^ 1]))
        if fault == "flipped in secret":
            os.utime(tmp_path / "1", ns=(status.st_atime_ns, status.st_mtime_ns))
    again = emit(native, checkpoint, tmp_path / "2", cache)
    assert again.reused == 0 and (tmp_path / "2").read_bytes() == whole
    assert emit(native, checkpoint, tmp_path / "3", cache).reused == 3


def test_a_damaged_copy_does_not_hide_a_sound_one(native: Native, checkpoint: Checkpoint, tmp_path: Path) -> None:
    for number in range(6):  # whichever index is read first
        cache = WeightCache(tmp_path / f"cache-{number}")
        for name in ("sound", "damaged"):
            emit(native, checkpoint, tmp_path / f"{name}-{number}", cache)
        place = tmp_path / f"damaged-{number}"
        status = place.stat()
        with place.open("r+b") as file:
            file.seek(9000)
            byte = file.read(1)[0]
            file.seek(9000)
            file.write(bytes([byte ^ 1]))
        os.utime(place, ns=(status.st_atime_ns, status.st_mtime_ns))
        assert emit(native, checkpoint, tmp_path / f"again-{number}", cache).reused == 3


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"version": 99}', "null", '{"version": 1, "file": ["/", "x"]}'])
def test_broken_index_is_dropped(native: Native, checkpoint: Checkpoint, tmp_path: Path, text: str) -> None:
    cache = WeightCache(tmp_path / "cache")
    emit(native, checkpoint, tmp_path / "1", cache)
    (index,) = (tmp_path / "cache").iterdir()
    index.write_text(text)
    assert emit(native, checkpoint, tmp_path / "2", cache).reused == 0
    assert not index.exists()


@pytest.mark.parametrize("place", [[-1, 100, None], [0, 1 << 60, None], [0, "x", None], [0], [0, 4096, ["a", "b"]], 7])
def test_absurd_entry_is_dropped(native: Native, checkpoint: Checkpoint, tmp_path: Path, place: object) -> None:
    cache = WeightCache(tmp_path / "cache")
    emit(native, checkpoint, tmp_path / "1", cache)
    (index,) = (tmp_path / "cache").iterdir()
    document = json.loads(index.read_text())
    document["weights"] = {key: place for key in document["weights"]}
    index.write_text(json.dumps(document))
    assert emit(native, checkpoint, tmp_path / "2", cache).reused == 0


def test_concurrent_compiles(native: Native, checkpoint: Checkpoint, tmp_path: Path) -> None:
    cache = WeightCache(tmp_path / "cache")
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda number: emit(native, checkpoint, tmp_path / str(number), cache), range(8)))
    files = {(tmp_path / str(number)).read_bytes() for number in range(8)}
    names = os.listdir(tmp_path / "cache")
    assert len(files) == 1 and len(names) == 8 and all(name.endswith(".json") for name in names)
    assert emit(native, checkpoint, tmp_path / "last", cache).reused == 3
