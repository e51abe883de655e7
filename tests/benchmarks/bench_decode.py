"""Decode beside llama.cpp on the same file: interleaved runs, the bandwidth floor, and with one CPU taken.

python bench_decode.py --artifact A --model M.gguf --llama-bin DIR [--tokens 128] [--busy] [--target x86_64_v3]
"""

from __future__ import annotations

import argparse
import os
import statistics

from peers import LlamaCpp, Tapeout, busy_core, interleaved, machine, options, paired_table


def main() -> None:
    parser = options("Decode beside llama.cpp.")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--busy", action="store_true", help="two threads while another process takes one CPU")
    arguments = parser.parse_args()
    if arguments.busy:
        busy_table(arguments)
    else:
        paired_table("decode", arguments.tokens, arguments, floor=True)


def busy_table(arguments: argparse.Namespace) -> None:
    """Both sides with one thread alone, then with all threads beside a process that spins on one CPU."""
    sides = {
        "tapeout": Tapeout(arguments.artifact, arguments.target),
        "llama.cpp": LlamaCpp(arguments.llama_bin, arguments.model),
    }
    most = max(arguments.threads)

    def measure(threads: int) -> dict[str, float]:
        rates = {
            name: lambda side=side: side.rate("decode", arguments.tokens, threads)  # type: ignore[attr-defined]
            for name, side in sides.items()
        }
        values = interleaved(rates, arguments.repeats)
        return {name: statistics.median(runs) for name, runs in values.items()}

    print(machine())
    alone = measure(1)
    with busy_core(max(os.sched_getaffinity(0))):
        taken = measure(most)
    print(f"decode of {arguments.tokens} tokens, tok/s, medians of {arguments.repeats}")
    for name in sides:
        print(
            f"{name:10s} 1 thread alone {alone[name]:7.1f}   {most} threads with one CPU taken {taken[name]:7.1f}   "
            f"ratio {taken[name] / alone[name]:.2f}"
        )


if __name__ == "__main__":
    main()
