"""Kimi-K2.5 as it is published: bfloat16 attention, and experts in INT4 groups of 32 by compressed-tensors."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import packed
import pytest
import torch
import witness_latent
from safetensors.torch import load_file, save_file
from test_families import TOLERANCE, build, decoded_logits, relative_error
from witness import Witness, kl_divergence, token_ids

from tapeout.compiler.spec import Quantization
from tapeout.runtime import TapeoutError, load

EXPERT = re.compile(r"language_model\.model\.layers\.(\d+)\.mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight")
IGNORE = ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"]


def write(reference: Witness, folder: Path) -> Witness:
    """The checkpoint; answers with the witness of the weights that it holds."""
    held, pack = copy.deepcopy(reference.model), packed.int4_packer(32, False, torch.bfloat16)
    reference.save_hf(folder)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if EXPERT.fullmatch(name)]:
        found = EXPERT.fullmatch(name)
        assert found is not None
        layer, expert, part = int(found[1]), int(found[2]), found[3]
        stored, values = pack(tensors.pop(name).float().numpy())
        tensors |= {name.removesuffix("weight") + each: tensor for each, tensor in stored.items()}
        experts: Any = held.model.layers[layer].mlp.experts
        width = experts.down_proj.shape[2]
        rows = {"gate": slice(0, width), "up": slice(width, None), "down": slice(None)}[part]
        merged = experts.down_proj if part == "down" else experts.gate_up_proj
        merged.data[expert, rows] = torch.from_numpy(values)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    raw = json.loads((folder / "config.json").read_text())
    quantization = packed.config(packed.int4_args(32, False), "pack-quantized", ignore=IGNORE)
    raw["text_config"]["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(raw))
    return Witness("deepseek2", held)


def test_experts_keep_their_codes(tmp_path: Path) -> None:
    reference, ids = witness_latent.kimi(), token_ids(80)
    held = write(reference, tmp_path / "hf")
    with load(build(tmp_path / "hf", tmp_path / "exact", Quantization(activations="f32"))) as model:
        assert relative_error(model.logits(ids), held.logits(ids)) <= TOLERANCE
    with load(build(tmp_path / "hf", tmp_path / "artifact")) as model:
        formats = {weight["name"]: weight["format"] for weight in model.plan["weights"]}
        both = (model.logits(ids), decoded_logits(model, ids))
    experts = {name: format for name, format in formats.items() if ".experts." in name and "bias" not in name}
    assert set(experts.values()) == {"int4_g32"} and len(experts) == 4
    assert {format for name, format in formats.items() if name not in experts} == {"f32"}
    assert max(kl_divergence(held.logits(ids), logits).mean() for logits in both) <= 5e-3


def test_an_expert_missing_on_one_layer(tmp_path: Path) -> None:
    write(witness_latent.kimi(), tmp_path / "hf")
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    name = "language_model.model.layers.2.mlp.experts.5.up_proj"
    for suffix in ("weight_packed", "weight_scale", "weight_shape"):
        del tensors[f"{name}.{suffix}"]
    save_file(tensors, tmp_path / "hf" / "model.safetensors")
    with pytest.raises(TapeoutError) as caught:
        build(tmp_path / "hf", tmp_path / "artifact")
    assert str(caught.value) == (
        f"{tmp_path / 'hf'}: tensor model.layers.2.mlp.experts.5.up_proj.weight is missing; "
        "the family deepseek needs it with shape [32, 64]"
    )
