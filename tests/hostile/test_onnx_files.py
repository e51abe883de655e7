"""Broken ONNX files: each ends in one sentence that names the file, the initializer and the rule."""

from __future__ import annotations

import os
import random
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from tapeout.compiler.cache import weight_key
from tapeout.compiler.checkpoints import open_checkpoint
from tapeout.compiler.recipes import Read
from tapeout.runtime.errors import TapeoutError

DAMAGED = "the file is damaged, or is not ONNX"
VALUES = np.arange(12, dtype=np.float32).reshape(3, 4)


def inline(name: str = "a.weight", values: np.ndarray[Any, Any] = VALUES) -> TensorProto:
    return numpy_helper.from_array(values, name)


def external(name: str = "a.weight", **place: object) -> TensorProto:
    tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=VALUES.shape, data_location=TensorProto.EXTERNAL)
    for key, value in {"location": "data.bin", "offset": 16, "length": 48, **place}.items():
        if value is not None:
            tensor.external_data.add(key=key, value=str(value))
    return tensor


def model(*tensors: TensorProto, nodes: list[onnx.NodeProto] | None = None, **fields: Any) -> onnx.ModelProto:
    return helper.make_model(helper.make_graph(nodes or [], "g", [], [], list(tensors)), **fields)


def write(folder: Path, proto: onnx.ModelProto | bytes) -> Path:
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "data.bin").write_bytes(bytes(16) + VALUES.tobytes())
    path = folder / "model.onnx"
    path.write_bytes(proto if isinstance(proto, bytes) else proto.SerializeToString())
    return path


def refused(folder: Path, proto: onnx.ModelProto | bytes) -> str:
    """What a folder with this model is refused with, after the file's name."""
    path = write(folder, proto)
    with pytest.raises(TapeoutError) as caught:
        open_checkpoint(folder)
    text = str(caught.value)
    assert "\n" not in text
    return text.removeprefix(f"{path}: ")


def field(number: int, payload: bytes) -> bytes:
    """A field of bytes, whose length is below 128."""
    return bytes([number << 3 | 2, len(payload)]) + payload


def test_what_is_read(tmp_path: Path) -> None:
    floats = helper.make_tensor("c.bias", TensorProto.FLOAT, [3], [1.0, 2.0, 3.0])  # as packed numbers
    product = helper.make_node("MatMul", ["x", "onnx::MatMul_7"], ["y"], name="/b/MatMul")
    gemms = [
        helper.make_node("Gemm", ["x", "d.weight"], ["z"], transB=1),
        helper.make_node("Gemm", ["x", "onnx::Gemm_9"], ["/e/Gemm_output_0"], transB=0),
    ]
    scoped = helper.make_node("MatMul", ["x", "val_20"], ["val_21"], name="node_MatMul_21")
    for key, value in {"stack_trace": "n" * 2000, "pkg.torch.onnx.name_scopes": "['', 'g', 'g.h', 'linear']"}.items():
        scoped.metadata_props.add(key=key, value=value)
    same = helper.make_node("Identity", ["a.weight"], ["f.weight"])
    constants = [
        inline("onnx::Add_1"),
        inline("shape", np.zeros((2, 2), np.int64)),
        inline("k.mask", np.zeros(3, bool)),
    ]
    anonymous = [
        inline("val_20"),
        inline("onnx::MatMul_7"),
        inline("onnx::Gemm_9"),
        inline("d.weight", VALUES.astype(np.float16)),
    ]
    write(tmp_path, model(external(), floats, *anonymous, *constants, nodes=[product, *gemms, scoped, same]))
    checkpoint = open_checkpoint(tmp_path / "model.onnx")
    assert {name: (info.format, info.transposed) for name, info in checkpoint.tensors.items()} == {
        "a.weight": ("f32", False), "b.weight": ("f32", True), "c.bias": ("f32", False), "d.weight": ("f16", False),
        "e.weight": ("f32", True), "f.weight": ("f32", False), "g.h.weight": ("f32", True),
    }  # fmt: skip
    assert checkpoint.unlisted == ("k.mask", "onnx::Add_1", "shape")
    for name in ("a.weight", "b.weight", "e.weight", "f.weight", "g.h.weight"):
        assert np.array_equal(checkpoint.read(name).view(np.float32), VALUES)
    assert np.array_equal(checkpoint.read("c.bias").view(np.float32), [[1, 2, 3]])
    assert np.array_equal(checkpoint.read("d.weight").view(np.float16), VALUES)


