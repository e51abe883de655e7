"""SmolLM2 and Gemma 3 270M on a GPU: the tokens of llama.cpp, and where ours differ, how near a tie that is.

    python gpu_real.py make OUT --llama-probe PROBE --llama-bin DIR    (where the compiler is; no GPU)
    python gpu_real.py split OUT PARTS --bytes 54000000                (weights in pieces that travel one by one)
    python gpu_real.py join OUT PARTS                                  (where the GPU is)
    python gpu_real.py run OUT                                         (where the GPU is)

After a change of kernels ``make`` without its options compiles again and keeps the witnesses; ``split`` says which
pieces of the weights changed, mostly none: then ``PARTS/small`` alone has to travel.

The witness is llama.cpp's greedy continuation of each prompt. Given its tokens, every token of ours is its token, or
the difference of both in the logits of transformers in float32 is printed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
WEIGHTS = "weights/rank0.safetensors"
PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a small village by the sea,",
    "Water boils at a lower temperature on a mountain because",
    "The three primary colors are",
    "import numpy as np\n\nx = np.",
    "In 1969, the first humans",
    "Dear Sir or Madam,\n\n",
)
TOKENS = 64
KEPT = 256  # best logits of the reference that are kept a step
NEAR = 0.25  # a difference of logits that two sound implementations of 8-bit activations may decide either way


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["make", "split", "join", "run"])
    parser.add_argument("out", type=Path)
    parser.add_argument("parts", type=Path, nargs="?")
    parser.add_argument("--llama-probe", type=Path)
    parser.add_argument("--llama-bin", type=Path)
    parser.add_argument("--bytes", type=int, default=54_000_000)
    parser.add_argument("--device", default="h200")
    arguments = parser.parse_args()
    if arguments.what == "make":
        for name, source in sources().items():
            make(name, source, arguments)
    elif arguments.what == "split":
        split(arguments.out, arguments.parts, arguments.bytes)
    elif arguments.what == "join":
        join(arguments.out, arguments.parts)
    else:
        return int(any([run(folder) for folder in folders(arguments.out)]))
    return 0


def sources() -> dict[str, str]:
    """Where the models come from."""
    sys.path.append(str(HERE.parent))
    from real_models import GEMMA3, SMOLLM2

    return {"smollm2": SMOLLM2, "gemma3": GEMMA3}


def folders(out: Path) -> list[Path]:
    """Artifacts that are whole."""
    found = (path.with_suffix("") for path in sorted(out.glob("*.npz")))
    return [path for path in found if (path / WEIGHTS).exists()]


def make(name: str, source: str, arguments: argparse.Namespace) -> None:
    """Compile, and where llama.cpp is given write the witness beside the artifact."""
    from tapeout.compiler.driver import compile_spec
    from tapeout.compiler.spec import Model, Serving, Spec, Topology

    serving = Serving(max_context=2048, max_sequences=1, prefill_chunk=512)
    spec = Spec(model=Model(source=source), topology=Topology(device=arguments.device), serving=serving)
    compile_spec(spec, arguments.out / name, force=True)
    if arguments.llama_probe:
        witness(name, source, arguments)


def witness(name: str, source: str, arguments: argparse.Namespace) -> None:
    """Write llama.cpp's tokens and the reference's best logits."""
    from tapeout.compiler.checkpoints.source import resolve_source
    from tapeout.compiler.verify.reference import Reference
    from tapeout.runtime.tokenizer import load_tokenizer

    folder, path = arguments.out / name, resolve_source(source, Path.cwd())
    tokenizer, reference = load_tokenizer(folder), Reference.open(path, "gguf")
    found: dict[str, Any] = {}
    for index, text in enumerate(PROMPTS):
        ids = tokenizer.encode(text)
        tokens = continued(arguments, path, ids)
        logits = reference.run(ids + tokens[:-1], (), lambda op, value: None)[len(ids) - 1 :]
        best = np.argsort(-logits, axis=1)[:, :KEPT]
        found |= {f"ids{index}": ids, f"tokens{index}": tokens, f"best{index}": best,
                  f"logits{index}": np.take_along_axis(logits, best, 1)}  # fmt: skip
        own = int((best[:, 0] == np.array(tokens)).sum())
        print(f"{name} prompt {index}: llama.cpp's token is float32's in {own} of {len(tokens)} steps", flush=True)
    np.savez_compressed(arguments.out / f"{name}.npz", **found)


def continued(arguments: argparse.Namespace, path: Path, ids: list[int]) -> list[int]:
    """llama.cpp's greedy tokens behind a prompt, on the CPU."""
    folder = str(arguments.llama_bin.resolve())
    command = [str(arguments.llama_probe), "run", str(path), "1", "1024", str(TOKENS), *map(str, ids)]
    environment = {**os.environ, "LD_LIBRARY_PATH": folder, "LLAMA_BACKENDS": folder}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    return [int(line) for line in done.stdout.split()]


