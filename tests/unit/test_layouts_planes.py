"""Layout planes: read back by a witness written from its description, native against numpy, and emission of it."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import planes_reference as witness
import pytest
from emission import emit_file
from safetensors.numpy import load_file, save_file

from tapeout.compiler.cache import WeightCache
from tapeout.compiler.checkpoints import Checkpoint, open_checkpoint
from tapeout.compiler.emit import pieces as pieces_module
from tapeout.compiler.emit.native import Native, load_native
from tapeout.compiler.emit.pack import pack_planes
from tapeout.compiler.emit.pieces import WeightEntry
from tapeout.compiler.emit.weights import EmissionReport
from tapeout.compiler.environment import Environment
from tapeout.compiler.formats import FORMATS
from tapeout.compiler.layouts import (
    PLANE,
    packed_bytes,
    parts_of,
    plan_offsets,
    plane_geometry,
    planes_hold,
    tile16_holds,
)
from tapeout.compiler.recipes import Concat, Convert, HalvesFromPairs, Pack, Read, Recipe, Rows, joined, joins_with
from tapeout.runtime.errors import TapeoutError

U8 = npt.NDArray[np.uint8]
HELD = [name for name in FORMATS if planes_hold(name)]
GGUF = [name for name in HELD if FORMATS[name].gguf_id is not None]
OURS = [name for name in HELD if FORMATS[name].gguf_id is None]
WRITTEN = [name for name in OURS if FORMATS[name].encode is not None]


@pytest.fixture(scope="session")
def native() -> Native:
    return load_native(Environment.read().cache / "emit")


def values(rows: int, k: int, seed: int = 0) -> npt.NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal((rows, k)).astype(np.float32)


def rows_of(format: str, rows: int, k: int) -> U8:
    """Rows of every bit pattern where rows are independent, of encoded values where they share scales."""
    known = FORMATS[format]
    if format in GGUF:
        return witness.random_gguf_rows(format, rows, k, np.random.default_rng(rows))
    if known.encode is None:
        encoded = np.random.default_rng(rows).integers(0, 256, (rows, known.row_bytes(k)), np.uint8)
        encoded.reshape(rows, -1, known.block_bytes)[..., 1] &= 0xBF  # finite scales
        return encoded
    encoded = known.encode(values(rows, k, seed=rows))
    if known.tiles is None:
        codes = encoded.reshape(rows, -1, known.block_bytes)[..., known.block_bytes - known.block // 2 :]
        codes[:] = np.random.default_rng(rows).integers(0, 256, codes.shape)
    return encoded


def natively(native: Native, format: str, rows: U8, k: int, cuts: list[int]) -> U8:
    """Packed by the native code in ranges of rows, over junk."""
    planes = plane_geometry((len(rows), k), format)
    parts = parts_of((len(rows), k), format, "planes")
    out = np.zeros(planes.nbytes, np.uint8)
    for part in parts:
        offset, nbytes = part.span(0, len(rows))
        out[offset : offset + nbytes] = 77
    for start, stop in zip(cuts, [*cuts[1:], len(rows)], strict=True):
        spans = [part.span(start, stop) for part in parts]
        native.pack_planes(format, rows[start:stop], k, [out[at : at + nbytes] for at, nbytes in spans])
    return out


SIZES = [(1, 576), (37, 768), (300, 576), (130, 1152), (5, 32), (260, 1024)]


@pytest.mark.parametrize("format", [*GGUF, *OURS])
@pytest.mark.parametrize(("rows", "k"), SIZES)
def test_native_equals_numpy_equals_the_description(native: Native, format: str, rows: int, k: int) -> None:
    if k % FORMATS[format].block:
        k = -(-k // FORMATS[format].block) * FORMATS[format].block
    data = rows_of(format, rows, k)
    packed = pack_planes(format, data, k)
    unit = 128 if format == "fp8_block128" else 1
    for cuts in ([0], [0, *range(unit, rows, max(unit, rows // 3))]):
        assert np.array_equal(natively(native, format, data, k, cuts), packed)
    expected = witness.dequantize(format, data) if format in GGUF else FORMATS[format].decode(data)
    np.testing.assert_array_equal(witness.read_back(format, packed, rows, k).view(np.uint32), expected.view(np.uint32))


def test_geometry_of_the_specification() -> None:
    q6 = plane_geometry((48, 768), "q6_k")
    assert [(plane.bits, plane.low, plane.offset, plane.row_bytes) for plane in q6.codes] == [
        (4, 0, 0, 384),
        (2, 4, 18432, 192),
    ]
    assert (q6.scales.offset, q6.scales.row_bytes, q6.scales.d, q6.scales.sub, q6.zero) == (27648, 64, 0, 6, 32)
    assert packed_bytes((48, 768), "q6_k", "planes") == q6.nbytes == 27648 + 48 * 64
    q4 = plane_geometry((3, 512), "q4_k")
    assert (q4.scales.offset, q4.scales.dmin, q4.scales.sub, q4.scales.submin) == (768, 4, 8, 24)
    q8 = plane_geometry((3, 96), "q8_0")
    assert (q8.zero, q8.codes[0].row_bytes, q8.scales.offset, q8.scales.row_bytes) == (0, 96, 512, 16)
    zp = plane_geometry((2, 256), "int4_g128_zp")
    assert (zp.zero, zp.scales.zeros, zp.d_type, zp.group) == (0, 4, "bf16", 128)
    tensor, blocks = plane_geometry((300, 576), "fp8"), plane_geometry((300, 576), "fp8_block128")
    assert (tensor.scales.rows, tensor.scales.row_bytes, tensor.group, tensor.element) == (1, 16, 576, "e4m3")
    assert (blocks.scales.rows, blocks.scales.row_bytes, blocks.group) == (3, 32, 128)
    for planes in (q6, q4, q8, zp, tensor, blocks):
        starts = [plane.offset for plane in planes.codes] + [planes.scales.offset]
        assert not any(start % 256 for start in starts)


def test_every_format_has_a_cpu_kernel_and_one_that_had_none_would_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(tile16_holds(format) for format in FORMATS)
    monkeypatch.setitem(FORMATS, "wide", replace(FORMATS["nvfp4"], name="wide", row_scale=False))
    assert not tile16_holds("wide")
    with pytest.raises(TapeoutError, match=r"no CPU kernel serves wide: layout tile16 .* holds: f32, .*nvfp4$"):
        packed_bytes((16, 256), "wide", "tile16")


@pytest.mark.parametrize("format", ["mxfp4", "nvfp4", "iq4_nl", "iq4_xs", "fp8_row"])
def test_formats_without_a_gpu_kernel_say_so(format: str) -> None:
    with pytest.raises(TapeoutError, match=f"no GPU kernel serves {format}: layout planes .* holds: q4_0, .*fp8"):
        packed_bytes((16, 256), format, "planes")


# ---- emission ----------------------------------------------------------------------------------------------------

SHAPES = {"a": (300, 256), "b": (84, 256), "wide": (96, 1024)}


def checkpoint_at(folder: Path) -> Checkpoint:
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Any] = {name: values(*shape, seed=i) for i, (name, shape) in enumerate(SHAPES.items())}
    save_file(tensors | {"v": values(1, 48)[0]}, folder / "model.safetensors")
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return open_checkpoint(folder)


def read(name: str) -> Read:
    return Read(name, SHAPES[name], "f32")


def recipes() -> dict[str, Recipe]:
    matrices: dict[str, Recipe] = {
        name: Pack(Convert(read("a"), name), "planes") for name in ("q8_0", "q6_k", *WRITTEN)
    }
    matrices["joined"] = Pack(joined([Convert(read("a"), "fp8"), Convert(read("b"), "fp8")]), "planes")
    matrices["blocks"] = Pack(Convert(HalvesFromPairs(read("wide"), 2), "fp8_block128"), "planes")
    return matrices | {"v": Pack(Read("v", (48,), "f32"), "raw"), "half": Pack(Convert(read("wide"), "bf16"), "raw")}


def emit(native: Native, source: Checkpoint, path: Path, **options: Any) -> tuple[EmissionReport, bytes]:
    named = recipes()
    sizes = [packed_bytes(recipe.shape, recipe.format, _layout(recipe)) for recipe in named.values()]
    spans = plan_offsets(sizes, PLANE)
    entries = [WeightEntry(name, recipe, *span) for (name, recipe), span in zip(named.items(), spans, strict=True)]
    assert not any(entry.offset % 256 for entry in entries)
    return emit_file(entries, source, path, native, **options), path.read_bytes()


def _layout(recipe: Recipe) -> str:
    assert isinstance(recipe, Pack)
    return recipe.layout


def test_emission_of_planes(native: Native, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = checkpoint_at(tmp_path / "m")
    first, data = emit(native, source, tmp_path / "1", jobs=1)
    assert list(first.sha256) == [hashlib.sha256(data).hexdigest()]
    tensors, x = load_file(tmp_path / "1"), values(*SHAPES["a"])
    for name in ("q8_0", "q6_k", *WRITTEN):
        encode = FORMATS[name].encode
        assert encode is not None
        packed = pack_planes(name, encode(x), 256)
        assert np.array_equal(tensors[name][: packed.size], packed), name
        assert not tensors[name][packed.size :].any()
    monkeypatch.setattr(pieces_module, "TASK_BYTES", 4096)
    monkeypatch.setattr(pieces_module, "STRIP_VALUES", 1024)
    for jobs in (1, 2, 3):
        again, same = emit(native, source, tmp_path / f"small-{jobs}", jobs=jobs)
        assert same == data and again.sha256 == first.sha256
        assert {name: error.max_abs for name, error in again.errors.items()} == {
            name: error.max_abs for name, error in first.errors.items()
        }


def test_one_scale_over_parts_that_are_joined(native: Native, tmp_path: Path) -> None:
    emit(native, checkpoint_at(tmp_path / "m"), tmp_path / "w")
    x = np.concatenate((values(*SHAPES["a"], seed=0), values(*SHAPES["b"], seed=1)))
    got = witness.read_back("fp8", load_file(tmp_path / "w")["joined"], *x.shape)
    scale = np.float32(np.abs(x).max() / np.float32(448))
    np.testing.assert_array_equal(got, witness.torch_e4m3(x / scale) * scale)


def test_planes_come_from_the_cache(native: Native, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, source = WeightCache(tmp_path / "cache"), checkpoint_at(tmp_path / "m")
    report, data = emit(native, source, tmp_path / "1", cache=cache)
    cache.record(tmp_path / "1", report.chunk_bytes, report.sha256, report.spans)
    monkeypatch.setattr(pieces_module, "TASK_BYTES", 4096)
    again, same = emit(native, source, tmp_path / "2", cache=cache, jobs=2)
    assert (again.built, again.reused) == (0, len(recipes())) and same == data and again.errors == report.errors


def test_joined_and_cut_where_rows_share_scales() -> None:
    a, b = Convert(read("a"), "fp8_block128"), Convert(read("b"), "fp8_block128")
    assert joined([a, b]) == Convert(Concat((read("a"), read("b"))), "fp8_block128")
    assert joined([read("a"), read("b")]) == Concat((read("a"), read("b")))
    assert joins_with(a) == "fp8_block128 from f32" and joins_with(Convert(read("a"), "q8_0")) == "q8_0"
    with pytest.raises(TapeoutError, match=r"start in rows \[300\] cut through a scale of fp8_block128, which"):
        Concat((a, b))
    with pytest.raises(TapeoutError, match=r"rows from 64 cut through a scale of fp8_block128"):
        Rows(a, 64, 192)
    with pytest.raises(TapeoutError, match=r"rows in another order cut through a scale of fp8_block128"):
        HalvesFromPairs(a, 2)
    with pytest.raises(TapeoutError, match=r"fp8 has one scale a tensor; concatenate before converting, not after"):
        Concat((Convert(read("a"), "fp8"), Convert(read("b"), "fp8")))


def test_a_gguf_matrix_is_repacked_as_it_is(native: Native, tmp_path: Path) -> None:
    blocks = witness.random_gguf_rows("q5_k", 40, 512, np.random.default_rng(3))
    writer = gguf.GGUFWriter(str(tmp_path / "m.gguf"), "llama")
    writer.add_tensor("w", blocks, raw_dtype=gguf.GGMLQuantizationType.Q5_K)
    writer.write_header_to_file(), writer.write_kv_data_to_file(), writer.write_tensors_to_file(), writer.close()
    nbytes = packed_bytes((40, 512), "q5_k", "planes")
    entry = WeightEntry("w", Pack(Read("w", (40, 512), "q5_k"), "planes"), 0, nbytes + -nbytes % 4096)
    report = emit_file([entry], open_checkpoint(tmp_path / "m.gguf"), tmp_path / "w", native)
    got = witness.read_back("q5_k", load_file(tmp_path / "w")["w"], 40, 512)
    np.testing.assert_array_equal(got, witness.dequantize("q5_k", blocks))
    assert report.errors == {}
