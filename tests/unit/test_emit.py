"""Emission against independent witnesses: gguf-py for values and formats, a second description of the tile16 layout."""

from __future__ import annotations

import hashlib
import itertools
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tile16_reference as witness
from emission import emit_file
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from tapeout.compiler.checkpoints import Checkpoint, open_checkpoint
from tapeout.compiler.emit import pieces as pieces_module
from tapeout.compiler.emit.digests import SegmentDigests, segments_of
from tapeout.compiler.emit.evaluate import ErrorSums, Evaluator
from tapeout.compiler.emit.native import Native, load_native
from tapeout.compiler.emit.pack import pack_tile16
from tapeout.compiler.emit.pieces import WeightEntry
from tapeout.compiler.emit.weights import EmissionReport
from tapeout.compiler.emit.workers import run_tasks
from tapeout.compiler.environment import Environment
from tapeout.compiler.formats import FORMATS
from tapeout.compiler.layouts import packed_bytes, plan_offsets, tile16_holds
from tapeout.compiler.recipes import (
    AddOne,
    Columns,
    Concat,
    Constant,
    Convert,
    HalvesFromPairs,
    Pack,
    Read,
    Recipe,
    Rows,
)
from tapeout.runtime.errors import TapeoutError

TILED = [name for name in FORMATS if tile16_holds(name)]


@pytest.fixture(scope="session")
def native() -> Native:
    return load_native(Environment.read().cache / "emit")


def random_bytes(rows: int, format: str, k: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 256, (rows, FORMATS[format].row_bytes(k)), dtype=np.uint8)


@pytest.mark.parametrize("format", TILED)
@pytest.mark.parametrize("rows", [1, 16, 37])
def test_packing_equals_both_references(native: Native, format: str, rows: int) -> None:
    k = {1: 77, 32: 544}.get(FORMATS[format].block, 512)
    data = witness.random_rows(format, rows, k, np.random.default_rng(rows))
    out = np.full(packed_bytes((rows, k), format, "tile16"), 77, np.uint8)
    native.pack_tile16(format, data, k, out)
    assert np.array_equal(out, witness.pack(format, data))
    assert np.array_equal(out, pack_tile16(format, data, k))


def test_record_sizes_of_the_specification() -> None:
    sizes = {"q4_0": 288, "q4_1": 320, "q8_0": 544, "q5_0": 352}
    assert {name: packed_bytes((16, 32), name, "tile16") for name in sizes} == sizes
    assert packed_bytes((17, 32), "q4_0", "tile16") == 2 * 288
    assert packed_bytes((3,), "f32", "raw") == 12


@given(st.lists(st.integers(1, 300_000), max_size=12))
def test_offsets_leave_no_holes(sizes: list[int]) -> None:
    spans = plan_offsets(sizes)
    end = 0
    for size, (offset, nbytes) in zip(sizes, spans, strict=True):
        assert offset == end and nbytes >= size and offset % (4096 if size >= 65536 else 64) == 0
        end = offset + nbytes
    assert end % 64 == 0 and end <= sum(sizes) + 4096 * len(sizes)


@pytest.mark.parametrize("format", [name for name in (*witness.FLOATS, *witness.GGUF) if name != "mxfp4"])
def test_not_finite_is_found_in_every_row(native: Native, format: str) -> None:
    k = 512
    clean = (
        FORMATS[format].encode(np.ones((5, k), np.float32))
        if FORMATS[format].is_float
        else np.zeros_like(random_bytes(5, format, k))
    )
    assert native.first_not_finite(format, clean) is None
    for row in range(5):
        for bits in (0x7C00, 0xFC00, 0x7E01):
            bad = clean.copy()
            if FORMATS[format].is_float:
                value = np.array([bits], np.uint16).view(np.float16).astype(np.float32)
                raw = {
                    "f32": value.view(np.uint8),
                    "f16": np.array([bits], "<u2").view(np.uint8),
                    "bf16": value.view(np.uint8)[2:],
                }[format]
                bad[row, -raw.size :] = raw
            else:
                at = FORMATS[format].row_bytes(k) - FORMATS[format].block_bytes + witness._float16_fields(format)[-1]
                bad[row, at : at + 2] = np.array([bits], "<u2").view(np.uint8)
            assert native.first_not_finite(format, bad) == row, hex(bits)


