"""Eight-bit integers in groups along K under one bfloat16 scale: int8_g32, int8_g128. Read, not written.

``value = d * code``, code -128..127: the numbers of compressed-tensors' int-quantized and 8-bit pack-quantized
checkpoints. A block is one group: d, then the codes. Under float16 scales the same groups are Q8_0.
"""

from __future__ import annotations

import numpy as np

from tapeout.compiler.formats.affine import blocks_of, decoder, flat
from tapeout.compiler.formats.base import Bytes, Codes, Format


def _codes(data: Bytes, group: int) -> Codes:
    blocks = blocks_of(data, 2 + group)
    upper = np.ascontiguousarray(blocks[..., :2]).view("<u2")[..., 0].astype(np.uint32)
    d = (upper << np.uint32(16)).view(np.float32)
    return Codes(8, group, group, 128, flat(blocks[..., 2:] ^ np.uint8(128)), d, d_type="bf16")


def _format(name: str, number: int, group: int) -> Format:
    def codes(data: Bytes) -> Codes:
        return _codes(data, group)

    return Format(name, group, 2 + group, decoder(codes), None, codes, own_number=number)


INT8: dict[str, Format] = {
    "int8_g32": _format("int8_g32", 213, 32),
    "int8_g128": _format("int8_g128", 214, 128),
}
