"""Four-bit codes that stand for sixteen unevenly spaced numbers: IQ4_NL in blocks of 32, IQ4_XS in super-blocks of 256.

Layouts and numbers are those of gguf-py's ``quants.py``; nibbles lie as in Q4_0 within each 32 elements.
"""

from __future__ import annotations

import numpy as np

from tapeout.compiler.formats.affine import blocks_of, decoder, fields, flat, half
from tapeout.compiler.formats.base import Bytes, Codes, Format

BLOCK = 32
SUPER = 256
TABLE = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)


def _codes_iq4_nl(data: Bytes) -> Codes:
    """d, qs[16]."""
    blocks = blocks_of(data, 18)
    return Codes(4, BLOCK, BLOCK, 0, flat(fields(blocks[..., 2:], (0, 4), 15)), half(blocks, 0), table=TABLE)


def _codes_iq4_xs(data: Bytes) -> Codes:
    """d, the two high bits of eight scales, their four low bits, qs[128]; 32 is subtracted from a scale."""
    blocks = blocks_of(data, 136)
    high = np.ascontiguousarray(blocks[..., 2:4]).view("<u2") >> np.arange(0, 16, 2).astype(np.uint16) & np.uint16(3)
    low = fields(blocks[..., 4:8], (0, 4), 15).swapaxes(-1, -2).reshape(*blocks.shape[:2], 8)
    sub = flat(low | (high << 4).astype(np.uint8)).astype(np.int16) - np.int16(32)
    codes = flat(fields(blocks[..., 8:].reshape(*blocks.shape[:2], 8, 16), (0, 4), 15))
    return Codes(4, BLOCK, SUPER, 0, codes, half(blocks, 0), sub, table=TABLE)


IQ4: dict[str, Format] = {
    "iq4_nl": Format("iq4_nl", BLOCK, 18, decoder(_codes_iq4_nl), None, _codes_iq4_nl, gguf_id=20),
    "iq4_xs": Format("iq4_xs", SUPER, 136, decoder(_codes_iq4_xs), None, _codes_iq4_xs, gguf_id=23),
}
