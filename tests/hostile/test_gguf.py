"""Broken GGUF files: each ends in one sentence that names the file, the place and the rule."""

from __future__ import annotations

import random
import re
import struct
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tapeout.compiler.checkpoints import open_checkpoint
from tapeout.runtime.errors import TapeoutError

TENSOR = b"blk.0.ffn_up.weight"  # [4, 64] Q8_0
VECTOR = b"output_norm.weight"  # [64] F32


def write(path: Path, endian: gguf.GGUFEndian = gguf.GGUFEndian.LITTLE) -> Path:
    """A small valid file by the format's own writer."""
    random_ = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama", endianess=endian)
    writer.add_block_count(1)
    writer.add_rope_freq_base(10000.0)
    writer.add_array("tokenizer.ggml.tokens", ["a", "b", "ünï"])
    writer.add_array("tokenizer.ggml.scores", [0.5, -1.0, 2.0])
    q8 = gguf.quants.quantize(random_.standard_normal((4, 64), np.float32), gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor(TENSOR.decode(), q8, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor(VECTOR.decode(), random_.standard_normal(64, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write(tmp_path_factory.mktemp("gguf") / "sound.gguf").read_bytes()


def refused(tmp_path: Path, data: bytes) -> str:
    """Open ``data`` as a file; what it is refused with, after the file's name."""
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    with pytest.raises(TapeoutError) as caught:
        open_checkpoint(path)
    text = str(caught.value)
    assert text.startswith(f"{path}: ") and "\n" not in text
    return text.removeprefix(f"{path}: ")


def put(data: bytes, at: int, code: str, value: int) -> bytes:
    return data[:at] + struct.pack(code, value) + data[at + struct.calcsize(code) :]


def after(data: bytes, name: bytes) -> int:
    """Where the fields that follow a key or tensor name begin."""
    return data.index(struct.pack("<Q", len(name)) + name) + 8 + len(name)


def test_the_sound_file_opens(tmp_path: Path, sound: bytes) -> None:
    (tmp_path / "model.gguf").write_bytes(sound)
    assert sorted(open_checkpoint(tmp_path / "model.gguf").tensors) == [TENSOR.decode(), VECTOR.decode()]


@pytest.mark.parametrize("at", [8, 16])
def test_absurd_counts_fail_at_once_and_allocate_nothing(tmp_path: Path, sound: bytes, at: int) -> None:
    tracemalloc.start()
    begin = time.perf_counter()
    text = refused(tmp_path, put(sound, at, "<Q", 1 << 60))
    took, (_, peak) = time.perf_counter() - begin, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    what = "tensors" if at == 8 else "metadata keys"
    assert re.match(rf"the header claims {1 << 60} {what}, which needs \d+ bytes where the file has \d+ left; ", text)
    assert text.endswith("the file is truncated or damaged: fetch it again")
    assert took < 0.5 and peak < 1 << 20


def test_big_endian_says_how_to_convert(tmp_path: Path) -> None:
    data = write(tmp_path / "big.gguf", gguf.GGUFEndian.BIG).read_bytes()
    assert refused(tmp_path, data) == (
        "is a big-endian GGUF; only little-endian files are read: "
        "convert it with `gguf-convert-endian FILE little` of the gguf package"
    )


def test_magic_and_version(tmp_path: Path, sound: bytes) -> None:
    text = refused(tmp_path, b"GGML" + sound[4:])
    assert text.startswith("is neither GGUF nor safetensors nor ONNX (it begins with b'GGML")
    assert "accepted are a .gguf file" in text
    for version in (0, 1, 4):
        expected = f"is GGUF version {version}; versions 2 and 3 are read: convert the model again"
        assert refused(tmp_path, put(sound, 4, "<I", version)) == expected
    assert refused(tmp_path, sound[:20]) == "has 20 bytes; a GGUF header has at least 24: the file is truncated"


def test_every_truncation_is_refused(tmp_path: Path, sound: bytes) -> None:
    data_end = len(sound.rstrip(b"\0"))
    for length in [*range(4, 600, 7), *range(600, data_end - 40, 61)]:
        text = refused(tmp_path, sound[:length])
        assert "truncated" in text or "past the end of the file" in text, (length, text)
    assert re.fullmatch(
        r"tensor 'output_norm.weight' ends at byte \d+ and the file has \d+; "
        r"the file is truncated or damaged: fetch it again",
        refused(tmp_path, sound[: data_end - 40]),
    )


def test_a_long_string_and_an_array(tmp_path: Path, sound: bytes) -> None:
    at = after(sound, b"tokenizer.ggml.tokens")
    assert re.match(
        r"the metadata key 'tokenizer.ggml.tokens' has an array of 3 strings that runs past the end of the file; ",
        refused(tmp_path, put(sound, at + 16, "<Q", (1 << 64) - 1)),
    )
    text = refused(tmp_path, put(sound, at + 8, "<Q", 1 << 61))
    assert text.startswith(f"the metadata key 'tokenizer.ggml.tokens' claims {1 << 61} array elements, which needs ")
    text = refused(tmp_path, put(sound, after(sound, b"general.architecture") + 4, "<Q", 1 << 62))
    assert text.startswith(f"the metadata key 'general.architecture' claims a string of {1 << 62} bytes, which needs ")
    assert (
        refused(tmp_path, put(sound, at + 4, "<I", 9))
        == "the metadata key 'tokenizer.ggml.tokens' is an array of arrays; only arrays of numbers and strings are read"
    )
    assert (
        refused(tmp_path, put(sound, at + 4, "<I", 77))
        == "the metadata key 'tokenizer.ggml.tokens' is an array of unknown type 77; types are 0 to 12"
    )
    assert (
        refused(tmp_path, put(sound, at, "<I", 13))
        == "the metadata key 'tokenizer.ggml.tokens' has unknown value type 13; types are 0 to 12"
    )
    text = refused(tmp_path, put(sound, at - len(b"tokenizer.ggml.tokens") - 8, "<Q", 1 << 20))
    assert text == "metadata key number 4 of 5 has a name of 1048576 bytes; names have at most 1024"


def test_duplicates(tmp_path: Path, sound: bytes) -> None:
    key = sound.replace(b"tokenizer.ggml.scores", b"tokenizer.ggml.tokens")
    assert refused(tmp_path, key) == "the metadata key 'tokenizer.ggml.tokens' stands twice; each may stand once"
    head = struct.pack("<Q", len(TENSOR)) + TENSOR
    info = head + sound[after(sound, TENSOR) :][: 4 + 16 + 4 + 8]
    start = sound.index(head)
    twice = put(sound[:start] + info + sound[start:], 8, "<Q", 3)
    assert refused(tmp_path, twice) == "the tensor 'blk.0.ffn_up.weight' stands twice; names must be unique"


def test_shapes(tmp_path: Path, sound: bytes) -> None:
    at = after(sound, TENSOR)
    for dims in (0, 5, 1 << 31):
        expected = f"tensor 'blk.0.ffn_up.weight' has {dims} dimensions; 1 to 4 are allowed"
        assert refused(tmp_path, put(sound, at, "<I", dims)) == expected
    rule = "every extent must be positive and the product below 2^63"
    for extent in (0, 1 << 62):
        text = refused(tmp_path, put(sound, at + 12, "<Q", extent))
        assert text == f"tensor 'blk.0.ffn_up.weight' has shape [{extent}, 64]; {rule}"
    assert refused(tmp_path, put(sound, at + 4, "<Q", 48)) == (
        "tensor 'blk.0.ffn_up.weight' has rows that do not fit its type: "
        "q8_0 stores blocks of 32 elements; a row of 48 is not a whole number of them"
    )


def test_an_unknown_type_lists_the_known(tmp_path: Path, sound: bytes) -> None:
    at = after(sound, TENSOR) + 4 + 16
    text = refused(tmp_path, put(sound, at, "<I", 15))
    assert text.startswith("tensor 'blk.0.ffn_up.weight' has ggml type 15 (Q8_K): unknown quantization type 15")
    assert all(name in text for name in ("8 (q8_0)", "12 (q4_k)", "30 (bf16)"))
    text = refused(tmp_path, put(sound, at, "<I", 999))
    assert "has ggml type 999 (a type that ggml does not list): unknown quantization type 999" in text


def test_offsets(tmp_path: Path, sound: bytes) -> None:
    at = after(sound, VECTOR) + 4 + 8 + 4
    text = refused(tmp_path, put(sound, at, "<Q", 1 << 40))
    assert re.fullmatch(
        r"tensor 'output_norm.weight' ends at byte \d{13} and the file has \d+; .* fetch it again", text
    )
    text = refused(tmp_path, put(sound, at, "<Q", 289))
    assert text == "tensor 'output_norm.weight' has offset 289; offsets must be multiples of 32"
    text = refused(tmp_path, put(sound, at, "<Q", 256))
    assert text == (
        "tensor 'output_norm.weight' overlaps 'blk.0.ffn_up.weight' (offset 256); each needs bytes of its own"
    )


@pytest.mark.parametrize("alignment", [0, 48, 1 << 31])
def test_alignment(tmp_path: Path, sound: bytes, alignment: int) -> None:
    pair = struct.pack("<Q", 17) + b"general.alignment" + struct.pack("<II", 4, alignment)
    data = put(sound[:24] + pair + sound[24:], 16, "<Q", 6)
    assert refused(tmp_path, data) == (
        f"the key 'general.alignment' is {alignment}; it must be a power of two up to 1048576"
    )


def split(folder: Path) -> list[Path]:
    """Three parts, by the format's own writer."""
    writer = gguf.GGUFWriter(folder / "m.gguf", "llama", split_max_tensors=1)
    for name in "abc":
        writer.add_tensor(name, np.full((2, 32), ord(name), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(folder.glob("*.gguf"))


def fails(path: Path, pattern: str) -> None:
    with pytest.raises(TapeoutError, match=pattern):
        open_checkpoint(path)


def test_split_files(tmp_path: Path) -> None:
    parts = split(tmp_path)
    assert sorted(open_checkpoint(parts[0]).tensors) == ["a", "b", "c"]
    fails(parts[1], r"00002-of-00003.gguf: is part 2 of 3; name the first part, m-00001-of-00003.gguf$")
    second = parts[1].read_bytes()
    parts[1].write_bytes(parts[2].read_bytes())
    fails(parts[0], r"00002-of-00003.gguf: says it is part 2 \(from 0\) of 3 where its name makes it part 1 of 3; ")
    parts[1].write_bytes(second.replace(b"\x01\0\0\0\0\0\0\0b", b"\x01\0\0\0\0\0\0\0a"))
    fails(parts[0], r"00002-of-00003.gguf: tensor 'a' stands in m-00001-of-00003.gguf too; once is allowed$")
    parts[1].write_bytes(second)
    first = parts[0].read_bytes()
    at = after(first, b"split.tensors.count")
    parts[0].write_bytes(put(first, at + 4, "<I", 4))
    fails(parts[0], r"key 'split.tensors.count' says 4 tensors and the 3 parts hold 3; ")
    parts[0].write_bytes(first)
    parts[2].unlink()
    fails(parts[0], r"is part 1 of 3 and m-00003-of-00003.gguf is missing; put all parts in one folder$")
    fails(
        parts[0].rename(tmp_path / "renamed.gguf"), r"is one of 3 parts .* its name must end in -00001-of-00003.gguf$"
    )


def test_a_file_cut_after_opening(tmp_path: Path, sound: bytes) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(sound)
    checkpoint = open_checkpoint(path)
    path.write_bytes(sound[:600])
    with pytest.raises(TapeoutError, match=r"the file changed while it was being read; compile again$"):
        checkpoint.read(TENSOR.decode())
    path.unlink()
    with pytest.raises(TapeoutError, match=r"cannot be read any more \(No such file or directory\); compile again$"):
        checkpoint.read(TENSOR.decode())


def flip(data: bytes, seed: int, count: int, length: int) -> bytes:
    """``count`` bytes of ``data`` changed, mostly in the header, and the end cut off."""
    source, out = random.Random(seed), bytearray(data)
    for _ in range(count):
        out[source.randrange(len(out) if source.random() < 0.2 else 620)] = source.choice(
            [0, 1, 0x7F, 0x80, 0xFF, source.randrange(256)]
        )
    return bytes(out[:length])


def use_everything(path: Path) -> None:
    """Whatever a compile would do with a checkpoint that opened."""
    checkpoint = open_checkpoint(path)
    for info in checkpoint.tensors.values():
        checkpoint.read_rows(info, 0, info.rows)
    for value in checkpoint.config.values():
        if not isinstance(value, str | int | float):
            list(value)


def parses_or_refuses(path: Path, act: Callable[[Path], None]) -> None:
    tracemalloc.start()
    try:
        act(path)
    except TapeoutError as error:
        assert "\n" not in str(error)
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < 64 << 20


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 1 << 32), count=st.integers(0, 6), cut=st.integers(0, 3000))
def test_damaged_files_parse_or_are_refused(tmp_path: Path, sound: bytes, seed: int, count: int, cut: int) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(flip(sound, seed, count, cut if cut < len(sound) and seed % 3 == 0 else len(sound)))
    parses_or_refuses(path, use_everything)