@pytest.mark.parametrize(
    ("format", "at", "bad"),
    [
        ("int4_g128", 0, b"\x80\x7f"),
        ("int4_g128_zp", 0, b"\x81\xff"),
        ("fp8", 0, b"\x00\x00\x80\x7f"),
        ("fp8", 9, b"\x7f"),
        ("fp8_block128", 35, b"\xff"),
    ],
)
def test_not_finite_of_our_formats(native: Native, format: str, at: int, bad: bytes) -> None:
    encode = FORMATS[format].encode
    assert encode is not None
    rows = encode(np.random.default_rng(1).standard_normal((5, 256)).astype(np.float32))
    assert native.first_not_finite(format, rows) is None
    place = rows.shape[1] - FORMATS[format].block_bytes + at
    rows[3, place : place + len(bad)] = np.frombuffer(bad, np.uint8)
    assert native.first_not_finite(format, rows) == 3


# ---- recipes -----------------------------------------------------------------------------------------------------

TENSORS = {"a": (48, 64), "b": (32, 64), "wide": (16, 256)}


def values_of(names: dict[str, tuple[int, ...]] = TENSORS, seed: int = 0) -> dict[str, np.ndarray[Any, Any]]:
    rng = np.random.default_rng(seed)
    found: dict[str, np.ndarray[Any, Any]] = {
        name: rng.standard_normal(shape).astype(np.float32) for name, shape in names.items()
    }
    return found | {
        "v": rng.standard_normal(48).astype(np.float32),
        "h": rng.standard_normal((40, 64)).astype(np.float16),
    }


def checkpoint_at(folder: Path, tensors: dict[str, np.ndarray[Any, Any]]) -> Checkpoint:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return open_checkpoint(folder)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return checkpoint_at(tmp_path_factory.mktemp("checkpoint"), values_of())


def read(name: str) -> Read:
    value = values_of()[name]
    return Read(name, value.shape, {"float32": "f32", "float16": "f16"}[str(value.dtype)])


