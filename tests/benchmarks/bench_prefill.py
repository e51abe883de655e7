"""Prefill beside llama.cpp on the same file: interleaved runs, 1 and 2 threads.

python bench_prefill.py --artifact A --model M.gguf --llama-bin DIR [--tokens 512] [--target x86_64_v3]
"""

from __future__ import annotations

from peers import options, paired_table


def main() -> None:
    parser = options("Prefill beside llama.cpp.")
    parser.add_argument("--tokens", type=int, default=512)
    arguments = parser.parse_args()
    paired_table("prefill", arguments.tokens, arguments, floor=False)


if __name__ == "__main__":
    main()
