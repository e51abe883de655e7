"""Whole models on a GPU: correctness, rates, memory, start, gaps. Artifacts come from gpu_skeleton.py and gpu_fill.py.

    python gpu_model.py SKELETONS [SECTION ...] [--folder DIR] [--out FILE] [--budget SECONDS]

Each section runs in a process of its own, so that one that fails leaves the others. Without sections, all run in order;
those that would start after the budget are left out and named. SKELETONS is what gpu_skeleton.py wrote.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpu_fill

Result = dict[str, Any]
CEILINGS = "ceilings.json"
LIMIT = 180  # seconds a section


def sections(arguments: argparse.Namespace) -> dict[str, Callable[[], Result | list[str]]]:
    """Every section by name, in the order they run."""
    place = Place(arguments.skeletons, arguments.folder)
    return {
        "ceilings": place.ceilings,
        "check:1b-bf16-4l": lambda: place.check("1b-bf16-4l"),
        "check:8b-q4_0-2l": lambda: place.check("8b-q4_0-2l"),
        "check:8b-int4_g128-2l": lambda: place.check("8b-int4_g128-2l"),
        "check:8b-bf16-2l": lambda: place.check("8b-bf16-2l"),
        "replay:1b-bf16-4l": lambda: place.replay("1b-bf16-4l"),
        "replay:8b-q4_0-2l": lambda: place.replay("8b-q4_0-2l"),
        "rates:1b-bf16": lambda: place.rates("1b-bf16"),
        "rates:8b-q4_0": lambda: place.rates("8b-q4_0"),
        "start:8b-q4_0": lambda: place.start("8b-q4_0"),
        "context:8b-q4_0": lambda: place.context("8b-q4_0", "8b-q4_0-128k"),
        "rates:8b-int4_g128": lambda: place.rates("8b-int4_g128"),
        "rates:8b-bf16": lambda: place.rates("8b-bf16", batch=True),
        "check:1b-bf16": lambda: place.check("1b-bf16"),
        "profile:1b-bf16": lambda: place.profile("1b-bf16"),
        "profile:8b-q4_0": lambda: place.profile("8b-q4_0"),
        "profile:8b-bf16": lambda: place.profile("8b-bf16"),
    }


class Place:
    """Where artifacts are filled and results of the run are kept."""

    def __init__(self, skeletons: Path, folder: Path) -> None:
        self.skeletons, self.folder = skeletons, folder

    def filled(self, name: str) -> Path:
        """The artifact, filled on its first use."""
        started = time.perf_counter()
        nbytes = gpu_fill.fill(self.skeletons, self.folder, name)
        seconds = time.perf_counter() - started
        print(f"  {name}: {nbytes / 1e9:.2f} GB of weights there after {seconds:.1f} s", flush=True)
        return self.folder / name

    def known(self) -> Any:
        """The ceilings measured in this run, else those measured before on such a card."""
        from gpu_rates import Ceilings

        path = self.folder / CEILINGS
        return Ceilings(**json.loads(path.read_text())) if path.exists() else Ceilings(4.49e12, 780e12)

    def ceilings(self) -> Result:
        import gpu_ceilings
        import torch

        found = {"bandwidth": gpu_ceilings.read_bandwidth(), "operations": gpu_ceilings.matrix_rate()}
        print(f"  {torch.cuda.get_device_name()}: reads {found['bandwidth'] / 1e12:.3f} TB/s, bf16 products of 8192 "
              f"{found['operations'] / 1e12:.0f} TFLOP/s", flush=True)  # fmt: skip
        (self.folder / CEILINGS).write_text(json.dumps(found))
        return found

    def check(self, name: str) -> list[str]:
        from gpu_checks import against_reference

        return against_reference(self.filled(name), self.skeletons / f"{name}.fill.json")

    def replay(self, name: str) -> list[str]:
        from gpu_checks import replay_is_eager

        return replay_is_eager(self.filled(name))

    def rates(self, name: str, *, batch: bool = False) -> Result:
        import gpu_engine
        import gpu_rates

        with gpu_engine.open_model(self.filled(name)) as model:
            result: Result = {"memory": gpu_rates.memory(model)}
            result |= gpu_rates.decode(model, self.known()) | gpu_rates.prefill(model, self.known())
            if batch:
                result["batch"] = gpu_rates.batch(model, self.known())
        return result

    def start(self, name: str) -> Result:
        import gpu_start

        return gpu_start.measure(self.filled(name))

    def context(self, *names: str) -> Result:
        from gpu_rates import live_context

        return live_context([self.filled(name) for name in names])

    def profile(self, name: str) -> Result:
        import gpu_engine
        import torch
        from gpu_profile import profile_decode

        torch.zeros(1, device="cuda")
        with gpu_engine.open_model(self.filled(name)) as model:
            return profile_decode(model)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("skeletons", type=Path)
    parser.add_argument("sections", nargs="*", metavar="SECTION")
    parser.add_argument("--folder", type=Path, default=_roomy_folder())
    parser.add_argument("--out", type=Path)
    parser.add_argument("--budget", type=float, default=480.0)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    every = sections(arguments)
    names = _expand(arguments.sections, list(every)) if arguments.sections else list(every)
    if arguments.inside:
        outcome = every[names[0]]()
        print("RESULT " + json.dumps(outcome), flush=True)
        return int(isinstance(outcome, list) and bool(outcome))
    return _run_all(arguments, names)


def _expand(asked: list[str], known: list[str]) -> list[str]:
    """Names, or their part before the colon for all of a kind."""
    names = [name for each in asked for name in known if name == each or name.split(":")[0] == each]
    unknown = [each for each in asked if not any(name == each or name.split(":")[0] == each for name in known)]
    if unknown:
        sys.exit(f"no such section: {', '.join(unknown)}; there are {', '.join(known)}")
    return names


def _run_all(arguments: argparse.Namespace, names: list[str]) -> int:
    started, results, failed = time.monotonic(), dict[str, Any](), list[str]()
    for name in names:
        left = arguments.budget - (time.monotonic() - started)
        _, _, case = name.partition(":")
        if left < 10 or (case and not (arguments.skeletons / f"{case}.fill.json").exists()):
            print(f"== {name}: left out ({'no time' if left < 10 else 'not compiled'})", flush=True)
            continue
        began = time.monotonic()
        print(f"== {name}", flush=True)
        outcome = _run_one(arguments, name, left)
        print(f"   ({time.monotonic() - began:.1f} s)", flush=True)
        results[name] = outcome
        if outcome is None or (isinstance(outcome, list) and outcome):
            failed.append(name)
    if arguments.out:
        arguments.out.write_text(json.dumps(results, indent=1))
    print(f"failed: {', '.join(failed) or 'none'}", flush=True)
    return int(bool(failed))


def _run_one(arguments: argparse.Namespace, name: str, seconds: float) -> Any:
    command = [sys.executable, __file__, str(arguments.skeletons), name, "--folder", str(arguments.folder), "--inside"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, bufsize=1)
    assert process.stdout is not None
    result: Any = None
    tail: list[str] = []
    alarm = threading.Timer(min(seconds, LIMIT), process.kill)
    alarm.start()
    for line in process.stdout:
        if line.startswith("RESULT "):
            result = json.loads(line[7:])
        elif line.startswith("  "):
            print(line, end="", flush=True)
        tail = [*tail[-12:], line]
    alarm.cancel()
    if process.wait() and result is None:
        print("   FAILED:", *(f"     {line}" for line in tail), sep="\n", end="", flush=True)
    return result


def _roomy_folder() -> Path:
    """Memory, if there is room for every artifact there; else the temporary folder of the disk."""
    memory = Path("/dev/shm")
    fits = memory.is_dir() and shutil.disk_usage(memory).free > 48e9
    return (memory if fits else Path("/tmp")) / "tapeout"


if __name__ == "__main__":
    sys.exit(main())
