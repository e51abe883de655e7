"""What the benchmarks share: our runtime and llama.cpp as processes, memory bandwidth, and how results are printed.

Nothing here knows where a peer lies; every place is a command-line option (README.md says how to build one).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent


def options(description: str) -> argparse.ArgumentParser:
    """A parser with the options of every paired benchmark."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--artifact", type=Path, required=True, help="compiled from the file that --model names")
    parser.add_argument("--model", type=Path, required=True, help="the GGUF that llama.cpp runs")
    parser.add_argument(
        "--llama-bin", type=Path, required=True, help="folder with llama-bench and llama.cpp's libraries"
    )
    parser.add_argument("--target", help="kernel target of the artifact (default: the best that this CPU runs)")
    parser.add_argument("--threads", type=lambda text: [int(part) for part in text.split(",")], default=[1, 2])
    parser.add_argument("--repeats", type=int, default=5, help="pairs of runs")
    return parser


@dataclass(frozen=True)
class Tapeout:
    """Our runtime, one process a measurement."""

    artifact: Path
    target: str | None = None

    def command(self, *words: str) -> list[str]:
        """``python -m tapeout.runtime`` with this target."""
        chosen = ["--target", self.target] if self.target else []
        return [sys.executable, "-m", "tapeout.runtime", *words, *chosen]

    def rate(self, phase: str, tokens: int, threads: int) -> float:
        """Tokens/s of one run of ``phase`` (prefill or decode) after a warm-up."""
        sizes = (tokens, 1) if phase == "prefill" else (1, tokens)
        words = ["bench", str(self.artifact), "--json", "--repeats", "1", "--threads", str(threads)]
        sized = self.command(*words, "--prompt-tokens", str(sizes[0]), "--max-tokens", str(sizes[1]))
        return float(json.loads(_output(sized))[f"{phase}_tok_s"])

    def bytes_per_token(self) -> int:
        """Weight bytes that a decode step reads."""
        words = ["bench", str(self.artifact), "--json", "--repeats", "1", "--prompt-tokens", "1", "--max-tokens", "1"]
        return int(json.loads(_output(self.command(*words)))["bytes_per_token"])


@dataclass(frozen=True)
class LlamaCpp:
    """llama.cpp by its own benchmark, one process a measurement."""

    folder: Path
    model: Path

    @property
    def environment(self) -> dict[str, str]:
        """With its libraries first."""
        folder = str(self.folder.resolve())
        return {**os.environ, "LD_LIBRARY_PATH": folder, "LLAMA_BACKENDS": folder}

    def rate(self, phase: str, tokens: int, threads: int) -> float:
        """Tokens/s of one run of ``phase`` after llama-bench's warm-up, F16 cache."""
        sizes = ["-p", str(tokens), "-n", "0"] if phase == "prefill" else ["-p", "0", "-n", str(tokens)]
        command = [str(self.folder / "llama-bench"), "-m", str(self.model), "-t", str(threads), "-r", "1", *sizes]
        return float(json.loads(_output([*command, "-o", "jsonl"], self.environment).splitlines()[-1])["avg_ts"])


def interleaved(sides: Mapping[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """Measure A B A B …; every value of every side."""
    values: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(repeats):
        for name, measure in sides.items():
            values[name].append(measure())
    return values


def paired_table(phase: str, tokens: int, arguments: argparse.Namespace, *, floor: bool) -> None:
    """Both sides for every thread count: medians, ranges, the median of the paired ratios, and the bandwidth floor."""
    ours, peer = (
        Tapeout(arguments.artifact, arguments.target),
        LlamaCpp(arguments.llama_bin, arguments.model),
    )
    print(machine())
    print(f"{phase} of {tokens} tokens, tok/s, medians of {arguments.repeats} (lowest to highest)")
    for threads in arguments.threads:
        sides = {
            "tapeout": lambda t=threads: ours.rate(phase, tokens, t),
            "llama.cpp": lambda t=threads: peer.rate(phase, tokens, t),
        }
        values = interleaved(sides, arguments.repeats)
        print(f"threads {threads}: {describe(values)}", flush=True)
        if floor:
            speed = statistics.median(read_bandwidth(threads))
            ceiling = speed * 1e9 / ours.bytes_per_token()
            share = statistics.median(values["tapeout"]) / ceiling
            print(f"  reads at {speed:.1f} GB/s, which would be {ceiling:.0f} tok/s; tapeout is at {100 * share:.0f} %")
    print(f"load average at the end: {os.getloadavg()[0]:.1f}")


def describe(values: Mapping[str, Sequence[float]]) -> str:
    """Medians and ranges of two sides, and the median ratio of pairs measured next to each other."""
    parts = [f"{name} {statistics.median(v):8.1f} ({min(v):.1f} to {max(v):.1f})" for name, v in values.items()]
    first, second = values.values()
    ratio = statistics.median(a / b for a, b in zip(first, second, strict=True))
    return f"{'   '.join(parts)}   ratio {ratio:.2f}"


def read_bandwidth(threads: int, mib: int = 1024, repeats: int = 5) -> list[float]:
    """GB/s of plain reads over ``mib`` MiB, one value a repeat."""
    with tempfile.TemporaryDirectory() as folder:
        program = compile_c(HERE / "read_bandwidth.c", Path(folder) / "read_bandwidth", "-mavx2", "-lpthread")
        return [float(line) for line in _output([str(program), str(mib), str(threads), str(repeats)]).split()]


def compile_c(source: Path, output: Path, *flags: str) -> Path:
    """Compile a C program with the ziglang wheel."""
    words = [sys.executable, "-m", "ziglang", "cc", "-O3", str(source), "-o", str(output), *flags]
    subprocess.run(words, check=True)
    return output


def llama_probe(llama_bin: Path, headers: Path, folder: Path) -> Path:
    """Compile llama_probe.c against a llama.cpp source tree and its built libraries."""
    includes = [f"-I{headers / part}" for part in ("include", "ggml/include")]
    libraries = [f"-L{llama_bin}", "-lllama", "-lggml", "-lggml-base", f"-Wl,-rpath,{llama_bin}"]
    flags = ["-Wl,--allow-shlib-undefined", *includes, *libraries]
    return compile_c(HERE / "llama_probe.c", folder / "llama_probe", *flags)


@contextlib.contextmanager
def busy_core(cpu: int) -> Iterator[None]:
    """A process that takes one CPU while the block runs."""
    process = multiprocessing.get_context("spawn").Process(target=_spin, args=(cpu,), daemon=True)
    process.start()
    time.sleep(1.0)
    try:
        yield
    finally:
        process.terminate()
        process.join()


def _spin(cpu: int) -> None:
    os.sched_setaffinity(0, {cpu})
    while True:
        pass


def machine() -> str:
    """CPU, count, load, date and commit, on one line."""
    cpu = next((line.split(":")[1].strip() for line in _cpuinfo() if line.startswith("model name")), platform.machine())
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=HERE, check=False)
    stamp = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    load = os.getloadavg()[0]
    return f"{cpu}, {os.cpu_count()} CPUs, load average {load:.1f}, {stamp}, commit {git.stdout.strip() or 'none'}"


def _cpuinfo() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []


def _output(command: Sequence[str], environment: Mapping[str, str] | None = None) -> str:
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return done.stdout
