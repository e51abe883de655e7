"""What a number format is: a block layout with bit-exact meaning.

A format is data about blocks plus two functions over whole rows. One file a format family registers its formats in
``tapeout.compiler.formats.FORMATS``; nothing else in the compiler knows a format by name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Codes:
    """A weight matrix taken apart into integer codes and affine group parameters, all exact.

    ``value[n, k] = scale(n, k // group) * (codes[n, k] - zero) - minimum(n, k // group)`` where

    - ``codes``: uint8 [N, K], ``bits`` significant bits each;
    - ``zero``: what is subtracted from every code (8 for Q4_0, 128 for Q8_0, 0 for Q4_1 and Q4_K);
    - ``table``: int8 [2^bits], what codes stand for where that is not their number: ``table[code]`` takes the place of
      ``code - zero`` (zero is 0 then, and there are no minima). E2M1 is doubled so that it is whole, and ``d`` halved;
    - ``d``: [N, K/super], float16, or float32 that holds what ``d_type`` says: bfloat16 values, any (f32), or for e8m0
      the powers of two 2^(byte - 128), whose bytes ``e8m0_bytes`` gives back;
    - ``sub``: [N, K/group] or None (then super == group): whole numbers of -128..255, or float16 that holds e4m3 values
      (``sub_type``); scale = float32(d) * float32(sub);
    - ``zeros``: uint8 [N, K/group] where every group has a zero of its own (``zero`` is 0 then);
    - ``dmin``, ``submin``: the same for the minimum, or None when the format has none.
      For Q4_1 and Q5_1 the file stores ``+m``; it is kept as ``dmin`` with ``negate_min`` True (value adds it).
    """

    bits: int
    group: int
    super: int
    zero: int
    codes: npt.NDArray[np.uint8]
    d: npt.NDArray[np.float16] | npt.NDArray[np.float32]
    sub: npt.NDArray[np.int16] | npt.NDArray[np.float16] | None = None
    dmin: npt.NDArray[np.float16] | None = None
    submin: npt.NDArray[np.int16] | None = None
    negate_min: bool = False
    zeros: npt.NDArray[np.uint8] | None = None
    d_type: Literal["f16", "bf16", "e8m0", "f32"] = "f16"
    table: npt.NDArray[np.int8] | None = None
    sub_type: Literal["int", "e4m3"] = "int"


@dataclass(frozen=True)
class Format:
    """One number format.

    ``block`` elements along the last axis take ``block_bytes`` bytes; a row is a whole number of blocks, so a tensor
    may be cut anywhere between rows and, along the last axis, only between blocks (``cut``).
    ``decode`` maps bytes [rows, row_bytes] to float32 [rows, K], bit for bit as the format's own library does.
    ``encode`` maps float32 [rows, K] to bytes [rows, row_bytes], or is None where we cannot write the format.
    ``codes`` takes a quantized matrix apart for the kernels, or is None for floats.
    ``tiles`` says, for e4m3 numbers under float32 scales, how many rows and columns share a scale (0: all of them);
    a block carries its scale with it, so rows decode on their own, but can only be encoded whole tiles at a time.
    ``row_scale`` says that ``Codes.d`` is the same in all blocks of a row, so that a layout may keep it once a row; it
    is encoded from the largest magnitude of the whole tensor.
    """

    name: str
    block: int
    block_bytes: int
    decode: Callable[[Bytes], Floats]
    encode: Callable[[Floats], Bytes] | None = None
    codes: Callable[[Bytes], Codes] | None = None
    gguf_id: int | None = None
    safetensors: str | None = None
    own_number: int | None = None
    tiles: tuple[int, int] | None = None
    row_scale: bool = False

    def row_bytes(self, k: int) -> int:
        """Bytes of one row of ``k`` elements. Raises ValueError when ``k`` is not a whole number of blocks."""
        return whole_blocks(self.name, self.block, self.block_bytes, k)

    @property
    def number(self) -> int:
        """What the C code calls it: the GGUF type, or for formats that GGUF has not a number from 201 up."""
        number = self.own_number if self.gguf_id is None else self.gguf_id
        assert number is not None, self.name
        return number

    @property
    def needs_largest(self) -> bool:
        """Whether rows can be encoded only when the largest magnitude of the whole tensor is known."""
        return self.row_scale or self.tiles == (0, 0)

    @property
    def is_float(self) -> bool:
        """Whether every element stands for itself (F32, F16, BF16)."""
        return self.block == 1

    @property
    def bits_per_weight(self) -> float:
        """Storage cost in bits per element."""
        return 8 * self.block_bytes / self.block


@dataclass(frozen=True)
class Carrier:
    """A type that carries a part of packed weights (codes, scales, zero points): ``block`` elements in bytes.

    No weight is in one: what it means follows from other tensors (``tapeout.compiler.checkpoints``).
    """

    name: str
    block: int
    block_bytes: int
    gguf_id: int | None = None
    safetensors: str | None = None

    def row_bytes(self, k: int) -> int:
        """Bytes of one row of ``k`` elements. Raises ValueError when ``k`` is not a whole number of blocks."""
        return whole_blocks(self.name, self.block, self.block_bytes, k)


def whole_blocks(name: str, block: int, block_bytes: int, k: int) -> int:
    """Bytes of ``k`` elements in blocks. Raises ValueError when they are not a whole number of blocks."""
    if k % block:
        raise ValueError(f"{name} stores blocks of {block} elements; a row of {k} is not a whole number of them")
    return k // block * block_bytes
