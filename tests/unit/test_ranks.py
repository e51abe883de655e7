"""Ranks as processes: what they compute, and that one that dies, hangs or fails ends the run and leaves nothing."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil
import pytest
import rank_programs
from native_engine import supported

from tapeout.runtime.errors import TapeoutError
from tapeout.runtime.ranks import Member, Place, RankError, Ranks, Segment, read_place, start_ranks

LIMIT_S = 5.0
PROGRAM = rank_programs.__file__
HERE = str(Path(PROGRAM).parent)

pytestmark = pytest.mark.skipif(not supported(rank_programs.TARGET), reason="this CPU runs no kernel of the test")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return rank_programs.build_library(tmp_path_factory.mktemp("ranks"))


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No file, shared memory or process outlives a test."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    before = set(os.listdir("/dev/shm"))
    yield
    assert set(os.listdir("/dev/shm")) <= before and not os.listdir(tmp_path)
    assert not [child for child in psutil.Process().children(recursive=True) if runs_ranks(child)]


def runs_ranks(process: psutil.Process) -> bool:
    try:
        return PROGRAM in process.cmdline()
    except psutil.Error:
        return False


def command(library: Path, program: str, *words: str) -> list[str]:
    return [sys.executable, PROGRAM, program, str(library), *words]


def start(library: Path, count: int, program: str, *words: str, patience_s: float = 1.0) -> Ranks:
    return start_ranks(count, command(library, program, *words), rank_programs.BUFFER_BYTES, patience_s=patience_s)


def started(library: Path, count: int, program: str) -> Ranks:
    """Ranks whose leader has printed that it runs."""
    reader, writer = os.pipe()
    kept = os.dup(1)
    os.dup2(writer, 1)
    try:
        ranks = start(library, count, program)
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(writer)
    with os.fdopen(reader) as lines:
        assert lines.readline() == "running\n"
    return ranks


def test_ranks_agree_and_runs_repeat(library: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for count in (2, 2, 3):
        with start(library, count, "some") as ranks:
            assert ranks.wait() == 0
    first, again, three = capfd.readouterr().out.split()
    assert first == again != three


def ended(ranks: Ranks, since: float) -> str:
    """What the run says when it is over, which must be soon; no process of it is left."""
    with pytest.raises(RankError) as raised:
        ranks.wait()
    assert time.monotonic() - since < LIMIT_S
    assert all(process.returncode is not None for process in ranks.processes)
    return str(raised.value)


def test_a_rank_killed_at_any_moment_ends_the_run(library: Path, pytestconfig: pytest.Config) -> None:
    rng = random.Random(0)
    worst = 0.0
    for _ in range(int(pytestconfig.getoption("--kill-trials") or 0)):
        count = rng.choice((2, 3))
        victim = rng.randrange(count)
        with started(library, count, "loop") as ranks:
            time.sleep(rng.uniform(0, 0.2))
            ranks.processes[victim].send_signal(signal.SIGKILL)
            since = time.monotonic()
            said = ended(ranks, since)
            worst = max(worst, time.monotonic() - since)
        assert said == f"rank {victim} was killed by SIGKILL; the other ranks were ended"
    print(f"the slowest end took {worst:.2f} s")


def test_a_rank_killed_while_it_starts_ends_the_run(library: Path) -> None:
    for delay in (0.0, 0.05, 0.2):
        with start(library, 2, "loop") as ranks:
            time.sleep(delay)
            ranks.processes[1].send_signal(signal.SIGKILL)
            assert ended(ranks, time.monotonic()).startswith("rank 1 was killed by SIGKILL")


@pytest.mark.parametrize("victim", [0, 1])
def test_a_stopped_rank_ends_the_run(library: Path, victim: int) -> None:
    with started(library, 2, "loop") as ranks:
        ranks.processes[victim].send_signal(signal.SIGSTOP)
        said = ended(ranks, time.monotonic())
    assert said in (
        f"rank {victim} has given no sign of life for 2.5 s: it was killed or stopped, and the other ranks were ended",
        f"rank {victim} is stuck: the others have waited 1 s for it in a collective, and were ended",
    )


def test_a_run_stopped_as_a_whole_goes_on(library: Path) -> None:
    with started(library, 2, "loop") as ranks:
        for process in ranks.processes:
            process.send_signal(signal.SIGSTOP)
        time.sleep(4)
        for process in ranks.processes:
            process.send_signal(signal.SIGCONT)
        time.sleep(1)
        assert all(process.poll() is None for process in ranks.processes)
        ranks.processes[1].kill()
        assert ended(ranks, time.monotonic()).startswith("rank 1 was killed")


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("hang", "rank 1 is stuck: the others have waited 1 s for it in a collective, and were ended"),
        ("fail", "rank 1 failed: no such token"),
        ("crash", "rank 1 ended with exit code 7: out of luck"),
    ],
)
def test_a_rank_that_hangs_or_fails_is_named(library: Path, program: str, said: str) -> None:
    with start(library, 2, program) as ranks:
        assert ended(ranks, time.monotonic() + 2) == said  # processes take a while to start


def test_a_rank_that_does_nothing_is_stuck_and_one_that_works_is_not(library: Path) -> None:
    with start(library, 3, "doze", patience_s=60) as ranks:
        said = ended(ranks, time.monotonic() + 2)
    assert said == (
        "rank 2 is stuck: it has done nothing for 4 s, in which the others waited for it in a collective, and they "
        "were ended"
    )
    with start(library, 2, "toil", patience_s=60) as ranks:
        assert ranks.wait() == 0


def test_a_rank_that_leaves_before_it_is_ready_ends_the_run(library: Path) -> None:
    with start(library, 3, "some", "unready") as ranks:
        said = ended(ranks, time.monotonic() + 2)
    assert said == "rank 2 left while other ranks were still waiting for it, and they were ended"


@pytest.mark.parametrize("program", ["lead", "think"])
def test_the_leader_may_pause_and_its_end_is_the_runs(library: Path, program: str) -> None:
    with start(library, 2, program) as ranks:
        assert ranks.wait() == 0


def test_children_die_with_a_killed_parent(library: Path) -> None:
    code = f"""
