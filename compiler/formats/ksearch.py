"""Encoding of Q4_K, Q5_K and Q6_K: a search for the scales of least squared error.

Per sub-block a grid of ranges, each followed by least squares, gives a real-valued scale (and minimum); then the
super-block's float16 scales and the integer sub-scales are refined in turn. ``emit/quantize.c`` is the same search,
operation for operation, so both give the same bytes: arrays are [element, sub-block], and sums run over the even and
the odd elements apart. Steps follow the C file's names.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tapeout.compiler.formats.affine import check_finite
from tapeout.compiler.formats.base import Bytes, Floats

Doubles = npt.NDArray[np.float64]

SUPER = 256
LIMIT = 4126752.0
"""The largest magnitude a K-quant takes: 65504 (float16) times 63 (a 6-bit scale)."""
_CHUNK = 2048
_f = np.float32


@dataclass(frozen=True)
class AffineChoice:
    """Scales of super-blocks: ``d``, ``dmin`` [B] (float16 values), ``sub``, ``submin`` [8 B] (integers), error [B]."""

    d: Floats
    dmin: Floats
    sub: Floats
    submin: Floats
    error: Doubles


@dataclass(frozen=True)
class SymmetricChoice:
    """Scales of super-blocks: ``d`` [B] (float16 values), ``sub`` [16 B] (integers), squared error [B]."""

    d: Floats
    sub: Floats
    error: Doubles


def search_affine(data: Floats, top: int) -> tuple[AffineChoice, Bytes]:
    """The choice for every super-block of float32 [B, 256] and its codes uint8 [B, 256], at most ``top``."""
    x = np.ascontiguousarray(data.reshape(-1, 32).T)
    high = _f(top)
    scale, minimum, total = _fit_affine(x, high)
    d = _clamp_half(_highest(scale) / _f(63))
    dmin = _clamp_half(_highest(minimum) / _f(63))
    best = _choose_affine(x, total, scale, minimum, d, dmin, high)
    for _ in range(3):
        d, dmin = _solve_affine(x, total, best, high)
        new = _choose_affine(x, total, scale, minimum, d, dmin, high)
        better = new.error < best.error
        lanes = np.repeat(better, 8)
        best = AffineChoice(
            np.where(better, new.d, best.d),
            np.where(better, new.dmin, best.dmin),
            np.where(lanes, new.sub, best.sub),
            np.where(lanes, new.submin, best.submin),
            np.where(better, new.error, best.error),
        )
    codes = _chosen_codes(x, best, high)
    return best, np.ascontiguousarray(codes.T).astype(np.uint8).reshape(-1, SUPER)


def search_symmetric(data: Floats) -> tuple[SymmetricChoice, Bytes]:
    """The choice for every super-block of float32 [B, 256] and its codes uint8 [B, 256], offset by 32."""
    x = np.ascontiguousarray(data.reshape(-1, 16).T)
    scale = _fit_symmetric(x)
    by_block = scale.reshape(-1, 16)
    peak = np.take_along_axis(by_block, np.abs(by_block).argmax(axis=1)[:, None], axis=1)[:, 0]
    best = _choose_symmetric(x, scale, _clamp_half(peak / _f(-128)))
    for _ in range(3):
        new = _choose_symmetric(x, scale, _solve_symmetric(x, best))
        better = new.error < best.error
        best = SymmetricChoice(
            np.where(better, new.d, best.d),
            np.where(np.repeat(better, 16), new.sub, best.sub),
            np.where(better, new.error, best.error),
        )
    codes = _codes(x, _ratio(_f(1), np.repeat(best.d, 16) * best.sub), _f(-32), _f(31)) + _f(32)
    return best, np.ascontiguousarray(codes.T).astype(np.uint8).reshape(-1, SUPER)


def super_blocks(data: Floats) -> list[Floats]:
    """float32 [rows, K] as pieces [at most 2048, 256]. Raises ValueError on NaN, infinity, or a value beyond LIMIT."""
    check_finite(data)
    if np.abs(data).max(initial=0) > LIMIT:
        raise ValueError(f"the value {np.abs(data).max():g} is too large for a K-quant, whose largest is {LIMIT:.0f}")
    blocks = np.ascontiguousarray(data).reshape(-1, SUPER)
    return [blocks[start : start + _CHUNK] for start in range(0, len(blocks), _CHUNK)]


def _ratio(numerator: Floats | np.float32, denominator: Floats) -> Floats:
    """numerator / denominator, or 0 where the denominator's magnitude is not above 1e-30."""
    good = np.abs(denominator) > _f(1e-30)
    return np.where(good, numerator / np.where(good, denominator, _f(1)), _f(0))


