"""Checkpoints of ModelOpt: NVFP4 and FP8 weights, by a quantization_config or by hf_quant_config.json beside it.

All scales multiply: ``weight_scale`` [N, K/16] e4m3 and ``weight_scale_2`` of NVFP4, ``weight_scale`` of FP8
(modelopt.torch.export). ``exclude_modules``, or ``ignore``, lists whole names with wildcards.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tapeout.compiler.checkpoints.base import Checkpoint, TensorInfo
from tapeout.compiler.checkpoints.fp4 import nvfp4_weight
from tapeout.compiler.checkpoints.names import matches_wildcard
from tapeout.compiler.checkpoints.quantized import ACTIVATIONS, CACHE, Weights
from tapeout.compiler.guards import is_mapping
from tapeout.compiler.recipes import Unpack

_CODES = {"NVFP4": ("u8", "e2m1"), "FP8": ("e4m3",), "FP8_PER_CHANNEL_PER_TOKEN": ("e4m3",)}
MIXED = "MIXED_PRECISION"


class ModelOpt(Weights):
    """Which weights are quantized is told by their scales; ``exclude_modules`` and ``quantized_layers`` must agree."""

    packed_suffixes = (".weight",)
    spares: Mapping[str, str] = {
        ".input_scale": ACTIVATIONS,
        ".k_scale": CACHE,
        ".v_scale": CACHE,
    }

    def __init__(self, checkpoint: Checkpoint, config: Mapping[str, Any]) -> None:
        super().__init__(checkpoint, config)
        inner: Any = config.get("quantization", config)
        if not is_mapping(inner):
            self.refuse(f"quantization is {inner!r:.60}; it must be an object")
        self.algorithm = self._checked(inner, "")
        layers: Any = inner.get("quantized_layers") if self.algorithm == MIXED else {}
        if not is_mapping(layers) or not all(is_mapping(layer) for layer in layers.values()):
            self.refuse(f"quantized_layers is {layers!r:.60}; under {MIXED} it must say how each layer is quantized")
        self.layers = {name: self._checked(layer, f"quantized_layers.{name}.") for name, layer in layers.items()}
        key = "exclude_modules" if inner.get("exclude_modules") is not None else "ignore"
        self.excluded = self.names(key, inner)

    def _checked(self, settings: Mapping[str, Any], where: str) -> str:
        found: Any = settings.get("quant_algo")
        known = (*_CODES, MIXED) if not where else tuple(_CODES)
        if found not in known:
            self.refuse(f"{where}quant_algo is {found!r}; read are {', '.join(known)}")
        size: Any = settings.get("group_size")
        if found == "NVFP4" and size not in (None, 16):
            self.refuse(f"{where}group_size is {size!r}; groups of NVFP4 are 16")
        return str(found)

    def algorithm_of(self, module: str) -> str | None:
        """The quant_algo of a module, or None where its weight is left alone."""
        if self.algorithm != MIXED:
            return self.algorithm
        pattern = matches_wildcard(module, tuple(self.layers))
        return None if pattern is None else self.layers[pattern]

    def check_plain(self, module: str, info: TensorInfo) -> None:
        """A plain matrix has no scales."""
        self.check_no_scales(module, info, (".weight_scale", ".weight_scale_2"))

    def unpack(self, module: str, codes: TensorInfo) -> Unpack:
        """By the algorithm, which the tensors must bear out."""
        pattern = matches_wildcard(module, self.excluded)
        if pattern is not None:
            self.refuse(
                f"exclude_modules has {pattern!r}, which names {module}, but tensor {codes.name!r} holds "
                f"{codes.format} codes; one of both must go"
            )
        algorithm = self.algorithm_of(module)
        if algorithm is None or codes.format not in _CODES[algorithm]:
            self.refuse(
                f"quant_algo of {module} is {algorithm}, but tensor {codes.name!r} holds {codes.format} codes; "
                f"NVFP4 weights are u8, FP8 ones e4m3"
            )
        if module + ".pre_quant_scale" in self.tensors:
            self.refuse(
                f"tensor {module + '.pre_quant_scale'!r} scales activations before the weight, which is not supported; "
                "export the model with it folded into the layer before"
            )
        if algorithm == "NVFP4":
            return nvfp4_weight(self, module, codes, "nvfp4", ".weight_scale_2")
        scales = self.companion(module, ".weight_scale", codes, ("f32", "bf16", "f16"))
        return self.fp8_weight(codes, scales, "tensor" if algorithm == "FP8" else "row")
