"""Broken safetensors files and folders: each ends in one sentence that names the file, the place and the rule."""

from __future__ import annotations

import json
import random
import re
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save, save_file

from tapeout.compiler.checkpoints import open_checkpoint
from tapeout.runtime.errors import TapeoutError

INDEX = "model.safetensors.index.json"
ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def arrays(*names: str) -> dict[str, np.ndarray[Any, Any]]:
    return {name: np.full((2, 8), 1 + at, np.float32) for at, name in enumerate(names)}


def folder(tmp_path: Path, config: bool = True) -> Path:
    if config:
        (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    return tmp_path


def refused(path: Path) -> str:
    """What opening ``path`` is refused with."""
    with pytest.raises(TapeoutError) as caught:
        open_checkpoint(path)
    text = str(caught.value)
    assert "\n" not in text
    return text


def refused_header(tmp_path: Path, header: Any, data: bytes = b"", length: int | None = None) -> str:
    """What a folder with this header and data is refused with, after the file's name."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path = folder(tmp_path) / "model.safetensors"
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return refused(tmp_path).removeprefix(f"{path}: ")


def entry(begin: int, end: int, **more: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [(end - begin) // 4], "data_offsets": [begin, end], **more}


def test_header_length(tmp_path: Path) -> None:
    rule = r"it must fit in the file and in 100000000 bytes: the file is truncated or is not safetensors"
    for length in (1 << 63, 1 << 40, 100, 0, 1):
        text = refused_header(tmp_path, {"a": entry(0, 8)}, bytes(8), length)
        assert re.fullmatch(rf"claims a header of {length} bytes in a file of \d+; {rule}", text)
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"\x10\0\0")
    assert re.search(rf"claims a header of 16 bytes in a file of 3; {rule}$", refused(tmp_path))


def test_header_json(tmp_path: Path) -> None:
    assert refused_header(tmp_path, b'{"a": 1, "a": 2}') == (
        "header: the key 'a' stands twice in one JSON object; each may stand once"
    )
    assert refused_header(tmp_path, b'{"a": {"dtype": "F32", "dtype": "F32"}}').startswith(
        "header: the key 'dtype' stands"
    )
    assert refused_header(tmp_path, b'{"a"}').startswith("header: not valid JSON (")
    assert refused_header(tmp_path, b"[" * 100_000).startswith("header: not valid JSON (")
    assert refused_header(tmp_path, b'{"a": NaN}') == "header: NaN is not JSON; numbers must be finite"
    assert refused_header(tmp_path, b'{"a\xff": 1}') == "header: not UTF-8 text (byte 3); JSON must be UTF-8"
    assert refused_header(tmp_path, b"[1, 2]") == "the header is a JSON list; it must be an object"
    assert (
        refused_header(tmp_path, {"n" * 2000: 1}) == "a tensor has a name of 2000 characters; names have at most 1024"
    )


@pytest.mark.parametrize(
    "value",
    [
        1,
        {},
        {"dtype": "F32", "shape": [2]},
        entry(0, 8, shape=[-2]),
        entry(0, 8, shape=[2.0]),
        entry(0, 8, shape=[True, 2]),
        entry(0, 8, shape="2"),
        entry(0, 8, data_offsets=[0, 4, 8]),
        entry(0, 8, data_offsets=[0, 1 << 70]),
        entry(0, 8, dtype=None),
    ],
)
def test_malformed_entries(tmp_path: Path, value: Any) -> None:
    text = refused_header(tmp_path, {"a": value}, bytes(8))
    assert text.startswith("tensor 'a' is described as ")
    assert text.endswith("needed are dtype, shape and data_offsets [begin, end] of whole numbers from 0 and below 2^63")


def test_offsets(tmp_path: Path) -> None:
    gapless = "tensors must follow each other without gaps"
    assert refused_header(tmp_path, {"a": entry(0, 8), "b": entry(4, 12)}, bytes(12)) == (
        f"tensor 'b' overlaps 'a'; {gapless}"
    )
    assert refused_header(tmp_path, {"a": entry(0, 8), "b": entry(12, 16)}, bytes(16)) == (
        f"tensor 'b' leaves a hole of 4 bytes after 'a'; {gapless}"
    )
    assert refused_header(tmp_path, {"a": entry(4, 8)}, bytes(8)) == (
        f"tensor 'a' leaves a hole of 4 bytes after 'the header'; {gapless}"
    )
    text = refused_header(tmp_path, {"a": entry(0, 8)}, bytes(7))
    assert re.fullmatch(
        r"tensor 'a' ends at byte \d+ and the file has \d+; the file is truncated: fetch it again", text
    )
    assert refused_header(tmp_path, {"a": entry(0, 8)}, bytes(11)) == (
        "has 3 bytes after the last tensor; nothing may follow it: the file is damaged"
    )
    assert refused_header(tmp_path, {"a": entry(0, 8, shape=[3])}, bytes(8)) == (
        "tensor 'a' of shape [3] and dtype F32 needs 12 bytes and its offsets [0, 8] give 8; they must agree"
    )
    assert "offsets [8, 0] give -8; they must agree" in refused_header(
        tmp_path, {"a": entry(8, 0, shape=[2])}, bytes(8)
    )
    huge = refused_header(tmp_path, {"a": entry(0, 8, shape=[1 << 62, 1 << 62])}, bytes(8))
    assert huge.endswith("give 8; they must agree")


def test_dtypes(tmp_path: Path) -> None:
    text = refused_header(tmp_path, {"a": entry(0, 8, dtype="F31")}, bytes(8))
    assert text.startswith("tensor 'a' has unknown dtype 'F31'; known: BOOL, U8, I8, ")
    text = refused_header(tmp_path, {"a": entry(0, 8, dtype="U32")}, bytes(8))
    assert text.startswith("tensor 'a' has dtype U32: unknown quantization type 'U32' in safetensors; known dtypes: ")
    assert all(name in text for name in ("F32", "F16", "BF16"))


def write_sharded(tmp_path: Path) -> dict[str, str]:
    """Two shards with an index; the weight map."""
    save_file(arrays("a", "b"), folder(tmp_path) / ONE)
    save_file(arrays("c", "b"), tmp_path / TWO)
    return {"a": ONE, "b": TWO, "c": TWO}


def write_index(tmp_path: Path, weight_map: Any) -> None:
    (tmp_path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_the_index_is_an_allow_list(tmp_path: Path) -> None:
    weight_map = write_sharded(tmp_path)
    write_index(tmp_path, weight_map)
    checkpoint = open_checkpoint(tmp_path)
    assert {name: info.file.name for name, info in checkpoint.tensors.items()} == weight_map
    assert checkpoint.read("b").view(np.float32).tolist() == [[2.0] * 8] * 2
    assert checkpoint.unlisted == ()
    write_index(tmp_path, {"a": ONE})
    checkpoint = open_checkpoint(tmp_path)
    assert list(checkpoint.tensors) == ["a"] and checkpoint.unlisted == ("b",)


def test_an_index_that_contradicts_the_folder(tmp_path: Path) -> None:
    weight_map = write_sharded(tmp_path)
    index = tmp_path / INDEX
    write_index(tmp_path, {**weight_map, "c": "model-00003-of-00003.safetensors"})
    assert refused(tmp_path) == (
        f"{index}: names the shard 'model-00003-of-00003.safetensors', which is not in the folder; "
        "fetch it, or repair the index"
    )
    write_index(tmp_path, {**weight_map, "a": TWO})
    assert refused(tmp_path) == (
        f"{index}: assigns tensor 'a' to {TWO}, which does not hold it; fetch the shard again, or repair the index"
    )
    for outside in ("../x.safetensors", "/etc/passwd", "a/../../x", "..\\x", "."):
        write_index(tmp_path, {"a": outside})
        assert refused(tmp_path) == (
            f"{index}: assigns tensor 'a' to {outside!r}, outside the folder; shards must lie inside it"
        )
    for nothing in ({}, [], None):
        write_index(tmp_path, nothing)
        assert refused(tmp_path) == f"{index}: has no 'weight_map'; it must map each tensor to its shard file"
    for odd in (3, "", "a\0b"):
        write_index(tmp_path, {"a": odd})
        assert refused(tmp_path) == f"{index}: assigns tensor 'a' to {odd!r}; it must be the name of a file"
    index.write_text('{"weight_map": {"a": "x", "a": "y"}}')
    assert refused(tmp_path) == f"{index}: the key 'a' stands twice in one JSON object; each may stand once"


def test_a_folder_without_an_index(tmp_path: Path) -> None:
    needed = (
        "needed are exactly model.safetensors, a complete set model-00001-of-0000N.safetensors, "
        "or model.safetensors.index.json"
    )
    assert refused(folder(tmp_path)) == f"{tmp_path}: holds no safetensors files; {needed}"
    save_file(arrays("b"), tmp_path / TWO)
    assert refused(tmp_path) == f"{tmp_path}: holds {TWO} without {INDEX}; {needed}"
    save_file(arrays("a"), tmp_path / ONE)
    assert list(open_checkpoint(tmp_path).tensors) == ["a", "b"]
    save_file(arrays("b"), tmp_path / ONE)
    assert refused(tmp_path) == f"{tmp_path}: tensor 'b' stands in {ONE} and in {TWO}; once is allowed"
    save_file(arrays("a"), tmp_path / "adapter.safetensors")
    assert refused(tmp_path).endswith(f"holds adapter.safetensors, {ONE}, {TWO} without {INDEX}; {needed}")


def test_config_and_single_files(tmp_path: Path) -> None:
    save_file(arrays("a"), folder(tmp_path, config=False) / "model.safetensors")
    missing = f"{tmp_path}: has no config.json; a safetensors checkpoint needs the model's config.json beside it"
    assert refused(tmp_path) == missing
    assert refused(tmp_path / "model.safetensors") == missing
    for text, end in [("[]", "holds a JSON list; it must be an object"), ("{", "the file is damaged")]:
        (tmp_path / "config.json").write_text(text)
        assert refused(tmp_path).startswith(f"{tmp_path / 'config.json'}: ") and refused(tmp_path).endswith(end)
    folder(tmp_path)
    assert list(open_checkpoint(tmp_path / "model.safetensors").tensors) == ["a"]
    (tmp_path / "model.safetensors").rename(tmp_path / TWO)
    assert refused(tmp_path / TWO) == f"{tmp_path / TWO}: is one of 2 shards; name the folder {tmp_path} instead"
    assert refused(tmp_path / "none").startswith(
        f"{tmp_path / 'none'}: there is no such file or folder; accepted are a "
    )
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).touch()
    (tmp_path / "config.json").unlink()
    assert refused(tmp_path) == f"{tmp_path}: holds several GGUF files; name one of a.gguf, b.gguf"


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 1 << 32), count=st.integers(0, 5), cut=st.integers(0, 600))
def test_damaged_files_parse_or_are_refused(tmp_path: Path, seed: int, count: int, cut: int) -> None:
    sound = save({**arrays("a", "b"), "c": np.zeros(3, np.float16)}, {"format": "pt"})
    source, data = random.Random(seed), bytearray(sound)
    for _ in range(count):
        data[source.randrange(len(data))] = source.choice([0, 0x22, 0x31, 0x7D, 0x80, 0xFF, source.randrange(256)])
    path = folder(tmp_path) / "model.safetensors"
    path.write_bytes(data[: cut if seed % 3 == 0 else len(data)])
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
