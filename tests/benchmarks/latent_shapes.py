"""Shapes of models with latent attention, as GGUF files have them, for bench_experts.py and bench_latent.py."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import gguf


@dataclass(frozen=True)
class LatentShape:
    """Sizes of a DeepSeek-V2 or V3; the first layer is dense, ``q_rank`` 0 is one projection of q."""

    layers: int
    hidden: int
    heads: int
    dense: int
    experts: int
    top_k: int
    width: int
    shared: int
    q_rank: int = 0
    latent: int = 512
    rope: int = 64
    nope: int = 128
    value: int = 128
    vocab: int = 32000
    arch: str = "deepseek2"

    def metadata(self, writer: gguf.GGUFWriter) -> None:
        """What llama.cpp and Tapeout read of the shape."""
        attention = {"head_count": self.heads, "head_count_kv": 1, "kv_lora_rank": self.latent,
                     "key_length": self.latent + self.rope, "value_length": self.latent,
                     "key_length_mla": self.nope + self.rope, "value_length_mla": self.value}  # fmt: skip
        if self.q_rank:
            attention["q_lora_rank"] = self.q_rank
        sizes = {f"attention.{key}": value for key, value in attention.items()} | {
            "context_length": 16384, "embedding_length": self.hidden, "block_count": self.layers,
            "feed_forward_length": self.dense, "rope.dimension_count": self.rope, "vocab_size": self.vocab,
            "leading_dense_block_count": 1, "expert_count": self.experts, "expert_used_count": self.top_k,
            "expert_feed_forward_length": self.width, "expert_shared_count": self.shared, "expert_gating_func": 1,
        }  # fmt: skip
        for key, value in sizes.items():
            writer.add_uint32(f"{self.arch}.{key}", value)
        writer.add_layer_norm_rms_eps(1e-6)
        writer.add_rope_freq_base(1e4)
        writer.add_expert_weights_scale(1.0)
        writer.add_tokenizer_model("no_vocab")

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Names and shapes, as numpy has them."""
        yield "token_embd", (self.vocab, self.hidden)
        for layer in range(self.layers):
            for name, shape in (self.attention() | (self.mixture() if layer else self.mlp(self.dense, ""))).items():
                yield f"blk.{layer}.{name}", shape
        yield "output_norm", (self.hidden,)
        yield "output", (self.vocab, self.hidden)

    def attention(self) -> Mapping[str, tuple[int, ...]]:
        """The attention of one layer, and its norms."""
        q = self.heads * (self.nope + self.rope)
        down = {"attn_q_a": (self.q_rank, self.hidden), "attn_q_a_norm": (self.q_rank,), "attn_q_b": (q, self.q_rank)}
        return {
            "attn_norm": (self.hidden,), **(down if self.q_rank else {"attn_q": (q, self.hidden)}),
            "attn_kv_a_mqa": (self.latent + self.rope, self.hidden), "attn_kv_a_norm": (self.latent,),
            "attn_k_b": (self.heads, self.latent, self.nope), "attn_v_b": (self.heads, self.value, self.latent),
            "attn_output": (self.hidden, self.heads * self.value), "ffn_norm": (self.hidden,),
        }  # fmt: skip

    def mlp(self, width: int, suffix: str) -> Mapping[str, tuple[int, ...]]:
        """Gate, up and down of one width."""
        return {f"ffn_gate{suffix}": (width, self.hidden), f"ffn_up{suffix}": (width, self.hidden),
                f"ffn_down{suffix}": (self.hidden, width)}  # fmt: skip

    def mixture(self) -> Mapping[str, tuple[int, ...]]:
        """Router, experts and shared experts."""
        wide, narrow = (self.experts, self.width, self.hidden), (self.experts, self.hidden, self.width)
        return {"ffn_gate_inp": (self.experts, self.hidden), "ffn_gate_exps": wide, "ffn_up_exps": wide,
                "ffn_down_exps": narrow, **self.mlp(self.shared * self.width, "_shexp")}  # fmt: skip


SHAPES = {
    # half of DeepSeek-V2-Lite's width, and a quarter of its experts'
    "deepseek-v2-lite": LatentShape(27, 1024, 16, 5472, 64, 6, 352, 2),
    # its attention with little else, to see what a long context costs
    "latent-attention": LatentShape(4, 512, 16, 512, 4, 1, 256, 1, q_rank=512),
}
