"""compressed-tensors checkpoints: integers in pack-quantized and int-quantized, floats in the other formats.

Which module has which scheme follows compressed-tensors: of the targets that match, exact names come first, then
``re:`` patterns (matched from the start of the name), then classes; whatever ``ignore`` matches has none.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from tapeout.compiler.checkpoints.base import Checkpoint, TensorInfo
from tapeout.compiler.checkpoints.fp4 import mxfp4_weight, nvfp4_weight
from tapeout.compiler.checkpoints.names import spellings
from tapeout.compiler.checkpoints.quantized import ACTIVATIONS, CACHE, Weights, read
from tapeout.compiler.guards import is_list, is_mapping
from tapeout.compiler.models.base import Fields
from tapeout.compiler.recipes import Unpack

_FORMATS: Mapping[tuple[bool, str], tuple[str, ...]] = {
    (True, "i32"): ("pack-quantized",),
    (True, "u8"): ("nvfp4-pack-quantized", "mxfp4-pack-quantized"),
    (False, "e4m3"): ("float-quantized", "naive-quantized"),
    (False, "i8"): ("int-quantized", "naive-quantized"),
}
"""The formats of packed and of plainly named codes, by their type."""
_SHAPE_BYTES = 16
_DENSE = ("dense", "fakequant")
_ROUTERS = (".mlp.gate", ".mlp.router", ".block_sparse_moe.gate")
"""Modules that many models have as a class of their own, which the target Linear does not name."""
_GROUPED = ("group", "channel")
_PER: Mapping[str, Literal["tensor", "row", "block"]] = {"tensor": "tensor", "channel": "row", "block": "block"}
_FP4 = {"nvfp4-pack-quantized": ("tensor_group", 16), "mxfp4-pack-quantized": ("group", 32)}


@dataclass(frozen=True)
class Scheme:
    """How the weights of a config group are quantized and stored; None where they are not."""

    group: str
    format: str
    bits: int
    type: str
    strategy: str
    group_size: int
    symmetric: bool
    block: tuple[int, ...]


@dataclass(frozen=True)
class _Target:
    """A name in a list of targets or of what to ignore: of a module or a class, or a pattern for modules."""

    name: str
    pattern: re.Pattern[str] | None

    @classmethod
    def of(cls, name: str) -> _Target:
        return cls(name, re.compile(name.removeprefix("re:")) if name.startswith("re:") else None)

    def matches(self, names: tuple[str, ...]) -> bool:
        """Whether it names a module, by any spelling of its name."""
        if self.pattern is None:
            return self.name in names
        return any(map(self.pattern.match, names))


class CompressedTensors(Weights):
    """Weights by config_groups, targets and ignore."""

    packed_suffixes = (".weight_packed", ".weight")
    spares: Mapping[str, str] = {
        ".input_scale": ACTIVATIONS,
        ".input_global_scale": ACTIVATIONS,
        ".input_zero_point": ACTIVATIONS,
        ".output_scale": ACTIVATIONS,
        ".output_zero_point": ACTIVATIONS,
        **{f".{part}_{field}": CACHE for part in "qkv" for field in ("scale", "zero_point")},
    }

    def __init__(self, checkpoint: Checkpoint, config: Mapping[str, Any]) -> None:
        super().__init__(checkpoint, config)
        for key in ("transform_config", "sparsity_config"):
            value = config.get(key)
            if value and not (is_mapping(value) and value.get("format") == "dense"):
                self.refuse(f"{key} is set, which changes the weights; it must be absent, as it is not supported")
        self.ignore = [_Target.of(name) for name in self._names(config.get("ignore"), "ignore")]
        self.schemes = self._schemes(config)
        self.targets = [_Target.of(name) for name in self.schemes]

    def _schemes(self, config: Mapping[str, Any]) -> dict[str, Scheme | None]:
        """The scheme of each target, in the order in which targets are tried."""
        groups: Any = config.get("config_groups")
        if not is_mapping(groups) or not groups:
            self.refuse("config_groups is missing or empty; it must say which modules are quantized, and how")
        found: dict[str, tuple[str, Scheme | None]] = {}
        for name, group in groups.items():
            if not is_mapping(group):
                self.refuse(f"config_groups.{name} is {group!r:.60}; it must be an object with targets and weights")
            scheme = self._scheme(f"config_groups.{name}", group, self.fields)
            for target in self._names(group.get("targets"), f"config_groups.{name}.targets"):
                if target in found and found[target][1] != scheme:
                    self.refuse(
                        f"{found[target][0]} and config_groups.{name} both target {target!r}, with different weights; "
                        "a module has one scheme"
                    )
                found[target] = f"config_groups.{name}", scheme
        order = sorted(found, key=lambda target: (target.startswith("re:"), target))
        return {target: found[target][1] for target in order}

    def _scheme(self, where: str, group: Mapping[str, Any], top: Fields) -> Scheme | None:
        raw: Any = group.get("weights")
        if raw is None:
            return None
        if not is_mapping(raw):
            self.refuse(f"{where}.weights is {raw!r:.60}; it must be an object")
        fields = Fields(raw, f"{self.where}: {where}.weights")
        size = raw.get("group_size")
        strategy = raw.get("strategy")
        if size is not None and (type(size) is not int or (size <= 0 and size != -1)):
            self.refuse(f"{where}.weights.group_size is {size!r}; it must be a positive integer, or -1 for whole rows")
        if strategy is None:
            strategy = "tensor" if size is None else "channel" if size == -1 else "group"
        strategy = str(strategy).lower()
        if (strategy == "group") != (size is not None and size > 0) and strategy != "tensor_group":
            self.refuse(
                f"{where}.weights has strategy {strategy!r} and group_size {size!r}, which contradict each other; "
                "strategy group needs a group_size above zero, and no other has one"
            )
        if raw.get("actorder") not in (None, False, "weight", "static"):
            self.refuse(
                f"{where}.weights.actorder is {raw['actorder']!r}, which spreads a group over columns out of order; "
                "formats here need groups of neighbours, as actorder weight or static give them"
            )
        block: Any = raw.get("block_structure")
        if isinstance(block, str):
            block = [int(part) if part.isdecimal() else part for part in block.split("x")]
        stored = group.get("format") or top.raw.get("format")
        return Scheme(
            group=where,
            format=str(stored),
            bits=fields.integer("num_bits", 8),
            type=str(raw.get("type", "int")).lower(),
            strategy=strategy,
            group_size=-1 if size is None else size,
            symmetric=fields.flag("symmetric", True),
            block=tuple(block) if is_list(block) else (),
        )

    def _names(self, value: Any, where: str) -> tuple[str, ...]:
        if value is None:
            return ()
        if not is_list(value) or not all(isinstance(name, str) for name in value):
            self.refuse(f"{where} is {value!r:.60}; it must be a list of names")
        for name in value:
            if name.startswith("re:"):
                self.check_pattern(where, name, name.removeprefix("re:"))
        return tuple(value)

    def scheme_of(self, module: str) -> Scheme | None:
        """The scheme of a module, or None where its weight is not quantized."""
        kind = "Embedding" if module.endswith("embed_tokens") else "Linear"
        names = spellings(module)
        for ignored in self.ignore:
            if ignored.name == kind or ignored.matches(names):
                return None
        named = next((target.name for target in self.targets if target.matches(names)), kind)
        return self.schemes.get(named)

    def check_plain(self, module: str, info: TensorInfo) -> None:
        """A plain matrix must be one that the config leaves alone. A router may be no Linear, and in no ignore then."""
        scheme = None if module.endswith(_ROUTERS) else self.scheme_of(module)
        if scheme and scheme.format not in _DENSE:
            self.refuse(
                f"{scheme.group} quantizes {module} ({scheme.format}), but tensor {info.name!r} is plain "
                f"{info.format}; name the module in ignore if that is right"
            )

    def unpack(self, module: str, codes: TensorInfo) -> Unpack:
        """By the scheme, which the tensors must bear out."""
        scheme = self.scheme_of(module)
        if scheme is None:
            self.refuse(
                f"tensor {codes.name!r} holds {codes.format} codes, but no target of config_groups matches {module}, "
                "or ignore does; a packed weight needs a scheme"
            )
        packed = codes.name.endswith("_packed")
        legal = _FORMATS.get((packed, codes.format), ())
        if scheme.format not in legal:
            self.refuse(
                f"{scheme.group} says format {scheme.format!r} for {module}, whose tensor {codes.name!r} is "
                f"{codes.format}; weights like that are {' or '.join(legal) or 'not read'}"
            )
        if codes.format == "u8":
            return self._fp4(module, codes, scheme)
        return self._fp8(module, codes, scheme) if codes.format == "e4m3" else self._int(module, codes, scheme)

    def _fp4(self, module: str, codes: TensorInfo, scheme: Scheme) -> Unpack:
        strategy, size = _FP4[scheme.format]
        found = (scheme.bits, scheme.type, scheme.symmetric, scheme.strategy, scheme.group_size)
        if found != (4, "float", True, strategy, size):
            self.refuse(
                f"{scheme.group} has weights of {scheme.bits} bits, type {scheme.type}, strategy {scheme.strategy}, "
                f"group_size {scheme.group_size}; {scheme.format} is symmetric 4-bit float in strategy {strategy} of "
                f"group_size {size}"
            )
        if size == 32:
            return mxfp4_weight(self, codes, self.companion(module, ".weight_scale", codes, ("u8", "e8m0")))
        return nvfp4_weight(self, module, codes, "nvfp4-divided", ".weight_global_scale")

    def _int(self, module: str, codes: TensorInfo, scheme: Scheme) -> Unpack:
        words = codes.format == "i32"
        bits = (4, 8) if words else (8,)
        symmetric = scheme.symmetric or scheme.bits == 4
        if scheme.bits not in bits or (scheme.type, symmetric) != ("int", True) or scheme.strategy not in _GROUPED:
            self.refuse(
                f"{scheme.group} has weights of {scheme.bits} bits, type {scheme.type}, strategy {scheme.strategy}"
                f"{'' if symmetric else ', not symmetric'}; of {scheme.format} weights {' or '.join(map(str, bits))}"
                f"-bit int in strategy group or channel are read{', those of 8 bits symmetric' if words else ''}"
            )
        if len(codes.shape) != 2:
            self.refuse(f"tensor {codes.name!r} has shape {list(codes.shape)}; packed weights are matrices")
        rows, k = codes.shape[0], codes.shape[1] * (32 // scheme.bits if words else 1)
        group = self.group_of(codes, k, scheme.group_size)
        scales = self.companion(module, ".weight_scale", codes, ("bf16", "f16"))
        self.check_shape(scales, (rows, k // group), f"groups of {group} over {[rows, k]}")
        zeros = None
        if not scheme.symmetric:
            zeros = self.companion(module, ".weight_zero_point", codes, ("i32",))
            self.check_shape(zeros, (-(-rows // 8), k // group), f"zero points of groups of {group} over {[rows, k]}")
        elif module + ".weight_zero_point" in self.tensors:
            self.refuse(
                f"{scheme.group} is symmetric, but there is a tensor {module + '.weight_zero_point'!r}; "
                "say symmetric: false if it counts"
            )
        self._check_stored_shape(module, (rows, k))
        if module + ".weight_g_idx" in self.tensors:
            self.refuse(
                f"tensor {module + '.weight_g_idx'!r} spreads groups over columns out of order; formats here need "
                "groups of neighbours, as actorder weight or static give them"
            )
        if scheme.bits == 8:
            packing = "pack-quantized-8" if words else "int-quantized"
            return Unpack(packing, self.int8_format(codes, scales, group), read(codes), read(scales))
        to = self.int4_format(codes, scales, zeros is not None, group)
        return self.int4_weight("pack-quantized", (codes, scales, zeros), to)

    def _check_stored_shape(self, module: str, shape: tuple[int, int]) -> None:
        info = self.tensors.get(module + ".weight_shape")
        if info is None:
            return
        self.checked.add(info.name)
        wide = info.format == "i64"
        stored = self._small_shapes.get(info.name)
        if stored == struct.pack("<2q" if wide else "<2i", *shape):
            return
        said = self.checkpoint.read(info.name).view("<i8" if wide else "<i4").reshape(-1).tolist()
        if said != list(shape):
            self.refuse(
                f"tensor {info.name!r} says {said[:8]}, but the packed weight is {list(shape)}; "
                "they must agree: the file is damaged"
            )

    @cached_property
    def _small_shapes(self) -> Mapping[str, bytes]:
        """The bytes of every ``weight_shape`` of two numbers, read at once: a checkpoint may have one an expert."""
        infos = (info for name, info in self.tensors.items() if name.endswith(".weight_shape"))
        return self.checkpoint.read_small(info for info in infos if info.nbytes <= _SHAPE_BYTES)

    def _fp8(self, module: str, codes: TensorInfo, scheme: Scheme) -> Unpack:
        per = _PER.get(scheme.strategy)
        odd = per == "block" and scheme.block != (128, 128)
        if (scheme.bits, scheme.type, scheme.symmetric) != (8, "float", True) or per is None or odd:
            self.refuse(
                f"{scheme.group} has weights of {scheme.bits} bits, type {scheme.type}, strategy {scheme.strategy}"
                f"{' ' + 'x'.join(map(str, scheme.block)) if scheme.block else ''}; of float-quantized weights "
                "symmetric 8-bit float with one scale a tensor, a channel, or a block of 128x128, are read"
            )
        scales = self.companion(module, ".weight_scale", codes, ("f32", "bf16", "f16"))
        return self.fp8_weight(codes, scales, per)
