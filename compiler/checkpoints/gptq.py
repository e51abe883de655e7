"""GPTQ checkpoints of 4 bits: ``qweight`` i32 [K/8, N], ``qzeros`` i32 [groups, N/8], ``scales`` [groups, N].

Files of checkpoint_format gptq store the zero point less one; those of gptq_v2 store it as it is (AutoGPTQ and
GPTQModel, ``qlinear``). With act-order ``g_idx`` [K] spreads the groups over columns; no format of blocks has them so,
and the weight is read as the float32 numbers that it stands for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tapeout.compiler.checkpoints.base import Checkpoint, TensorInfo
from tapeout.compiler.checkpoints.quantized import Weights, read
from tapeout.compiler.recipes import Unpack
from tapeout.runtime.errors import TapeoutError


class Transposed(Weights):
    """What GPTQ and AWQ have in common. Which weights are quantized is told by the presence of ``qweight``."""

    packed_suffixes = (".qweight",)

    def check_group_size(self, size: Any) -> int:
        """The group_size of the config, -1 for whole columns."""
        if type(size) is not int or (size <= 0 and size != -1):
            self.refuse(f"group_size is {size!r}; it must be a positive integer, or -1 for whole columns")
        return size

    def check_words(self, codes: TensorInfo) -> tuple[int, int]:
        """The shape of a matrix of words."""
        if codes.format != "i32" or len(codes.shape) != 2:
            self.refuse(f"tensor {codes.name!r} is {codes.format} {list(codes.shape)}; it must be an i32 matrix")
        return codes.shape[0], codes.shape[1]

    def scales_and_zeros(
        self, module: str, codes: TensorInfo, shape: tuple[int, int], group: int
    ) -> tuple[TensorInfo, TensorInfo]:
        """Both for a weight [N, K] = ``shape``, transposed as the codes are."""
        n, k = shape
        scales = self.companion(module, ".scales", codes, ("f16", "bf16"))
        self.check_shape(scales, (k // group, n), f"groups of {group} over {[n, k]}")
        zeros = self.companion(module, ".qzeros", codes, ("i32",))
        self.check_shape(zeros, (k // group, -(-n // 8)), f"zero points of groups of {group} over {[n, k]}")
        return scales, zeros


class Gptq(Transposed):
    """Words hold eight codes of K."""

    def __init__(self, checkpoint: Checkpoint, config: Mapping[str, Any]) -> None:
        super().__init__(checkpoint, config)
        if config.get("bits") != 4:
            self.refuse(f"bits is {config.get('bits')!r}; of gptq weights those of 4 bits are read")
        self.group_size = self.check_group_size(config.get("group_size"))
        stored = config.get("checkpoint_format") or config.get("format") or "gptq"
        if stored not in ("gptq", "gptq_v2"):
            self.refuse(f"checkpoint_format is {stored!r}; read are gptq and gptq_v2")
        dynamic: Any = config.get("dynamic") or {}
        changed = [str(pattern) for pattern in dynamic if not str(pattern).startswith("-:")]
        if changed:
            self.refuse(
                f"dynamic gives modules that match {changed[0]!r} settings of their own, which is not supported; "
                "patterns that begin with -: (modules left alone) are"
            )
        self.packing = str(stored)
        self.symmetric = self.fields.flag("sym", False)

    def unpack(self, module: str, codes: TensorInfo) -> Unpack:
        """Groups of neighbours keep their codes."""
        words, n = self.check_words(codes)
        k = 8 * words
        group = self.group_of(codes, k, self.group_size)
        scales, zeros = self.scales_and_zeros(module, codes, (n, k), group)
        order = self._order(module, k, group)
        if order is not None:
            parts = [read(part) for part in (codes, scales, zeros)]
            return Unpack(self.packing, "f32", *parts, order=read(order))
        to = self.int4_format(codes, scales, not self.symmetric, group)
        return self.int4_weight(self.packing, (codes, scales, zeros), to)

    def _order(self, module: str, k: int, group: int) -> TensorInfo | None:
        """The tensor that says which group a column is in, or None where groups are neighbours."""
        info = self.tensors.get(module + ".g_idx")
        if info is None:
            if self.fields.flag("desc_act", False) and not self.fields.flag("static_groups", False):
                self.refuse(f"desc_act is true, but there is no tensor {module + '.g_idx'!r} that says the order")
            return None
        self.checked.add(info.name)
        self.check_shape(info, (k,), f"columns of {module}")
        order = self.checkpoint.read(info.name).view("<i8" if info.format == "i64" else "<i4").reshape(-1)
        wrong = np.flatnonzero((order < 0) | (order >= k // group))
        if wrong.size:
            raise TapeoutError(
                f"{info.file}: tensor {info.name!r} puts column {wrong[0]} in group {order[wrong[0]]}; "
                f"{k} columns in groups of {group} have groups 0 to {k // group - 1}"
            )
        return None if (order == np.arange(k) // group).all() else info
