"""Which rank this process is: read from the environment that Tapeout, torchrun, mpirun or srun gave it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from tapeout.runtime.errors import TapeoutError

RANK, RANKS, SEGMENT, PARENT = "TAPEOUT_RANK", "TAPEOUT_RANKS", "TAPEOUT_SEGMENT", "TAPEOUT_PARENT"
"""What ``start_ranks`` sets: this rank, how many there are, the descriptor of their memory, and its own process."""


@dataclass(frozen=True)
class Place:
    """One rank among those of one machine. ``job`` is what all ranks of one run have in common, and no other run has.

    ``segment`` is the descriptor of the shared memory and ``parent`` the process that watches, where Tapeout itself
    started the ranks.
    """

    rank: int
    count: int
    job: str
    segment: int | None = None
    parent: int | None = None


@dataclass(frozen=True)
class _Launcher:
    """The variables of one launcher: rank, rank on this machine, ranks, ranks on this machine, machines, what is the
    run's alone. Of several the first that is set counts; where none names the run, the parent process does."""

    name: str
    rank: str
    local_rank: str
    count: tuple[str, ...]
    local_count: tuple[str, ...]
    nodes: tuple[str, ...]
    job: tuple[str, ...]


_TORCHRUN = _Launcher(
    *("torchrun", "RANK", "LOCAL_RANK"),
    count=("WORLD_SIZE",),
    local_count=("LOCAL_WORLD_SIZE",),
    nodes=("GROUP_WORLD_SIZE",),
    job=("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"),
)
_LAUNCHERS = (
    _TORCHRUN,
    _Launcher(
        *("mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"),
        count=("OMPI_COMM_WORLD_SIZE",),
        local_count=("OMPI_COMM_WORLD_LOCAL_SIZE",),
        nodes=(),
        job=("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
    ),
    _Launcher(
        *("mpirun (PMI)", "PMI_RANK", "MPI_LOCALRANKID"),
        count=("PMI_SIZE",),
        local_count=("MPI_LOCALNRANKS",),
        nodes=(),
        job=(),
    ),
    _Launcher(
        *("srun", "SLURM_PROCID", "SLURM_LOCALID"),
        count=("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        local_count=(),
        nodes=("SLURM_STEP_NUM_NODES", "SLURM_NNODES"),
        job=("SLURM_JOB_ID", "SLURM_STEP_ID"),
    ),
)


def read_place(environ: Mapping[str, str] = os.environ) -> Place | None:
    """This process's rank; None where nobody started several. Raises TapeoutError for contradictions.

    A launcher that speaks of one rank says nothing: torchrun inside a Slurm step of one task is torchrun's.
    """
    if RANK in environ:
        rank, count = _number(environ, RANK), _number(environ, RANKS)
        return Place(rank, count, "", _number(environ, SEGMENT), _number(environ, PARENT))
    found = [(launcher, _place(launcher, environ)) for launcher in _LAUNCHERS if _speaks(launcher, environ)]
    found = [(launcher, place) for launcher, place in found if place.count > 1]
    if not found:
        return None
    launcher, place = found[0]
    for other, contradicting in found[1:]:
        if (contradicting.rank, contradicting.count) != (place.rank, place.count):
            raise TapeoutError(
                f"{launcher.name} says that this is rank {place.rank} of {place.count} ({launcher.rank}), but "
                f"{other.name} that it is rank {contradicting.rank} of {contradicting.count} ({other.rank}); start the "
                "ranks with one launcher"
            )
    return place


def _speaks(launcher: _Launcher, environ: Mapping[str, str]) -> bool:
    """Whether the launcher started this process. A batch script of Slurm has its variables without being a step."""
    if launcher.name == "srun" and "SLURM_JOB_ID" in environ and "SLURM_STEP_ID" not in environ:
        return False
    return launcher.rank in environ or (launcher is _TORCHRUN and "WORLD_SIZE" in environ)


def _place(launcher: _Launcher, environ: Mapping[str, str]) -> Place:
    rank = _number(environ, launcher.rank)
    size = _first(launcher.count, environ) or launcher.count[-1]
    count = _number(environ, size)
    if not 0 <= rank < count:
        raise TapeoutError(f"{launcher.rank} is {rank} and {size} is {count}; ranks are numbered from 0 to {count - 1}")
    _one_machine(launcher, environ, rank, count)
    job = [environ[name] for name in launcher.job if name in environ]
    return Place(rank, count, "/".join([launcher.name, *(job or [str(os.getppid())])]))


def _one_machine(launcher: _Launcher, environ: Mapping[str, str], rank: int, count: int) -> None:
    """Refuse ranks on several machines."""
    nodes, local = _first(launcher.nodes, environ), _first(launcher.local_count, environ)
    if nodes and _number(environ, nodes) > 1:
        where = f"{nodes} is {environ[nodes]}"
    elif local and _number(environ, local) != count:
        where = f"{local} is {environ[local]}, of {count} in all"
    elif launcher.local_rank in environ and _number(environ, launcher.local_rank) != rank:
        where = f"{launcher.rank} is {rank}, but {launcher.local_rank} is {environ[launcher.local_rank]}"
    else:
        return
    raise TapeoutError(
        f"the ranks were started on several machines ({where}); an artifact runs on one, so start all ranks there"
    )


def _first(names: tuple[str, ...], environ: Mapping[str, str]) -> str | None:
    return next((name for name in names if name in environ), None)


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name)
    if text is None or not text.isascii() or not text.isdigit():
        raise TapeoutError(
            f"the environment variable {name} is {'missing' if text is None else repr(text)}; who starts ranks sets it "
            "to a whole number"
        )
    return int(text)
