"""KL divergence of the logits from transformers in float32, ours and llama.cpp's, at every position of several texts.

python bench_accuracy.py --artifact A --model M.gguf --llama-bin DIR --llama-source DIR [--text FILE ...]
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import numpy as np
from peers import LlamaCpp, llama_probe, machine, options

from tapeout.compiler.verify.reference import Reference
from tapeout.compiler.verify.report import LogitsError, compare_logits
from tapeout.runtime import load

LIBRARY = Path(sysconfig.get_paths()["stdlib"])
TEXTS = [LIBRARY / "argparse.py", LIBRARY / "pydoc_data" / "topics.py", LIBRARY / "heapq.py", LIBRARY / "_pydecimal.py"]


def main() -> None:
    parser = options("KL divergence beside llama.cpp.")
    parser.add_argument("--llama-source", type=Path, required=True, help="llama.cpp's source tree, for its headers")
    parser.add_argument("--text", type=Path, action="append", help="text files (default: of the standard library)")
    parser.add_argument("--positions", type=int, default=512)
    parser.add_argument("--skip", type=int, default=2000, help="characters to leave out at the start of each text")
    arguments = parser.parse_args()
    peer = LlamaCpp(arguments.llama_bin, arguments.model)
    reference = Reference.open(arguments.model.resolve(), "gguf")
    print(machine(), reference.name, sep="\n")
    found: dict[str, list[LogitsError]] = {"tapeout": [], "llama.cpp": []}
    with tempfile.TemporaryDirectory() as folder, load(arguments.artifact, target=arguments.target) as model:
        probe = llama_probe(arguments.llama_bin.resolve(), arguments.llama_source, Path(folder))
        for path in arguments.text or TEXTS:
            text = path.read_text("utf-8")[arguments.skip :][: 16 * arguments.positions]
            ids = model.tokenizer.encode(text)[: arguments.positions]
            expected = reference.run(ids, (), lambda op, value: None)
            theirs = llama_logits(probe, peer, ids, max(arguments.threads), Path(folder))
            for name, logits in (("tapeout", model.logits(ids)), ("llama.cpp", theirs)):
                found[name].append(compare_logits(expected, logits))
                print(f"{path.name:14s} {len(ids)} positions  {name:10s} {line(found[name][-1])}", flush=True)
    for name, errors in found.items():
        print(f"{name:10s} mean KL over {len(errors)} texts {np.mean([error.kl_mean for error in errors]):.3e}")


def line(error: LogitsError) -> str:
    """One result in words."""
    return (
        f"KL mean {error.kl_mean:.2e} max {error.kl_max:.2e}  best token equal {100 * error.top1:5.1f} %  "
        f"where the margin exceeds 1: {error.sure - error.sure_wrong} of {error.sure}"
    )


def llama_logits(probe: Path, peer: LlamaCpp, ids: list[int], threads: int, folder: Path) -> np.ndarray:
    """llama.cpp's logits, float32 [positions, vocab]."""
    np.array(ids, np.int32).tofile(folder / "ids")
    words = [str(probe), "logits", str(peer.model), str(threads), str(folder / "ids"), str(folder / "logits")]
    if subprocess.run(words, env=peer.environment, check=False).returncode:
        sys.exit("llama_probe failed")
    return np.fromfile(folder / "logits", np.float32).reshape(len(ids), -1)


if __name__ == "__main__":
    main()
