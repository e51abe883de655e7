"""Who runs the jobs of an emission: the threads of this process, or the workers of a Ray cluster."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

from tapeout.compiler.cache import code_digest
from tapeout.compiler.emit.jobs import Advance, Job, JobResult, JobWork, alone
from tapeout.compiler.emit.native import Native, load_native
from tapeout.compiler.emit.pieces import Emission, PieceWriter
from tapeout.compiler.emit.workers import default_jobs, run_tasks
from tapeout.compiler.environment import Environment
from tapeout.runtime.errors import TapeoutError

Done = Callable[[Job, JobResult], None]


class WorkersLost(TapeoutError):
    """The workers went away, through no fault of the jobs; the same emission may go on later."""


class Executor(Protocol):
    """Runs jobs that may run in any order."""

    @property
    def uses_cache(self) -> bool:
        """Whether its workers can read the artifacts that the cache of this machine knows of."""
        ...

    def run(self, emission: Emission, jobs: Sequence[Job], native: Native, advance: Advance, done: Done) -> None:
        """Run all jobs. ``done`` gets each result, from any thread; ``advance`` the number of bytes that were written.

        Raises what the earliest failing job raised: TapeoutError or OSError, see ``PieceWriter.write``.
        """
        ...


@dataclass(frozen=True)
class Threads:
    """Threads of this process, which take the pieces of all jobs in order; all cores if ``workers`` is left out."""

    workers: int | None = None

    @property
    def uses_cache(self) -> bool:
        """They share its disks."""
        return True

    def run(self, emission: Emission, jobs: Sequence[Job], native: Native, advance: Advance, done: Done) -> None:
        """See ``Executor``."""

        def pieces() -> Iterator[tuple[JobWork, int]]:
            for job in jobs:
                work = JobWork(emission, job, advance)
                yield from ((work, number) for number in range(len(job.pieces)))

        with PieceWriter(emission, native) as writer:

            def run(task: tuple[JobWork, int]) -> None:
                work, number = task
                result = work.piece(writer, number)
                if result is not None:
                    done(work.job, result)

            run_tasks(pieces(), run, self.workers or default_jobs())


@dataclass(frozen=True)
class Ray:
    """Workers of a Ray cluster, a job and a core each: the one that ``RAY_ADDRESS`` names, else a local one.

    Machines share the file system that holds the source and the output. At most ``workers`` jobs run at a time; as many
    as the cluster has cores if it is left out.
    """

    workers: int | None = None

    @property
    def uses_cache(self) -> bool:
        """What the cache knows of lies on one machine."""
        return False

    def run(self, emission: Emission, jobs: Sequence[Job], native: Native, advance: Advance, done: Done) -> None:
        """See ``Executor``. Raises WorkersLost when Ray cannot be reached or gives up on a job."""
        del native  # each worker loads its own
        ray = import_ray()
        started = not ray.is_initialized()
        try:
            if started:
                _connect(ray)
            _run_with(ray, emission, jobs, self.workers, advance, done)
        except ray.exceptions.RayTaskError as error:
            if "ModuleNotFoundError" not in str(error):
                raise
            lines = str(error).strip().splitlines()
            raise WorkersLost(
                f"ray: its workers cannot run jobs ({lines[-1]}); install tapeout on every machine of the cluster"
            ) from error
        except ray.exceptions.RayError as error:
            raise WorkersLost(
                f"ray: the cluster failed ({_first_line(error)}); start it again, and compile again with the same "
                f"command"
            ) from error
        finally:
            if started:
                ray.shutdown()


def _connect(ray: Any) -> None:
    try:
        ray.init(log_to_driver=False, logging_level="error")
    except (ConnectionError, ValueError) as error:
        raise WorkersLost(
            f"ray: there is no cluster to connect to ({_first_line(error)}); start it, or unset RAY_ADDRESS for "
            f"workers on this machine"
        ) from error


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n", maxsplit=1)[0].removesuffix(".")


def import_ray() -> Any:
    """The ray package. Raises TapeoutError when it is not installed."""
    try:
        import ray  # noqa: PLC0415 - an extra, and slow to import
    except ModuleNotFoundError as error:
        raise TapeoutError(
            "--executor ray needs the package ray, which is not installed; pip install 'tapeout[ray]', "
            "or leave the option out to compile with the threads of this machine"
        ) from error
    return ray


def _run_with(
    ray: Any, emission: Emission, jobs: Sequence[Job], workers: int | None, advance: Advance, done: Done
) -> None:
    start, queue = ray.remote(num_cpus=1)(_run_job), iter(jobs)
    waiting: dict[Any, Job] = {}
    failures: dict[int, Exception] = {}
    try:
        while True:
            # two jobs a core, so that the next one is there when one ends; none after one that failed
            most = workers or 2 * int(ray.cluster_resources().get("CPU", 1))
            for job in islice(queue, 0 if failures else max(0, most - len(waiting))):
                waiting[start.remote(*alone(emission, job), code_digest())] = job
            if not waiting:
                break
            (ready, *_), _ = ray.wait(list(waiting))
            job, found = waiting.pop(ready), ray.get(ready)
            if isinstance(found, JobResult):
                advance(job.nbytes * len(emission.paths))
                done(job, found)
            else:
                failures[job.number] = found
    finally:
        for ref in waiting:
            ray.cancel(ref)
    if failures:
        raise failures[min(failures)]


def _run_job(emission: Emission, job: Job, code: str) -> JobResult | Exception:
    """A job from its first piece to its last, on a worker. What a user can cause comes back as it would be raised."""
    result: JobResult | None = None
    work = JobWork(emission, job, lambda _: None)
    try:
        _check_worker(emission, code)
        native = load_native(Environment.read().cache / "emit")
        with PieceWriter(emission, native) as writer:
            for number in range(len(job.pieces)):
                result = work.piece(writer, number)
    except (TapeoutError, OSError) as error:
        return error
    assert result is not None, job.number
    return result


def _check_worker(emission: Emission, code: str) -> None:
    """Refuse a machine whose bytes would be others, or go elsewhere."""
    if code_digest() != code:
        raise TapeoutError(
            f"ray: the worker {platform.node()} has another version of tapeout; install the same one on every machine"
        )
    files = [*emission.paths, *(each.path for each in emission.checkpoint.files)]
    missing = next((path for path in files if not path.exists()), None)
    if missing is not None:
        raise TapeoutError(
            f"{missing}: is not there on the worker {platform.node()}; the machines of a Ray cluster must share the "
            f"file system of the source and of the output"
        )


def make_executor(name: str, workers: int | None) -> Executor:
    """The executor ``threads`` or ``ray``. Raises TapeoutError when a package that it needs is not installed."""
    if name == "ray":
        import_ray()
    return {"threads": Threads, "ray": Ray}[name](workers)