import sys; sys.path.insert(0, {HERE!r})
from tapeout.runtime.ranks import start_ranks
ranks = start_ranks(2, {command(library, "loop")!r}, {rank_programs.BUFFER_BYTES})
print(*(process.pid for process in ranks.processes), flush=True)
ranks.wait()
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout
    children = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
    assert parent.stdout.readline() == "running\n"
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert len(children) == 2 and not psutil.wait_procs(children, timeout=LIMIT_S)[1]


def test_ranks_that_opened_different_artifacts_are_refused(library: Path) -> None:
    with start(library, 3, "some", "different") as ranks:
        said = ended(ranks, time.monotonic() + 2)
    assert re.fullmatch(
        "the ranks opened different artifacts: the manifest of rank 0 has digest [0-9a-f]{12}, that of rank 2 "
        "[0-9a-f]{12}; give every rank the same artifact",
        said,
    )


class Outside:
    """Ranks that this test starts as a launcher would."""

    def __init__(self, library: Path, program: str, environments: list[dict[str, str]], *words: str) -> None:
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "OMPI", "PMI"))}
        self.processes = [
            subprocess.Popen(
                command(library, program, *words), env={**clean, **own}, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                text=True,
            )
            for own in environments
        ]  # fmt: skip

    def results(self) -> list[tuple[int, str, str]]:
        outputs = [process.communicate(timeout=30) for process in self.processes]
        return [(process.returncode, *both) for process, both in zip(self.processes, outputs, strict=True)]


