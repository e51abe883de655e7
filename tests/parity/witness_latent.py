"""Tiny random models with latent attention, and how a GGUF holds them: kv_b_proj in halves, experts stacked."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import witness
from witness import Witness

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 32, "beta_slow": 1,
        "mscale": 1.0, "mscale_all_dim": 1.0}  # fmt: skip
DEFAULT = {"rope_type": "default"}


@dataclass(frozen=True)
class LatentWitness(Witness):
    """``whole`` writes a GGUF as before kv_b_proj was split; ``drafts`` adds a layer that drafts further tokens."""

    whole: bool = False
    drafts: bool = False

    def save_hf(self, folder: Path, *, sharded: bool = False) -> Path:
        """With ``drafts`` also tensors of the layer behind the last."""
        super().save_hf(folder, sharded=sharded)
        if self.drafts:
            _edit(folder, {}, self._drafts("model.layers.{}"), "")
        return folder

    def write_gguf(self, path: Path, formats: Mapping[str, str] | None = None, *, tokenizer: bool = True) -> Witness:
        """See Witness."""
        import gguf
        import torch

        held = copy.deepcopy(self.model)
        writer = gguf.GGUFWriter(path, self.arch)
        self._sizes(writer)
        witness.write_vocabulary(writer, tokenizer)
        for name, part in self._tensors(held):
            values = part.float().numpy()
            fitting = (to for glob, to in (formats or {}).items() if fnmatchcase(name, glob))
            kind = next(fitting, "F32") if values.ndim > 1 else "F32"
            if kind == "F32":
                writer.add_tensor(name, np.ascontiguousarray(values, np.float32))
                continue
            wanted = gguf.GGMLQuantizationType[kind]
            raw = witness.blocks(np.ascontiguousarray(values).reshape(-1, values.shape[-1]), wanted)
            writer.add_tensor(name, raw.reshape(*values.shape[:-1], -1), raw_dtype=wanted)
            back = gguf.quants.dequantize(raw, wanted).astype(np.float32)
            part.copy_(torch.from_numpy(back.reshape(values.shape)))
        if self.drafts:
            for name, values in self._drafts("blk.{}.nextn").items():
                writer.add_tensor(name, values)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return Witness(self.arch, held)

    def _drafts(self, at: str) -> dict[str, Any]:
        at, width = at.format(self.model.config.num_hidden_layers), self.model.config.hidden_size
        shapes = {"enorm": (width,), "hnorm": (width,), "eh_proj": (width, 2 * width)}
        return {f"{at}.{name}.weight": np.ones(shape, np.float32) for name, shape in shapes.items()}

    def _tensors(self, held: Any) -> Iterator[tuple[str, Any]]:
        """GGUF names and the parts of the model's tensors that they hold, as views."""
        import gguf

        config = held.config
        arch = gguf.MODEL_ARCH.DEEPSEEK2 if self.arch == "deepseek2" else gguf.MODEL_ARCH.GLM_DSA
        names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
        for source, values in held.state_dict().items():
            for part, view in self._parts(source, values, config):
                name = names.get_name(part, try_suffixes=(".weight", ".bias"))
                assert name, part
                yield name, view

    def _parts(self, source: str, values: Any, config: Any) -> list[tuple[str, Any]]:
        at = source.rpartition(".")[0].rpartition(".")[0]
        if source.endswith("kv_b_proj.weight") and not self.whole:
            nope, both = config.qk_nope_head_dim, config.qk_nope_head_dim + config.v_head_dim
            heads = values.view(config.num_attention_heads, both, config.kv_lora_rank)
            halves = heads[:, :nope].transpose(1, 2), heads[:, nope:]
            return [(f"{at}.{name}_b_proj.weight", half) for name, half in zip("kv", halves, strict=True)]
        if source.endswith("experts.gate_up_proj"):
            at = source.removesuffix(".gate_up_proj")
            gate, up = values.chunk(2, 1)
            return [(f"{at}.gate_proj.weight", gate), (f"{at}.up_proj.weight", up)]
        if source.endswith("experts.down_proj"):
            return [(f"{source}.weight", values)]
        if source.endswith("e_score_correction_bias"):
            return [(f"{at}.gate.e_score_correction.bias", values)]
        return [(source, values)]

    def _sizes(self, writer: Any) -> None:
        config, arch = self.model.config, self.arch
        c, r, n, v = config.kv_lora_rank, config.qk_rope_head_dim, config.qk_nope_head_dim, config.v_head_dim
        attention = {"head_count": config.num_attention_heads, "kv_lora_rank": c}
        if self.whole:
            attention |= {"head_count_kv": config.num_attention_heads, "key_length": n + r, "value_length": v}
        else:
            attention |= {"head_count_kv": 1, "key_length": c + r, "value_length": c, "key_length_mla": n + r,
                          "value_length_mla": v}  # fmt: skip
        if config.q_lora_rank:
            attention["q_lora_rank"] = config.q_lora_rank
        if arch != "deepseek2":
            attention |= {"indexer.head_count": config.index_n_heads, "indexer.key_length": config.index_head_dim,
                          "indexer.top_k": config.index_topk}  # fmt: skip
        sizes = {f"attention.{key}": value for key, value in attention.items()} | {
            "context_length": config.max_position_embeddings,
            "embedding_length": config.hidden_size,
            "block_count": config.num_hidden_layers + self.drafts,
            "feed_forward_length": config.intermediate_size,
            "rope.dimension_count": r,
            "vocab_size": config.vocab_size,
            "leading_dense_block_count": config.first_k_dense_replace,
            "expert_count": config.n_routed_experts,
            "expert_used_count": config.num_experts_per_tok,
            "expert_shared_count": config.n_shared_experts,
            "expert_feed_forward_length": config.moe_intermediate_size,
            "expert_gating_func": 1 if "V2" in type(self.model).__name__ else 2,
        }
        if config.n_group and config.n_group > 1:
            sizes |= {"expert_group_count": config.n_group, "expert_group_used_count": config.topk_group}
        if self.drafts:
            sizes["nextn_predict_layers"] = 1
        for key, value in sizes.items():
            writer.add_uint32(f"{arch}.{key}", value)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        writer.add_expert_weights_norm(bool(config.norm_topk_prob))
        _rope(writer, arch, config.rope_parameters)