def _clamp_half(value: Floats | Doubles) -> Floats:
    return np.clip(value.astype(np.float32), _f(-65504), _f(65504)).astype(np.float16).astype(np.float32)


def _codes(shifted: Floats, factor: Floats, bottom: np.float32, top: np.float32) -> Floats:
    return np.rint(np.maximum(np.minimum(shifted * factor, top), bottom))


def _sum(terms: Floats) -> Floats:
    """Sum over elements: even ones in order, odd ones in order, then the two."""
    even, odd = terms[0].copy(), terms[1].copy()
    for i in range(2, len(terms), 2):
        even += terms[i]
        odd += terms[i + 1]
    return even + odd


def _across(value: Floats, lanes: int) -> Doubles:
    """Sum over the sub-blocks of a super-block, in double precision, eight lanes at a time."""
    wide = value.astype(np.float64).reshape(-1, lanes)
    total = np.zeros(len(wide))
    for group in range(0, lanes, 8):
        part = np.zeros(len(wide))
        for lane in range(group, group + 8):
            part += wide[:, lane]
        total += part
    return total


def _highest(value: Floats) -> Floats:
    return value.reshape(-1, 8).max(axis=1)


def _error(x: Floats, scale: Floats, minimum: Floats, bottom: np.float32, top: np.float32) -> tuple[Floats, Floats]:
    """Squared error of x against scale * q - minimum, and the sum of q."""
    shifted = x + minimum
    q = _codes(shifted, _ratio(_f(1), scale), bottom, top)
    fitted: Floats = scale * q
    residual: Floats = shifted - fitted
    return _sum(residual * residual), _sum(q)


def _fit_affine(x: Floats, top: np.float32) -> tuple[Floats, Floats, Floats]:
    """Real-valued scale and minimum of every sub-block, and the sum of x."""
    low, total = np.minimum(x.min(axis=0), _f(0)), _sum(x)
    span = x.max(axis=0) - low
    span = np.where(span > _f(1e-15), span, _f(0))
    raised = _f(0) - low - span / top * _f(0.4)
    state = (np.zeros_like(low), np.zeros_like(low), np.full_like(low, 1e30))
    for c in range(11):
        factor = _ratio(top + _f(-2 + 0.25 * c), span)
        state = _improve_affine(x, total, top, _f(0) - low, factor, state)
        state = _improve_affine(x, total, top, raised, factor, state)
    for _ in range(2):
        state = _improve_affine(x, total, top, state[1], _ratio(_f(1), state[0]), state)
    return state[0], state[1], total


def _improve_affine(
    x: Floats, total: Floats, top: np.float32, minimum: Floats, factor: Floats, state: tuple[Floats, Floats, Floats]
) -> tuple[Floats, Floats, Floats]:
    """Least squares under the codes that (minimum, factor) give; ``state`` is (scale, minimum, error less sum x*x)."""
    n, two = _f(32), _f(2)
    q = _codes(x + minimum, factor, _f(0), top)
    sq, sqq, sqx = _sum(q), _sum(q * q), _sum(q * x)
    covariance: Floats = np.subtract(n * sqx, sq * total)
    variance: Floats = np.subtract(n * sqq, sq * sq)
    slope = _ratio(covariance, variance)
    offset = (slope * sq - total) * _f(1 / 32)
    scale = np.maximum(np.where(offset < 0, _ratio(sqx, sqq), slope), _f(0))
    offset = np.maximum(offset, _f(0))
    error = scale * (scale * sqq - two * (offset * sq + sqx)) + offset * (n * offset + two * total)
    better = error < state[2]
    return np.where(better, scale, state[0]), np.where(better, offset, state[1]), np.where(better, error, state[2])


def _choose_affine(
    x: Floats, total: Floats, scale: Floats, minimum: Floats, d: Floats, dmin: Floats, top: np.float32
) -> AffineChoice:
    """The best 6-bit scales and minima under d and dmin, among three scales and two minima each."""
    zero, limit = _f(0), _f(63)
    lane_d, lane_dmin = np.repeat(d, 8), np.repeat(dmin, 8)
    unit = _ratio(_f(1), lane_dmin)
    centre = np.rint(np.minimum(scale * _ratio(_f(1), lane_d), limit))
    start = np.rint(np.minimum(minimum * unit, limit))
    best_sub, best_submin, best = np.zeros_like(scale), np.zeros_like(scale), np.full_like(scale, 1e30)
    for step in (-1, 0, 1):
        sub, submin = np.maximum(np.minimum(centre + _f(step), limit), zero), start
        for _ in range(2):
            error, q = _error(x, lane_d * sub, lane_dmin * submin, zero, top)
            better = error < best
            best = np.where(better, error, best)
            best_sub, best_submin = np.where(better, sub, best_sub), np.where(better, submin, best_submin)
            wanted = (lane_d * sub * q - total) * _f(1 / 32) * unit
            submin = np.rint(np.maximum(np.minimum(wanted, limit), zero))
    return AffineChoice(d, dmin, best_sub, best_submin, _across(best, 8))