def torchrun(count: int, port: int) -> list[dict[str, str]]:
    common = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "MASTER_ADDR": "localhost"}
    return [{**common, "MASTER_PORT": str(port), "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]


def port() -> int:
    """A name for a run that no other test uses."""
    return os.getpid() * 1000 + random.SystemRandom().randrange(1000)


def test_ranks_started_by_another_launcher_find_each_other(library: Path, capfd: pytest.CaptureFixture[str]) -> None:
    outputs = Outside(library, "some", torchrun(2, port())).results()
    assert [(code, error) for code, _, error in outputs] == [(0, ""), (0, "")]
    with start(library, 2, "some") as ranks:
        assert ranks.wait() == 0
    assert outputs[0][1] == capfd.readouterr().out and not outputs[1][1]


def test_a_rank_of_another_launcher_that_is_killed_is_named_by_the_rest(library: Path) -> None:
    outside = Outside(library, "loop", torchrun(3, port()))
    leader = outside.processes[0]
    assert leader.stdout and leader.stdout.readline() == "running\n"
    outside.processes[1].kill()
    since = time.monotonic()
    results = outside.results()
    assert time.monotonic() - since < LIMIT_S
    assert [code for code, _, _ in results] == [2, -signal.SIGKILL, 2]
    for _, _, error in (results[0], results[2]):
        assert error in (
            "error: rank 1 has given no sign of life for 2.5 s: it was killed or stopped, and the other ranks were "
            "ended\n",
            "error: rank 1 is stuck: the others have waited 1 s for it in a collective, and were ended\n",
        )


def test_a_plan_for_another_number_of_ranks_is_refused(library: Path) -> None:
    for code, _, error in Outside(library, "some", torchrun(2, port()), "planned=3").results():
        assert code == 2
        assert error == (
            "error: the artifact was planned for 3 ranks, but 2 were started; start 3, or compile it with "
            "topology.count=2\n"
        )


def test_two_processes_of_one_rank_are_refused(library: Path) -> None:
    one, two, three = torchrun(3, port())
    del three
    results = Outside(library, "some", [one, two, two]).results()
    assert {code for code, _, _ in results} == {2}
    said = "error: two processes say that they are rank 1; every rank is one process\n"
    assert {error for _, _, error in results} == {said}


def test_a_rank_is_claimed_once_however_close_two_processes_are() -> None:
    segment = Segment.create(2, 4096)
    code = f"""
from tapeout.runtime.ranks import Segment
segment = Segment({segment.fd})
print(segment.claim(1), flush=True)
input()
"""
    words, pipe = [sys.executable, "-c", code], subprocess.PIPE
    with subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True, pass_fds=(segment.fd,)) as other:
        assert other.stdout and other.stdout.readline() == "True\n"
        with pytest.raises(TapeoutError, match="two processes say that they are rank 1; every rank is one process"):
            Member(Place(1, 2, ""), segment)
        assert segment.claim(0)
        other.communicate("\n")
    assert segment.claim(1)
    segment.close()


MPIRUN = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}
SRUN = {"SLURM_PROCID": "1", "SLURM_NTASKS": "4", "SLURM_NNODES": "1", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}


@pytest.mark.parametrize(
    ("environ", "place"),
    [
        ({}, None),
        (torchrun(4, 5)[2], Place(2, 4, "torchrun/localhost/5")),
        ({**MPIRUN, "PMIX_NAMESPACE": "a"}, Place(1, 4, "mpirun/a")),
        ({"PMI_RANK": "3", "PMI_SIZE": "4"}, Place(3, 4, f"mpirun (PMI)/{os.getppid()}")),
        (SRUN, Place(1, 4, "srun/7/0")),
        ({**SRUN, "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "1"}, Place(1, 2, "srun/7/0")),
        (
            {**SRUN, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", **torchrun(4, 5)[2]},
            Place(2, 4, "torchrun/localhost/5"),
        ),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "7"}, None),  # a batch script
        ({"WORLD_SIZE": "1", "RANK": "0"}, None),
        (
            {"TAPEOUT_RANK": "1", "TAPEOUT_RANKS": "2", "TAPEOUT_SEGMENT": "5", "TAPEOUT_PARENT": "9", **SRUN},
            Place(1, 2, "", 5, 9),
        ),
    ],
)  # fmt: skip
def test_launchers_are_understood(environ: Mapping[str, str], place: Place | None) -> None:
    assert read_place(environ) == place


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"RANK": "1"}, "WORLD_SIZE is missing; who starts ranks sets it to a whole number"),
        ({"WORLD_SIZE": "2"}, "RANK is missing"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK is '-1'"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK is 2 and WORLD_SIZE is 2; ranks are numbered from 0 to 1"),
        ({**SRUN, "SLURM_NNODES": "2"}, r"several machines \(SLURM_NNODES is 2\); an artifact runs on one, so start"),
        ({**MPIRUN, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, r"\(OMPI_COMM_WORLD_LOCAL_SIZE is 2, of 4 in all\)"),
        ({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}, r"\(RANK is 3, but LOCAL_RANK is 1\)"),
        (
            {**SRUN, **torchrun(4, 5)[2]},
            r"torchrun says that this is rank 2 of 4 \(RANK\), but srun that it is rank 1 of 4 \(SLURM_PROCID\); start "
            "the ranks with one launcher",
        ),
    ],
)  # fmt: skip
def test_contradictions_are_refused(environ: Mapping[str, str], said: str) -> None:
    with pytest.raises(TapeoutError, match=said):
        read_place(environ)
