"""Arithmetic and bit packing that the block formats share."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from tapeout.compiler.formats.base import Bytes, Codes, Floats

F16 = npt.NDArray[np.float16]


def values(codes: Codes) -> Floats:
    """float32 [N, K] of a matrix taken apart, in the operation order of gguf-py: (d * sub) * code, then the minimum."""
    n, k = codes.codes.shape
    groups = k // codes.group
    signed = (codes.codes if codes.table is None else codes.table[codes.codes]).astype(np.float32)
    if codes.zero:
        signed -= np.float32(codes.zero)
    out = signed.reshape(n, groups, codes.group)
    if codes.zeros is not None:
        out -= codes.zeros.astype(np.float32)[..., None]
    with np.errstate(
        invalid="ignore", over="ignore"
    ):  # a file may hold infinite scales; checks find them in the result
        out *= _spread(codes.d, codes.sub, groups)[..., None]
        if codes.dmin is not None:
            minimum = _spread(codes.dmin, codes.submin, groups)[..., None]
            out = np.add(out, minimum, out=out) if codes.negate_min else np.subtract(out, minimum, out=out)
    return out.reshape(n, k)


def decoder(codes: Callable[[Bytes], Codes]) -> Callable[[Bytes], Floats]:
    """The ``decode`` of a format from its ``codes``: one reading of the layout serves both."""
    return lambda data: values(codes(data))


def blocks_of(data: Bytes, block_bytes: int) -> Bytes:
    """Rows of bytes [rows, row_bytes] as blocks [rows, blocks, block_bytes]."""
    assert data.dtype == np.uint8 and data.ndim == 2 and data.shape[1] % block_bytes == 0
    return np.ascontiguousarray(data).reshape(data.shape[0], -1, block_bytes)


def half(blocks: Bytes, offset: int) -> F16:
    """The float16 at byte ``offset`` of every block, [rows, blocks]."""
    return np.ascontiguousarray(blocks[..., offset : offset + 2]).view("<f2")[..., 0]


def half_bytes(scale: npt.NDArray[np.float32], what: str) -> Bytes:
    """float32 [...] rounded to float16, as bytes [..., 2]. Raises ValueError when one leaves the range of float16."""
    with np.errstate(over="ignore"):
        rounded = scale.astype("<f2")
    if np.isinf(rounded).any():
        raise ValueError(f"a value is too large for {what}: its float16 scale would exceed 65504")
    return rounded[..., None].view(np.uint8)


def fields(data: Bytes, shifts: tuple[int, ...], mask: int) -> Bytes:
    """Bit fields of bytes [..., lanes] as [..., len(shifts), lanes]."""
    steps = np.array(shifts, np.uint8)[:, None]
    return (data[..., None, :] >> steps) & np.uint8(mask)


def flat(codes: Bytes) -> Bytes:
    """Codes [rows, blocks, ...] as [rows, K]."""
    return codes.reshape(codes.shape[0], -1)


def check_finite(data: Floats) -> None:
    """Raises ValueError when a value is NaN or infinite: no number format here can carry it in meaning."""
    bad = ~np.isfinite(data)
    if bad.any():
        where = [int(i) for i in np.argwhere(bad)[0]]
        raise ValueError(f"the value at {where} is {data[tuple(where)]}; only finite values can be encoded")


def _spread(d: F16 | Floats, sub: npt.NDArray[np.int16] | F16 | None, groups: int) -> Floats:
    """float32 scale of every group, [N, groups]."""
    scale = d.astype(np.float32)
    if sub is None:
        return scale
    return np.repeat(scale, groups // d.shape[1], axis=1) * sub.astype(np.float32)
