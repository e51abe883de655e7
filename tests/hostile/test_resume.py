"""A compile that was killed, interrupted or starved goes on where it stopped; what it wrote is not trusted blindly."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import small_model
from dying import JOB_BYTES, Compile

from tapeout.compiler import cli
from tapeout.compiler.artifact import ArtifactWriter
from tapeout.compiler.emit import jobs as jobs_module
from tapeout.compiler.emit.executors import WorkersLost
from tapeout.compiler.emit.jobs import JOURNAL, Job, Journal, journal_state
from tapeout.compiler.emit.pieces import PieceWriter
from tapeout.runtime.errors import TapeoutError

KILLED = -signal.SIGKILL


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    source = small_model.write_folder(tmp_path / "model")
    return small_model.write_spec(tmp_path / "spec.yaml", source, topology={"count": 2})


@pytest.fixture(scope="session")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The artifact of a compile that nothing disturbed, in one job."""
    folder = tmp_path_factory.mktemp("undisturbed")
    source = small_model.write_folder(folder / "model")
    written = small_model.write_spec(folder / "spec.yaml", source, topology={"count": 2})
    assert cli.main(["compile", str(written), "-o", str(folder / "artifact"), "--no-cache"]) == 0
    return contents(folder / "artifact")


def contents(folder: Path) -> dict[str, bytes]:
    """Files by name, plan.json without the place of the source."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def kill(spec: Path, out: Path, after: int) -> set[int]:
    """A compile that is killed after so many jobs, which one thread runs in order. Returns the jobs it began."""
    return Compile(spec, out, "--jobs=1", after=after).end(KILLED)[0]


def compiled(spec: Path, out: Path, *more: str) -> set[int]:
    """A compile to the end. Returns the jobs that it ran."""
    return Compile(spec, out, *more).end(0)[0]


def left(tmp_path: Path) -> Path:
    """The folder that a dead compile left."""
    (folder,) = tmp_path.glob(".artifact.tmp-*")
    return folder


def jobs_in(folder: Path) -> set[int]:
    """The jobs that a journal says are finished; a torn last line says nothing."""
    found = set[int]()
    for line in (folder / JOURNAL).read_text().splitlines() if (folder / JOURNAL).exists() else ():
        with contextlib.suppress(json.JSONDecodeError):
            found |= {json.loads(line[9:])["job"][0]} if '"job"' in line else set()
    return found


@pytest.mark.parametrize("seed", range(4))
def test_kill_at_any_moment_and_go_on(seed: int, spec: Path, tmp_path: Path, expected: dict[str, bytes]) -> None:
    out, rng, before, most = tmp_path / "artifact", random.Random(seed), set[int](), 0
    while not out.exists():
        again, _ = Compile(spec, out, call=rng.randint(1, 80)).end(0, KILLED)
        assert not again & before, "a finished job was done again"
        before = jobs_in(left(tmp_path)) if not out.exists() else set()
        most = max(most, len(before))
    assert most > 0
    assert contents(out) == expected
    assert not list(tmp_path.glob(".artifact*"))


def test_what_is_left_is_said(spec: Path, tmp_path: Path, expected: dict[str, bytes]) -> None:
    assert kill(spec, tmp_path / "artifact", 3) == {0, 1, 2}
    again, said = Compile(spec, tmp_path / "artifact").end(0)
    assert min(again) == 3
    assert "weights: 490.6 KiB (0 reused, 32 built, 144.0 KiB were there from before) in " in said
    assert contents(tmp_path / "artifact") == expected


@pytest.mark.parametrize("damage", ["flipped", "cut", "gone"])
def test_a_damaged_byte_is_written_again(damage: str, spec: Path, tmp_path: Path, expected: dict[str, bytes]) -> None:
    kill(spec, tmp_path / "artifact", 4)
    place = left(tmp_path) / "weights" / "rank1.safetensors"
    data = place.read_bytes()
    header = 8 + int.from_bytes(data[:8], "little")
    if damage == "flipped":
        place.write_bytes(data[: header + 99] + bytes([data[header + 99] ^ 1]) + data[header + 100 :])
    elif damage == "cut":
        os.truncate(place, header + 99)
    else:
        place.unlink()
    redone = compiled(spec, tmp_path / "artifact") & {0, 1, 2, 3}
    assert redone == ({0} if damage == "flipped" else {0, 1, 2, 3})
    assert contents(tmp_path / "artifact") == expected


@pytest.mark.parametrize("tail", [b"", b"0", b'00000000 {"job":[0,[],[]]}\n', b"12345678 {\n", b"\n"])
def test_a_torn_line_of_the_journal_ends_it(
    tail: bytes, spec: Path, tmp_path: Path, expected: dict[str, bytes]
) -> None:
    kill(spec, tmp_path / "artifact", 3)
    place = left(tmp_path) / JOURNAL
    lines = place.read_bytes().splitlines(keepends=True)
    assert len(lines) == 4  # the key, and three jobs
    place.write_bytes(b"".join(lines[:3]) + lines[3][:20] + tail)
    assert kill(spec, tmp_path / "artifact", 2) == {2, 3}
    assert min(compiled(spec, tmp_path / "artifact")) == 4
    assert contents(tmp_path / "artifact") == expected


def test_other_weights_start_afresh(spec: Path, tmp_path: Path) -> None:
    kill(spec, tmp_path / "artifact", 3)
    assert 0 in compiled(spec, tmp_path / "artifact", "--set", "quantization.default=q8_0")
    assert not list(tmp_path.glob(".artifact*"))


def test_another_plan_of_the_same_weights_goes_on(spec: Path, tmp_path: Path) -> None:
    """Whatever else the folder held is not kept."""
    more = ["--set", "serving.max_sequences=2"]
    kill(spec, tmp_path / "artifact", 3)
    (left(tmp_path) / "kernels").mkdir(exist_ok=True)
    (left(tmp_path) / "kernels" / "old.so").write_text("")
    (left(tmp_path) / "old.json").write_text("")
    assert min(compiled(spec, tmp_path / "artifact", *more)) == 3
    compiled(spec, tmp_path / "fresh", *more)
    assert contents(tmp_path / "artifact") == contents(tmp_path / "fresh")


def test_a_changed_source_starts_afresh(spec: Path, tmp_path: Path) -> None:
    kill(spec, tmp_path / "artifact", 3)
    os.utime(tmp_path / "model" / "model.safetensors", ns=(1, 1))
    assert 0 in compiled(spec, tmp_path / "artifact")


def test_an_interrupt_says_how_to_go_on(spec: Path, tmp_path: Path, expected: dict[str, bytes]) -> None:
    first, said = Compile(spec, tmp_path / "artifact", "--jobs=1", after=3, kind=signal.SIGINT).end(130)
    folder = left(tmp_path)
    done = jobs_in(folder)
    assert {0, 1, 2} <= done <= first
    assert said.splitlines()[-1] == (
        f"interrupted; {len(done)} jobs are finished: the same command continues there, or remove {folder}"
    )
    assert not compiled(spec, tmp_path / "artifact") & done
    assert contents(tmp_path / "artifact") == expected


def failing(monkeypatch: pytest.MonkeyPatch, after: int, error: BaseException) -> None:
    """Let writing fail after so many pieces."""
    write, calls = PieceWriter.write, 0

    def limited(self: PieceWriter, *arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > after:
            raise error
        return write(self, *arguments)

    monkeypatch.setattr(PieceWriter, "write", limited)


def test_a_full_disk_keeps_finished_jobs(
    spec: Path, tmp_path: Path, expected: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(jobs_module, "JOB_BYTES", JOB_BYTES)
    words = ["compile", str(spec), "-o", str(tmp_path / "artifact"), "--no-cache", "--jobs=1"]
    with monkeypatch.context() as patch:
        failing(patch, 12, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
        assert cli.main(words) == 2
    folder = left(tmp_path)
    count = len(jobs_in(folder))
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith(f"error: {tmp_path}/artifact: the disk became full during the compilation (it needs ")
    assert said.endswith(
        f"; free some space or choose another folder; {count} jobs are finished: the same command continues there, "
        f"or remove {folder}"
    )
    assert cli.main(words) == 0  # the process is alive, but holds no lock
    assert contents(tmp_path / "artifact") == expected and not list(tmp_path.glob(".artifact*"))


def test_an_error_of_the_source_leaves_nothing(spec: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs_module, "JOB_BYTES", JOB_BYTES)
    failing(monkeypatch, 12, TapeoutError("a weight is NaN"))
    assert cli.main(["compile", str(spec), "-o", str(tmp_path / "artifact"), "--no-cache", "--jobs=1"]) == 2
    assert not list(tmp_path.glob(".artifact*"))


@pytest.mark.parametrize("refused", [0, 1])
def test_two_compiles_to_one_place_share_nothing(
    refused: int, spec: Path, tmp_path: Path, expected: dict[str, bytes]
) -> None:
    """Only one takes over what a dead one left; the second to end is refused."""
    out, gates = tmp_path / "artifact", [tmp_path / "first", tmp_path / "second"]
    kill(spec, out, 3)
    both: list[Compile] = []
    for gate in gates:
        both.append(Compile(spec, out, gate=gate))
        both[-1].wait_for(gate.with_suffix(".reached"))
    gates[1 - refused].touch()
    ran = {1 - refused: both[1 - refused].end(0)[0]}
    gates[refused].touch()
    ran[refused], said = both[refused].end(2)
    assert said.splitlines()[-1] in (
        f"error: {out}: another compilation has put an artifact there meanwhile; choose another folder",
        f"error: {out}: the output folder exists; choose another, or replace its artifact with --force",
    )
    assert min(ran[0]) == 3 and min(ran[1]) == 0
    assert contents(out) == expected and not list(tmp_path.glob(".artifact*"))


@pytest.mark.parametrize("error", [SystemExit(15), OSError(errno.EIO, os.strerror(errno.EIO)), WorkersLost("gone")])
def test_what_may_pass_leaves_finished_jobs(error: BaseException, tmp_path: Path) -> None:
    """An exit is what Ray makes of SIGTERM."""
    with pytest.raises((SystemExit, TapeoutError)), ArtifactWriter(tmp_path / "artifact", emission="key") as first:
        line_of_a_job(first)
        raise error
    assert journal_state(left(tmp_path)) == ("key", 1)


def test_a_live_folder_is_not_taken_over(tmp_path: Path) -> None:
    out = tmp_path / "artifact"
    with pytest.raises(KeyboardInterrupt), ArtifactWriter(out, emission="key") as first:
        line_of_a_job(first)
        with pytest.raises(ValueError), ArtifactWriter(out, emission="key") as second:
            assert second.path(JOURNAL) != first.path(JOURNAL)
            raise ValueError
        assert first.path(JOURNAL).exists()
        raise KeyboardInterrupt
    folder = left(tmp_path)
    with ArtifactWriter(out, emission="key") as third:
        assert third.path(JOURNAL) == folder / JOURNAL and journal_state(folder) == ("key", 1)
        third.seal([])
    assert not (out / JOURNAL).exists() and os.listdir(tmp_path) == ["artifact"]


def line_of_a_job(writer: ArtifactWriter) -> None:
    """Write the journal of an emission with one finished job."""
    journal = Journal(writer.path(JOURNAL), "key")
    journal.append(jobs_module.JobResult(Job(0, ()).number, ((),), ()))


def test_space_that_is_taken_already_is_not_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "artifact"
    with pytest.raises(KeyboardInterrupt), ArtifactWriter(out, emission="key") as first:
        line_of_a_job(first)
        first.path("weights/rank0.safetensors").write_bytes(b"1" * 3_000_000)
        raise KeyboardInterrupt
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=2_000_000))
    with pytest.raises(KeyboardInterrupt), ArtifactWriter(out, emission="key", needed_bytes=5_000_000):
        raise KeyboardInterrupt
    with pytest.raises(TapeoutError, match="the artifact needs 5 MB and 2 MB are free there"):
        ArtifactWriter(out, emission="other", needed_bytes=5_000_000).__enter__()
