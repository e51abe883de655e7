"""compute-sanitizer's memcheck and racecheck over one prefill chunk and one decode step of tiny models.

python tests/gpu/sanitizer.py FOLDER ...            (artifacts; ends with 1 if any check finds something)
python tests/gpu/sanitizer.py --steps FOLDER        (what runs under the tool)
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path

TOOLS = {
    "memcheck": ("--leak-check", "no"),
    "racecheck": ("--racecheck-report", "all"),
}
FOUND = 9
ROWS = 5


def main() -> int:
    if sys.argv[1] == "--steps":
        return steps(Path(sys.argv[2]))
    program = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    failed = 0
    for folder in sys.argv[1:]:
        for tool, options in TOOLS.items():
            started = time.monotonic()
            command = [program, "--tool", tool, *options, "--error-exitcode", str(FOUND), "--print-limit", "20"]
            command += [sys.executable, __file__, "--steps", folder]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            clean = done.returncode == 0
            failed += not clean
            print(f"{tool} {Path(folder).name}: {'clean' if clean else f'FAILED ({done.returncode})'} in "
                  f"{time.monotonic() - started:.1f} s", flush=True)  # fmt: skip
            lines = (done.stdout + done.stderr).splitlines()
            for line in lines[-40:] if not clean else [each for each in lines if "SUMMARY" in each]:
                print(f"    {line[:220]}", flush=True)
    return int(failed > 0)


def steps(folder: Path) -> int:
    """One prefill chunk with its sampling, one decode step of one sequence, and one of several."""
    from tapeout.runtime import load

    with load(folder) as model:
        ids = [(7 * index + 11) % model.vocab_size for index in range(model.chunk)]
        held = [model.pool.open() for _ in range(min(ROWS, model.max_sequences))]
        tokens = [model.prefill(held[0], ids), *(model.prefill(each, ids[:3]) for each in held[1:])]
        model.decode(held[:1], tokens[:1])
        if len(held) > 1:
            print(model.decode(held, tokens))
    return 0


if __name__ == "__main__":
    sys.exit(main())
