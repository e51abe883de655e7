"""Jobs on the workers of a Ray cluster: the same bytes and sentences as threads give, and what its loss leaves."""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import subprocess
import sys
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import small_model
from ray.cluster_utils import Cluster

from tapeout.compiler import cli
from tapeout.compiler.checkpoints.base import Checkpoint, FileIdentity, TensorInfo
from tapeout.compiler.emit import executors, jobs
from tapeout.compiler.emit.jobs import Journal, alone, cut_jobs
from tapeout.compiler.emit.pieces import Emission, WeightEntry
from tapeout.compiler.emit.weights import plan_emission
from tapeout.compiler.layouts import packed_bytes, plan_offsets
from tapeout.compiler.recipes import Pack, Read, Rows


@contextlib.contextmanager
def running_cluster() -> Generator[Cluster]:
    """A head with two workers, in processes of its own, and its address in RAY_ADDRESS."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
        patch.setenv("RAY_ADDRESS", cluster.address)
        yield cluster
        cluster.shutdown()


@pytest.fixture(scope="module")
def cluster() -> Generator[Cluster]:
    """For tests that leave it as it was."""
    with running_cluster() as found:
        yield found


@pytest.fixture
def small_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "JOB_BYTES", 24_000)


def raylet(cluster: Cluster) -> psutil.Process:
    """The process that starts workers."""
    (found,) = cluster.head_node.all_processes["raylet"]
    return psutil.Process(found.process.pid)


def write_spec(folder: Path, arrays: Any = None, **sections: Any) -> Path:
    source = small_model.write_folder(folder / "model", arrays)
    return small_model.write_spec(folder / "spec.yaml", source, **sections)


def compiled(spec: Path, out: Path, *more: str) -> int:
    return cli.main(["compile", str(spec), "-o", str(out), "--no-cache", *more])


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.usefixtures("cluster", "small_jobs")
@pytest.mark.parametrize(("count", "format"), [(1, None), (2, None), (2, "q8_0")])
def test_workers_write_the_bytes_of_threads(count: int, format: str | None, tmp_path: Path) -> None:
    quantization = {"quantization": {"default": format}} if format else {}
    spec = write_spec(tmp_path, topology={"count": count}, **quantization)
    assert compiled(spec, tmp_path / "threads") == 0
    assert compiled(spec, tmp_path / "ray", "--executor", "ray") == 0
    assert contents(tmp_path / "ray") == contents(tmp_path / "threads")


@pytest.mark.usefixtures("cluster", "small_jobs")
def test_an_error_is_that_of_threads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first of two, which other workers meet."""
    arrays, said = small_model.tensors(), list[str]()
    for layer, row in ((0, 7), (1, 3)):
        arrays[f"model.layers.{layer}.mlp.down_proj.weight"][row, 5] = np.nan
    spec = write_spec(tmp_path, arrays, topology={"count": 2})
    for executor in ("threads", "ray"):
        assert compiled(spec, tmp_path / "artifact", "--executor", executor) == 2
        said.append(capsys.readouterr().err.splitlines()[-1])
    assert said[0] == said[1]
    assert said[0].startswith(f"error: {tmp_path}/model/model.safetensors: tensor ")
    assert said[0].endswith(
        "'model.layers.0.mlp.down_proj.weight' has NaN/Inf weights in row 7; every weight must be finite, so the file "
        "is damaged or the model was saved after it diverged"
    )
    assert not list(tmp_path.glob(".artifact*"))


@pytest.mark.usefixtures("cluster")
def test_workers_without_tapeout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A job of a module that they cannot import."""
    (tmp_path / "absent.py").write_text("def run_job(*arguments): ...")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(executors, "_run_job", importlib.import_module("absent").run_job)
    assert compiled(write_spec(tmp_path), tmp_path / "artifact", "--executor", "ray") == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        "error: ray: its workers cannot run jobs (ModuleNotFoundError: No module named 'absent'); install tapeout on "
        "every machine of the cluster"
    )


@pytest.mark.usefixtures("small_jobs")
def test_a_worker_that_is_killed_is_replaced(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = write_spec(tmp_path, topology={"count": 2})
    assert compiled(spec, tmp_path / "threads") == 0
    killed: list[int] = []

    def kill() -> None:
        for process in raylet(cluster).children(recursive=True):
            if process.cmdline()[0].startswith(("ray::_run_job", "ray::IDLE")):
                process.kill()
                killed.append(process.pid)

    after_jobs(monkeypatch, 3, kill)
    assert compiled(spec, tmp_path / "ray", "--executor", "ray") == 0
    assert killed and contents(tmp_path / "ray") == contents(tmp_path / "threads")


@pytest.mark.usefixtures("small_jobs")
def test_a_cluster_that_is_lost_leaves_finished_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Threads go on with what its workers wrote."""
    spec = write_spec(tmp_path, topology={"count": 2})
    assert compiled(spec, tmp_path / "threads") == 0
    with running_cluster() as cluster, monkeypatch.context() as patch:
        node = raylet(cluster)  # which ends without its agents, and says so at once
        after_jobs(patch, 3, lambda: [process.kill() for process in node.children(recursive=True)])
        assert compiled(spec, tmp_path / "artifact", "--executor", "ray") == 2
    (folder,) = tmp_path.glob(".artifact.tmp-*")
    _, count = jobs.journal_state(folder)
    before, reason, after = _split(capsys.readouterr().err.splitlines()[-1])
    assert before == "error: ray: the cluster failed" and reason
    assert after == (
        f"; start it again, and compile again with the same command; {count} jobs are finished: the same command "
        f"continues there, or remove {folder}"
    )
    assert count >= 3
    assert compiled(spec, tmp_path / "artifact") == 0
    assert "were there from before" in capsys.readouterr().err
    assert contents(tmp_path / "artifact") == contents(tmp_path / "threads")


