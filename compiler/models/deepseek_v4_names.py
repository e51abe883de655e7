"""What checkpoints of DeepSeek-V4 call its tensors: the hub's names, and the few that transformers saves otherwise."""

from __future__ import annotations

import re

from tapeout.compiler.models.base import Sources
from tapeout.compiler.recipes import Convert, Integers, Read, Recipe, Vector


def _compressor(slots: str, tensors: str) -> dict[str, str]:
    return {
        f"self_attn.{slots}.kv_proj": f"attn.{tensors}.wkv.weight",
        f"self_attn.{slots}.gate_proj": f"attn.{tensors}.wgate.weight",
        f"self_attn.{slots}.entries.ape": f"attn.{tensors}.ape",
        f"self_attn.{slots}.entries.norm": f"attn.{tensors}.norm.weight",
    }


_TOP = {
    "model.embed_tokens": "embed.weight",
    "model.norm": "norm.weight",
    "lm_head": "head.weight",
    "model.hc_head.fn": "hc_head_fn",
    "model.hc_head.weights.base": "hc_head_base",
    "model.hc_head.weights.scale": "hc_head_scale",
}
_SAVED = {"embed.weight": "model.embed_tokens.weight", "head.weight": "lm_head.weight"} | {
    f"hc_head_{part}": f"model.hc_head.hc_{part}" for part in ("fn", "base", "scale")
}
_LAYER = {
    "input_layernorm": "attn_norm.weight",
    "post_attention_layernorm": "ffn_norm.weight",
    "self_attn.q_a_proj": "attn.wq_a.weight",
    "self_attn.q_a_norm": "attn.q_norm.weight",
    "self_attn.q_b_proj": "attn.wq_b.weight",
    "self_attn.kv_proj": "attn.wkv.weight",
    "self_attn.kv_norm": "attn.kv_norm.weight",
    "self_attn.o_a_proj": "attn.wo_a.weight",
    "self_attn.o_b_proj": "attn.wo_b.weight",
    "self_attn.sinks": "attn.attn_sink",
    "self_attn.compressor.indexer.q_b_proj": "attn.indexer.wq_b.weight",
    "self_attn.compressor.indexer.scorer.weights_proj": "attn.indexer.weights_proj.weight",
    "mlp.gate": "ffn.gate.weight",
    "mlp.route.bias": "ffn.gate.bias",
    "mlp.route.table": "ffn.gate.tid2eid",
    "mlp.shared_experts.gate_proj": "ffn.shared_experts.w1.weight",
    "mlp.shared_experts.up_proj": "ffn.shared_experts.w3.weight",
    "mlp.shared_experts.down_proj": "ffn.shared_experts.w2.weight",
    **{f"{block}_hc.fn": f"hc_{block}_fn" for block in ("attn", "ffn")},
    **{f"{block}_hc.weights.{part}": f"hc_{block}_{part}" for block in ("attn", "ffn") for part in ("base", "scale")},
    **_compressor("compressor", "compressor"),
    **_compressor("compressor.indexer", "indexer.compressor"),
}
_EXPERT = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def _name(slot: str) -> str:
    match = re.fullmatch(r"model\.(layers\.\d+)\.(.+)", slot)
    if match is None:
        return _TOP.get(slot, slot)
    return f"{match[1]}.{_LAYER.get(match[2], match[2])}"


def _saved(name: str) -> tuple[str, ...]:
    """What transformers' save_pretrained calls a tensor of the hub."""
    return (_SAVED.get(name) or "model." + name.replace(".attn.kv_norm.", ".attn.norm."),)


def _ignored(tensor: str) -> str | None:
    if re.match(r"(model\.)?mtp\.", tensor):
        return "multi-token prediction is a draft source, not part of the model's own forward pass"
    return None


def sources(count: int) -> Sources:
    """Each of ``count`` experts has tensors of its own; small tables become vectors."""

    def parts(slot: str) -> tuple[str, ...]:
        match = re.fullmatch(r"model\.(layers\.\d+)\.mlp\.experts\.(\w+)", slot)
        if match is None:
            return ()
        return tuple(f"{match[1]}.ffn.experts.{expert}.{_EXPERT[match[2]]}.weight" for expert in range(count))

    def adapt(slot: str, recipe: Recipe) -> Recipe:
        if slot.endswith(".table") and isinstance(recipe, Read):
            return Vector(Integers(recipe, count))
        if slot.endswith(".ape"):
            return Vector(recipe if recipe.format == "f32" else Convert(recipe, "f32"))
        return recipe

    return Sources(_name, adapt, _ignored, parts, _saved)
