"""Mixtures of experts beside llama.cpp: a random GGUF of a given shape, compiled, then decode and prefill in pairs.

python bench_experts.py --llama-bin DIR --folder F [--shape qwen3-moe] [--formats q4_k_m] [--target x86_64_v3]
       [--processor]

``--folder`` keeps the file and its artifact, which later runs use again. Weights are random and routers too, so every
expert is chosen about as often as any other.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import latent_shapes
import numpy as np
from latent_shapes import LatentShape
from peers import LlamaCpp, Tapeout, describe, interleaved, paired_table

# the first glob that fits a tensor's name decides
FORMATS: dict[str, dict[str, str]] = {
    "q4_k_m": {"*ffn_down_exps*": "Q6_K", "output.*": "Q6_K", "*attn_v*": "Q6_K", "*": "Q4_K"},
    "q4_0": {"output.*": "Q6_K", "*": "Q4_0"},
}
# byte offsets of the float16 fields of a block, and their values for codes that spread by about 1
SCALES = {"Q4_K": [(0, 0.004), (2, 0.03)], "Q6_K": [(208, 0.00073)], "Q4_0": [(0, 0.2)]}


@dataclass(frozen=True)
class Shape:
    """Sizes of a model; ``arch`` is its GGUF architecture."""

    arch: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int
    top_k: int
    width: int
    vocab: int = 32000

    def metadata(self, writer: gguf.GGUFWriter) -> None:
        """What llama.cpp and Tapeout read of the shape."""
        writer.add_context_length(4096)
        writer.add_embedding_length(self.hidden)
        writer.add_block_count(self.layers)
        writer.add_feed_forward_length(3 * self.hidden)
        writer.add_head_count(self.heads)
        writer.add_head_count_kv(self.kv_heads)
        writer.add_key_length(self.head_dim)
        writer.add_value_length(self.head_dim)
        writer.add_layer_norm_rms_eps(1e-6)
        writer.add_rope_freq_base(1e6)
        writer.add_vocab_size(self.vocab)
        writer.add_expert_count(self.experts)
        writer.add_expert_used_count(self.top_k)
        writer.add_expert_feed_forward_length(self.width)
        writer.add_tokenizer_model("no_vocab")

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Names and shapes, as numpy has them."""
        yield "token_embd", (self.vocab, self.hidden)
        for layer in range(self.layers):
            for name, shape in self.layer().items():
                yield f"blk.{layer}.{name}", shape
        yield "output_norm", (self.hidden,)
        yield "output", (self.vocab, self.hidden)

    def layer(self) -> Mapping[str, tuple[int, ...]]:
        """Names and shapes of one layer."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        wide, narrow = (self.experts, self.width, self.hidden), (self.experts, self.hidden, self.width)
        return {"attn_norm": (self.hidden,), "attn_q": (q, self.hidden), "attn_k": (kv, self.hidden),
                "attn_v": (kv, self.hidden), "attn_output": (self.hidden, q), "attn_q_norm": (self.head_dim,),
                "attn_k_norm": (self.head_dim,), "ffn_norm": (self.hidden,),
                "ffn_gate_inp": (self.experts, self.hidden), "ffn_gate_exps": wide, "ffn_up_exps": wide,
                "ffn_down_exps": narrow}  # fmt: skip


SHAPES: Mapping[str, Shape | LatentShape] = {
    # a third of Qwen3-30B-A3B's width, half of its experts, a third of its layers
    "qwen3-moe": Shape("qwen3moe", 16, 1024, 16, 4, 64, 64, 8, 512),
    **latent_shapes.SHAPES,
}


def write(path: Path, shape: Shape | LatentShape, formats: Mapping[str, str]) -> None:
    """A GGUF of random blocks; norms are 1 and routers F32."""
    writer = gguf.GGUFWriter(path, shape.arch)
    shape.metadata(writer)
    rng = np.random.default_rng(0)
    for name, sizes in shape.tensors():
        if len(sizes) == 1 or name.endswith("ffn_gate_inp"):
            values = np.ones(sizes) if len(sizes) == 1 else rng.standard_normal(sizes) / np.sqrt(sizes[-1])
            writer.add_tensor(f"{name}.weight", values.astype(np.float32))
            continue
        kind = next(to for glob, to in formats.items() if fnmatchcase(f"{name}.weight", glob))
        kind = kind if sizes[-1] % 256 == 0 else "Q4_0"  # rows that are not whole blocks of a k-quant
        writer.add_tensor(f"{name}.weight", _blocks(sizes, kind, rng), raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _blocks(sizes: tuple[int, ...], kind: str, rng: np.random.Generator) -> np.ndarray[Any, Any]:
    elements, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    raw = rng.integers(0, 256, (int(np.prod(sizes)) // elements, nbytes), np.uint8)
    for offset, scale in SCALES[kind]:
        values = scale / np.sqrt(sizes[-1]) * rng.uniform(0.8, 1.2, len(raw))
        raw[:, offset : offset + 2] = values.astype("<f2").view(np.uint8).reshape(-1, 2)
    return raw.reshape(*sizes[:-1], -1)


def compiled(model: Path, artifact: Path) -> Path:
    """The artifact of a model, compiled unless it is there."""
    if not artifact.exists():
        spec = artifact.with_suffix(".yaml")
        spec.write_text(f"model: {{source: {model}}}\nserving: {{max_context: 2048}}\n")
        tapeout = Path(sys.executable).with_name("tapeout")
        subprocess.run([tapeout, "compile", spec, "-o", artifact], check=True)
    return artifact


def processor_table(phase: str, tokens: int, arguments: argparse.Namespace) -> None:
    """Milliseconds of processor a token, one thread: what ``tokens`` more take, by runs of two lengths.

    For machines that others use, where waiting for a core would be most of the time.
    """
    ours, peer = Tapeout(arguments.artifact, arguments.target), LlamaCpp(arguments.llama_bin, arguments.model)
    words = ["bench", str(arguments.artifact), "--json", "--repeats", "1", "--threads", "1"]
    programs = {
        "tapeout": (lambda p, n: ours.command(*words, "--prompt-tokens", str(p or 1), "--max-tokens", str(n or 1)), 1),
        # llama-bench reads a prompt twice, to warm up
        "llama.cpp": (lambda p, n: [arguments.llama_bin / "llama-bench", "-m", arguments.model, "-t", "1", "-r", "1",
                                    "-p", str(p), "-n", str(n)], 2 if phase == "prefill" else 1),
    }  # fmt: skip

    def spent(command: list[Any]) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, env=peer.environment, check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    def cost(name: str) -> float:
        command, times = programs[name]
        short, long = ((16 + more, 0) if phase == "prefill" else (0, 16 + more) for more in (0, tokens))
        return (spent(command(*long)) - spent(command(*short))) / tokens / times * 1e3

    values = interleaved({name: partial(cost, name) for name in programs}, arguments.repeats)
    print(f"{phase}, {tokens} tokens more, ms of processor a token: {describe(values)} (below 1 is faster)", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-bin", type=Path, help="folder with llama-bench; without it only the file is made")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-moe")
    parser.add_argument("--formats", choices=FORMATS, default="q4_k_m")
    parser.add_argument("--target", help="kernel target of the artifact (default: the best that this CPU runs)")
    parser.add_argument("--threads", type=lambda text: [int(part) for part in text.split(",")], default=[1, 2])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--decode", type=int, default=64, help="tokens to generate")
    parser.add_argument("--prefill", type=int, default=512, help="tokens to read")
    parser.add_argument("--processor", action="store_true", help="time of the processor with one thread")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    name = f"{arguments.shape}-{arguments.formats}"
    arguments.model = arguments.folder / f"{name}.gguf"
    if not arguments.model.exists():
        write(arguments.model, SHAPES[arguments.shape], FORMATS[arguments.formats])
    arguments.artifact = compiled(arguments.model, arguments.folder / name)
    sizes = arguments.model.stat().st_size, Tapeout(arguments.artifact).bytes_per_token()
    print(f"{name}: {sizes[0] / 1e9:.2f} GB, all weights but the embedding {sizes[1] / 1e9:.2f} GB")
    if arguments.llama_bin:
        for phase, tokens in (("decode", arguments.decode), ("prefill", arguments.prefill)):
            if tokens and arguments.processor:
                processor_table(phase, tokens, arguments)
            elif tokens:
                paired_table(phase, tokens, arguments, floor=False)


if __name__ == "__main__":
    main()