def _rope(writer: Any, arch: str, rope: Mapping[str, Any]) -> None:
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "yarn":
        writer.add_string(f"{arch}.rope.scaling.type", "yarn")
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_float32(f"{arch}.rope.scaling.yarn_log_multiplier", 0.1 * rope["mscale_all_dim"])


class KimiWitness(LatentWitness):
    """DeepSeek-V3 as the text part of Kimi-K2.5, beside a tensor of its vision part."""

    def save_hf(self, folder: Path, *, sharded: bool = False) -> Path:
        """Hub names: ``language_model.`` before all of it, the config under text_config."""
        super().save_hf(folder, sharded=sharded)
        text = json.loads((folder / "config.json").read_text())
        whole = {"architectures": ["KimiK25ForConditionalGeneration"], "text_config": text | {"architectures": None}}
        vision = {"vision_tower.patch_embed.proj.weight": np.ones((4, 4), np.float32),
                  "mm_projector.proj.0.weight": np.ones((4, 4), np.float32)}  # fmt: skip
        _edit(folder, whole, vision, "language_model.")
        return folder


def _edit(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Any], prefix: str) -> None:
    """Adds tensors to a checkpoint of one file, puts a prefix before the names of the others, replaces the config."""
    from safetensors.numpy import load_file, save_file

    path = folder / "model.safetensors"
    held = {prefix + name: values for name, values in load_file(path).items()}
    save_file({**held, **tensors}, path)
    if config:
        (folder / "config.json").write_text(json.dumps(config))


