"""Four-bit floats of every packing: what their tensors must be, MXFP4 of gpt-oss, and NVFP4 in GGUF."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tapeout.compiler.checkpoints.base import Checkpoint, TensorInfo
from tapeout.compiler.checkpoints.quantized import ACTIVATIONS, Weights, read
from tapeout.compiler.formats import CARRIERS
from tapeout.compiler.formats.iq import DECODERS
from tapeout.compiler.recipes import Recipe, Unpack
from tapeout.runtime.errors import TapeoutError

_GROUPS = {"mxfp4": 32, "nvfp4": 16}


def mxfp4_weight(weights: Weights, codes: TensorInfo, scales: TensorInfo) -> Unpack:
    """Codes [N, K/2] under one exponent for each 32 elements."""
    rows, k = _check_codes(weights, codes, "mxfp4")
    weights.check_shape(scales, (rows, k // 32), f"groups of 32 over {[rows, k]}")
    return Unpack("mxfp4", "mxfp4", read(codes), read(scales))


def nvfp4_weight(weights: Weights, module: str, codes: TensorInfo, packing: str, tensor_scale: str) -> Unpack:
    """Codes [N, K/2] under an e4m3 scale for each 16 elements, and one for all, which ``packing`` says how to use."""
    rows, k = _check_codes(weights, codes, "nvfp4")
    scales = weights.companion(module, ".weight_scale", codes, ("e4m3",))
    weights.check_shape(scales, (rows, k // 16), f"groups of 16 over {[rows, k]}")
    whole = weights.companion(module, tensor_scale, codes, ("f32",))
    if whole.shape not in ((), (1,), (1, 1)):
        weights.check_shape(whole, (1,), "nvfp4 weights")
    return Unpack(packing, "nvfp4", read(codes), read(scales), tensor_scale=read(whole))


def _check_codes(weights: Weights, codes: TensorInfo, format: str) -> tuple[int, int]:
    """Rows and columns of the weight."""
    if len(codes.shape) != 2:
        weights.refuse(f"tensor {codes.name!r} has shape {list(codes.shape)}; {format} weights are matrices")
    rows, k = codes.shape[0], 2 * codes.shape[1] // CARRIERS[codes.format].block
    if k % 32:
        raise TapeoutError(
            f"{codes.file}: tensor {codes.name!r} has rows of {k} elements, which are not whole blocks of 32 as "
            f"{format} has them here ({_GROUPS[format]} share a scale)"
        )
    return rows, k


class Mxfp4(Weights):
    """Experts of quant_method mxfp4 (gpt-oss): ``X_blocks`` u8 [E, N, K/32, 16] and ``X_scales`` u8 [E, N, K/32].

    The low nibble of a byte is the even element. A stack becomes one matrix [E * N, K], rows as they are: those of
    ``gate_up_proj`` take turns between gate and up.
    """

    def __init__(self, checkpoint: Checkpoint, config: Mapping[str, Any]) -> None:
        super().__init__(checkpoint, config)
        self.plain = self.names("modules_to_not_convert", regular=True)

    def find(self, name: str) -> Recipe | None:
        """Packed experts by the name of their plain tensor, and whatever is plain."""
        codes = self.tensors.get(name + "_blocks")
        if codes is None:
            return super().find(name)
        if name in self.tensors:
            self.refuse(f"there is a tensor {name!r} beside {codes.name!r}; one of both must go")
        self.check_excluded(name, codes, self.plain)
        return self._experts(name, codes)

    def _experts(self, name: str, codes: TensorInfo) -> Unpack:
        if codes.format != "u8" or len(codes.shape) != 4 or codes.shape[-1] != 16:
            self.refuse(
                f"tensor {codes.name!r} is {codes.format} {list(codes.shape)}; blocks of mxfp4 are u8 [E, N, K/32, 16]"
            )
        scales = self.companion(name, "_scales", codes, ("u8", "e8m0"))
        self.check_shape(scales, codes.shape[:3], f"blocks {list(codes.shape)}")
        return Unpack("mxfp4-blocks", "mxfp4", read(codes), read(scales))


class GgufWeights(Weights):
    """Tensors of a GGUF: NVFP4 ones may have a scale each, or one for each matrix of a stack, in ``X.scale``.

    Types without a format here (``formats.iq``) are read as float32 numbers.
    """

    packed_suffixes = (".weight",)
    spares: Mapping[str, str] = {".input_scale": ACTIVATIONS}

    def unpack(self, module: str, codes: TensorInfo) -> Unpack:
        """NVFP4, the one type whose numbers may follow from two tensors, or what is read as floats."""
        if codes.format in DECODERS:
            return Unpack("gguf-floats", "f32", read(codes), None)
        whole = self.tensors.get(module + ".scale")
        if whole is not None:
            one = whole.shape in ((), (1,))
            if whole.format != "f32" or not (one or whole.shape == codes.shape[:-2]):
                raise TapeoutError(
                    f"{whole.file}: tensor {whole.name!r} is {whole.format} {list(whole.shape)}; the scale of NVFP4 is "
                    f"one f32, or one for each of the matrices of {list(codes.shape)}"
                )
        return Unpack("gguf-nvfp4", "nvfp4", read(codes), None, tensor_scale=read(whole) if whole else None)