def split(out: Path, parts: Path, nbytes: int) -> None:
    """Everything but the weights, and the weights in pieces; says which pieces are new or changed."""
    shutil.rmtree(parts / "small", ignore_errors=True)
    for folder in folders(out):
        shutil.copytree(folder, parts / "small" / folder.name, ignore=shutil.ignore_patterns("weights"))
        shutil.copy(folder.with_suffix(".npz"), parts / "small")
        data = (folder / WEIGHTS).read_bytes()
        for number, start in enumerate(range(0, len(data), nbytes)):
            path, piece = parts / f"{folder.name}.{number:02}", data[start : start + nbytes]
            same = path.exists() and path.read_bytes() == piece
            path.write_bytes(piece)
            print(f"{path} {len(piece):,} bytes, {'as before' if same else 'CHANGED'}")
    small = sum(path.stat().st_size for path in (parts / "small").rglob("*") if path.is_file())
    print(f"{parts / 'small'} {small:,} bytes")


def join(out: Path, parts: Path) -> None:
    """What ``split`` cut, whole again; models of which a piece is missing fail their digests on load."""
    for folder in folders(out):
        shutil.rmtree(folder)  # an earlier run's kernels
    shutil.copytree(parts / "small", out, dirs_exist_ok=True)
    for npz in sorted(out.glob("*.npz")):
        pieces = sorted(parts.glob(f"{npz.stem}.[0-9][0-9]"))
        if pieces:
            target = out / npz.stem / WEIGHTS
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(b"".join(piece.read_bytes() for piece in pieces))


def run(folder: Path) -> bool:
    """Compare tokens, then measure; returns whether a difference is no near-tie."""
    import gpu_rates
    from gpu_engine import open_model

    with np.load(folder.with_suffix(".npz")) as kept, open_model(folder) as model:
        equal, near, far = 0, list[str](), list[str]()
        free = 0
        for index in range(sum(name.startswith("ids") for name in kept.files)):
            ids, tokens = kept[f"ids{index}"].tolist(), kept[f"tokens{index}"].tolist()
            ours = _forced(model, ids, tokens)
            free += _free_run(model, ids, tokens)
            for step, (mine, theirs) in enumerate(zip(ours, tokens, strict=True)):
                equal += mine == theirs
                if mine != theirs:
                    gap = _gap(kept[f"best{index}"][step], kept[f"logits{index}"][step], mine, theirs)
                    text = f"prompt {index} step {step}: ours {mine}, llama.cpp {theirs}, float32 logits {gap:+.3f}"
                    (near if abs(gap) <= NEAR or gap > 0 else far).append(text)
        print(f"  {folder.name}: given llama.cpp's tokens, {equal} of {equal + len(near) + len(far)} of ours are its; "
              f"{free} of {index + 1} free continuations of {TOKENS} tokens are equal throughout; "
              f"{len(near)} differ at near-ties or with float32 on our side, {len(far)} otherwise",
              flush=True)  # fmt: skip
        for line in [*far, *near][:24]:
            print(f"    {line}", flush=True)
        ceilings = gpu_rates.Ceilings(4.49e12, 780e12)
        gpu_rates.memory(model)
        gpu_rates.decode(model, ceilings)
        gpu_rates.prefill(model, ceilings, (512,))
    return bool(far)


def _forced(model: Any, ids: list[int], tokens: list[int]) -> list[int]:
    """What we choose at every step when the tokens before are the witness's."""
    sequence = model.pool.open()
    try:
        chosen = [model.prefill(sequence, ids)]
        for token in tokens[:-1]:
            chosen += model.decode([sequence], [token])
        return chosen
    finally:
        model.pool.close(sequence)


def _free_run(model: Any, ids: list[int], tokens: list[int]) -> bool:
    sequence = model.pool.open()
    try:
        first = model.prefill(sequence, ids)
        stream = model.stream([sequence], [first], len(tokens) - 1)
        return [first, *(each for [each] in stream)] == tokens
    finally:
        model.pool.close(sequence)


def _gap(best: Any, logits: Any, mine: int, theirs: int) -> float:
    """Float32's logit of our token less that of theirs; minus infinity where ours is not among its best."""
    held = dict(zip(best.tolist(), logits.tolist(), strict=True))
    return held.get(mine, float("-inf")) - held.get(theirs, float("-inf"))


if __name__ == "__main__":
    sys.exit(main())
