"""From the start of a fresh Python process to its first token, and what that time went to.

python gpu_start.py FOLDER          (the process that is measured: prints one JSON object)
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

PROMPT = 16
GROUPS = {
    "context": ("cuInit", "cuDevicePrimaryCtxRetain"),
    "cubins": ("cuModuleLoadData", "cuModuleGetFunction", "cuFuncLoad", "cuFuncSetAttribute"),
    "memory": ("cuMemAlloc", "cuMemHostAlloc", "cuMemFreeHost"),
    "graphs": ("cuStreamBeginCapture", "cuStreamEndCapture", "cuGraphInstantiate", "cuGraphUpload"),
}


def measure(folder: Path, repeats: int = 5) -> dict[str, float]:
    """Medians over fresh processes, the first one left out: it may find files outside the page cache."""
    runs: list[dict[str, float]] = []
    for _ in range(repeats + 1):
        started = time.time()
        command = [sys.executable, __file__, str(folder), str(started)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            print(f"  {folder.name} start: failed: {done.stderr[-1500:]}", flush=True)
            return {}
        runs.append(json.loads(done.stdout.splitlines()[-1]))
    medians = {key: statistics.median(run[key] for run in runs[1:]) for key in runs[0]}
    parts = ", ".join(f"{key} {value:.3f}" for key, value in medians.items() if key != "first_token")
    print(f"  {folder.name} start to first token: {medians['first_token']:.3f} s "
          f"(of {', '.join(format(run['first_token'], '.2f') for run in runs)}); {parts}", flush=True)  # fmt: skip
    return medians


def main() -> None:
    folder, started = Path(sys.argv[1]), float(sys.argv[2])
    python = time.time()
    import numpy  # noqa: F401
    from cuda.bindings import driver  # noqa: F401

    from tapeout.runtime import load

    imported = time.time()
    spent = _watch()
    model = load(folder)
    loaded = time.time()
    sequence = model.pool.open()
    model.prefill(sequence, [(7 * index + 11) % model.vocab_size for index in range(PROMPT)])
    ended = time.time()
    result = {"first_token": ended - started, "python": python - started, "imports": imported - python,
              "load": loaded - imported, "prefill": ended - loaded,
              "upload": float(getattr(model.backend, "upload_s", 0.0))}  # fmt: skip
    result |= {f"in {name}": sum(spent[call] for call in calls) for name, calls in GROUPS.items()}
    print(json.dumps(result))


def _watch() -> dict[str, float]:
    """Seconds spent in each driver call, by name. Calls of several threads add up."""
    from tapeout.runtime.cuda.driver import Driver

    spent: dict[str, float] = defaultdict(float)
    call = Driver._call
    start = Driver._start

    def timed(self: Any, name: str, *args: Any, where: object = None) -> Any:
        began = time.perf_counter()
        try:
            return call(self, name, *args, where=where)
        finally:
            spent[name] += time.perf_counter() - began

    def timed_start(self: Any, ordinal: int) -> None:
        began = time.perf_counter()
        start(self, ordinal)
        spent["cuInit"] += time.perf_counter() - began

    Driver._call, Driver._start = timed, timed_start  # type: ignore[method-assign]
    return spent


if __name__ == "__main__":
    main()
