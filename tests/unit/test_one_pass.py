"""All ranks' files in one pass: every byte of the source is read once, and the files are those that numpy cuts."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small_model
from emission import emit_files
from safetensors.numpy import load_file, save_file

from tapeout.compiler.cache import WeightCache
from tapeout.compiler.checkpoints import Checkpoint, open_checkpoint
from tapeout.compiler.checkpoints.base import TensorInfo
from tapeout.compiler.driver import compile_spec
from tapeout.compiler.emit import jobs as jobs_module
from tapeout.compiler.emit import outputs, pieces
from tapeout.compiler.emit.evaluate import ConversionError
from tapeout.compiler.emit.native import Native, load_native
from tapeout.compiler.emit.pieces import WeightEntry
from tapeout.compiler.environment import Environment
from tapeout.compiler.formats import FORMATS
from tapeout.compiler.layouts import packed_bytes, plan_offsets
from tapeout.compiler.recipes import (
    Columns,
    Concat,
    Convert,
    GroupRows,
    HalvesFromPairs,
    Interleave,
    Pack,
    PadRows,
    Read,
    Recipe,
    Rows,
    TransposeGroups,
)
from tapeout.compiler.spec import Model, Quantization, Serving, Spec, Topology

Array = np.ndarray[Any, Any]
Cut = Callable[[int, int], tuple[Recipe, Callable[[dict[str, Array]], Array]]]

EXPERTS = 8
SHAPES: dict[str, tuple[int, ...]] = {
    "rows": (320, 64),
    "columns": (96, 512),
    "whole": (80, 64),
    "pairs": (256, 64),
    "padded": (72, 64),
    "bias": (64,),
    "turned": (128, 96),
    "scaled": (64, 512),
    **{f"up.{expert}": (64, 64) for expert in range(EXPERTS)},
    **{f"gate.{expert}": (64, 64) for expert in range(EXPERTS)},
    **{f"down.{expert}": (64, 512) for expert in range(EXPERTS)},
}


def read(name: str) -> Read:
    return Read(name, SHAPES[name], "f32")


def values() -> dict[str, Array]:
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}


def experts(name: str) -> Recipe:
    return Concat(tuple(read(f"{name}.{expert}") for expert in range(EXPERTS)))


def stack(t: dict[str, Array], name: str) -> Array:
    return np.stack([t[f"{name}.{expert}"] for expert in range(EXPERTS)])


def piece(count: int, ranks: int, rank: int) -> tuple[int, int]:
    return count // ranks * rank, count // ranks * (rank + 1)


def gate_up(ranks: int, rank: int) -> tuple[Recipe, Callable[[dict[str, Array]], Array]]:
    """A rank's channels of every expert, gate above up."""
    first, last = piece(64, ranks, rank)
    parts = tuple(GroupRows(experts(name), 64, first, last) for name in ("gate", "up"))
    return Interleave(parts, EXPERTS), lambda t: np.concatenate(
        [stack(t, "gate")[:, first:last], stack(t, "up")[:, first:last]], axis=1
    ).reshape(-1, 64)


CUTS: dict[str, Cut] = {
    "rows": lambda n, r: (Rows(read("rows"), *piece(320, n, r)), lambda t: t["rows"][slice(*piece(320, n, r))]),
    "columns": lambda n, r: (
        Columns(read("columns"), *piece(512, n, r)),
        lambda t: t["columns"][:, slice(*piece(512, n, r))],
    ),
    "whole": lambda n, r: (read("whole"), lambda t: t["whole"]),
    "pairs": lambda n, r: (
        Rows(HalvesFromPairs(read("pairs"), 8), *piece(256, n, r)),
        lambda t: t["pairs"].reshape(8, 16, 2, 64).swapaxes(1, 2).reshape(256, 64)[slice(*piece(256, n, r))],
    ),
    "padded": lambda n, r: (
        Rows(PadRows(read("padded"), 9, 16), *piece(128, n, r)),
        lambda t: np.pad(t["padded"].reshape(8, 9, 64), ((0, 0), (0, 7), (0, 0))).reshape(128, 64)[
            slice(*piece(128, n, r))
        ],
    ),
    "bias": lambda n, r: (Rows(read("bias"), *piece(64, n, r)), lambda t: t["bias"][slice(*piece(64, n, r))]),
    "turned": lambda n, r: (
        Columns(TransposeGroups(read("turned"), 2), *piece(64, n, r)),
        lambda t: t["turned"].reshape(2, 64, 96).swapaxes(1, 2).reshape(192, 64)[:, slice(*piece(64, n, r))],
    ),
    "gate_up": gate_up,
    "down": lambda n, r: (
        Columns(experts("down"), *piece(512, n, r)),
        lambda t: stack(t, "down").reshape(-1, 512)[:, slice(*piece(512, n, r))],
    ),
}


