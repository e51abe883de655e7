"""What this machine can run: which kernel targets, on how many threads."""

from __future__ import annotations

import os

from tapeout.runtime.errors import TapeoutError

# Each target's CPU flags as Linux names them, the most capable first.
_FLAGS = {
    "x86_64_v4": ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx512_vnni", "avx2", "fma", "f16c"),
    "x86_64_v3": ("avx2", "fma", "f16c", "bmi2", "movbe"),
}


def host_targets() -> list[str]:
    """Kernel targets that this CPU can run, best first; empty where none can."""
    if os.uname().machine != "x86_64":
        return []
    flags = _cpu_flags()
    return [target for target, needed in _FLAGS.items() if flags.issuperset(needed)]


def _cpu_flags() -> set[str]:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            for line in file:
                if line.startswith("flags"):
                    return set(line.partition(":")[2].split())
    except OSError:
        pass
    return set()


RANK_VARIABLES = ("TAPEOUT_RANK", "RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
"""One of these is set where a launcher started several processes; what it says is read in ``runtime.ranks``."""


def thread_count(asked: int | None, ranks: int = 1) -> int:
    """How many threads to run: the number asked for, else a rank's share of the CPUs this process may use."""
    if asked is None:
        cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return max(1, cpus // ranks)
    if not 1 <= asked <= 1024:
        raise TapeoutError(f"threads is {asked}; it must lie between 1 and 1024")
    return asked
