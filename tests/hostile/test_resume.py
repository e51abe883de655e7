"""A compile that was killed, interrupted or starved goes on where it stopped; what it wrote is not trusted blindly."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import small_model

from tapeout.compiler import cli
from tapeout.compiler.artifact import ArtifactWriter
from tapeout.compiler.emit import jobs as jobs_module
from tapeout.compiler.emit.jobs import JOURNAL, Job, Journal, journal_state
from tapeout.compiler.emit.pieces import PieceWriter
from tapeout.runtime.errors import TapeoutError

JOB_BYTES = 24_000
COMPILE = """
import os, signal, sys, time
from tapeout.compiler.cli import main
from tapeout.compiler.emit import jobs, pieces
jobs.JOB_BYTES = 24_000
pieces.TASK_BYTES = 4096
pause, last, spec, out = float(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
write, append = pieces.PieceWriter.write, jobs.Journal.append

def slowly(self, piece, hashed):
    time.sleep(pause)
    return write(self, piece, hashed)

def until(self, result):
    global last
    append(self, result)
    print(result.number, flush=True)
    last -= 1
    if last == 0:
        os.kill(os.getpid(), signal.SIGKILL)

pieces.PieceWriter.write, jobs.Journal.append = slowly, until
sys.exit(main(["compile", spec, "-o", out, "--no-cache", *sys.argv[5:]]))
"""


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


def start(spec: Path, out: Path, *more: str, pause: float = 0.0, last: int = 0) -> subprocess.Popen[str]:
    """Compile in a process of its own, which prints each job that it finished."""
    words = [sys.executable, "-c", COMPILE, str(pause), str(last), str(spec), str(out), *more]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finished(process: subprocess.Popen[str], code: int = 0) -> tuple[set[int], str]:
    """The jobs that a process ran, and what it said."""
    out, err = process.communicate(timeout=300)
    assert process.returncode == code, err
    return {int(line) for line in out.splitlines() if line.isdigit()}, err


def left(tmp_path: Path) -> Path:
    """The folder that a dead compile left."""
    (folder,) = tmp_path.glob(".artifact.tmp-*")
    return folder


def jobs_in(folder: Path) -> set[int]:
    """The jobs that a journal says are finished."""
    lines = [json.loads(line[9:]) for line in (folder / JOURNAL).read_text().splitlines()]
    return {line["job"][0] for line in lines if "job" in line}


def test_kill_at_any_moment_and_go_on(spec: Path, tmp_path: Path, expected: dict[str, bytes]) -> None:
    out, rng, before, ran = tmp_path / "artifact", random.Random(0), set[int](), list[int]()
    total = 0
    for _ in range(40):
        process = start(spec, out, pause=0.02)
        assert process.stdout is not None
        if not total:
            process.stdout.readline()  # the first kill comes after a job, or there may be nothing to go on with
        time.sleep(rng.uniform(0, 1.5))
        process.send_signal(signal.SIGKILL)
        numbers, _ = finished(process, process.wait())
        ran += numbers
        assert not numbers & before, "a finished job was done again"
        if out.exists():
            break
        before |= jobs_in(left(tmp_path))
        total += 1
    else:
        numbers, _ = finished(start(spec, out))
        ran += numbers
        assert not numbers & before
    assert len(ran) == len(set(ran)) and total >= 2
    assert contents(out) == expected
    assert not list(tmp_path.glob(".artifact*"))


def test_what_is_left_is_said(spec: Path, tmp_path: Path, expected: dict[str, bytes]) -> None:
    first, _ = finished(start(spec, tmp_path / "artifact", "--jobs=1", last=3), -signal.SIGKILL)
    second, said = finished(start(spec, tmp_path / "artifact"))
    assert first == {0, 1, 2} and min(second) == 3
    line = next(line for line in said.splitlines() if line.startswith("weights: "))
    assert " 0 reused, " in line and " KiB were there from before) in " in line
    assert contents(tmp_path / "artifact") == expected


@pytest.mark.parametrize("damage", ["flipped", "cut", "gone"])
def test_a_damaged_byte_is_written_again(damage: str, spec: Path, tmp_path: Path, expected: dict[str, bytes]) -> None:
    finished(start(spec, tmp_path / "artifact", "--jobs=1", last=4), -signal.SIGKILL)
    place = left(tmp_path) / "weights" / "rank1.safetensors"
    data = place.read_bytes()
    header = 8 + int.from_bytes(data[:8], "little")
    if damage == "flipped":
        place.write_bytes(data[: header + 99] + bytes([data[header + 99] ^ 1]) + data[header + 100 :])
    elif damage == "cut":
        os.truncate(place, header + 99)
    else:
        place.unlink()
    again, _ = finished(start(spec, tmp_path / "artifact"))
    redone = again & {0, 1, 2, 3}
    assert redone == ({0} if damage == "flipped" else {0, 1, 2, 3})
    assert contents(tmp_path / "artifact") == expected


@pytest.mark.parametrize("tail", [b"", b"0", b'00000000 {"job":[0,[],[]]}\n', b"12345678 {\n", b"\n"])
def test_a_torn_line_of_the_journal_ends_it(
    tail: bytes, spec: Path, tmp_path: Path, expected: dict[str, bytes]
) -> None:
    finished(start(spec, tmp_path / "artifact", "--jobs=1", last=3), -signal.SIGKILL)
    place = left(tmp_path) / JOURNAL
    lines = place.read_bytes().splitlines(keepends=True)
    assert len(lines) == 4  # the key, and three jobs
    place.write_bytes(b"".join(lines[:3]) + lines[3][:20] + tail)
    again, _ = finished(start(spec, tmp_path / "artifact", last=4), -signal.SIGKILL)
    assert 2 in again and not again & {0, 1}
    again, _ = finished(start(spec, tmp_path / "artifact"))
    assert not again & {0, 1, 2}
    assert contents(tmp_path / "artifact") == expected


def test_other_weights_start_afresh(spec: Path, tmp_path: Path) -> None:
    finished(start(spec, tmp_path / "artifact", "--jobs=1", last=3), -signal.SIGKILL)
    again, _ = finished(start(spec, tmp_path / "artifact", "--set", "quantization.default=q8_0"))
    assert 0 in again and not list(tmp_path.glob(".artifact*"))


def test_another_plan_of_the_same_weights_goes_on(spec: Path, tmp_path: Path) -> None:
    """Whatever else the folder held is not kept."""
    more = ["--set", "serving.max_sequences=2"]
    finished(start(spec, tmp_path / "artifact", "--jobs=1", last=3), -signal.SIGKILL)
    (left(tmp_path) / "kernels").mkdir(exist_ok=True)
    (left(tmp_path) / "kernels" / "old.so").write_text("")
    (left(tmp_path) / "old.json").write_text("")
    again, _ = finished(start(spec, tmp_path / "artifact", *more))
    assert min(again) == 3
    finished(start(spec, tmp_path / "fresh", *more))
    assert contents(tmp_path / "artifact") == contents(tmp_path / "fresh")


def test_a_changed_source_starts_afresh(spec: Path, tmp_path: Path) -> None:
    finished(start(spec, tmp_path / "artifact", "--jobs=1", last=3), -signal.SIGKILL)
    os.utime(tmp_path / "model" / "model.safetensors", ns=(1, 1))
    again, _ = finished(start(spec, tmp_path / "artifact"))
    assert 0 in again


def test_an_interrupt_says_how_to_go_on(spec: Path, tmp_path: Path, expected: dict[str, bytes]) -> None:
    process = start(spec, tmp_path / "artifact", "--jobs=1", pause=0.05)
    assert process.stdout is not None
    first = {int(process.stdout.readline()) for _ in range(3)}
    process.send_signal(signal.SIGINT)
    rest, said = finished(process, 130)
    folder = left(tmp_path)
    count = len(first | rest)
    assert said.splitlines()[-1] == (
        f"interrupted; {count} jobs are finished: the same command continues there, or remove {folder}"
    )
    again, _ = finished(start(spec, tmp_path / "artifact"))
    assert not again & (first | rest) and contents(tmp_path / "artifact") == expected


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


def test_two_compiles_to_one_place_share_nothing(spec: Path, tmp_path: Path, expected: dict[str, bytes]) -> None:
    """Only one takes over what a dead one left; the second to end is refused."""
    out = tmp_path / "artifact"
    finished(start(spec, out, "--jobs=1", last=3), -signal.SIGKILL)
    both = [start(spec, out, pause=0.01) for _ in range(2)]
    outputs = [process.communicate(timeout=300) for process in both]
    codes = sorted(process.returncode for process in both)
    assert codes == [0, 2]
    lost = next(err for process, (_, err) in zip(both, outputs, strict=True) if process.returncode)
    assert "another compilation has put an artifact there meanwhile" in lost or "the output folder exists" in lost
    ran = sorted(min(int(line) for line in text.splitlines() if line.isdigit()) for text, _ in outputs)
    assert ran == [0, 3]
    assert contents(out) == expected and not list(tmp_path.glob(".artifact*"))


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