def _chosen_codes(x: Floats, choice: AffineChoice, top: np.float32) -> Floats:
    scale: Floats = np.repeat(choice.d, 8) * choice.sub
    minimum: Floats = np.repeat(choice.dmin, 8) * choice.submin
    return _codes(x + minimum, _ratio(_f(1), scale), _f(0), top)


def _solve_affine(x: Floats, total: Floats, best: AffineChoice, top: np.float32) -> tuple[Floats, Floats]:
    """d and dmin by least squares over each super-block, all codes held."""
    sub, submin = best.sub, best.submin
    q = _chosen_codes(x, best, top)
    sq, sqq, sqx = _sum(q), _sum(q * q), _sum(q * x)
    dd, dm, mm = _across(sub * sub * sqq, 8), _across(sub * submin * sq, 8), _across(submin * submin * _f(32), 8)
    dx, mx = _across(sub * sqx, 8), _across(submin * total, 8)
    determinant = dd * mm - dm * dm
    solvable = determinant > 0
    divisor = np.where(solvable, determinant, 1.0)
    alone = np.where(dd > 0, _clamp_half(dx / np.where(dd > 0, dd, 1.0)), best.d)
    d = np.where(solvable, _clamp_half((dx * mm - dm * mx) / divisor), alone)
    dmin = np.where(solvable, _clamp_half((dx * dm - mx * dd) / divisor), best.dmin)
    return np.where(d > 0, d, _f(0)), np.where(dmin > 0, dmin, _f(0))


def _fit_symmetric(x: Floats) -> Floats:
    """Real-valued scale of every sub-block, of either sign."""
    peak = np.take_along_axis(x, np.abs(x).argmax(axis=0)[None], axis=0)[0]
    peak = np.where(np.abs(peak) > _f(1e-15), peak, _f(0))
    state = (np.zeros_like(peak), np.zeros_like(peak))
    for c in range(9):
        stretch = -1.25 + 0.25 * c
        state = _improve_symmetric(x, _ratio(_f(-32 + stretch), peak), state)
        state = _improve_symmetric(x, _ratio(_f(31 - stretch), peak), state)
    return _improve_symmetric(x, _ratio(_f(1), state[0]), state)[0]


def _improve_symmetric(x: Floats, factor: Floats, state: tuple[Floats, Floats]) -> tuple[Floats, Floats]:
    """Least squares under the codes that ``factor`` gives; ``state`` is (scale, squares explained)."""
    q = _codes(x, factor, _f(-32), _f(31))
    sqx = _sum(q * x)
    slope = _ratio(sqx, _sum(q * q))
    explained = slope * sqx
    better = explained > state[1]
    return np.where(better, slope, state[0]), np.where(better, explained, state[1])


def _choose_symmetric(x: Floats, scale: Floats, d: Floats) -> SymmetricChoice:
    """The best 8-bit scales under d: two to each side of the real-valued fit."""
    bottom, top = _f(-128), _f(127)
    lane_d = np.repeat(d, 16)
    centre = np.rint(np.maximum(np.minimum(scale * _ratio(_f(1), lane_d), top), bottom))
    best_sub, best = np.zeros_like(scale), np.full_like(scale, 1e30)
    for step in range(-2, 3):
        sub = np.maximum(np.minimum(centre + _f(step), top), bottom)
        error, _ = _error(x, lane_d * sub, np.zeros_like(scale), _f(-32), _f(31))
        better = error < best
        best_sub, best = np.where(better, sub, best_sub), np.where(better, error, best)
    return SymmetricChoice(d, best_sub, _across(best, 16))


def _solve_symmetric(x: Floats, best: SymmetricChoice) -> Floats:
    """d by least squares over each super-block, all codes held."""
    q = _codes(x, _ratio(_f(1), np.repeat(best.d, 16) * best.sub), _f(-32), _f(31))
    dd = _across(best.sub * best.sub * _sum(q * q), 16)
    dx = _across(best.sub * _sum(q * x), 16)
    return np.where(dd > 0, _clamp_half(dx / np.where(dd > 0, dd, 1.0)), best.d)
