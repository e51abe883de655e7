"""Random GGUF files in the shapes of gpu_shapes.py, for timing llama.cpp. Needs numpy alone.

    python gpu_gguf.py OUT 1b-bf16 8b-q4_0

Format: github.com/ggml-org/ggml/blob/master/docs/gguf.md, version 3. llama.cpp loads them without a vocabulary.
"""

from __future__ import annotations

import argparse
import struct
import time
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gpu_fill import BLOCK, Bytes, Span, normal_block, write_spans
from gpu_shapes import CASES, Config, tensor_shapes

ALIGNMENT = 32
UINT32, FLOAT32, STRING = 4, 6, 8
KINDS = {"f32": 0, "q4_0": 2, "bf16": 30}
NAMES = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
         "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
         "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
         "post_attention_layernorm": "ffn_norm"}  # fmt: skip
TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("cases", nargs="+", metavar="CASE")
    arguments = parser.parse_args()
    for name in arguments.cases:
        started = time.perf_counter()
        case = CASES[name]
        path = write_gguf(arguments.out / f"{name}.gguf", case.config, case.format.replace("keep", "bf16"))
        seconds = time.perf_counter() - started
        print(f"wrote {path.name}: {path.stat().st_size / 1e9:.2f} GB in {seconds:.1f} s", flush=True)


def write_gguf(path: Path, config: Config, format: str) -> Path:
    """A llama GGUF whose matrices are all in ``format`` (bf16 or q4_0)."""
    tensors = {_name(name): shape for name, shape in tensor_shapes(config).items()}
    infos, spans, offset = bytearray(), list[Span](), 0
    block = normal_block("bf16") if format == "bf16" else _q4_0_block()
    for name, shape in tensors.items():
        kind = format if len(shape) == 2 else "f32"
        infos += _string(name) + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *reversed(shape))
        infos += struct.pack("<IQ", KINDS[kind], offset)
        nbytes = _nbytes(shape, kind)
        unit = 18 if kind == "q4_0" else 16
        data = block if kind == format else np.ones(shape, np.float32).view(np.uint8)
        phase = zlib.crc32(name.encode()) % (data.size // unit) * unit if kind == format else 0
        spans.append(Span(offset, nbytes, data, phase))
        offset += -(-nbytes // ALIGNMENT) * ALIGNMENT
    fields = _fields(config)
    head = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(fields)) + b"".join(fields) + bytes(infos)
    head += b"\0" * (-len(head) % ALIGNMENT)
    placed = [Span(0, len(head), np.frombuffer(head, np.uint8), 0)]
    placed += [Span(len(head) + span.offset, span.nbytes, span.block, span.phase) for span in spans]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_spans(path, placed, len(head) + offset)
    return path


def _fields(config: Mapping[str, Any]) -> list[bytes]:
    numbers = {
        "context_length": 8192,
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"],
        "rope.dimension_count": config["head_dim"],
        "vocab_size": config["vocab_size"],
    }
    floats = {"attention.layer_norm_rms_epsilon": config["rms_norm_eps"], "rope.freq_base": config["rope_theta"]}
    texts = {"general.architecture": "llama", "tokenizer.ggml.model": "no_vocab"}
    return [
        *(_string(key) + struct.pack("<I", STRING) + _string(value) for key, value in texts.items()),
        *(_string(f"llama.{key}") + struct.pack("<II", UINT32, value) for key, value in numbers.items()),
        *(_string(f"llama.{key}") + struct.pack("<If", FLOAT32, value) for key, value in floats.items()),
    ]


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def _name(name: str) -> str:
    """The GGUF name of a Hugging Face tensor."""
    base = name.removesuffix(".weight")
    if base in TOP:
        return f"{TOP[base]}.weight"
    _, _, layer, rest = base.split(".", 3)
    return f"blk.{layer}.{NAMES[rest]}.weight"


def _nbytes(shape: tuple[int, ...], kind: str) -> int:
    count = int(np.prod(shape))
    return count // 32 * 18 if kind == "q4_0" else count * {"bf16": 2, "f32": 4}[kind]


def _q4_0_block() -> Bytes:
    """Blocks of Q4_0: an f16 scale near 0.0043 (values of a standard deviation near 0.02), then 16 random bytes."""
    rng = np.random.default_rng(4)
    count = BLOCK // 18 | 1
    block = np.frombuffer(rng.bytes(count * 18), np.uint8).reshape(count, 18).copy()
    block[:, :2] = rng.uniform(0.003, 0.0056, count).astype(np.float16).view(np.uint8).reshape(count, 2)
    return block.reshape(-1)


if __name__ == "__main__":
    main()