def test_a_folder_of_both_is_safetensors(tmp_path: Path) -> None:
    write(tmp_path, model(inline()))
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(TapeoutError, match=r"model\.safetensors: claims a header"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(TapeoutError, match=r"has no config\.json; an ONNX checkpoint needs the model's config\.json"):
        open_checkpoint(tmp_path / "model.onnx")


def test_external_places(tmp_path: Path) -> None:
    where = "initializer 'a.weight'"
    for place in ("/etc/passwd", "../data.bin", "a\\data.bin", "", "a\0"):
        assert refused(tmp_path, model(external(location=place))) == (
            f"{where} lies in {place!r}; external data must be a file in the folder of the model"
        )
    for place in ("none.bin", "n" * 1000):
        assert refused(tmp_path, model(external(location=place))) == (
            f"{where} lies in {place!r}, which is not in the folder; fetch it, it holds the weights"
        )
    assert refused(tmp_path, model(external(offset=17))) == (
        f"{where} ends at byte 65 of data.bin, which has 64; the file is truncated: fetch it again"
    )
    assert refused(tmp_path, model(external(length=47))) == (
        f"{where} of shape [3, 4] needs 48 bytes and its external data says length 47; they must agree"
    )
    for offset in ("-1", "1e3", "9" * 30):
        assert refused(tmp_path, model(external(offset=offset))) == (
            f"{where} has external data of offset {offset!r}; it must be a whole number of bytes"
        )


def test_initializers(tmp_path: Path) -> None:
    short = inline()
    short.raw_data = short.raw_data[:-1]
    assert refused(tmp_path, model(short)) == (
        "initializer 'a.weight' of shape [3, 4] needs 48 bytes and has 47; they must agree"
    )
    single = helper.make_tensor("a.weight", TensorProto.FLOAT16, [2], [1.0, 2.0])
    assert refused(tmp_path, model(single)) == (
        "initializer 'a.weight' holds its values as single numbers; they must be raw data, or external data"
    )
    assert refused(tmp_path, model(inline(), inline())) == ("initializer 'a.weight' stands twice; each may stand once")
    two = [
        helper.make_node("MatMul", ["x", name], ["y"], name="/a/MatMul")
        for name in ("onnx::MatMul_1", "onnx::MatMul_2")
    ]
    assert refused(tmp_path, model(inline("onnx::MatMul_1"), inline("onnx::MatMul_2"), nodes=two)) == (
        "two initializers are the weight 'a.weight'; a weight has exactly one source"
    )
    assert refused(tmp_path, model(inline("a.weight_quantized", VALUES.astype(np.int8)))) == (
        "initializer 'a.weight_quantized' is INT8 codes; weights are read from FLOAT, FLOAT16 and BFLOAT16 "
        "initializers: export the model unquantized, and quantize it with quantization.default"
    )
    assert refused(tmp_path, model(inline("a.weight", VALUES.astype(np.float64)))) == (
        "initializer 'a.weight' is of ONNX type 11; "
        "weights are read from FLOAT (1), FLOAT16 (10) and BFLOAT16 (16) initializers"
    )
    negative = inline()
    negative.dims[0] = -3
    rule = "at most 8 dimensions from 0 and below 2^63 are allowed"
    assert refused(tmp_path, model(negative)) == f"an initializer has the shape [18446744073709551613]; {rule}"
    deep = refused(tmp_path, model(inline(values=VALUES.reshape(*[1] * 9, 12))))
    assert deep == f"an initializer has the shape {[1] * 9}; {rule}"
    packed = b"\x08\x09" + field(7, field(5, field(1, b"\x01" * 9)))
    assert refused(tmp_path, packed) == f"lists more than 8 numbers at byte 8: {DAMAGED}"
    proto = model(inline())
    proto.graph.sparse_initializer.add()
    assert refused(tmp_path, proto) == "has a sparse initializer; weights are read from dense ones"


def test_messages(tmp_path: Path) -> None:
    start = b"\x08\x09"
    assert refused(tmp_path, start + field(8, b"")) == f"holds 0 graphs; a model has exactly one: {DAMAGED}"
    assert refused(tmp_path, start + field(7, b"") * 2) == f"holds 2 graphs; a model has exactly one: {DAMAGED}"
    assert refused(tmp_path, start + b"\x3a\xff\xff\xff\xff\x0f") == (
        f"has a field of 4294967295 bytes at byte 8, where 0 are left: {DAMAGED}"
    )
    assert refused(tmp_path, start + field(7, b"\x2a\x7f")) == (
        f"has a field of 127 bytes at byte 6, where 0 are left: {DAMAGED}"
    )
    assert refused(tmp_path, start + b"\x3b") == f"has a field of the unknown kind 3 before byte 3: {DAMAGED}"
    assert refused(tmp_path, start + b"\xff" * 12) == f"has a number at byte 2 that does not end: {DAMAGED}"
    assert refused(tmp_path, start + field(7, b"\x28\x01")) == (
        f"holds a number where a message belongs, before byte 6: {DAMAGED}"
    )
    assert refused(tmp_path, start + field(7, field(5, field(8, b"\xff")))) == (
        f"has a name that is not UTF-8 text at byte 8: {DAMAGED}"
    )
    assert refused(tmp_path, model(inline("n" * 2000))) == (
        f"has a name of 2000 bytes; names have at most 1024: {DAMAGED}"
    )


def test_a_cached_weight_is_not_that_of_another_place(tmp_path: Path) -> None:
    """The data file stays as it is when the model points elsewhere into it."""
    keys: list[str] = []
    for offset in (16, 0):
        path = write(tmp_path, model(external(offset=offset)))
        os.utime(tmp_path / "data.bin", (0, 0))
        keys.append(weight_key(Read("a.weight", VALUES.shape, "f32"), open_checkpoint(path)))
    assert len(set(keys)) == 2


def test_exports_of_ours_are_not_checkpoints(tmp_path: Path) -> None:
    assert refused(tmp_path, model(inline(), producer_name="tapeout")).startswith("was written by export-onnx, whose")


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 1 << 32), count=st.integers(0, 5), cut=st.integers(0, 400))
def test_damaged_files_parse_or_are_refused(tmp_path: Path, seed: int, count: int, cut: int) -> None:
    node = helper.make_node("MatMul", ["x", "onnx::MatMul_7"], ["y"], name="/b/MatMul")
    sound = model(inline(), external("c.weight"), inline("onnx::MatMul_7"), nodes=[node]).SerializeToString()
    source, data = random.Random(seed), bytearray(sound)
    for _ in range(count):
        data[source.randrange(2, len(data))] = source.choice([0, 0x0A, 0x2A, 0x7F, 0x80, 0xFF, source.randrange(256)])
    write(tmp_path, bytes(data[: cut if seed % 3 == 0 else len(data)]))
    tracemalloc.start()
    try:
        checkpoint = open_checkpoint(tmp_path)
        for info in checkpoint.tensors.values():
            checkpoint.read_rows(info, 0, info.rows)
    except TapeoutError as error:
        assert "\n" not in str(error)
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < 64 << 20
