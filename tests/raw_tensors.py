"""Safetensors folders of any dtype, written byte by byte, and what a quantized Llama-shaped layer holds."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Raw = Mapping[str, tuple[str, tuple[int, ...], bytes | None]]
SIZES = {"F32": 4, "BF16": 2, "F16": 2, "I32": 4, "I64": 8, "F8_E4M3": 1, "F8_E8M0": 1, "U8": 1, "I8": 1}


def write_raw(folder: Path, tensors: Raw, config: Mapping[str, Any]) -> Path:
    """A folder with one shard of {name: (dtype, shape, bytes or None for zeros)} and this config.json."""
    header: dict[str, Any] = {}
    data = b""
    for name, (dtype, shape, given) in tensors.items():
        content = bytes(math.prod(shape) * SIZES[dtype]) if given is None else given
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    text = json.dumps(header).encode()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def int4_group(group: int = 32, **changes: Any) -> dict[str, Any]:
    """A config group of symmetric 4-bit integers; ``changes`` go into its weights."""
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": group, **changes}
    return {"targets": ["Linear"], "weights": weights}


def pack_quantized(group: int = 32, **changes: Any) -> dict[str, Any]:
    """A quantization_config of compressed-tensors; ``changes`` go into its top level."""
    fields = {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"]}
    return {**fields, "config_groups": {"group_0": int4_group(group)}, **changes}


def fp4_quantized(format: str, strategy: str, group: int, **weights: Any) -> dict[str, Any]:
    """A quantization_config of compressed-tensors for four-bit floats."""
    fields = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": strategy, "group_size": group, **weights}
    top = {"quant_method": "compressed-tensors", "format": format}
    return {**top, "config_groups": {"group_0": {"targets": ["Linear"], "weights": fields}}}


def float_quantized(**weights: Any) -> dict[str, Any]:
    """A quantization_config of compressed-tensors for e4m3 weights under one scale."""
    group = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": "tensor", **weights}}
    fields = {"quant_method": "compressed-tensors", "format": "float-quantized"}
    return {**fields, "config_groups": {"group_0": group}}