class Reads:
    """How often each byte of each tensor was fetched."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.counts: dict[str, Array] = {}
        rows, columns = Checkpoint.read_rows, Checkpoint.read_columns

        def of(info: TensorInfo) -> Array:
            return self.counts.setdefault(info.name, np.zeros((info.rows, info.shape[-1]), int))

        def read_rows(self: Checkpoint, info: TensorInfo, start: int, stop: int) -> Any:
            of(info)[start:stop] += 1
            return rows(self, info, start, stop)

        def read_columns(self: Checkpoint, info: TensorInfo, start: int, stop: int) -> Any:
            of(info)[:, start:stop] += 1
            return columns(self, info, start, stop)

        monkeypatch.setattr(Checkpoint, "read_rows", read_rows)
        monkeypatch.setattr(Checkpoint, "read_columns", read_columns)

    def most(self) -> dict[str, int]:
        return {name: int(count.max()) for name, count in self.counts.items()}


@pytest.fixture(scope="session")
def native() -> Native:
    return load_native(Environment.read().cache / "emit")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    (tmp_path / "model").mkdir()
    save_file(values(), tmp_path / "model" / "model.safetensors")
    (tmp_path / "model" / "config.json").write_text("{}")
    return open_checkpoint(tmp_path / "model")


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces, strips and jobs that cut these weights in many places."""
    monkeypatch.setattr(pieces, "TASK_BYTES", 8192)
    monkeypatch.setattr(pieces, "STRIP_VALUES", 1024)
    monkeypatch.setattr(jobs_module, "JOB_BYTES", 40000)


def entries_of(named: dict[str, list[Recipe]], layout: str = "raw") -> list[WeightEntry]:
    packed = {name: [Pack(recipe, layout) for recipe in recipes] for name, recipes in named.items()}
    sizes = [packed_bytes(ranks[0].shape, ranks[0].format, layout) for ranks in packed.values()]
    return [
        WeightEntry(name, ranks[0], *span, tuple(ranks[1:]))
        for (name, ranks), span in zip(packed.items(), plan_offsets(sizes), strict=True)
    ]


def cut(ranks: int, to: str = "f32") -> list[WeightEntry]:
    named = {name: [make(ranks, rank)[0] for rank in range(ranks)] for name, make in CUTS.items()}
    if to != "f32":
        named = {name: [Convert(recipe, to) for recipe in recipes] for name, recipes in named.items()}
    return entries_of(named)


