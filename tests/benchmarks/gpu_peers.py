"""Peers on the same card: llama.cpp's CUDA build, and transformers with a static cache and torch.compile.

python gpu_peers.py llama BIN_DIR MODEL.gguf ...      (BIN_DIR holds llama-bench and its libraries)
python gpu_peers.py transformers 1b-bf16 8b-bf16
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gpu_shapes import CASES

STEPS, CONTEXT = 128, 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peer", choices=["llama", "transformers"])
    parser.add_argument("arguments", nargs="+")
    arguments = parser.parse_args()
    if arguments.peer == "llama":
        folder, *models = (Path(each) for each in arguments.arguments)
        for model in models:
            llama_bench(folder, model)
    else:
        for name in arguments.arguments:
            compiled_transformers(name)


def llama_bench(folder: Path, model: Path) -> dict[str, float]:
    """Rates of prefill 512 and decode 128 by llama-bench, everything on the GPU, flash attention on.

    ``libggml-stub.so``, where it is there, stands for the template instances that a shortened build left out; each of
    its functions aborts.
    """
    command = [str(folder / "llama-bench"), "-m", str(model), "-ngl", "99", "-fa", "1", "-p", "512", "-n", "128"]
    places = [str(folder), *map(str, _library_folders()), os.environ.get("LD_LIBRARY_PATH", "")]
    environment = os.environ | {
        "LD_LIBRARY_PATH": ":".join(places),
        "LD_PRELOAD": " ".join(["libcuda.so.1", *map(str, folder.glob("libggml-stub.so"))]),
    }
    command += ["-r", "3", "-o", "json"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        print(f"llama.cpp {model.name}: failed with {done.returncode}: {done.stderr[-1500:]}", flush=True)
        return {}
    rates: dict[str, float] = {}
    for test in json.loads(done.stdout):
        what = f"prefill {test['n_prompt']}" if test["n_prompt"] else f"decode {test['n_gen']}"
        rates[what] = test["avg_ts"]
        print(f"llama.cpp {model.name}: {what}: {test['avg_ts']:,.1f} +- {test['stddev_ts']:.1f} tok/s "
              f"({test['gpu_info'] or 'on the CPU'})", flush=True)  # fmt: skip
    return rates


def _library_folders() -> Iterator[Path]:
    """Where CUDA's libraries lie: the toolkit, and the wheels that torch brings."""
    yield from (Path("/usr/local/nvidia/lib64"), Path("/usr/local/cuda/lib64"))
    spec = importlib.util.find_spec("nvidia")
    for place in spec.submodule_search_locations or [] if spec else []:
        yield from sorted({path.parent for path in Path(place).rglob("lib*.so*")})


def compiled_transformers(name: str) -> None:
    """Decode of a random Llama, one sequence, each step one compiled graph with a static cache."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

    fields = {key: value for key, value in CASES[name].config.items() if key != "architectures"}
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = LlamaForCausalLM(LlamaConfig(**fields)).eval()
    torch.set_default_dtype(torch.float32)
    held: dict[str, Any] = {
        "cache": StaticCache(config=model.config, max_cache_len=1024),
        "token": torch.zeros((1, 1), dtype=torch.long, device="cuda"),
        "place": torch.zeros(1, dtype=torch.long, device="cuda"),
    }

    def step(ids: Any, place: Any) -> Any:
        out = model(input_ids=ids, past_key_values=held["cache"], position_ids=place[None], use_cache=True)
        return out.logits[:, -1:].argmax(-1)

    with torch.inference_mode():
        ids = torch.randint(0, 1000, (1, CONTEXT), device="cuda")
        held["token"] = step(ids, torch.arange(CONTEXT, device="cuda"))
        started = time.perf_counter()
        fast = torch.compile(step, mode="reduce-overhead")
        rates = [_rate(fast, held, torch) for _ in range(4)][1:]
        print(f"transformers {name}: compiled and timed in {time.perf_counter() - started:.0f} s", flush=True)
    print(f"transformers {name}: decode {STEPS}: {statistics.median(rates):,.1f} tok/s", flush=True)


def _rate(step: Any, held: dict[str, Any], torch: Any) -> float:
    token = held["token"].clone()
    places = [torch.tensor([CONTEXT + index], device="cuda") for index in range(STEPS)]
    torch.cuda.synchronize()
    started = time.perf_counter()
    for place in places:
        token = step(token, place).clone()
    torch.cuda.synchronize()
    return STEPS / (time.perf_counter() - started)


if __name__ == "__main__":
    sys.exit(main())
