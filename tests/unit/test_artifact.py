"""Writing artifacts: what is refused, what appears, and that nothing else is ever touched."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import tomllib
from collections import namedtuple
from pathlib import Path

import pytest

from tapeout.compiler import artifact
from tapeout.compiler.artifact import ArtifactWriter, canonical_json
from tapeout.runtime.errors import TapeoutError
from tapeout.runtime.manifest import RUNTIME_VERSION, open_manifest


def write(out: Path, text: bytes = b"first", *, force: bool = False) -> Path:
    with ArtifactWriter(out, force=force) as writer:
        writer.add("plan.json", text)
        writer.add("kernels/cpu.so", b"\x7fELF" + text)
        return writer.seal(["x86_64_v3"])


def tree(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()
    }


def refused(out: Path, *, force: bool = False) -> str:
    with pytest.raises(TapeoutError) as caught:
        write(out, b"new", force=force)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_written_artifact(tmp_path: Path) -> None:
    out = write(tmp_path / "deep" / "a")
    assert os.listdir(out.parent) == ["a"]
    manifest = json.loads((out / "manifest.json").read_bytes())
    assert manifest == {
        "format_version": 2,
        "tapeout_version": RUNTIME_VERSION,
        "requires_runtime": ">=0.1",
        "architectures": ["x86_64_v3"],
        "files": [
            {"path": path, "bytes": len(data), "chunk_bytes": 8388608, "sha256": [hashlib.sha256(data).hexdigest()]}
            for path, data in (("kernels/cpu.so", b"\x7fELFfirst"), ("plan.json", b"first"))
        ],
    }
    opened = open_manifest(out, host_targets=["x86_64_v3"])
    opened.verify()
    assert opened.file("plan.json") == out / "plan.json" and not opened.has("tokenizer.json")


def test_version_is_that_of_the_project() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert project["project"]["version"] == RUNTIME_VERSION


def test_same_bytes_wherever_it_is_written(tmp_path: Path) -> None:
    assert tree(write(tmp_path / "a")) == tree(write(tmp_path / "elsewhere" / "b"))


def test_existing_output_is_refused(tmp_path: Path) -> None:
    out = write(tmp_path / "a")
    before = tree(out)
    assert refused(out) == f"{out}: the output folder exists; choose another, or replace its artifact with --force"
    (tmp_path / "empty").mkdir()
    assert "the output folder exists" in refused(tmp_path / "empty")
    assert tree(out) == before and sorted(os.listdir(tmp_path)) == ["a", "empty"]


def test_force_replaces_an_artifact(tmp_path: Path) -> None:
    out = write(tmp_path / "a")
    write(out, b"second", force=True)
    assert (out / "plan.json").read_bytes() == b"second" and os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize("exchange", [True, False])
def test_replacing_without_an_exchange(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchange: bool) -> None:
    if not exchange:
        monkeypatch.setattr(artifact, "_rename", lambda *_: False)
    out = write(tmp_path / "a")
    write(out, b"second", force=True)
    assert (out / "plan.json").read_bytes() == b"second" and os.listdir(tmp_path) == ["a"]


def test_force_spares_foreign_folders(tmp_path: Path) -> None:
    foreign = tmp_path / "photos"
    foreign.mkdir()
    (foreign / "cat.jpg").write_bytes(b"meow")
    text = "exists and is not an artifact of this version, so it is not replaced; choose another folder"
    assert refused(foreign, force=True) == f"{foreign}: {text}"
    (foreign / "manifest.json").write_text('{"name": "an app"}')
    assert refused(foreign, force=True) == f"{foreign}: {text}"
    assert len(tree(foreign)) == 2


def test_force_spares_files_that_someone_added(tmp_path: Path) -> None:
    out = write(tmp_path / "a")
    (out / "kernels" / "notes.txt").write_text("mine")
    assert refused(out, force=True) == (
        f"{out}: holds kernels/notes.txt, which is not part of its artifact, so it is not replaced; "
        "move that file or choose another folder"
    )
    assert (out / "kernels" / "notes.txt").exists() and os.listdir(tmp_path) == ["a"]


def test_a_failure_leaves_nothing(tmp_path: Path) -> None:
    out = write(tmp_path / "a")
    with pytest.raises(KeyboardInterrupt), ArtifactWriter(out, force=True) as writer:
        writer.add("plan.json", b"second")
        raise KeyboardInterrupt
    assert (out / "plan.json").read_bytes() == b"first" and os.listdir(tmp_path) == ["a"]


def test_full_disk_before_and_during(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = write(tmp_path / "a")
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**12, 0, 5 * 10**9))
    with pytest.raises(TapeoutError) as caught, ArtifactWriter(tmp_path / "b", needed_bytes=6 * 10**9):
        pass
    rest = "the artifact needs 6.0 GB and 5.0 GB are free there; free some space or choose another folder"
    assert str(caught.value) == f"{tmp_path}: {rest}"
    with pytest.raises(TapeoutError) as caught, ArtifactWriter(out, force=True, needed_bytes=10**6):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert str(caught.value) == (
        f"{out}: the disk became full during the compilation (it needs 1 MB, 5.0 GB are free there now); "
        "free some space or choose another folder"
    )
    assert (out / "plan.json").read_bytes() == b"first" and os.listdir(tmp_path) == ["a"]


def test_output_below_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert (
        refused(tmp_path / "file" / "a")
        == f"{tmp_path}/file/a: cannot be written (a part of the path is a file); choose another folder"
    )


def test_link_to_an_artifact_is_followed(tmp_path: Path) -> None:
    out = write(tmp_path / "real" / "a")
    (tmp_path / "link").symlink_to(out)
    write(tmp_path / "link", b"second", force=True)
    assert (tmp_path / "link").is_symlink() and (out / "plan.json").read_bytes() == b"second"


def test_remains_of_dead_processes_are_swept(tmp_path: Path) -> None:
    dead = next(pid for pid in range(4_000_000, 1, -1) if not Path(f"/proc/{pid}").exists())
    for name in (f".a.tmp-{dead}", f".a.tmp-{dead}-1", f".a.tmp-{os.getpid()}", f".b.tmp-{dead}", ".a.tmp-notes"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "plan.json").write_text("")
    write(tmp_path / "a")
    assert sorted(os.listdir(tmp_path)) == sorted(["a", f".a.tmp-{os.getpid()}", f".b.tmp-{dead}", ".a.tmp-notes"])


def test_artifact_that_stepped_aside_comes_back(tmp_path: Path) -> None:
    dead = next(pid for pid in range(4_000_000, 1, -1) if not Path(f"/proc/{pid}").exists())
    out = write(tmp_path / "a")
    out.rename(tmp_path / f".a.old-{dead}")
    assert "the output folder exists" in refused(out)
    assert (out / "plan.json").read_bytes() == b"first" and os.listdir(tmp_path) == ["a"]


def test_canonical_json() -> None:
    assert canonical_json({"b": 1, "a": [1.0, "é"]}) == '{\n "a": [\n  1.0,\n  "é"\n ],\n "b": 1\n}\n'.encode()
