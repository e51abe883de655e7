"""Quantized checkpoints, written with compressed-tensors itself and, for GPTQ and AWQ, by their packing written out.

``weights`` are {module: (tensors, values)}: the tensors as a file holds them and the float32 values they stand for.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import torch
from compressed_tensors.compressors.mxfp4 import MXFP4PackedCompressor
from compressed_tensors.compressors.naive_quantized import FloatQuantizationCompressor
from compressed_tensors.compressors.nvfp4 import NVFP4PackedCompressor
from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8, unpack_fp4_from_uint8
from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import dequantize
from safetensors.torch import save_file
from witness import Witness

Floats = npt.NDArray[np.float32]
Tensors = dict[str, torch.Tensor]
Packed = tuple[Tensors, Floats]
Pack = Callable[[Floats], Packed]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


# ---- compressed-tensors ------------------------------------------------------------------------------------------


def int4_args(group: int, zeros: bool) -> dict[str, Any]:
    """``weights`` of a config group; ``group`` -1 is one scale a row."""
    strategy = {"strategy": "channel"} if group == -1 else {"strategy": "group", "group_size": group}
    return {"num_bits": 4, "type": "int", "symmetric": not zeros, **strategy}


def config(weights: Mapping[str, Any], format: str, **changes: Any) -> dict[str, Any]:
    """A quantization_config of one group."""
    group = {"targets": ["Linear"], "weights": dict(weights), "input_activations": None, "output_activations": None}
    fields = {"quant_method": "compressed-tensors", "format": format, "quantization_status": "compressed"}
    return {**fields, "config_groups": {"group_0": group}, "ignore": ["lm_head"], **changes}


def pack_quantized(codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None, group: int) -> Packed:
    """int8 codes [N, K] -8..7, scales and zero points [N, groups], packed and decoded by compressed-tensors."""
    tensors = {"weight_packed": pack_to_int32(codes, 4), "weight_scale": scale}
    tensors["weight_shape"] = torch.tensor(codes.shape)
    if zero is not None:
        tensors["weight_zero_point"] = pack_to_int32(zero, 4, packed_dim=0)
    return tensors, decompressed(tensors, group, scale.float()).numpy()


def decompressed(tensors: Tensors, group: int, scale: torch.Tensor) -> torch.Tensor:
    """What compressed-tensors makes of packed tensors under ``scale``, in the type of the scale."""
    args = QuantizationArgs(**int4_args(group, "weight_zero_point" in tensors))
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    return PackedQuantizationCompressor.decompress({**tensors, "weight_scale": scale}, scheme)["weight"]


def int4_packer(group: int, zeros: bool, dtype: torch.dtype) -> Pack:
    """Absmax (or range) of each group, rounded to nearest."""

    def pack(values: Floats) -> Packed:
        codes, scale, zero = _affine(values, group, zeros, dtype)
        centred = (codes - 8).to(torch.int8)
        return pack_quantized(centred, scale, (zero - 8).to(torch.int8) if zeros else None, group)

    return pack


def _affine(values: Floats, group: int, zeros: bool, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Codes 0..15 [N, K], scales and zero points [N, groups]."""
    x = torch.from_numpy(values)
    size = x.shape[1] if group == -1 else group
    x = x.reshape(len(x), -1, size)
    low, high = x.amin(-1).clamp(max=0), x.amax(-1).clamp(min=0)
    scale = (((high - low) / 15) if zeros else x.abs().amax(-1) / 7).to(dtype)
    zero = (-low / scale.float()).round().clamp(1, 15) if zeros else torch.full_like(low, 8)
    codes = ((x / scale.float()[..., None]).round() + zero[..., None]).clamp(0, 15)
    return codes.reshape(len(x), -1).to(torch.int32), scale, zero.to(torch.int32)


def fp8_packer(blocks: bool, dtype: torch.dtype, name: str = "weight_scale") -> Pack:
    """absmax / 448 of the tensor or of each 128 x 128 block; decoded by compressed-tensors."""

    def pack(values: Floats) -> Packed:
        x = torch.from_numpy(values)
        tall, wide = -(-x.shape[0] // 128), -(-x.shape[1] // 128)
        if blocks:
            whole = torch.zeros(tall * 128, wide * 128)
            whole[: x.shape[0], : x.shape[1]] = x
            scale = (whole.reshape(tall, 128, wide, 128).abs().amax((1, 3)) / 448).to(dtype)
        else:
            scale = (x.abs().amax().reshape(1) / 448).to(dtype)
        codes = (x / _spread(scale.float(), x.shape)).clamp(-448, 448).to(torch.float8_e4m3fn)
        return fp8(codes, scale, blocks, name)

    return pack


def fp8_args(blocks: bool) -> dict[str, Any]:
    """``weights`` of a config group."""
    strategy = {"strategy": "block", "block_structure": [128, 128]} if blocks else {"strategy": "tensor"}
    return {"num_bits": 8, "type": "float", "symmetric": True, **strategy}


def fp8(codes: torch.Tensor, scale: torch.Tensor, blocks: bool, name: str = "weight_scale") -> Packed:
    """e4m3 codes, decoded by compressed-tensors."""
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**fp8_args(blocks)))
    state = {"weight": codes, "weight_scale": scale.float()}
    return {"weight": codes, name: scale}, FloatQuantizationCompressor.decompress(state, scheme)["weight"].numpy()


