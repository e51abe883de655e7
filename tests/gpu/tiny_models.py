"""Tiny random models for the GPU tests: artifacts with the logits that a reference computes, built without a GPU.

    python tests/gpu/tiny_models.py build/gpu/models [NAME ...]

Writes OUT/tiny-NAME (the artifact) and OUT/tiny-NAME.npz (token ids and expected logits), so that a machine that has a
GPU but not the compiler's dependencies can run tests/gpu/test_model_gpu.py. Expected values come from transformers in
float64, on weights that gguf-py dequantized, or that tests/benchmarks/gpu_reference.py unpacked from the artifact.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

HERE = Path(__file__).parent
sys.path += [str(HERE.parent / "parity"), str(HERE.parent / "benchmarks")]

POSITIONS = 150  # beyond any window, several pages, three prefill chunks
STARTS = (1, 2, 15, 16, 17, 31, 47, 64)  # lengths of the sequences of a batch, around page edges
FOLLOWED = 6
SERVING = {"max_context": 512, "max_sequences": 8, "page_tokens": 16, "prefill_chunk": 64, "kv_dtype": "f16"}

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Tiny:
    """One model: witness.llama, witness.gemma3 … with ``sizes``, and how its weights are stored.

    With ``formats`` (globs of GGUF names) it goes through a GGUF, else through safetensors and ``format``.
    ``tolerance`` bounds the relative error (norms) of any position's logits.
    """

    family: str
    tolerance: float
    format: str = "keep"
    formats: Mapping[str, str] = field(default_factory=dict[str, str])
    sizes: Mapping[str, Any] = field(default_factory=dict[str, Any])


EXACT, ROUNDED, CODED = 3e-3, 3e-2, 6e-2
WIDE = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 32, "num_hidden_layers": 2}
UPPER_SLIDE = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}
MIXED = {"*attn_q.weight": "Q4_K", "*attn_k.weight": "Q6_K", "*attn_v.weight": "Q5_K", "*attn_output.weight": "Q8_0",
         "*ffn_gate.weight": "Q4_1", "*ffn_up.weight": "Q5_0", "*ffn_down.weight": "Q6_K",
         "token_embd.weight": "Q8_0", "output.weight": "Q4_K"}  # fmt: skip

MODELS: dict[str, Tiny] = {
    "llama": Tiny("llama", EXACT),
    "llama-tied": Tiny("llama", EXACT, sizes={"tied": True}),
    "llama-biases": Tiny("llama", EXACT, sizes={"bias": True}),
    "llama-llama3": Tiny("llama", EXACT, sizes={"rope": "llama3"}),
    "llama-yarn": Tiny("llama", EXACT, sizes={"rope": "yarn"}),
    "llama-one-kv-head": Tiny("llama", EXACT, sizes={"num_key_value_heads": 1}),
    "llama-three-heads-a-kv-head": Tiny(
        "llama", ROUNDED, "bf16", sizes={"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 96}
    ),
    "llama-untidy-f32": Tiny("llama", EXACT, sizes={"hidden_size": 72, "intermediate_size": 100}),
    "llama-untidy-bf16": Tiny("llama", ROUNDED, "bf16", sizes={"hidden_size": 72, "intermediate_size": 104}),
    "llama-wide-mlp": Tiny(
        "llama", ROUNDED, "bf16", sizes={"intermediate_size": 16384, "num_hidden_layers": 1}
    ),  # four rows of it do not fit in shared memory
    "llama-f16": Tiny("llama", ROUNDED, "f16", sizes={"bias": True}),
    "llama-q4_0": Tiny("llama", CODED, formats={"*": "Q4_0"}, sizes={"hidden_size": 96, "intermediate_size": 160}),
    "llama-mixed": Tiny("llama", CODED, formats=MIXED, sizes=WIDE),
    "llama-int4_g32": Tiny("llama", CODED, "int4_g32", sizes={"hidden_size": 96, "intermediate_size": 160}),
    "llama-int4_g128": Tiny("llama", CODED, "int4_g128", sizes=WIDE),
    "llama-int4_g128_zp": Tiny("llama", CODED, "int4_g128_zp", sizes=WIDE),
    "llama-fp8": Tiny("llama", CODED, "fp8", sizes=WIDE),
    "llama-fp8_block128": Tiny("llama", CODED, "fp8_block128", sizes=WIDE),
    "mistral": Tiny("mistral", EXACT),
    "mistral-nemo-q4_0": Tiny(
        "mistral", CODED, formats={"*": "Q4_0"}, sizes={"hidden_size": 160, "head_dim": 32, "sliding_window": None}
    ),
    "qwen2": Tiny("qwen2", EXACT, sizes=UPPER_SLIDE),
    "qwen2-seven-heads-q8_0": Tiny(
        "qwen2", CODED, formats={"*": "Q8_0"}, sizes={"hidden_size": 224, "num_attention_heads": 14}
    ),
    "qwen3": Tiny("qwen3", EXACT, sizes=UPPER_SLIDE),
    "qwen3-q4_0": Tiny("qwen3", CODED, formats={"*": "Q4_0"}, sizes={"tied": True}),
    "gemma3": Tiny("gemma3", EXACT, formats={"*": "F32"}),
    "gemma3-q8_0": Tiny("gemma3", CODED, formats={"*": "Q8_0"}),
}


def build(name: str, out: Path, device: str = "h200") -> Path:
    """Compile a model to ``out / tiny-name`` and write what it is expected to compute beside it."""
    import witness

    from tapeout.compiler.driver import compile_spec
    from tapeout.compiler.spec import Model, Quantization, Serving, Spec, Topology

    model = MODELS[name]
    made = getattr(witness, model.family)(**model.sizes)
    folder = out / f"tiny-{name}"
    shutil.rmtree(folder, ignore_errors=True)
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch) / ("model.gguf" if model.formats else "hf")
        if model.formats:
            made = made.write_gguf(source, model.formats, tokenizer=False)
        else:
            made.model.save_pretrained(source)
        spec = Spec(
            model=Model(source=str(source), name=name),
            quantization=Quantization(default=model.format),
            topology=Topology(device=device),
            serving=Serving.model_validate(SERVING),
        )
        plan = compile_spec(spec, folder, cache=False)
        reference = made.model if model.format == "keep" else _unpacked(folder, plan, source, Path(scratch))
    np.savez_compressed(out / f"tiny-{name}.npz", **_expected(reference.double()))
    return folder


def _unpacked(folder: Path, plan: dict[str, Any], source: Path, scratch: Path) -> Any:
    """A reference with the weights of the artifact itself."""
    import torch
    from gpu_reference import llama
    from gpu_skeleton import fill_recipe

    recipe = scratch / "fill.json"
    recipe.write_text(json.dumps(fill_recipe(plan, json.loads((source / "config.json").read_text()), "")))
    return llama(folder, recipe, torch.float64, "cpu")


def _expected(reference: Any) -> dict[str, Any]:
    """Logits of every position of one text, and of ``FOLLOWED`` tokens after each start of a batch."""
    vocab = reference.config.vocab_size
    rng = np.random.default_rng(1)
    ids = rng.integers(0, vocab, POSITIONS)
    batch = rng.integers(0, vocab, (len(STARTS), max(STARTS) + FOLLOWED))
    rows = [_logits(reference, row[: start + FOLLOWED])[start - 1 :] for start, row in zip(STARTS, batch, strict=True)]
    return {"ids": ids, "logits": _logits(reference, ids), "starts": np.array(STARTS), "batch": batch,
            "batch_logits": np.stack(rows)}  # fmt: skip


def _logits(reference: Any, ids: Sequence[int] | npt.NDArray[Any]) -> Floats:
    import torch

    with torch.no_grad():
        return reference(torch.tensor([list(map(int, ids))]), use_cache=False).logits[0].float().numpy()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("names", nargs="*", default=list(MODELS), metavar="NAME")
    parser.add_argument("--device", default="h200")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name in arguments.names:
        started = time.perf_counter()
        folder = build(name, arguments.out, arguments.device)
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        print(f"{name}: {size / 1e6:.2f} MB in {time.perf_counter() - started:.1f} s", flush=True)


if __name__ == "__main__":
    main()
