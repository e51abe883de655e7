"""Tiny random gpt-oss models: their gate and up take turns in transformers, and their experts may be MXFP4."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import witness
from witness import Witness

YARN = {**witness.ROPE["yarn"], "rope_theta": 150000.0, "truncate": False}


@dataclass(frozen=True)
class GptOssWitness(Witness):
    """See Witness."""

    def write_gguf(self, path: Path, formats: Mapping[str, str] | None = None, *, tokenizer: bool = True) -> Witness:
        """See Witness."""
        import gguf

        held = copy.deepcopy(self.model)
        writer = gguf.GGUFWriter(path, self.arch)
        witness.write_metadata(writer, self.arch, self.model.config, tokenizer)
        names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GPT_OSS, self.model.config.num_hidden_layers)
        for source, values in held.state_dict().items():
            for part, view in _parts(source, values):
                name = names.get_name(part, try_suffixes=(".weight", ".bias"))
                assert name, part
                witness.write_view(writer, name, view, formats or {})
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return Witness(self.arch, held)

    def save_mxfp4(self, folder: Path) -> Witness:
        """A folder as on the hub: experts of random MXFP4 codes, the rest bfloat16. Answers with what it holds."""
        import torch
        from safetensors.torch import load_file, save_file
        from transformers.integrations.mxfp4 import convert_moe_packed_tensors

        held = copy.deepcopy(self.model)
        rng, state = np.random.default_rng(5), held.state_dict()
        for values in state.values():
            values.copy_(values.bfloat16())
        copy.deepcopy(held).bfloat16().save_pretrained(folder)
        tensors = load_file(folder / "model.safetensors")
        for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
            count, k, rows = tensors.pop(name).shape
            blocks = torch.from_numpy(rng.integers(0, 256, (count, rows, k // 32, 16), dtype=np.uint8))
            scales = torch.from_numpy(rng.integers(120, 125, (count, rows, k // 32), dtype=np.uint8))
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            state[name].copy_(convert_moe_packed_tensors(blocks, scales))
        save_file(tensors, folder / "model.safetensors")
        config = json.loads((folder / "config.json").read_text())
        plain = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
        config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": plain}
        (folder / "config.json").write_text(json.dumps(config))
        witness.write_tokenizer(folder)
        return Witness(self.arch, held)


def _parts(source: str, values: Any) -> Iterator[tuple[str, Any]]:
    """What a GGUF calls the parts of a tensor of transformers, with each part as a view in the order of a GGUF."""
    name = source.removesuffix("_bias")
    if ".experts." not in source:
        yield f"{source}.weight" if source.endswith("sinks") else source, values
        return
    kind, stack = (".bias", values) if name != source else (".weight", values.transpose(1, 2))
    if name.endswith("gate_up_proj"):
        for turn, part in enumerate(("gate_proj", "up_proj")):
            yield name.replace("gate_up_proj", part) + kind, stack[:, turn::2]
    else:
        yield name + kind, stack


def gpt_oss(*, seed: int = 0, **sizes: Any) -> GptOssWitness:
    """A tiny GptOssForCausalLM with 2 of 5 experts and windows of 8, randomised; gate and up meet their limit."""
    import torch
    from transformers import GptOssConfig, GptOssForCausalLM

    fields = {**witness.common(), "num_hidden_layers": 4, "rms_norm_eps": 1e-3, "head_dim": 16, "sliding_window": 8,
              "num_local_experts": 5, "num_experts_per_tok": 2, "rope_parameters": YARN, **sizes}  # fmt: skip
    model = witness.randomised(GptOssForCausalLM, GptOssConfig(**fields), seed)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.experts.gate_up_proj *= 4
    return GptOssWitness("gpt-oss", model)