def fp8_rows(codes: torch.Tensor, scale: torch.Tensor) -> Packed:
    """e4m3 codes under a scale a row [N, 1], decoded by compressed-tensors."""
    args = QuantizationArgs(num_bits=8, type="float", strategy="channel")
    state = {"weight": codes, "weight_scale": scale.float()}
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    values = FloatQuantizationCompressor.decompress(state, scheme)["weight"].numpy()
    return {"weight": codes, "weight_scale": scale}, values


def int8(codes: torch.Tensor, scale: torch.Tensor, words: bool) -> Packed:
    """int8 codes [N, K] under 16-bit scales [N, groups], as bytes or in words, decoded by compressed-tensors."""
    group = codes.shape[1] // scale.shape[1]
    args = QuantizationArgs(**int8_args(group if scale.shape[1] > 1 else -1))
    tensors = {"weight_packed": pack_to_int32(codes, 8)} if words else {"weight": codes}
    if words:
        tensors["weight_shape"] = torch.tensor(codes.shape)
    values = dequantize(codes, scale.float(), args=args, dtype=torch.float32).numpy()
    return {**tensors, "weight_scale": scale}, values


def int8_packer(group: int) -> Pack:
    """Absmax / 127 of each group, rounded to nearest; bfloat16 scales."""

    def pack(values: Floats) -> Packed:
        x = torch.from_numpy(values).reshape(len(values), -1, group)
        scale = (x.abs().amax(-1) / 127).to(torch.bfloat16)
        codes = (x / scale.float()[..., None]).round().clamp(-128, 127).reshape(values.shape)
        return int8(codes.to(torch.int8), scale, words=True)

    return pack


def int8_args(group: int) -> dict[str, Any]:
    """``weights`` of a config group; ``group`` -1 is one scale a row."""
    return {**int4_args(group, False), "num_bits": 8}


def fp4_args(format: str) -> dict[str, Any]:
    """``weights`` of a config group of nvfp4 or mxfp4."""
    strategy = (
        {"strategy": "tensor_group", "group_size": 16} if format == "nvfp4" else {"strategy": "group", "group_size": 32}
    )
    return {"num_bits": 4, "type": "float", "symmetric": True, **strategy}


def fp4_library(tensors: Tensors, format: str) -> torch.Tensor:
    """What compressed-tensors makes of packed four-bit floats, in its type, bfloat16."""
    compressor = NVFP4PackedCompressor if format == "nvfp4" else MXFP4PackedCompressor
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**fp4_args(format)))
    return compressor.decompress(tensors, scheme)["weight"]


def fp4_values(tensors: Tensors) -> Floats:
    """The same for nvfp4 with every product in float32."""
    packed = tensors["weight_packed"]
    codes = unpack_fp4_from_uint8(packed, len(packed), 2 * packed.shape[1], torch.float32)
    args = QuantizationArgs(**fp4_args("nvfp4"))
    scales = tensors["weight_scale"].float(), tensors["weight_global_scale"]
    return dequantize(codes, scales[0], args=args, dtype=torch.float32, global_scale=scales[1]).numpy()


def nvfp4_packer(multiplier: bool) -> Pack:
    """absmax / (448 * 6) of the tensor and absmax / 6 of each 16, with ModelOpt's multiplier or the divisor."""

    def pack(values: Floats) -> Packed:
        x = torch.from_numpy(values)
        divisor = 448 * 6 / x.abs().amax().reshape(1)
        whole = 1 / divisor
        groups = x.reshape(len(x), -1, 16)
        scale = (groups.abs().amax(-1) / 6 * divisor).to(torch.float8_e4m3fn)
        step = scale.float() * whole
        codes = pack_fp4_to_uint8(_nearest_e2m1(groups / step[..., None]).reshape(x.shape))
        held = unpack_fp4_from_uint8(codes, *x.shape, torch.float32).reshape(groups.shape) * step[..., None]
        if multiplier:
            return {"weight": codes, "weight_scale": scale, "weight_scale_2": whole[0]}, held.reshape(x.shape).numpy()
        tensors = {"weight_packed": codes, "weight_scale": scale, "weight_global_scale": divisor}
        return tensors, held.reshape(x.shape).numpy()

    return pack


