"""Checkpoints of quant_method fp8: e4m3 weights under scales of 128 x 128 blocks (DeepSeek, GLM), or one a tensor.

DeepSeek-V4 calls the scales ``X.scale``, stores them as powers of two (scale_fmt ue8m0), and has experts of four-bit
floats: i8 [N, K/2] under an exponent for each 32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tapeout.compiler.checkpoints.base import Checkpoint, TensorInfo
from tapeout.compiler.checkpoints.fp4 import mxfp4_weight
from tapeout.compiler.checkpoints.quantized import ACTIVATIONS, CACHE, Weights
from tapeout.compiler.recipes import Unpack

_OF_BLOCKS, _OF_TENSOR = (".weight_scale_inv", ".scale"), (".weight_scale",)
_FP4 = ("i8", "u8", "e2m1")


class Fp8(Weights):
    """Which weights are quantized is told by the presence of their scales; ``modules_to_not_convert`` must agree."""

    packed_suffixes = (".weight",)
    spares: Mapping[str, str] = {
        ".input_scale": ACTIVATIONS,
        ".activation_scale": ACTIVATIONS,
        ".k_scale": CACHE,
        ".v_scale": CACHE,
    }

    def __init__(self, checkpoint: Checkpoint, config: Mapping[str, Any]) -> None:
        super().__init__(checkpoint, config)
        size: Any = config.get("weight_block_size")
        if size is not None and size != [128, 128]:
            self.refuse(f"weight_block_size is {size!r:.60}; read are [128, 128], and none for one scale a tensor")
        self.fields.choice("fmt", {"e4m3": "e4m3"}, "e4m3")
        self.blocks = size is not None
        self.powers = self.fields.choice("scale_fmt", {"float": "", "ue8m0": "ue8m0"}, "float")
        self.experts = self.fields.choice("expert_dtype", {"fp8": "fp8", "fp4": "fp4", "unsaid": ""}, "unsaid")
        key = "modules_to_not_convert" if config.get("modules_to_not_convert") else "ignored_layers"
        self.plain = self.names(key, regular=True)

    @property
    def scales(self) -> tuple[str, ...]:
        """What the name of a scale may end with."""
        return _OF_BLOCKS if self.blocks else _OF_TENSOR

    def check_plain(self, module: str, info: TensorInfo) -> None:
        """A plain matrix has no scales."""
        self.check_no_scales(module, info, (".weight_scale_inv", ".weight_scale"))

    def unpack(self, module: str, codes: TensorInfo) -> Unpack:
        """e4m3 codes, or of experts E2M1 ones, and their scales, which multiply."""
        four_bits = codes.format in _FP4 and self.experts != "fp8"
        if codes.format != "e4m3" and not four_bits:
            self.refuse(
                f"tensor {codes.name!r} is {codes.format}; quantized weights of quant_method fp8 are e4m3"
                f"{'' if self.experts else ', experts of four bits i8'}"
            )
        self.check_excluded(module, codes, self.plain)
        suffix = self._suffix(module)
        if four_bits:
            return mxfp4_weight(self, codes, self.companion(module, suffix, codes, ("e8m0", "u8")))
        types = ("f32", "bf16", "f16", "e8m0", *(("u8",) if self.powers else ()))
        return self.fp8_weight(
            codes, self.companion(module, suffix, codes, types), "block" if self.blocks else "tensor"
        )

    def _suffix(self, module: str) -> str:
        """What the name of a module's scale ends with."""
        found = [suffix for suffix in self.scales if module + suffix in self.tensors]
        other = next((each for each in (*_OF_BLOCKS, *_OF_TENSOR) if module + each in self.tensors), None)
        if not found and other is not None:
            self.refuse(
                f"weight_block_size is {[128, 128] if self.blocks else None}, under which scales are called "
                f"*{' or *'.join(self.scales)}, but there is a tensor {module + other!r}"
            )
        return found[0] if found else self.scales[0]
