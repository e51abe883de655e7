"""AWQ checkpoints of 4 bits: ``qweight`` i32 [K, N/8], ``qzeros`` i32 [groups, N/8], ``scales`` [groups, N].

Nibble i of a word, from the low ones up, holds column 0, 2, 4, 6, 1, 3, 5, 7 of its eight; zero points have no offset
(AutoAWQ, ``packing_utils.py`` and ``modules/linear/gemm.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tapeout.compiler.checkpoints.base import Checkpoint, TensorInfo
from tapeout.compiler.checkpoints.gptq import Transposed
from tapeout.compiler.recipes import Unpack


class Awq(Transposed):
    """Words hold eight codes of N."""

    def __init__(self, checkpoint: Checkpoint, config: Mapping[str, Any]) -> None:
        super().__init__(checkpoint, config)
        bits = config.get("bits", config.get("w_bit"))
        if bits != 4:
            self.refuse(f"bits is {bits!r}; of awq weights those of 4 bits are read")
        self.group_size = self.check_group_size(config.get("group_size", config.get("q_group_size", 128)))
        if not self.fields.flag("zero_point", True):
            self.refuse("zero_point is false; of awq weights those with zero points are read")
        version = str(config.get("version", "gemm")).lower()
        if version != "gemm":
            self.refuse(f"version is {version!r}, whose words lie otherwise; gemm is read")

    def unpack(self, module: str, codes: TensorInfo) -> Unpack:
        """Zero points are always there."""
        k, words = self.check_words(codes)
        group = self.group_of(codes, k, self.group_size)
        scales, zeros = self.scales_and_zeros(module, codes, (8 * words, k), group)
        return self.int4_weight("awq", (codes, scales, zeros), self.int4_format(codes, scales, True, group))
