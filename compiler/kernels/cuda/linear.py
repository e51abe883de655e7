"""Linear layers of eight rows and more on tensor cores: which tiles could serve one, and what each costs.

The kernel is ``triton_linear.linear``; ``gemv`` serves fewer rows. What is fixed per kernel is the weight's shape, the
epilogue and the tile; live rows are read on the device, so one kernel serves every bucket that likes its tile.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

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
from tapeout.compiler.layouts import packed_bytes, plane_geometry, planes_hold

if TYPE_CHECKING:
    from tapeout.compiler.devices import CudaDevice

Element = Literal["float", "int", "e4m3"]
"""What a stored value of a weight is."""
Height = Literal["any", "wide", "mid", "low"]
"""Of a weight: wide ones give every multiprocessor 128 rows and more, low ones have 4,096 rows at most."""
_EPILOGUES = {STORE: "store", ADD: "add", GATED_SILU: "silu", GATED_GELU: "gelu"}
_FEW_STAGES = 2
_ANY_ROWS = 1 << 31
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
    x: str
    count_index: int
    y: str = "f32"

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

    @property
    def element(self) -> Element:
        """What a stored value is."""
        return "float" if self.is_float else plane_geometry((self.weight_rows, self.k), self.format).element


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


class Measured(NamedTuple):
    """A line of the table: the tile for weights of an element and a height, times up to ``rows`` rows of x."""

    element: Element
    rows: int
    height: Height
    tile: Tile


# The fastest tiles on one H200 over the linear layers of an 8B model, with weights read from device memory. The first
# line that holds counts.
MEASURED = (
    #         element        rows  height        bm   bn   bk warps stages swap   ahead
    Measured("float",         16,  "any",  Tile( 16,  64, 128,  4,  5,  False, ahead=512)),
    Measured("float",         64,  "wide", Tile( 64,  64,  64,  4,  6,  False, ahead=512)),
    Measured("float",         64,  "mid",  Tile( 64,  64, 128,  4,  5,  False, ahead=512)),
    Measured("float",         64,  "any",  Tile( 64,  32, 128,  4,  6,  False, ahead=512)),
    Measured("float",        128,  "wide", Tile(128, 128,  64,  8,  4,  False, ahead=256)),
    Measured("float",        128,  "mid",  Tile(128,  64,  64,  4,  5,  False, ahead=256)),
    Measured("float",        128,  "any",  Tile(128,  32,  64,  4,  6,  False, ahead=256)),
    Measured("float",        512,  "any",  Tile(128, 128,  64,  4,  4,  False)),
    Measured("float",  _ANY_ROWS,  "any",  Tile(128, 256,  64,  8,  4,  False)),
    Measured("int",           16,  "wide", Tile( 16, 128, 128,  8,  4,  True,  ahead=256)),
    Measured("int",           16,  "any",  Tile( 16,  64, 256,  4,  4,  True,  ahead=256)),
    Measured("int",           64,  "wide", Tile( 64, 128, 128,  4,  4,  True,  ahead=256)),
    Measured("int",           64,  "any",  Tile( 64,  64, 256,  4,  4,  True,  ahead=256)),
    Measured("int",          128,  "wide", Tile(128, 128, 128,  8,  3,  True,  ahead=256)),
    Measured("int",          128,  "any",  Tile(128,  64, 128,  4,  4,  True,  ahead=256)),
    Measured("int",          512,  "low",  Tile(128, 128, 128,  8,  3,  True)),
    Measured("int",    _ANY_ROWS,  "any",  Tile(256, 128,  64,  8,  3,  True)),
    Measured("e4m3",          16,  "wide", Tile( 16,  64, 256,  4,  4,  True,  ahead=256)),
    Measured("e4m3",          16,  "any",  Tile( 16,  32, 128,  2,  4,  True,  ahead=256)),
    Measured("e4m3",          64,  "wide", Tile( 64, 128, 128,  4,  4,  True,  ahead=256)),
    Measured("e4m3",          64,  "any",  Tile( 64,  64, 128,  4,  4,  True,  ahead=256)),
    Measured("e4m3",         128,  "wide", Tile(128, 128, 128,  8,  3,  True,  ahead=256)),
    Measured("e4m3",         128,  "any",  Tile(128,  64, 128,  4,  4,  True,  ahead=256)),
    Measured("e4m3",         512,  "low",  Tile(128, 128, 128,  8,  3,  True)),
    Measured("e4m3",   _ANY_ROWS,  "any",  Tile(256, 128,  64,  8,  4,  True)),
)  # fmt: skip


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
    x: str,
    y: str,
    count_index: int,
    device: CudaDevice,
) -> list[Candidate]:
    """Kernels for y = x W^T over at most ``rows`` rows, the one predicted to be the fastest first; never empty.

    ``x`` and ``y``: number types of activations (f32, bf16, f16); a y that is added into is f32. ``n`` counts columns
    of y, so a gated weight has 2 n rows. Tiles that shared memory leaves two stages, too few to hide a load behind
    another, come last. Raises ValueError for a k that the format cannot hold.
    """
    problem = Problem(format, n, k, ldx, ldy, epilogue, bias, x, count_index, y)
    tiles = [fitted for tile in _tiles(problem, rows, device) if (fitted := _fit(tile, problem, device))]
    tiles.sort(key=lambda tile: tile.stages <= _FEW_STAGES)
    distinct: dict[Tile, Tile] = {}
    for tile in tiles:  # what is fetched ahead does not change what fits
        distinct.setdefault(replace(tile, ahead=0), tile)
    return [_candidate(problem, tile, rows) for tile in distinct.values()]


def _tiles(problem: Problem, rows: int, device: CudaDevice) -> list[Tile]:
    """The measured tile, then what serves where that one does not fit; ``_fit`` adapts them to k and device."""
    if problem.x == "f32":
        return [Tile(16, 32, 32, 4, 2, False), Tile(16, 16, 32, 2, 2, False)]
    others = _wide_tiles(problem, rows, device) if rows > 64 else _narrow_tiles(problem, rows, device)
    return [measured_tile(problem, rows, device), *others]


def measured_tile(problem: Problem, rows: int, device: CudaDevice) -> Tile:
    """The tile that was the fastest for such a problem of at most ``rows`` rows: the first line of MEASURED to hold."""
    height = _height(problem.weight_rows, device)
    return next(
        line.tile
        for line in MEASURED
        if line.element == problem.element and rows <= line.rows and line.height in (height, "any")
    )


def _height(weight_rows: int, device: CudaDevice) -> Height:
    if weight_rows >= 128 * device.sm_count:
        return "wide"
    return "mid" if weight_rows > 4096 else "low"


def _narrow_tiles(problem: Problem, rows: int, device: CudaDevice) -> list[Tile]:
    """For so few rows that reading the weight counts: a tile as high as the rows, and long runs of each weight row."""
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


def _wide_tiles(problem: Problem, rows: int, device: CudaDevice) -> list[Tile]:
    """For so many rows that arithmetic counts: as much of both operands a tile as registers hold."""
    if problem.is_float:
        return [
            Tile(128, 256, 64, 8, 4, False),
            Tile(128, 128, 64, 8, 4, False),
            Tile(64, 128, 64, 4, 3, False),
        ]
    squares = -(-rows // 128) * -(-problem.weight_rows // 128)
    bn = 64 if 2 * squares <= device.sm_count else 128  # or else half of the multiprocessors would idle
    return [
        Tile(128, bn, 128, 8, 3, True),
        Tile(128, 128, 64, 8, 3, True),
        Tile(64, 64, 64, 4, 3, True),
    ]


def _fit(tile: Tile, problem: Problem, device: CudaDevice) -> Tile | None:
    """The tile with a k step that divides k where one does, and as many stages as shared memory holds.

    In a step the kernel takes one scale for a block of e4m3 numbers, so the step stays inside the block.
    """
    bk = tile.bk
    if not problem.is_float:
        geometry = plane_geometry((problem.weight_rows, problem.k), problem.format)
        if geometry.element == "e4m3" and geometry.group != problem.k:
            bk = min(bk, geometry.group)
    while bk > _MIN_K_STEP and problem.k % bk:
        bk //= 2
    stages = tile.stages
    while stages > _FEW_STAGES and shared_bytes(problem, tile, bk, stages, device) > device.shared_per_block:
        stages -= 1
    if shared_bytes(problem, tile, bk, stages, device) > device.shared_per_block:
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


def shared_bytes(problem: Problem, tile: Tile, bk: int, stages: int, device: CudaDevice) -> int:
    """Shared memory that the loads of a tile keep in flight; the compiled kernel has the last word.

    Where the tensor cores read shared memory by themselves (sm_90, sm_100), the step they work on lies there too.
    """
    steps = stages if device.capability in (90, 100) else stages - 1
    return steps * bk * (tile.bm * FLOAT_BYTES[problem.x] + tile.bn * weight_bits(problem) // 8)


def kernel_of(problem: Problem, tile: Tile) -> GpuKernel:
    """The kernel of a problem cut by a tile."""
    weight = problem.format if problem.is_float else "u8"
    params = (
        Param("x", dtype=problem.x),
        Param("w", dtype=weight),
        Param("bias", dtype="f32"),
        Param("y", dtype=problem.y),
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
        names = "BITS HIGH LOW ZERO MIN_SIGN GROUP SUPER MAIN_ROW HIGH_PLANE HIGH_ROW SCALES SCALES_ROW"
        names += " SCALES_TILE D_BF16"
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
        ("SCALES_TILE", scales.tile_rows),
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
    parts += [problem.x] * (problem.x != "bf16")
    parts += [problem.y] * (problem.y != (problem.x if problem.gated else "f32"))
    return "_".join(parts)


def grid_of(problem: Problem, tile: Tile, rows: int) -> int:
    """Blocks for at most ``rows`` live rows."""
    out = tile.bn // 2 if problem.gated else tile.bn
    return -(-rows // tile.bm) * -(-problem.n // out)


def _candidate(problem: Problem, tile: Tile, rows: int) -> Candidate:
    layout = "raw" if problem.is_float else "planes"
    weight = packed_bytes((problem.weight_rows, problem.k), problem.format, layout)
    x = FLOAT_BYTES[problem.x]
    out = rows * problem.n * FLOAT_BYTES[problem.y] * (2 if problem.epilogue == ADD else 1)
    rate: Rate = "f32" if problem.x == "f32" else "bf16"
    filled = -(-rows // tile.bm) * tile.bm
    return Candidate(
        kernel=kernel_of(problem, tile),
        grid=(grid_of(problem, tile, rows), 1, 1),
        nbytes=weight + rows * problem.k * x + out,
        operations=2 * filled * problem.weight_rows * problem.k,
        rate=rate,
    )


def examples() -> list[GpuKernel]:
    """Small instances of every format, epilogue and kind of tile, for tests of the toolchain."""
    found: list[GpuKernel] = []
    narrow, square = Tile(16, 32, 64, 4, 3, True, ahead=128), Tile(64, 64, 64, 4, 3, True)
    served = [name for name, known in FORMATS.items() if known.is_float or planes_hold(name)]
    for index, format in enumerate(served):
        act = format if FORMATS[format].is_float else "bf16"
        if act == "f32":
            found.append(kernel_of(Problem("f32", 96, 96, 96, 96, ADD, True, act, 0), Tile(16, 32, 32, 4, 2, False)))
            continue
        problem = Problem(
            format, 192, 512, 512, 192, index % 4, index % 2 == 0, act, 0, act if index % 4 >= GATED_SILU else "f32"
        )
        tile = (narrow, square)[index // 4 % 2]
        if act != "bf16" or format == "bf16":
            tile = Tile(tile.bm, tile.bn, tile.bk, tile.warps, tile.stages, False, ahead=tile.ahead)
        found.append(kernel_of(problem, tile))
    for epilogue in _EPILOGUES:
        for format in ("bf16", "q4_k"):
            problem = Problem(
                format, 320, 768, 768, 384, epilogue, True, "bf16", 2, "bf16" if epilogue >= GATED_SILU else "f32"
            )
            found.append(kernel_of(problem, square if format == "q4_k" else Tile(64, 64, 64, 4, 3, False)))
    return found
