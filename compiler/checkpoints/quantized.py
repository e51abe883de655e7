"""A checkpoint's tensors as weights: what a quantization_config says another tool packed becomes one recipe a weight.

Families ask for ``X.weight`` and know nothing of this. Each quant_method has a module, which says what it follows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal, NoReturn

from tapeout.compiler.checkpoints.base import Checkpoint, TensorInfo
from tapeout.compiler.checkpoints.hub import QUANTIZATION
from tapeout.compiler.checkpoints.names import matches_start
from tapeout.compiler.checkpoints.quantization_config import quantization_config
from tapeout.compiler.formats import CARRIERS, FORMATS
from tapeout.compiler.guards import is_list
from tapeout.compiler.models.base import Fields
from tapeout.compiler.recipes import Read, Recipe, TransposeGroups, Unpack
from tapeout.runtime.errors import TapeoutError

INT4_FORMATS: Mapping[tuple[str, bool], tuple[str, ...]] = {
    ("bf16", False): ("int4_g128", "int4_g64", "int4_g32"),
    ("bf16", True): ("int4_g128_zp", "int4_g64_zp", "int4_g32_zp"),
    ("f16", False): ("q4_0",),
    ("f16", True): ("int4_g128_zp_f16", "int4_g32_zp_f16"),
}
"""Formats that hold four-bit groups, by the type of their scales and whether there are zero points, widest first."""
INT8_FORMATS: Mapping[str, tuple[str, ...]] = {"bf16": ("int8_g128", "int8_g32"), "f16": ("q8_0",)}
"""The same for eight-bit groups, which have no zero points."""
ACTIVATIONS = "activations are not quantized to the scales of the checkpoint"
CACHE = "the KV cache has the type that the spec says"


class Weights:
    """The weights of a checkpoint in plain tensors, and the ground for those of each ``quant_method``.

    ``checked`` are tensors that were read to see that they agree with a weight, and are not part of its recipe.
    """

    packed_suffixes: tuple[str, ...] = ()
    """What the name of a module's packed codes ends with."""
    spares: Mapping[str, str] = {}
    """Endings of tensors that belong to a packed weight and are not part of its recipe, with the reason."""

    def __init__(self, checkpoint: Checkpoint, config: Mapping[str, Any] | None = None) -> None:
        self.checkpoint = checkpoint
        self.tensors = checkpoint.tensors
        self.checked: set[str] = set()
        beside = config is not None and config is checkpoint.quantization
        self.where = f"{checkpoint.path}: {QUANTIZATION if beside else 'config.json: quantization_config'}"
        self.fields = Fields(config or {}, self.where)

    def find(self, name: str) -> Recipe | None:
        """The recipe of a weight or vector by the name of its plain tensor, or None when nothing holds it."""
        module = name.removesuffix(".weight")
        if module != name:
            for suffix in self.packed_suffixes:
                codes = self.tensors.get(module + suffix)
                if codes is not None and codes.format in CARRIERS:
                    return self.unpack(module, codes)
        info = self.tensors.get(name)
        if info is None:
            return None
        if info.format in ("i32", "i64") and module == name and len(info.shape) == 2:
            return read(info)  # a table of ids
        if info.format in CARRIERS:
            raise TapeoutError(
                f"{info.file}: tensor {info.name!r} holds {info.format} codes without scales; they are weights only "
                "under a quantization_config in config.json whose quant_method is one of " + ", ".join(METHODS)
            )
        if len(info.shape) == 2:
            self.check_plain(module, info)
        return TransposeGroups(read(info), 1) if info.transposed else read(info)

    def spare(self, tensor: str) -> str | None:
        """Why a tensor beside a packed weight is not read, or None when it is not known to be one."""
        return next((reason for suffix, reason in self.spares.items() if tensor.endswith(suffix)), None)

    def unpack(self, module: str, codes: TensorInfo) -> Unpack:
        """The recipe of a packed weight."""
        raise AssertionError(f"plain tensors have no packed weights: {module}, {codes.name}")

    def check_plain(self, module: str, info: TensorInfo) -> None:
        """Refuse a plain matrix that the config says is quantized."""

    # ---- what the methods share ------------------------------------------------------------------------------------

    def refuse(self, what: str) -> NoReturn:
        """A fault of the config."""
        raise TapeoutError(f"{self.where}: {what}")

    def companion(self, module: str, suffix: str, codes: TensorInfo, types: tuple[str, ...]) -> TensorInfo:
        """A tensor that must stand beside the codes, of one of ``types``."""
        info = self.tensors.get(module + suffix)
        if info is None:
            raise TapeoutError(
                f"{codes.file}: tensor {module + suffix!r} is missing; {codes.name!r} holds codes, which mean nothing "
                "without it: fetch the checkpoint again, or the index leaves it out"
            )
        if info.format not in types:
            raise TapeoutError(
                f"{info.file}: tensor {info.name!r} is {info.format}; it must be {' or '.join(types)}, "
                f"as no format here holds {self.method} weights under anything else"
            )
        return info

    @property
    def method(self) -> str:
        """The quant_method."""
        return str(self.fields.raw.get("quant_method"))

    def check_shape(self, info: TensorInfo, wanted: tuple[int, ...], because: str) -> None:
        """Refuse a tensor of another shape."""
        if info.shape != wanted:
            raise TapeoutError(
                f"{info.file}: tensor {info.name!r} has shape {list(info.shape)}; {because} need {list(wanted)}"
            )

    def group_of(self, codes: TensorInfo, k: int, size: int) -> int:
        """Elements that share a scale: ``size``, or all ``k`` of a row where it is -1. Refuses cut groups."""
        group = k if size == -1 else size
        if group <= 0 or k % group:
            raise TapeoutError(
                f"{codes.file}: tensor {codes.name!r} has rows of {k} elements, which are not whole groups of "
                f"group_size {size} as quantization_config says; it must divide them"
            )
        return group

    def int4_format(self, codes: TensorInfo, scales: TensorInfo, zeros: bool, group: int) -> str:
        """The widest format whose groups divide those of the checkpoint."""
        return self._widest(INT4_FORMATS[scales.format, zeros], codes, scales, zeros, group)

    def int8_format(self, codes: TensorInfo, scales: TensorInfo, group: int) -> str:
        """The same for eight-bit integers."""
        return self._widest(INT8_FORMATS[scales.format], codes, scales, False, group)

    def _widest(self, held: tuple[str, ...], codes: TensorInfo, scales: TensorInfo, zeros: bool, group: int) -> str:
        for name in held:
            if group % FORMATS[name].block == 0:
                return name
        raise TapeoutError(
            f"{codes.file}: tensor {codes.name!r} has groups of {group} under {scales.format} scales"
            f"{' with zero points' if zeros else ''}; groups must be multiples of {FORMATS[held[-1]].block}"
        )

    def fp8_weight(self, codes: TensorInfo, scales: TensorInfo, per: Literal["tensor", "row", "block"]) -> Unpack:
        """e4m3 codes under one scale, or one for each row or each 128 x 128 block."""
        if len(codes.shape) != 2 or codes.shape[1] % 32:
            raise TapeoutError(
                f"{codes.file}: tensor {codes.name!r} has shape {list(codes.shape)}; "
                "fp8 weights are matrices of whole groups of 32 columns here"
            )
        if per == "block":
            wanted = (-(-codes.shape[0] // 128), -(-codes.shape[1] // 128))
            self.check_shape(scales, wanted, f"blocks of 128 x 128 over {list(codes.shape)}")
        elif per == "row" and scales.shape != codes.shape[:1]:
            self.check_shape(scales, (codes.shape[0], 1), f"one scale a row over {list(codes.shape)}")
        elif per == "tensor" and scales.shape not in ((), (1,), (1, 1)):
            self.check_shape(scales, (1,), "weights under one scale a tensor")
        return Unpack(
            "fp8", {"tensor": "fp8", "row": "fp8_row", "block": "fp8_block128"}[per], read(codes), read(scales)
        )

    def int4_weight(self, packing: str, parts: tuple[TensorInfo, TensorInfo, TensorInfo | None], to: str) -> Unpack:
        """Four-bit codes, their scales, and zero points where there are some."""
        codes, scales, zeros = parts
        return Unpack(packing, to, read(codes), read(scales), read(zeros) if zeros else None)

    def names(self, key: str, config: Mapping[str, Any] | None = None, *, regular: bool = False) -> tuple[str, ...]:
        """A list of names or patterns, ``regular`` expressions or not."""
        value: Any = (self.fields.raw if config is None else config).get(key) or []
        if not is_list(value) or not all(isinstance(name, str) for name in value):
            self.refuse(f"{key} is {value!r:.60}; it must be a list of names")
        for name in value if regular else ():
            self.check_pattern(key, name, name)
        return tuple(value)

    def check_pattern(self, key: str, name: str, pattern: str) -> None:
        """Refuse what is no regular expression."""
        try:
            re.compile(pattern)
        except re.error as error:
            self.refuse(f"{key} has the pattern {name!r}, which is no regular expression ({error})")

    def check_excluded(self, module: str, codes: TensorInfo, plain: tuple[str, ...]) -> None:
        """Refuse codes of a module that modules_to_not_convert names."""
        pattern = matches_start(module, plain)
        if pattern is not None:
            self.refuse(
                f"modules_to_not_convert names {module}{f' ({pattern!r})' if pattern != module else ''}, "
                f"but tensor {codes.name!r} is {codes.format}; one of both must go"
            )

    def check_no_scales(self, module: str, info: TensorInfo, suffixes: tuple[str, ...]) -> None:
        """Refuse scales beside a plain matrix."""
        for suffix in suffixes:
            if module + suffix in self.tensors:
                self.refuse(
                    f"tensor {info.name!r} is plain {info.format}, but there is a tensor {module + suffix!r}; scales "
                    "belong to codes alone"
                )


def read(info: TensorInfo) -> Read:
    """The recipe that reads a tensor as it is."""
    return Read(info.name, info.shape, info.format)


METHODS = ("compressed-tensors", "fp8", "gptq", "awq", "modelopt", "mxfp4")


def weights_of(checkpoint: Checkpoint) -> Weights:
    """How the weights of a checkpoint are to be found. Raises TapeoutError for a quant_method that is not read."""
    if checkpoint.container == "gguf":
        from tapeout.compiler.checkpoints.fp4 import GgufWeights  # noqa: PLC0415 - they build on this module

        return GgufWeights(checkpoint)
    config = quantization_config(checkpoint)
    if config is None:
        return Weights(checkpoint)
    from tapeout.compiler.checkpoints.awq import Awq  # noqa: PLC0415 - they build on this module
    from tapeout.compiler.checkpoints.compressed_tensors import CompressedTensors  # noqa: PLC0415
    from tapeout.compiler.checkpoints.fp4 import Mxfp4  # noqa: PLC0415
    from tapeout.compiler.checkpoints.fp8 import Fp8  # noqa: PLC0415
    from tapeout.compiler.checkpoints.gptq import Gptq  # noqa: PLC0415
    from tapeout.compiler.checkpoints.modelopt import ModelOpt  # noqa: PLC0415

    kinds = (CompressedTensors, Fp8, Gptq, Awq, ModelOpt, Mxfp4)
    readers: dict[str, type[Weights]] = dict(zip(METHODS, kinds, strict=True))
    method = config.get("quant_method")
    if not isinstance(method, str) or method not in readers:
        raise TapeoutError(
            f"{checkpoint.path}: config.json: quantization_config: quant_method is {method!r}; "
            f"read are {', '.join(METHODS)}"
        )
    return readers[method](checkpoint, config)
