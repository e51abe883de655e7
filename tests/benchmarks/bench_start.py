"""Process start to the first token of a short prompt, peak memory of a generation, and the import of the runtime.

    python bench_start.py --artifact A --model M.gguf --llama-bin DIR --llama-source DIR [--prompt TEXT]

llama.cpp is run by llama_probe.c: its own C++ loader, with nothing of its chat tools. It is handed token ids; our side
starts Python and tokenizes the text. Files are warm. The first token is the first byte on standard output.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from peers import LlamaCpp, Tapeout, describe, interleaved, llama_probe, machine, options

IDS = "import sys; from tapeout.runtime import load; print(*load(sys.argv[1]).tokenizer.encode(sys.argv[2]))"
IMPORT = "import sys, time; t = time.perf_counter(); __import__(sys.argv[1]); print(time.perf_counter() - t)"


def first_byte(command: Sequence[str], environment: Mapping[str, str] | None = None) -> tuple[float, float]:
    """(Seconds from start to the first byte of output, peak resident MiB) of a process that is run to its end."""
    started = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment) as process:
        assert process.stdout
        process.stdout.read(1)
        seconds = time.perf_counter() - started
        process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"{' '.join(command)} ended with {process.returncode}")
    return seconds, usage.ru_maxrss / 1024


def main() -> None:
    parser = options("Start-up and memory beside llama.cpp.")
    parser.add_argument("--llama-source", type=Path, required=True, help="llama.cpp's source tree, for its headers")
    parser.add_argument("--prompt", default="The capital of France is")
    parser.add_argument("--context", type=int, default=2048, help="of llama.cpp; ours is the artifact's")
    parser.add_argument("--generate", type=int, default=64, help="tokens of the generation whose memory is read")
    arguments = parser.parse_args()
    print(machine())
    with tempfile.TemporaryDirectory() as folder:
        probe = llama_probe(arguments.llama_bin.resolve(), arguments.llama_source, Path(folder))
        for threads in arguments.threads:
            start(arguments, probe, threads)
    for name in ("numpy", "tapeout.runtime"):
        times = [float(subprocess.check_output([sys.executable, "-c", IMPORT, name])) for _ in range(arguments.repeats)]
        print(f"import {name}: {1000 * statistics.median(times):.0f} ms")


def start(arguments: argparse.Namespace, probe: Path, threads: int) -> None:
    """Both tables for one number of threads."""
    ours, peer = Tapeout(arguments.artifact, arguments.target), LlamaCpp(arguments.llama_bin, arguments.model)
    ids = subprocess.check_output([sys.executable, "-c", IDS, str(arguments.artifact), arguments.prompt], text=True)
    words = ["--prompt", arguments.prompt, "--threads", str(threads)]
    sizes = [str(threads), str(arguments.context)]

    def sides(tokens: int) -> dict[str, tuple[list[str], Mapping[str, str] | None]]:
        return {
            "tapeout": (ours.command(str(arguments.artifact), *words, "--max-tokens", str(tokens)), None),
            "llama.cpp": (
                [str(probe), "run", str(arguments.model), *sizes, str(tokens), *ids.split()],
                peer.environment,
            ),
        }

    first = interleaved(
        {name: lambda run=run: 1000 * first_byte(*run)[0] for name, run in sides(1).items()}, arguments.repeats
    )
    print(f"threads {threads}: first token of {len(ids.split())} after, ms: {describe(first)}")
    memory = interleaved(
        {name: lambda run=run: first_byte(*run)[1] for name, run in sides(arguments.generate).items()},
        arguments.repeats,
    )
    print(f"threads {threads}: peak RSS of {arguments.generate} tokens, MiB:  {describe(memory)}", flush=True)


if __name__ == "__main__":
    main()
