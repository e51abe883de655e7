"""The independent witness on the card: an artifact's weights, unpacked with torch, in a transformers Llama.

Unpacks by what the docs say of the layouts (compiler/layouts.py, "planes"), with none of the compiler's code.
"""

from __future__ import annotations

import json
import mmap
from pathlib import Path
from typing import Any

import torch

Tensor = torch.Tensor

WEIGHTS = "weights/rank0.safetensors"
FLOATS = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


class Weights:
    """The weights of an artifact by checkpoint name, on a device."""

    def __init__(self, folder: Path, recipe: dict[str, Any], device: str) -> None:
        self.device, self.recipe = device, recipe
        with (folder / WEIGHTS).open("rb") as file:
            self.memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        self.start = 8 + int.from_bytes(self.memory[:8], "little")

    def bytes(self, weight: dict[str, Any]) -> Tensor:
        """The raw bytes of one weight."""
        raw = torch.frombuffer(self.memory, dtype=torch.uint8, count=weight["bytes"],
                               offset=self.start + weight["offset"])  # fmt: skip
        return raw.to(self.device)

    def tensors(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Every checkpoint tensor, dequantized, in ``dtype``."""
        found: dict[str, Tensor] = {}
        for weight in self.recipe["weights"]:
            if "tensors" not in weight:
                continue
            values = unpack(self.bytes(weight), weight).to(dtype)
            row = 0
            for name, rows in weight["tensors"]:
                found[name] = values[row : row + rows]
                row += rows
        return found


def unpack(raw: Tensor, weight: dict[str, Any]) -> Tensor:
    """A weight's values, [N, K] or [K]: exact in float32 up to its rounding of products."""
    shape = weight["shape"]
    if "planes" in weight:
        return unpack_planes(raw, weight["planes"])
    dtype = FLOATS[weight["format"]]
    count = torch.Size(shape).numel()
    return raw[: count * dtype.itemsize].view(dtype).reshape(shape)


def unpack_planes(raw: Tensor, planes: dict[str, Any]) -> Tensor:
    """Layout planes to float32 [rows, k]."""
    rows, k, scales = planes["rows"], planes["k"], planes["scales"]
    codes = sum(_codes(raw, planes, code) for code in planes["codes"])
    assert isinstance(codes, Tensor)
    table = _matrix(raw, scales["offset"], scales["rows"], scales["row_bytes"])
    supers, groups = -(-k // planes["super"]), -(-k // planes["group"])
    d_type = FLOATS[planes["d_type"]]
    d = _field(table, scales["d"], supers, d_type)
    if planes["element"] == "e4m3":
        values = codes.to(torch.uint8).view(torch.float8_e4m3fn).float()
        tall = -(-rows // scales["rows"]) if scales["rows"] > 1 else rows
        tall = 128 if scales["rows"] > 1 else tall
        d = d.repeat_interleave(tall, 0)[:rows].repeat_interleave(planes["super"], 1)[:, :k]
        return values * d
    zero: Tensor | float = float(planes["zero"])
    if scales["zeros"] is not None:
        zero = _spread(_field(table, scales["zeros"], groups, torch.uint8), planes["group"])
    signed = torch.int8 if scales["dmin"] is None else torch.uint8
    scale = _spread(d, planes["super"])
    if scales["sub"] is not None:
        scale = scale * _spread(_field(table, scales["sub"], groups, signed), planes["group"])
    values = scale * (codes - zero)
    if scales["dmin"] is not None:
        low = _spread(_field(table, scales["dmin"], supers, torch.float16), planes["super"])
        if scales["submin"] is not None:
            low = low * _spread(_field(table, scales["submin"], groups, torch.uint8), planes["group"])
        values = values + planes["minimum_sign"] * low
    return values


def _matrix(raw: Tensor, offset: int, rows: int, row_bytes: int) -> Tensor:
    return raw[offset : offset + rows * row_bytes].reshape(rows, row_bytes)


def _field(table: Tensor, at: int, count: int, dtype: torch.dtype) -> Tensor:
    size = dtype.itemsize * count
    return table[:, at : at + size].contiguous().view(dtype).float()


def _spread(values: Tensor, times: int) -> Tensor:
    return values.repeat_interleave(times, 1)


def _codes(raw: Tensor, planes: dict[str, Any], plane: dict[str, Any]) -> Tensor:
    """One plane's contribution to the codes, float32 [rows, k]: quad q of a line of 32 is k = 4q .. 4q + 3."""
    rows, k, bits = planes["rows"], planes["k"], plane["bits"]
    data = _matrix(raw, plane["offset"], rows, plane["row_bytes"])[:, : k * bits // 8]
    if bits == 8:
        return data.float() if planes["element"] == "e4m3" else data.contiguous().view(torch.int8).float()
    words = data.reshape(rows, k // 32, bits, 4)  # [row][line][word][byte]
    values = torch.empty((rows, k // 32, 8, 4), dtype=torch.float32, device=raw.device)
    for quad in range(8):
        word, shift = quad % bits, bits * (quad // bits)
        values[:, :, quad] = ((words[:, :, word] >> shift) & (2**bits - 1)).float()
    return values.reshape(rows, k) * 2 ** plane["low"]


def llama(folder: Path, recipe_path: Path, dtype: torch.dtype, device: str = "cuda") -> Any:
    """A transformers Llama that holds an artifact's weights, with eager attention."""
    from transformers import LlamaConfig, LlamaForCausalLM

    recipe = json.loads(recipe_path.read_text())
    config = LlamaConfig(**{key: value for key, value in recipe["config"].items() if key != "architectures"})
    config._attn_implementation = "eager"
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    state = Weights(folder, recipe, device).tensors(dtype)
    if config.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    missing, unexpected = model.load_state_dict(state, strict=False, assign=True)
    assert not missing and not unexpected, (missing, unexpected)
    with torch.device(device):
        model.model.rotary_emb = type(model.model.rotary_emb)(config)  # its buffers were on the meta device
    return model.eval()


@torch.no_grad()
def logits(model: Any, ids: list[int]) -> Tensor:
    """Logits after every position, float64 [len(ids), vocab]."""
    held = torch.tensor([ids], device=next(model.parameters()).device)
    return model(held, use_cache=False).logits[0].double()