def _sizes(**sizes: Any) -> dict[str, Any]:
    return {**witness.common(), "num_hidden_layers": 3, "num_key_value_heads": 4, "moe_intermediate_size": 32,
            "kv_lora_rank": 32, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
            "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1,
            "rms_norm_eps": 1e-3, **sizes}  # fmt: skip


_INDEX = {"index_topk": 24, "index_head_dim": 16, "index_n_heads": 32}


def deepseek_v2(*, rope: Mapping[str, Any] = YARN, seed: int = 0, whole: bool = False, **sizes: Any) -> LatentWitness:
    """A tiny DeepseekV2ForCausalLM, randomised, with two of four groups."""
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    fields = {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5}
    config = DeepseekV2Config(**_sizes(**{**fields, **sizes}), rope_parameters={**rope, "rope_theta": 1e4})
    return LatentWitness("deepseek2", _randomised(DeepseekV2ForCausalLM, config, seed), whole)


def deepseek_v2_lite() -> LatentWitness:
    """One projection of q, no groups, two shared experts."""
    return deepseek_v2(q_lora_rank=None, topk_method="greedy", n_group=None, topk_group=None, n_shared_experts=2)


def deepseek_v3(*, rope: Mapping[str, Any] = YARN, seed: int = 0, kind: type[LatentWitness] = LatentWitness,
                drafts: bool = False, **sizes: Any) -> LatentWitness:  # fmt: skip
    """A tiny DeepseekV3ForCausalLM, randomised, with two of four groups."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    fields = _sizes(**{"n_group": 4, "topk_group": 2, "num_nextn_predict_layers": int(drafts), **sizes})
    config = DeepseekV3Config(**fields, rope_parameters={**rope, "rope_theta": 1e4})
    return kind("deepseek2", _randomised(DeepseekV3ForCausalLM, config, seed), drafts=drafts)


def kimi() -> LatentWitness:
    """Kimi-K2.5: no groups, text beside vision."""
    return deepseek_v3(n_group=1, topk_group=1, kind=KimiWitness)


def deepseek_v32(*, rope: Mapping[str, Any] = YARN, seed: int = 0, **sizes: Any) -> LatentWitness:
    """A tiny DeepseekV32ForCausalLM, randomised, that attends to 24 keys."""
    from transformers import DeepseekV32Config, DeepseekV32ForCausalLM

    fields = _sizes(**{"n_group": 4, "topk_group": 2, **_INDEX, **sizes})
    config = DeepseekV32Config(**fields, rope_parameters={**rope, "rope_theta": 1e4})
    return LatentWitness("deepseek32", _randomised(DeepseekV32ForCausalLM, config, seed))


def glm_dsa(*, seed: int = 0, drafts: bool = False, **sizes: Any) -> LatentWitness:
    """A tiny GlmMoeDsaForCausalLM, randomised, whose second layer shares the selection of the first."""
    from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM

    fields = _sizes(**{"n_group": 1, "topk_group": 1, "index_topk_freq": 2, "index_skip_topk_offset": 1,
                       "num_nextn_predict_layers": int(drafts), **_INDEX, **sizes})  # fmt: skip
    config = GlmMoeDsaConfig(**fields, rope_parameters={**DEFAULT, "rope_theta": 1e4})
    return LatentWitness("glm-dsa", _randomised(GlmMoeDsaForCausalLM, config, seed), drafts=drafts)


def _randomised(kind: Any, config: Any, seed: int) -> Any:
    """As for other models, and the bias that only chooses experts, which is no parameter."""
    import torch

    model = witness.randomised(kind, config, seed)
    rng = np.random.default_rng(seed + 1)
    for name, buffer in sorted(model.named_buffers()):
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.from_numpy(0.3 * rng.standard_normal(tuple(buffer.shape)).astype(np.float32)))
    return model