@pytest.mark.parametrize("ranks", [1, 2, 8])
@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.usefixtures("small_pieces")
def test_every_byte_is_read_once(
    ranks: int, direct: bool, native: Native, checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if direct:
        monkeypatch.setattr(outputs, "CACHE_SHARE", 1 << 60)
    paths, reads, t = [tmp_path / str(rank) for rank in range(ranks)], Reads(monkeypatch), values()
    emit_files(cut(ranks), checkpoint, paths, native, jobs=1)
    once = reads.most()
    assert once.keys() == SHAPES.keys() - {"scaled"}
    assert set(once.values()) == {1}, once
    assert all(count.min() == 1 for count in reads.counts.values())
    for rank, path in enumerate(paths):
        found = load_file(path)
        for name, make in CUTS.items():
            expected = make(ranks, rank)[1](t).tobytes()
            assert found[name].tobytes() == expected + bytes(found[name].size - len(expected)), (name, rank)


@pytest.mark.parametrize("to", ["fp8", "nvfp4"])
def test_the_largest_number_is_looked_for_once(
    to: str, native: Native, checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A column cut is converted apart on each rank, under a scale of its own; all scales come from one more pass."""
    monkeypatch.setattr(pieces, "STRIP_VALUES", 1024)
    paths, reads = [tmp_path / str(rank) for rank in range(8)], Reads(monkeypatch)
    recipes: list[Recipe] = [Convert(Columns(read("scaled"), *piece(512, 8, rank)), to) for rank in range(8)]
    emit_files(entries_of({"scaled": recipes}), checkpoint, paths, native)
    assert reads.most() == {"scaled": 2}
    encode = FORMATS[to].encode
    assert encode is not None
    for rank, path in enumerate(paths):
        expected = encode(np.ascontiguousarray(values()["scaled"][:, slice(*piece(512, 8, rank))]))
        assert load_file(path)["scaled"][: expected.size].tobytes() == expected.tobytes()


@pytest.mark.usefixtures("small_pieces")
def test_errors_of_a_rank_are_those_it_has_alone(native: Native, checkpoint: Checkpoint, tmp_path: Path) -> None:
    paths = [tmp_path / str(rank) for rank in range(4)]
    reports = emit_files(cut(4, "bf16"), checkpoint, paths, native, jobs=3)
    assert len(reports[0].errors) == len(CUTS)
    for rank, path in enumerate(paths):
        named: dict[str, list[Recipe]] = {name: [Convert(make(4, rank)[0], "bf16")] for name, make in CUTS.items()}
        (alone,) = emit_files(entries_of(named), checkpoint, [tmp_path / "alone"], native, jobs=1)
        assert alone.errors == reports[rank].errors and alone.sha256 == reports[rank].sha256
        assert (tmp_path / "alone").read_bytes() == path.read_bytes()
        for name, make in CUTS.items():
            x = make(4, rank)[1](values()).astype(np.float64)
            assert np.sqrt(((to_bf16(x) - x) ** 2).sum() / (x**2).sum()) == pytest.approx(
                reports[rank].errors[name].relative_rms, rel=1e-6
            )


def to_bf16(x: Array) -> Array:
    """Rounded to nearest, ties to even."""
    bits = x.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32).astype(np.float64)


@pytest.mark.usefixtures("small_pieces")
def test_each_rank_finds_its_weights_in_the_cache(native: Native, checkpoint: Checkpoint, tmp_path: Path) -> None:
    cache, first = WeightCache(tmp_path / "cache"), [tmp_path / f"a{rank}" for rank in range(4)]
    reports = emit_files(cut(4, "bf16"), checkpoint, first, native, cache=cache)
    for path, report in zip(first, reports, strict=True):
        assert (report.built, report.reused) == (len(CUTS), 0)
        cache.record(path, report.chunk_bytes, report.sha256, report.spans)
    again = emit_files(cut(4, "bf16"), checkpoint, [tmp_path / f"b{rank}" for rank in range(4)], native, cache=cache)
    assert [(report.built, report.reused) for report in again] == [(0, len(CUTS))] * 4
    first[2].unlink()  # its own pieces are built again, what it shares with other ranks is not
    mixed = emit_files(cut(4, "bf16"), checkpoint, [tmp_path / f"c{rank}" for rank in range(4)], native, cache=cache)
    assert [report.built for report in mixed] == [0, 0, len(CUTS) - 1, 0]
    for rank, (one, two, three) in enumerate(zip(reports, again, mixed, strict=True)):
        assert one.errors == two.errors == three.errors and one.sha256 == two.sha256 == three.sha256
        assert (tmp_path / f"b{rank}").read_bytes() == (tmp_path / f"c{rank}").read_bytes()
    assert all(isinstance(error, ConversionError) for error in again[0].errors.values())


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("direct", [False, True])
def test_jobs_and_threads_change_no_byte(
    direct: bool, native: Native, checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[tuple[Any, ...]] = []
    for number, (size, threads) in enumerate(itertools.product((1, 20_000, 1 << 30), (1, 3))):
        monkeypatch.setattr(jobs_module, "JOB_BYTES", size)
        monkeypatch.setattr(outputs, "CACHE_SHARE", 1 << 60 if direct and number else 4)
        paths = [tmp_path / f"{number}-{rank}" for rank in range(2)]
        reports = emit_files(cut(2, "bf16"), checkpoint, paths, native, jobs=threads)
        files = zip(paths, reports, strict=True)
        found.append(tuple((path.read_bytes(), report.sha256, report.errors) for path, report in files))
    assert all(each == found[0] for each in found[1:])


@pytest.mark.parametrize(("container", "count"), [("folder", 1), ("folder", 2), ("folder", 8), ("gguf", 2)])
def test_a_model_is_read_once(container: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for the tied head of several ranks, which hold the whole embedding and a cut of it."""
    write = small_model.write_folder if container == "folder" else small_model.write_gguf
    source, reads = write(tmp_path / "model"), Reads(monkeypatch)
    spec = Spec(model=Model(source=str(source)), quantization=Quantization(), serving=Serving(max_context=256),
                topology=Topology.model_validate({"count": count}))  # fmt: skip
    compile_spec(spec, tmp_path / "artifact", cache=False)
    used = reads.most()
    assert used.keys() == open_checkpoint(source).tensors.keys()
    tied = next(name for name in used if "embd" in name or "embed" in name)
    assert used.pop(tied) == (2 if count > 1 else 1)
    assert set(used.values()) == {1}