def unpair(matrix: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """The inverse of llama.cpp's conversion script, which does reshape(h, 2, d/2, ...).swapaxes(1, 2)."""
    return matrix.reshape(heads, -1, 2, *matrix.shape[1:]).swapaxes(1, 2).reshape(matrix.shape)


EXPECTED: list[tuple[Recipe, Any]] = [
    (read("a"), lambda t: t["a"]),
    (Rows(read("a"), 5, 40), lambda t: t["a"][5:40]),
    (Rows(Rows(read("a"), 5, 40), 3, 9), lambda t: t["a"][8:14]),
    (Columns(read("a"), 8, 40), lambda t: t["a"][:, 8:40]),
    (Concat((read("b"), read("a"), Rows(read("a"), 0, 7))), lambda t: np.concatenate((t["b"], t["a"], t["a"][:7]))),
    (HalvesFromPairs(read("a"), 3), lambda t: unpair(t["a"], 3)),
    (
        HalvesFromPairs(Concat((read("b"), Rows(read("a"), 0, 32))), 4),
        lambda t: unpair(np.concatenate((t["b"], t["a"][:32])), 4),
    ),
    (HalvesFromPairs(read("v"), 3), lambda t: unpair(t["v"], 3)),
    (Convert(read("h"), "f32"), lambda t: t["h"].astype(np.float32)),
    (Convert(read("a"), "f16"), lambda t: t["a"].astype(np.float16)),
    (AddOne(read("v")), lambda t: t["v"] + np.float32(1)),
    (Concat((read("v"), Constant((0.5, 0.25)))), lambda t: np.concatenate((t["v"], np.array([0.5, 0.25], np.float32)))),
    (Rows(read("v"), 3, 9), lambda t: t["v"][3:9]),
]


@settings(max_examples=15, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("case", range(len(EXPECTED)))
def test_any_rows_of_a_recipe(native: Native, checkpoint: Checkpoint, case: int, data: st.DataObject) -> None:
    recipe, expected = EXPECTED[case]
    start = data.draw(st.integers(0, recipe.shape[0] - 1))
    stop = data.draw(st.integers(start + 1, recipe.shape[0]))
    rows = Evaluator(checkpoint, native).rows(recipe, start, stop, ErrorSums())
    assert rows.tobytes() == expected(values_of())[start:stop].tobytes()


def test_columns_of_blocks(native: Native, tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(str(tmp_path / "m.gguf"), "llama")
    blocks = witness.random_rows("q4_0", 20, 128, np.random.default_rng(3))
    writer.add_tensor("w", blocks, raw_dtype=gguf.GGMLQuantizationType.Q4_0)
    writer.write_header_to_file(), writer.write_kv_data_to_file(), writer.write_tensors_to_file(), writer.close()
    recipe = Convert(Columns(Read("w", (20, 128), "q4_0"), 32, 96), "f32")
    rows = Evaluator(open_checkpoint(tmp_path / "m.gguf"), native).rows(recipe, 2, 20, ErrorSums())
    assert rows.tobytes() == np.ascontiguousarray(witness.dequantize("q4_0", blocks)[2:, 32:96]).tobytes()


# ---- the weights file --------------------------------------------------------------------------------------------


def recipes() -> dict[str, Recipe]:
    return {
        "qkv": Pack(Concat((HalvesFromPairs(read("a"), 3), read("b"))), "tile16"),
        "q8": Pack(Convert(Concat((read("a"), read("b"))), "q8_0"), "tile16"),
        "q4k": Pack(Convert(read("wide"), "q4_k"), "tile16"),
        "half": Pack(Convert(read("h"), "bf16"), "tile16"),
        "norm": Pack(AddOne(read("v")), "raw"),
        "freq": Pack(Constant((1.0, 0.1, 0.01)), "raw"),
    }


def entries_of(named: dict[str, Recipe]) -> list[WeightEntry]:
    sizes = [packed_bytes(r.shape, r.format, r.layout if isinstance(r, Pack) else "raw") for r in named.values()]
    spans = plan_offsets(sizes)
    return [WeightEntry(name, recipe, *span) for (name, recipe), span in zip(named.items(), spans, strict=True)]


def emitted(native: Native, checkpoint: Checkpoint, path: Path, **options: Any) -> tuple[EmissionReport, bytes]:
    report = emit_file(entries_of(recipes()), checkpoint, path, native, **options)
    return report, path.read_bytes()


def test_weights_file(native: Native, checkpoint: Checkpoint, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    report, data = emitted(native, checkpoint, tmp_path / "w.safetensors", progress=lambda *step: seen.append(step))
    tensors, t = load_file(tmp_path / "w.safetensors"), values_of()
    assert (report.nbytes, report.data_start % 4096, report.built, report.reused) == (len(data), 0, 6, 0)
    assert list(report.sha256) == [hashlib.sha256(data).hexdigest()]
    assert seen[-1] == (len(data), len(data)) and seen == sorted(seen)
    qkv = witness.pack("f32", np.concatenate((unpair(t["a"], 3), t["b"])).view(np.uint8))
    assert np.array_equal(tensors["qkv"][: qkv.size], qkv) and not tensors["qkv"][qkv.size :].any()
    blocks = gguf.quantize(np.concatenate((t["a"], t["b"])), gguf.GGMLQuantizationType.Q8_0)
    assert np.array_equal(tensors["q8"][: 80 // 16 * 2 * 544], witness.pack("q8_0", blocks))
    norm = t["v"] + np.float32(1)
    assert tensors["norm"][:192].tobytes() == norm.tobytes()
    assert tensors["freq"].tobytes() == np.array([1.0, 0.1, 0.01], np.float32).tobytes() + bytes(64 - 12)


def test_same_bytes_for_any_workers_order_and_path(
    native: Native, checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces_module, "TASK_BYTES", 4096)
    monkeypatch.setattr(pieces_module, "STRIP_VALUES", 1024)
    first, data = emitted(native, checkpoint, tmp_path / "1", jobs=1)
    for jobs in (2, 3):
        again, same = emitted(native, checkpoint, tmp_path / str(jobs), jobs=jobs)
        assert same == data and again.errors == first.errors and again.sha256 == first.sha256
    permuted = checkpoint_at(tmp_path / "elsewhere", dict(reversed(values_of().items())))
    again, same = emitted(native, permuted, tmp_path / "permuted", jobs=2)
    assert same == data and again.errors == first.errors


def test_conversion_error_is_that_of_gguf_py(native: Native, checkpoint: Checkpoint, tmp_path: Path) -> None:
    report, _ = emitted(native, checkpoint, tmp_path / "w")
    x = np.concatenate((values_of()["a"], values_of()["b"]))
    q8 = gguf.GGMLQuantizationType.Q8_0
    e = (x - gguf.dequantize(gguf.quantize(x, q8), q8)).astype(np.float64)
    assert report.errors["q8"].max_abs == pytest.approx(np.abs(e).max(), rel=1e-7)
    assert report.errors["q8"].relative_rms == pytest.approx(
        np.sqrt((e**2).sum() / (x.astype(np.float64) ** 2).sum()), rel=1e-6
    )
    assert set(report.errors) == {"q8", "q4k", "half"}


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_not_finite_weights(native: Native, tmp_path: Path, bad: float) -> None:
    tensors = values_of()
    tensors["a"][31, 5] = bad
    broken = checkpoint_at(tmp_path / "broken", tensors)
    with pytest.raises(
        TapeoutError, match=r"model\.safetensors: tensor 'a' has NaN/Inf weights in row 31; every weight"
    ):
        emitted(native, broken, tmp_path / "w")


def test_value_too_large_for_its_format(native: Native, tmp_path: Path) -> None:
    tensors = values_of()
    tensors["a"][31, 5] = 1e30
    broken = checkpoint_at(tmp_path / "broken", tensors)
    with pytest.raises(TapeoutError, match=r"row 31 of tensor 'a' cannot be stored as q8_0: a value is too large for"):
        emitted(native, broken, tmp_path / "w", jobs=1)


def test_the_row_named_is_that_of_the_file(native: Native, tmp_path: Path) -> None:
    tensors = values_of()
    tensors["b"][5, 5] = 1e30
    evaluator = Evaluator(checkpoint_at(tmp_path / "broken", tensors), native)
    nested = Rows(Concat((Rows(read("a"), 4, 20), HalvesFromPairs(read("b"), 4))), 8, 48)
    with pytest.raises(TapeoutError, match=r"row 5 of tensor 'b' cannot be stored as f16: a value is too large"):
        evaluator.rows(Convert(nested, "f16"), 0, 40, ErrorSums())


def test_infinite_scale_of_a_block(native: Native, tmp_path: Path) -> None:
    blocks = witness.random_rows("q4_k", 16, 512, np.random.default_rng(3))
    blocks[7, 146:148] = np.array([np.inf], np.float16).view(np.uint8)
    writer = gguf.GGUFWriter(str(tmp_path / "m.gguf"), "llama")
    writer.add_tensor("w", blocks, raw_dtype=gguf.GGMLQuantizationType.Q4_K)
    writer.write_header_to_file(), writer.write_kv_data_to_file(), writer.write_tensors_to_file(), writer.close()
    entry = WeightEntry("w", Pack(Read("w", (16, 512), "q4_k"), "tile16"), 0, packed_bytes((16, 512), "q4_k", "tile16"))
    with pytest.raises(
        TapeoutError, match=r"m\.gguf: tensor 'w' has NaN/Inf weights in row 7; every weight must be finite"
    ):
        emit_file([entry], open_checkpoint(tmp_path / "m.gguf"), tmp_path / "w", native)


def test_header_is_canonical(native: Native, checkpoint: Checkpoint, tmp_path: Path) -> None:
    _, data = emitted(native, checkpoint, tmp_path / "w")
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    assert (8 + length) % 4096 == 0 and data[8 + length - 1] == ord(" ")
    ends = [0, *(entry["data_offsets"][1] for entry in header.values())]
    assert [entry["data_offsets"][0] for entry in header.values()] == ends[:-1]
    assert 8 + length + ends[-1] == len(data)


@given(st.integers(1, 200), st.integers(1, 50), st.randoms(use_true_random=False))
def test_digests_of_pieces_in_any_order(size: int, chunk: int, random: Any) -> None:
    data = bytes(random.randrange(256) for _ in range(size))
    cuts = sorted({0, size, *(random.randrange(size) for _ in range(5))})
    pieces = list(itertools.pairwise(cuts))
    random.shuffle(pieces)
    segments = list(segments_of(sorted(pieces), chunk))
    assert segments == [(at, min(at + chunk, size)) for at in range(0, size, chunk)]
    digests = SegmentDigests(segments)
    for start, stop in pieces:
        digests.add(start, memoryview(data)[start:stop])
    assert [digests.hexdigest(at) for at in range(len(segments))] == [
        hashlib.sha256(data[at : at + chunk]).hexdigest() for at in range(0, size, chunk)
    ]


@pytest.mark.parametrize("jobs", [1, 2, 4])
def test_earliest_failure_is_reported(jobs: int) -> None:
    def work(task: int) -> None:
        if task >= 20:
            raise TapeoutError(f"task {task}")

    with pytest.raises(TapeoutError, match=r"task 20$"):
        run_tasks(range(1000), work, jobs)