def _split(sentence: str) -> tuple[str, str, str]:
    """Before, inside and after the first pair of brackets: inside is what Ray said."""
    before, _, rest = sentence.partition(" (")
    inside, _, after = rest.partition(")")
    return before, inside, after


def after_jobs(monkeypatch: pytest.MonkeyPatch, count: int, act: Any) -> None:
    """Act when so many jobs are in the journal."""
    append, numbers = Journal.append, iter(range(1, 1000))

    def counted(self: Journal, result: jobs.JobResult) -> None:
        append(self, result)
        if next(numbers) == count:
            act()

    monkeypatch.setattr(Journal, "append", counted)


def test_without_an_address_workers_are_started_and_ended(tmp_path: Path) -> None:
    """From a folder that has nothing to do with the project."""
    spec = write_spec(tmp_path, topology={"count": 2})
    mark = f"{tmp_path}/mark"
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    words = ["compile", str(spec), "-o", str(tmp_path / "ray"), "--no-cache", "--executor", "ray"]
    main = "import sys; from tapeout.compiler.cli import main; sys.exit(main())"
    subprocess.run(
        [sys.executable, "-c", main, *words],
        check=True, cwd=tmp_path, env=environment | {"RAY_USAGE_STATS_ENABLED": "0", "MARK_OF_TEST": mark},
    )  # fmt: skip
    assert compiled(spec, tmp_path / "threads") == 0
    assert contents(tmp_path / "ray") == contents(tmp_path / "threads")
    assert not [process for process in psutil.process_iter() if _environment(process).get("MARK_OF_TEST") == mark]


def _environment(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ()
    except psutil.Error:
        return {}


def test_no_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "nonsense")
    assert compiled(write_spec(tmp_path), tmp_path / "artifact", "--executor", "ray") == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        "error: ray: there is no cluster to connect to (Invalid address format: nonsense); start it, or unset "
        "RAY_ADDRESS for workers on this machine"
    )
    assert not list(tmp_path.glob(".artifact*"))


def test_ray_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert compiled(write_spec(tmp_path), tmp_path / "artifact", "--executor", "ray") == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        "error: --executor ray needs the package ray, which is not installed; pip install 'tapeout[ray]', or leave "
        "the option out to compile with the threads of this machine"
    )


def emission_of(folder: Path, count: int) -> Emission:
    """So many matrices of 64 MiB over two ranks, in files of 100 that are not there."""
    shape = (4096, 8192)
    names = [f"model.layers.{number}.mlp.up_proj.weight" for number in range(count)]
    places = {name: (folder / f"{number // 100}.safetensors", number % 100 << 26) for number, name in enumerate(names)}
    infos = {name: TensorInfo(name, shape, "bf16", *place, 1 << 26) for name, place in places.items()}
    files = tuple(FileIdentity(path, 1, 1, 1) for path in sorted({info.file for info in infos.values()}))
    recipes = [[Pack(Rows(Read(name, shape, "bf16"), at, at + 2048), "raw") for at in (0, 2048)] for name in names]
    offsets = plan_offsets([packed_bytes((2048, 8192), "bf16", "raw")] * count)
    entries = [
        WeightEntry(name, *pair[:1], *place, tuple(pair[1:]))
        for name, pair, place in zip(names, recipes, offsets, strict=True)
    ]
    checkpoint = Checkpoint("safetensors", folder, infos, {"config": "large"}, files=files)
    return replace(plan_emission(entries, checkpoint), paths=(folder / "rank0", folder / "rank1"))


def test_what_a_worker_is_sent_does_not_grow_with_the_plan(tmp_path: Path) -> None:
    sizes: list[int] = []
    for count in (100, 2000):
        emission = emission_of(tmp_path, count)
        *_, last, _ = cut_jobs(emission)  # a whole one
        sent, job = alone(emission, last)
        assert [sent.entries[piece.entry].name for piece in job.pieces] == [
            emission.entries[piece.entry].name for piece in last.pieces
        ]
        assert [piece.spans for piece in job.pieces] == [piece.spans for piece in last.pieces]
        assert (sent.nbytes, sent.data_start) == (emission.nbytes, emission.data_start)
        sizes.append(len(pickle.dumps((sent, job))))
    assert sizes[1] < 1.1 * sizes[0] < 100_000


def test_a_worker_must_have_the_same_code_and_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    emission = emission_of(tmp_path, 1)
    monkeypatch.setattr("platform.node", lambda: "far")
    job = next(cut_jobs(emission))
    error = executors._run_job(*alone(emission, job), "another digest")
    assert str(error) == ("ray: the worker far has another version of tapeout; install the same one on every machine")
    for path in emission.paths:
        path.touch()
    error = executors._run_job(*alone(emission, job), executors.code_digest())
    assert str(error) == (
        f"{tmp_path}/0.safetensors: is not there on the worker far; the machines of a Ray cluster must share the file "
        f"system of the source and of the output"
    )
