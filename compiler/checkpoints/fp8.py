"""Checkpoints of quant_method fp8: e4m3 weights under scales of 128 x 128 blocks (DeepSeek, GLM), or one a tensor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tapeout.compiler.checkpoints.base import Checkpoint, TensorInfo
from tapeout.compiler.checkpoints.quantized import Weights
from tapeout.compiler.guards import is_list
from tapeout.compiler.recipes import Unpack

_ACTIVATIONS = "activations are not quantized to the scales of the checkpoint"


class Fp8(Weights):
    """Which weights are quantized is told by the presence of their scales; ``modules_to_not_convert`` must agree."""

    packed_suffixes = (".weight",)
    spares: Mapping[str, str] = {
        ".input_scale": _ACTIVATIONS,
        ".activation_scale": _ACTIVATIONS,
        ".k_scale": "the KV cache has the type that the spec says",
        ".v_scale": "the KV cache has the type that the spec says",
    }

    def __init__(self, checkpoint: Checkpoint, config: Mapping[str, Any]) -> None:
        super().__init__(checkpoint, config)
        size: Any = config.get("weight_block_size")
        if size is not None and size != [128, 128]:
            self.refuse(f"weight_block_size is {size!r:.60}; read are [128, 128], and none for one scale a tensor")
        self.fields.choice("fmt", {"e4m3": "e4m3"}, "e4m3")
        self.blocks = size is not None
        plain: Any = config.get("modules_to_not_convert") or config.get("ignored_layers") or []
        if not is_list(plain):
            self.refuse(f"modules_to_not_convert is {plain!r:.60}; it must be a list of names")
        self.plain = {str(name) for name in plain}

    @property
    def scale(self) -> str:
        """What the name of a scale ends with."""
        return ".weight_scale_inv" if self.blocks else ".weight_scale"

    def check_plain(self, module: str, info: TensorInfo) -> None:
        """A plain matrix has no scales."""
        for suffix in (".weight_scale_inv", ".weight_scale"):
            if module + suffix in self.tensors:
                self.refuse(
                    f"tensor {info.name!r} is plain {info.format}, but there is a tensor {module + suffix!r}; scales "
                    "belong to e4m3 weights alone"
                )

    def unpack(self, module: str, codes: TensorInfo) -> Unpack:
        """e4m3 codes and their scales, which multiply."""
        if codes.format != "e4m3":
            self.refuse(f"tensor {codes.name!r} is {codes.format}; quantized weights of quant_method fp8 are e4m3")
        if module in self.plain:
            self.refuse(
                f"modules_to_not_convert names {module}, but tensor {codes.name!r} is e4m3; one of both must go"
            )
        other = ".weight_scale" if self.blocks else ".weight_scale_inv"
        if module + self.scale not in self.tensors and module + other in self.tensors:
            self.refuse(
                f"weight_block_size is {[128, 128] if self.blocks else None}, under which scales are called "
                f"*{self.scale}, but there is a tensor {module + other!r}"
            )
        scales = self.companion(module, self.scale, codes, ("f32", "bf16", "f16"))
        return self.fp8_weight(codes, scales, self.blocks)