def _nearest_e2m1(values: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(values.numpy().astype(ml_dtypes.float4_e2m1fn).astype(np.float32))


def _spread(scale: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    if scale.ndim < 2:
        return scale
    return scale.repeat_interleave(128, 0)[: shape[0]].repeat_interleave(128, 1)[:, : shape[1]]


# ---- GPTQ and AWQ, written out -----------------------------------------------------------------------------------


def words(codes: npt.NDArray[np.int64], order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """int32 [rows, columns / 8]: nibble i of a word, from the low ones up, is column ``order[i]`` of its eight."""
    out = np.zeros((codes.shape[0], codes.shape[1] // 8), np.int64)
    for nibble, column in enumerate(order):
        out |= codes[:, column::8] << 4 * nibble
    return torch.from_numpy(out.astype(np.uint32).view(np.int32))


def gptq(
    codes: npt.NDArray[np.int64],
    scale: torch.Tensor,
    zero: npt.NDArray[np.int64],
    version: int = 1,
    order: npt.NDArray[np.int64] | None = None,
) -> Packed:
    """Codes 0..15 [N, K]; scales and zero points [N, groups]. Version 1 stores the zero points less one.

    ``order`` is the group of each column, if groups are not neighbours.
    """
    group = codes.shape[1] // scale.shape[1]
    tensors = {
        "qweight": words(codes).T.contiguous(),
        "qzeros": words(zero.T - (version == 1)),
        "scales": scale.T.contiguous(),
        "g_idx": torch.arange(codes.shape[1], dtype=torch.int32) // group,
    }
    if order is None:
        return tensors, _values(codes, scale, zero)
    tensors["g_idx"] = torch.from_numpy(order.astype(np.int32))
    exact = (codes - zero[:, order]) * scale.double().numpy()[:, order]
    return tensors, exact.astype(np.float32)


def awq(codes: npt.NDArray[np.int64], scale: torch.Tensor, zero: npt.NDArray[np.int64]) -> Packed:
    """Codes 0..15 [N, K]; scales and zero points [N, groups]."""
    tensors = {"qweight": words(codes.T, AWQ_ORDER), "qzeros": words(zero.T, AWQ_ORDER)}
    return {**tensors, "scales": scale.T.contiguous()}, _values(codes, scale, zero)


def _values(codes: npt.NDArray[np.int64], scale: torch.Tensor, zero: npt.NDArray[np.int64]) -> Floats:
    group = codes.shape[1] // scale.shape[1]
    exact = (codes - zero.repeat(group, 1)) * scale.double().numpy().repeat(group, 1)
    assert (exact == exact.astype(np.float32)).all()
    return exact.astype(np.float32)


def transposed_packer(kind: str, group: int, zeros: bool) -> Pack:
    """Range of each group, rounded to nearest; float16 scales."""

    def pack(values: Floats) -> Packed:
        codes, scale, zero = _affine(values, group, zeros, torch.float16)
        arguments = codes.numpy().astype(np.int64), scale, zero.numpy().astype(np.int64)
        return awq(*arguments) if kind == "awq" else gptq(*arguments, version=2 if kind == "gptq_v2" else 1)

    return pack


def act_order_packer(group: int) -> Pack:
    """GPTQ whose groups are not of neighbours: ``g_idx`` is out of order, by the same rule for one width."""

    def pack(values: Floats) -> Packed:
        columns = np.random.default_rng(values.shape[1]).permutation(values.shape[1])
        sorted_codes, scale, zero = _affine(values[:, columns], group, True, torch.float16)
        codes, order = np.empty(values.shape, np.int64), np.empty(values.shape[1], np.int64)
        codes[:, columns], order[columns] = sorted_codes.numpy(), np.arange(values.shape[1]) // group
        return gptq(codes, scale, zero.numpy().astype(np.int64), order=order)

    return pack


# ---- files -------------------------------------------------------------------------------------------------------


def write(folder: Path, tensors: Tensors, raw: Mapping[str, Any]) -> Path:
    """A folder of one safetensors file and a config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: each.contiguous() for name, each in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


def write_model(reference: Witness, folder: Path, quantization: Mapping[str, Any], pack: Pack) -> Witness:
    """A witness with every Linear but lm_head packed; answers with the witness of what the file holds."""
    held = copy.deepcopy(reference.model)
    reference.save_hf(folder)
    tensors: Tensors = {}
    for name, parameter in held.state_dict().items():
        if not name.endswith("_proj.weight"):
            tensors[name] = parameter
            continue
        stored, values = pack(parameter.numpy())
        tensors |= {name.removesuffix("weight") + part: tensor for part, tensor in stored.items()}
        parameter.copy_(torch.from_numpy(values))
    raw = json.loads((folder / "config.json").read_text())
    write(folder, tensors, {**raw, "quantization_config": dict(quantization)})
    return Witness(reference.arch, held)
