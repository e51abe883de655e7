"""Linear layers of eight rows and more on tensor cores: which tiles could serve one, and what each costs.

The kernel is ``triton_linear.linear``; ``gemv`` serves fewer rows. What is fixed per kernel is the weight's shape, the
epilogue and the tile; live rows are read on the device, so one kernel serves every bucket that likes its tile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tapeout.compiler.formats import FORMATS
from tapeout.compiler.kernels.cuda.base import (
    ADD,
    FLOAT_BYTES,
    GATED_GELU,
    GATED_SILU,
    STORE,
    Candidate,
    Define,
    GpuKernel,
    Param,
    Rate,
)
from tapeout.compiler.layouts import packed_bytes, plane_geometry

if TYPE_CHECKING:
    from tapeout.compiler.devices import CudaDevice

_EPILOGUES = {STORE: "store", ADD: "add", GATED_SILU: "silu", GATED_GELU: "gelu"}
_MAX_CANDIDATES = 4
_MIN_K_STEP = 32


@dataclass(frozen=True)
class Problem:
    """One linear layer: y[rows][n] of x[rows][k] and a weight of n rows (2 n when gated) in a format."""

    format: str
    n: int
    k: int
    ldx: int
    ldy: int
    epilogue: int
    bias: bool
    act: str
    count_index: int

    @property
    def gated(self) -> bool:
        """Whether the weight holds n gates and then n ups."""
        return self.epilogue >= GATED_SILU

    @property
    def weight_rows(self) -> int:
        """Rows of the weight."""
        return 2 * self.n if self.gated else self.n

    @property
    def is_float(self) -> bool:
        """Whether weights go to the tensor cores as they are stored."""
        return FORMATS[self.format].is_float


@dataclass(frozen=True)
class Tile:
    """How a kernel cuts a problem: bm rows of x, bn rows of the weight, bk columns a step, loaded ``stages`` ahead.

    ``swap``: weights are the left operand, so bm may be narrow. ``group_m`` tiles of x walk along the weight together.
    ``ahead``: bytes of each weight row fetched to L2 before the previous kernel has ended.
    """

    bm: int
    bn: int
    bk: int
    warps: int
    stages: int
    swap: bool
    group_m: int = 8
    ahead: int = 0


def candidates(
    format: str,
    n: int,
    k: int,
    rows: int,
    *,
    ldx: int,
    ldy: int,
    epilogue: int,
    bias: bool,
    act: str,
    count_index: int,
    device: CudaDevice,
) -> list[Candidate]:
    """Kernels for y = x W^T over at most ``rows`` rows, the one predicted to be the fastest first; never empty.

    ``n`` counts columns of y, so a gated weight has 2 n rows. Raises ValueError for a k that the format cannot hold.
    """
    problem = Problem(format, n, k, ldx, ldy, epilogue, bias, act, count_index)
    tiles = [fitted for tile in _tiles(problem, rows, device) if (fitted := _fit(tile, problem, device))]
    unique = list(dict.fromkeys(tiles))[:_MAX_CANDIDATES]
    return [_candidate(problem, tile, rows) for tile in unique]


def _tiles(problem: Problem, rows: int, device: CudaDevice) -> list[Tile]:
    """Tiles in order of preference, as measured on sm_90; their stages and steps are fitted afterwards."""
    if problem.act == "f32":
        return [Tile(16, 32, 32, 4, 2, False), Tile(16, 16, 32, 2, 2, False)]
    if rows > 64:
        return _wide_tiles(problem)
    bm = 16 if rows <= 16 else 32 if rows <= 32 else 64
    bn = 32 if problem.weight_rows < 64 * device.sm_count else 64
    if problem.is_float:
        return [
            Tile(bm, bn, 128, 4, 6, False, ahead=512),
            Tile(bm, bn, 64, 4, 6, False, ahead=256),
            Tile(bm, 32, 64, 4, 3, False, ahead=256),
        ]
    return [
        Tile(bm, bn, 256, 4, 4, True, ahead=256),
        Tile(bm, bn, 128, 4, 4, True, ahead=256),
        Tile(bm, 32, 64, 4, 3, True, ahead=128),
    ]


def _wide_tiles(problem: Problem) -> list[Tile]:
    """For so many rows that arithmetic counts: as much of both operands a tile as registers hold."""
    if problem.is_float:
        return [
            Tile(128, 256, 64, 8, 4, False),
            Tile(128, 128, 64, 8, 4, False),
            Tile(128, 128, 64, 4, 3, False),
            Tile(64, 128, 64, 4, 3, False),
        ]
    return [
        Tile(128, 128, 128, 8, 3, True),
        Tile(128, 128, 64, 8, 3, True),
        Tile(64, 64, 64, 4, 3, True),
    ]


def _fit(tile: Tile, problem: Problem, device: CudaDevice) -> Tile | None:
    """The tile with a k step that divides k where one does, and as many stages as shared memory holds."""
    bk = tile.bk
    if not problem.is_float:
        geometry = plane_geometry((problem.weight_rows, problem.k), problem.format)
        if geometry.element == "e4m3" and geometry.group != problem.k:
            bk = min(bk, geometry.group)
    while bk > _MIN_K_STEP and problem.k % bk:
        bk //= 2
    stages = tile.stages
    while stages > 2 and shared_bytes(problem, tile, bk, stages) > device.shared_per_block:
        stages -= 1
    if shared_bytes(problem, tile, bk, stages) > device.shared_per_block:
        return None
    ahead = 0 if device.capability < 90 else min(tile.ahead, problem.k * weight_bits(problem) // 8 // 128 * 128)
    while ahead & (ahead - 1):
        ahead &= ahead - 1
    return Tile(tile.bm, tile.bn, bk, tile.warps, stages, tile.swap, tile.group_m, ahead)


def weight_bits(problem: Problem) -> int:
    """Bits a value in the plane of codes that holds most of them."""
    if problem.is_float:
        return 8 * FORMATS[problem.format].block_bytes
    return plane_geometry((problem.weight_rows, problem.k), problem.format).codes[0].bits


def shared_bytes(problem: Problem, tile: Tile, bk: int, stages: int) -> int:
    """Shared memory that the loads of a tile keep in flight; the compiled kernel has the last word."""
    return stages * bk * (tile.bm * FLOAT_BYTES[problem.act] + tile.bn * weight_bits(problem) // 8)


def kernel_of(problem: Problem, tile: Tile) -> GpuKernel:
    """The kernel of a problem cut by a tile."""
    weight = problem.format if problem.is_float else "u8"
    params = (
        Param("x", dtype=problem.act),
        Param("w", dtype=weight),
        Param("bias", dtype="f32"),
        Param("y", dtype=problem.act if problem.gated else "f32"),
        Param("counts", dtype="i32"),
    )
    shape: list[tuple[str, Define]] = [
        ("N", problem.n),
        ("K", problem.k),
        ("LDX", problem.ldx),
        ("LDY", problem.ldy),
        ("EPILOGUE", problem.epilogue),
        ("BIAS", problem.bias),
        ("COUNT_INDEX", problem.count_index),
        ("BM", tile.bm),
        ("BN", tile.bn),
        ("BK", tile.bk),
        ("GROUP_M", tile.group_m),
        ("SWAP", tile.swap),
        ("AHEAD", tile.ahead),
        ("INTERPRET", False),
    ]
    return GpuKernel(
        name=_name(problem, tile),
        template="linear",
        language="triton",
        source="triton_linear:linear",
        params=params,
        defines=(*shape, *_geometry(problem)),
        threads=32 * tile.warps,
        options=(("num_stages", tile.stages),),
    )


def _geometry(problem: Problem) -> tuple[tuple[str, Define], ...]:
    """Where the planes of the weight lie, as defines."""
    absent = -1
    if problem.is_float:
        names = "BITS HIGH LOW ZERO MIN_SIGN GROUP SUPER MAIN_ROW HIGH_PLANE HIGH_ROW SCALES SCALES_ROW D_BF16"
        fields = "DMIN SUB SUBMIN ZEROS"
        zeros: list[tuple[str, Define]] = [(name, 0) for name in names.split()]
        return (("ELEMENT", "float"), *zeros, *((name, absent) for name in fields.split()))
    planes = plane_geometry((problem.weight_rows, problem.k), problem.format)
    main, high = planes.codes[0], planes.codes[1] if len(planes.codes) > 1 else None
    scales = planes.scales

    def place(offset: int | None) -> int:
        return absent if offset is None else offset

    return (
        ("ELEMENT", planes.element),
        ("BITS", main.bits),
        ("HIGH", high.bits if high else 0),
        ("LOW", high.low if high else 0),
        ("ZERO", planes.zero),
        ("MIN_SIGN", planes.minimum_sign),
        ("GROUP", planes.group),
        ("SUPER", planes.super),
        ("MAIN_ROW", main.row_bytes),
        ("HIGH_PLANE", high.offset if high else 0),
        ("HIGH_ROW", high.row_bytes if high else 0),
        ("SCALES", scales.offset),
        ("SCALES_ROW", scales.row_bytes),
        ("D_BF16", planes.d_type == "bf16"),
        ("DMIN", place(scales.dmin)),
        ("SUB", place(scales.sub)),
        ("SUBMIN", place(scales.submin)),
        ("ZEROS", place(scales.zeros)),
    )


def _name(problem: Problem, tile: Tile) -> str:
    """Everything that tells one kernel from another, the usual left out."""
    parts = [f"linear_{problem.format}_n{problem.n}_k{problem.k}"]
    parts.append(f"bm{tile.bm}_bn{tile.bn}_bk{tile.bk}_s{tile.stages}_w{tile.warps}{'_swap' * tile.swap}")
    parts.append(_EPILOGUES[problem.epilogue])
    parts += [f"g{tile.group_m}"] * (tile.group_m != 8) + [f"a{tile.ahead}"] * (tile.ahead > 0)
    parts += ["bias"] * problem.bias + [f"x{problem.ldx}"] * (problem.ldx != problem.k)
    parts += [f"y{problem.ldy}"] * (problem.ldy != problem.n) + [f"c{problem.count_index}"] * bool(problem.count_index)
    parts += [problem.act] * (problem.act != "bf16")
    return "_".join(parts)


def grid_of(problem: Problem, tile: Tile, rows: int) -> int:
    """Blocks for at most ``rows`` live rows."""
    out = tile.bn // 2 if problem.gated else tile.bn
    return -(-rows // tile.bm) * -(-problem.n // out)


def _candidate(problem: Problem, tile: Tile, rows: int) -> Candidate:
    layout = "raw" if problem.is_float else "planes"
    weight = packed_bytes((problem.weight_rows, problem.k), problem.format, layout)
    act = FLOAT_BYTES[problem.act]
    out = rows * problem.n * (act if problem.gated else 8 if problem.epilogue == ADD else 4)
    rate: Rate = "f32" if problem.act == "f32" else "bf16"
    filled = -(-rows // tile.bm) * tile.bm
    return Candidate(
        kernel=kernel_of(problem, tile),
        grid=(grid_of(problem, tile, rows), 1, 1),
        nbytes=weight + rows * problem.k * act + out,
        operations=2 * filled * problem.weight_rows * problem.k,
        rate=rate,
    )


def examples() -> list[GpuKernel]:
    """Small instances of every format, epilogue and kind of tile, for tests of the toolchain."""
    found: list[GpuKernel] = []
    narrow, square = Tile(16, 32, 64, 4, 3, True, ahead=128), Tile(64, 64, 64, 4, 3, True)
    for index, format in enumerate(FORMATS):
        act = format if FORMATS[format].is_float else "bf16"
        if act == "f32":
            found.append(kernel_of(Problem("f32", 96, 96, 96, 96, ADD, True, act, 0), Tile(16, 32, 32, 4, 2, False)))
            continue
        problem = Problem(format, 192, 512, 512, 192, index % 4, index % 2 == 0, act, 0)
        tile = (narrow, square)[index // 4 % 2]
        if act != "bf16" or format == "bf16":
            tile = Tile(tile.bm, tile.bn, tile.bk, tile.warps, tile.stages, False, ahead=tile.ahead)
        found.append(kernel_of(problem, tile))
    for epilogue in _EPILOGUES:
        for format in ("bf16", "q4_k"):
            problem = Problem(format, 320, 768, 768, 384, epilogue, True, "bf16", 2)
            found.append(kernel_of(problem, square if format == "q4_k" else Tile(64, 64, 64, 4, 3, False)))
    return found
