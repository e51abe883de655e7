"""Broken and hostile artifacts: each ends in one sentence before anything in it is read further or executed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tapeout.compiler.artifact import ArtifactWriter
from tapeout.runtime.errors import TapeoutError
from tapeout.runtime.manifest import open_manifest

HOST = ["x86_64_v3"]
CHUNK = 8 << 20
FILES = {
    "plan.json": b'{"format_version": 2}\n',
    "kernels/cpu-x86_64_v3.so": b"\x7fELF" + bytes(1000),
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "generation.json": b"{}",
    "weights/rank0.safetensors": bytes(range(256)) * (CHUNK // 256 * 2 + 5),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with ArtifactWriter(tmp_path / "artifact") as writer:
        for name, data in FILES.items():
            writer.add(name, data)
        return writer.seal(HOST)


def refused(folder: Path, host: list[str] | None = None) -> str:
    """What opening and verifying is refused with, after the folder's name."""
    with pytest.raises(TapeoutError) as caught:
        open_manifest(folder, host_targets=HOST if host is None else host).verify()
    text = str(caught.value)
    assert "\n" not in text and text.startswith(str(folder))
    return text.removeprefix(str(folder)).removeprefix(": ")


def change(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    document = json.loads((folder / "manifest.json").read_bytes())
    edit(document)
    (folder / "manifest.json").write_text(json.dumps(document))


@pytest.mark.parametrize("name", FILES)
def test_flipped_byte(folder: Path, name: str) -> None:
    data = bytearray(FILES[name])
    data[-1] ^= 1
    (folder / name).write_bytes(data)
    start = len(data) // CHUNK * CHUNK
    assert refused(folder) == (
        f"/{name}: bytes {start} to {len(data)} differ from what was compiled (digest mismatch); "
        "the file is damaged, copy the artifact again or compile it again"
    )


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_first_damaged_chunk_is_named(folder: Path, threads: int) -> None:
    data = bytearray(FILES["weights/rank0.safetensors"])
    data[CHUNK + 3] ^= 128
    data[2 * CHUNK + 3] ^= 128
    (folder / "weights/rank0.safetensors").write_bytes(data)
    manifest = open_manifest(folder, host_targets=HOST)
    manifest.verify(["plan.json", "kernels/cpu-x86_64_v3.so"], threads)
    with pytest.raises(TapeoutError, match=f"rank0.safetensors: bytes {CHUNK} to {2 * CHUNK} differ"):
        manifest.verify(threads=threads)


def test_missing_file(folder: Path) -> None:
    (folder / "plan.json").unlink()
    assert refused(folder) == "the file plan.json is missing; copy the artifact again or compile it again"


def test_file_of_another_size(folder: Path) -> None:
    (folder / "plan.json").write_bytes(b"{}")
    assert refused(folder) == "plan.json has 2 bytes and should have 22; copy the artifact again or compile it again"


def test_unlisted_file_is_never_opened(folder: Path) -> None:
    (folder / "kernels" / "other.so").write_bytes(b"evil")
    manifest = open_manifest(folder, host_targets=HOST)
    manifest.verify()
    with pytest.raises(TapeoutError, match=r"the artifact's manifest lists no kernels/other\.so; compile it again"):
        manifest.file("kernels/other.so")


@pytest.mark.parametrize(
    "path", ["../secret", "kernels/../../secret", "/etc/passwd", "", ".", "a//b", "a\\..\\b", "C:x", "a\0b"]
)
def test_path_that_escapes(folder: Path, path: str) -> None:
    (folder.parent / "secret").write_bytes(FILES["plan.json"])
    change(folder, lambda document: document["files"][0].update(path=path))
    assert (
        refused(folder)
        == f"/manifest.json: the path {path!r} leaves the artifact's folder; paths must be relative and stay inside"
    )


@pytest.mark.parametrize("name", ["plan.json", "kernels"])
def test_link_that_escapes(folder: Path, name: str) -> None:
    outside = folder.parent / "outside"
    (folder / name).rename(outside)
    (folder / name).symlink_to(outside)
    listed = "plan.json" if name == "plan.json" else "kernels/cpu-x86_64_v3.so"
    assert refused(folder) == f"{listed} is a link that leaves the artifact's folder; copy the file into it"


def test_link_inside_and_hard_link_are_fine(folder: Path) -> None:
    (folder / "plan.json").rename(folder / "the plan")
    (folder / "plan.json").symlink_to("the plan")
    os.link(folder / "tokenizer.json", folder.parent / "shared")
    linked = folder.parent / "mounted"
    linked.symlink_to(folder)
    open_manifest(linked, host_targets=HOST).verify()


def test_folder_or_pipe_in_place_of_a_file(folder: Path) -> None:
    (folder / "plan.json").unlink()
    os.mkfifo(folder / "plan.json")
    assert refused(folder) == "plan.json is not a regular file; copy the artifact again"


@pytest.mark.parametrize(
    ("version", "rest"),
    [
        (3, "reads up to 2; upgrade tapeout, or compile with this version"),
        (10**30, "reads up to 2; upgrade tapeout, or compile with this version"),
        (1, "reads 2; compile it again"),
    ],
)
def test_other_format_version(folder: Path, version: int, rest: str) -> None:
    change(folder, lambda document: document.update(format_version=version, files="in another shape"))
    assert refused(folder) == f"the artifact has format version {version}, but this runtime (0.1.0) {rest}"


def test_newer_runtime_needed(folder: Path) -> None:
    change(folder, lambda document: document.update(requires_runtime=">=0.10"))
    assert refused(folder) == "the artifact needs a runtime >=0.10, and this one is 0.1.0; upgrade tapeout"
    change(folder, lambda document: document.update(requires_runtime=">=0.1.0.0"))
    open_manifest(folder, host_targets=HOST)
    change(folder, lambda document: document.update(requires_runtime="<2"))
    assert refused(folder) == "/manifest.json: requires_runtime is '<2'; it must read like '>=0.1'"


def test_other_architecture(folder: Path) -> None:
    text = "the artifact holds code for x86_64_v3, but this machine runs"
    assert refused(folder, ["aarch64"]) == f"{text} aarch64; compile it for this machine"
    assert refused(folder, []) == f"{text} none of the known architectures; compile it for this machine"
    change(folder, lambda document: document.update(architectures=[]))
    open_manifest(folder, host_targets=[]).verify()


def test_no_artifact(tmp_path: Path) -> None:
    assert refused(tmp_path / "none") == "no such folder; an artifact is a folder with a manifest.json"
    assert refused(tmp_path) == "not an artifact, it has no manifest.json; `tapeout compile` makes one"


def test_truncated_manifest(folder: Path) -> None:
    whole = (folder / "manifest.json").read_bytes()
    for length in range(0, len(whole) - 2, 37):
        (folder / "manifest.json").write_bytes(whole[:length])
        assert refused(folder) == "/manifest.json: not valid JSON, so it is cut or damaged; copy the artifact again"
    (folder / "manifest.json").write_bytes(b"[" * 200_000)
    assert "not valid JSON" in refused(folder)
    (folder / "manifest.json").write_bytes(b"[]")
    assert refused(folder) == "/manifest.json: holds no JSON object, so it is not a manifest"
    (folder / "manifest.json").write_bytes(b"{}")
    assert refused(folder) == "/manifest.json: states no format_version, so it is not a manifest of Tapeout"


@pytest.mark.parametrize(
    ("key", "value", "what"),
    [
        ("bytes", -1, "-1 is not a whole number between 0 and"),
        ("bytes", 1 << 70, f"{1 << 70} is not a whole number between 0 and"),
        ("bytes", 1 << 59, "has 1 digests for 576460752303423488 bytes in chunks of 8388608"),
        ("bytes", True, "True is not a whole number"),
        ("bytes", 5.0, "5.0 is not a whole number"),
        ("chunk_bytes", 0, "0 is not a whole number between 1 and 67108864"),
        ("chunk_bytes", 1 << 40, "is not a whole number between 1 and 67108864"),
        ("sha256", [], "has 0 digests for"),
        ("sha256", "abc", "'abc' is not a list"),
        ("sha256", ["abc"], "has a digest that is not 64 hexadecimal digits"),
        ("path", 3, "3 is not a string"),
    ],
)
def test_absurd_entries(folder: Path, key: str, value: object, what: str) -> None:
    change(folder, lambda document: document["files"][0].update({key: value}))
    text = refused(folder)
    assert text.startswith("/manifest.json: not a valid manifest (") and what in text
    assert text.endswith("; copy the artifact again or compile it again")


def test_missing_keys_and_doubles(folder: Path) -> None:
    change(folder, lambda document: document["files"].append(document["files"][0]))
    assert refused(folder) == "/manifest.json: lists a file twice; a manifest lists every file once"
    change(folder, lambda document: document["files"][0].pop("bytes"))
    assert "(the key 'bytes' is missing)" in refused(folder)
    change(folder, lambda document: document.update(files={"a": 1}))
    assert "is not a list" in refused(folder)
    change(folder, lambda document: document.pop("architectures"))
    assert "(the key 'architectures' is missing)" in refused(folder)


def test_no_numpy_to_open_and_verify(folder: Path) -> None:
    place = Path(__file__).parents[2] / "runtime" / "manifest.py"
    code = (
        "import sys, types\n"
        "runtime = types.ModuleType('tapeout.runtime'); runtime.__path__ = [sys.argv[1]]\n"
        "sys.modules['tapeout.runtime'] = runtime\n"
        "from pathlib import Path\n"
        "from tapeout.runtime.manifest import open_manifest\n"
        "open_manifest(Path(sys.argv[2]), host_targets=['x86_64_v3']).verify()\n"
        "assert 'numpy' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code, str(place.parent), str(folder)], check=True)
