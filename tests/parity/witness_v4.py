"""A tiny random DeepSeek-V4 of transformers, in the names of the hub and in those of save_pretrained."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from witness import VOCAB, Witness, randomised

YARN = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 64, "beta_fast": 32, "beta_slow": 1}
RATES = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}
_LAYERS = ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention",
           "compressed_sparse_attention"]  # fmt: skip


def deepseek_v4(*, yarn: bool = False, seed: int = 0, **sizes: Any) -> Witness:
    """Four layers of all kinds, the first with experts by token; all norms, tables, sinks and biases are random."""
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    fields: dict[str, Any] = {
        "vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 1, "head_dim": 32, "q_lora_rank": 24, "moe_intermediate_size": 32,
        "n_routed_experts": 8, "num_experts_per_tok": 2, "layer_types": _LAYERS,
        "compress_rates": RATES, "hc_mult": 4,
        "hc_sinkhorn_iters": 4, "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"], "sliding_window": 8,
        "o_groups": 2, "o_lora_rank": 16, "index_n_heads": 32, "index_head_dim": 16, "index_topk": 4,
        "partial_rotary_factor": 0.25, "max_position_embeddings": 1024, "rms_norm_eps": 1e-3, "hc_eps": 1e-3,
        "swiglu_limit": 1.0,
        "bos_token_id": VOCAB - 1, "eos_token_id": VOCAB - 1,
    }  # fmt: skip
    if yarn:
        fields["rope_parameters"] = dict(YARN)
    model = randomised(DeepseekV4ForCausalLM, DeepseekV4Config(**{**fields, **sizes}), seed)
    _randomise_the_rest(model, seed)
    return Witness("deepseek_v4", model)


def _randomise_the_rest(model: Any, seed: int) -> None:
    """What is no parameter or would hardly show: experts of tokens, biases that choose, tables of windows, scales."""
    import torch

    rng = np.random.default_rng(seed + 1)
    with torch.no_grad():
        for name, value in sorted({**dict(model.named_buffers()), **dict(model.named_parameters())}.items()):
            shape = tuple(value.shape)
            if name.endswith("tid2eid"):
                chosen = [rng.permutation(model.config.n_routed_experts)[: shape[1]] for _ in range(shape[0])]
                value.copy_(torch.from_numpy(np.stack(chosen)))
            elif name.endswith(("e_score_correction_bias", "position_bias")):
                value.copy_(torch.from_numpy(0.3 * rng.standard_normal(shape).astype(np.float32)))
            elif name.endswith("scale"):
                value.add_(1)


_PLAIN = {"model.embed_tokens.weight": "embed.weight"} | {
    f"model.hc_head.hc_{part}": f"hc_head_{part}" for part in ("fn", "base", "scale")
}


def save_hub(witness: Witness, folder: Path, changes: Mapping[str, Any] | None = None) -> Path:
    """The checkpoint as on the hub: no ``model.`` before names, compress_ratios and flat scaling in the config.

    With the layers of multi-token prediction that it has too. ``changes`` are more keys of config.json.
    """
    from safetensors.numpy import load_file, save_file

    witness.save_hf(folder)
    tensors = load_file(folder / "model.safetensors")
    renamed = {
        _PLAIN.get(name) or name.removeprefix("model.").replace(".attn.norm.", ".attn.kv_norm."): tensor
        for name, tensor in tensors.items()
    }
    renamed["mtp.0.e_proj.weight"] = np.zeros((8, 8), np.float32)
    save_file(renamed, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    rope = config.pop("rope_parameters")["compress"]
    kinds = {"sliding_attention": 0, "compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
    config["compress_ratios"] = [*(kinds[kind] for kind in config.pop("layer_types")), 0]
    config["num_hash_layers"] = config.pop("mlp_layer_types").count("hash_moe")
    rates = config.pop("compress_rates")
    config["compress_rate_csa"], config["compress_rate_hca"] = rates.values()
    del config["partial_rotary_factor"]
    if rope["rope_type"] == "yarn":
        config["rope_scaling"] = {key: rope[key] for key in YARN if key != "rope_type"} | {"type": "yarn"}
    (folder / "config.json").write_text(json.dumps({**config, **(changes or {})}))
    return folder


FP8 = r"attn\.(wq_a|wq_b|wkv|wo_a|wo_b|indexer\.wq_b)\.weight|shared_experts\.w\d\.weight"
QUANTIZATION = {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "activation_scheme": "dynamic",
                "weight_block_size": [128, 128]}  # fmt: skip
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def save_hub_quantized(witness: Witness, folder: Path) -> Witness:
    """As on the hub: FP8 in blocks, experts of four bits, the rest BF16 or float32; the witness of what it holds."""
    import torch
    from safetensors.torch import load_file, save_file

    save_hub(witness, folder, {"quantization_config": QUANTIZATION, "expert_dtype": "fp4"})
    stored, held = dict[str, Any](), dict[str, Any]()
    for name, tensor in load_file(folder / "model.safetensors").items():
        scale = name.removesuffix("weight") + "scale"
        if re.search(FP8, name):
            stored[name], stored[scale], held[name] = _fp8(tensor)
        elif ".ffn.experts." in name:
            stored[name], stored[scale], held[name] = _fp4(tensor)
        elif tensor.ndim == 2 and tensor.is_floating_point() and not name.startswith("hc_") and ".hc_" not in name:
            stored[name] = tensor.to(torch.bfloat16)
            held[name] = stored[name].float()
        else:
            stored[name] = held[name] = tensor
    save_file(stored, folder / "model.safetensors")
    plain = save_hub(witness, folder.with_name(f"{folder.name}-plain"))
    save_file(held, plain / "model.safetensors")
    kind = type(witness.model)
    return Witness(witness.arch, kind.from_pretrained(plain, dtype=torch.float32, attn_implementation="eager").eval())


def _fp8(x: Any) -> tuple[Any, Any, Any]:
    """e4m3 codes, the exponents of their blocks of 128 x 128, and the numbers they stand for."""
    import torch

    rows, columns = (-(-size // 128) for size in x.shape)
    whole = torch.zeros(rows * 128, columns * 128)
    whole[: x.shape[0], : x.shape[1]] = x
    largest = whole.view(rows, 128, columns, 128).abs().amax((1, 3))
    scale = torch.exp2(torch.ceil(torch.log2(largest / 448)))
    spread = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[: x.shape[0], : x.shape[1]]
    codes = (x / spread).to(torch.float8_e4m3fn)
    return codes, scale.to(torch.float8_e8m0fnu), codes.float() * spread


def _fp4(x: Any) -> tuple[Any, Any, Any]:
    """E2M1 codes, two a byte, the lower nibble first; the exponents of groups of 32; the numbers they stand for."""
    import torch

    groups = x.numpy().reshape(x.shape[0], -1, 32)
    scale = np.exp2(np.ceil(np.log2(np.abs(groups).max(-1, keepdims=True) / 6)))
    codes = np.abs((groups / scale)[..., None] - _E2M1).argmin(-1).reshape(x.shape).astype(np.uint8)
    held = (_E2M1[codes].reshape(groups.shape) * scale).reshape(x.shape).astype(np.float32)
    packed = (codes[:, ::2] | codes[:, 1::2] << 4).view(np.int8)
    exponents = torch.from_numpy(scale[..., 0].astype(np.float32)).to(torch.float8_e8m0fnu)
    return torch.from_numpy(packed), exponents, torch.from_numpy(held)
