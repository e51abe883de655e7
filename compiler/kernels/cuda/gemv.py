"""Kernels for decode: matrix-vector products over every weight format, for 1, 2 or 4 rows of activations.

The kernel is ``src/gemv.cu``. Here its geometry is fixed: rows and steps of a warp's stage, stages of its ring, and
what of shared memory holds activations.

A block takes half of a multiprocessor (``CudaDevice.half_shared``, and at most half of the registers), and there is one
on each: the block of the next kernel fits beside it, fills its ring while this one runs, and no third does. With
other sizes blocks of one kernel met on a multiprocessor while others stood empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tapeout.compiler.formats import FORMATS
from tapeout.compiler.kernels.cuda.base import (
    ADD,
    FLOAT_BYTES,
    FLOAT_NAMES,
    GATED_SILU,
    Candidate,
    Define,
    GpuKernel,
    Param,
)
from tapeout.compiler.layouts import Planes, plane_geometry

if TYPE_CHECKING:
    from tapeout.compiler.devices import CudaDevice

EPILOGUES = ("store", "add", "silu", "gelu")
PARAMS = tuple(Param(name) for name in ("x", "norm", "w", "bias", "y"))
ELEMENTS = {"f16": (1, 2), "bf16": (2, 2), "f32": (3, 4), "e4m3": (4, 1)}
"""Number in the source and bytes of a float element."""

RING_LEAST = 32_768
"""Bytes of shared memory that weights on their way have at least."""
PACE = 20_000
"""Bytes on their way to a multiprocessor before the wait: more would hold up what the kernel before reads meanwhile."""
INTEGER_STEPS = (1, 2, 4)
"""Groups of 32 a lane can have of a stage, for integer codes."""
STAGES = 12
"""At most so many stages a ring: more do not put more bytes on their way."""


@dataclass(frozen=True)
class Tile:
    """How a block works: ``rows`` output rows an item of a warp, ``steps`` units a lane and stage, ``warps`` a block.

    ``shared`` bytes a block, or what ``CudaDevice.half_shared`` says where it is 0.
    """

    rows: int
    steps: int
    warps: int
    shared: int = 0


@dataclass(frozen=True)
class Problem:
    """One matrix-vector product; as the arguments of ``candidates``."""

    format: str
    n: int
    k: int
    m: int
    ldx: int
    ldy: int
    epilogue: int
    norm: bool
    eps: float
    bias: bool
    x: str
    y: str

    @property
    def gated(self) -> bool:
        """Whether the weight has gate rows and then as many up rows."""
        return self.epilogue >= GATED_SILU

    @property
    def weight_rows(self) -> int:
        """Rows of the weight."""
        return self.n * (2 if self.gated else 1)


@dataclass(frozen=True)
class Weight:
    """A weight as the kernel reads it: bytes of a lane's unit by plane, and the scale arrays of a row."""

    unit: int
    plane_units: tuple[int, ...]
    arrays: tuple[tuple[int, float], ...]
    """First byte in a row of scales and bytes for each k."""
    nbytes: int
    defines: tuple[tuple[str, Define], ...]
    side_bytes: int = 0
    """Integer codes: bytes beside each 32 activations (their scale, and what their sum is needed for)."""


def candidates(
    format: str,
    n: int,
    k: int,
    m: int,
    *,
    ldx: int,
    ldy: int,
    epilogue: int,
    norm: bool,
    eps: float,
    bias: bool,
    x: str,
    y: str,
    device: CudaDevice,
    tiles: Sequence[Tile] | None = None,
) -> list[Candidate]:
    """Kernels for ``y[m, n] = epilogue(norm(x)[m, k] @ w[n, k].T + bias)``, the likely best first.

    ``epilogue``: 0 store, 1 add into y, 2 gated SiLU, 3 gated GELU (tanh). ``x`` and ``y``: number types of activations
    (f32, bf16, f16); a y that is added into is f32. ``tiles`` overrides the shapes of blocks.
    """
    problem = Problem(format, n, k, m, ldx, ldy, epilogue, norm, eps, bias, x, y)
    weight = _weight(problem)
    chosen = tiles or _tiles(problem, weight, device)
    made = [_candidate(problem, weight, tile, device) for tile in chosen]
    return [candidate for candidate in made if candidate is not None]


def _weight(problem: Problem) -> Weight:
    shape = (problem.weight_rows, problem.k)
    if FORMATS[problem.format].is_float:
        code, width = ELEMENTS[problem.format]
        row = problem.k * width
        defines = _float_defines(code) | {"PLANE0": 0, "PLANE0_ROW": row, "SCALE_ROW": 16, "SCALE_ROWS": 1, "SCALES": 0}
        return Weight(16 // width, (16,), (), shape[0] * row, tuple(defines.items()))
    planes = plane_geometry(shape, problem.format)
    defines: dict[str, Define] = {}
    for i, plane in enumerate(planes.codes):
        defines |= {f"PLANE{i}": plane.offset, f"PLANE{i}_ROW": plane.row_bytes}
    scales = planes.scales
    defines |= {"SCALES": scales.offset, "SCALE_ROW": scales.row_bytes, "SCALE_ROWS": scales.tile_rows}
    if planes.element == "e4m3":
        whole = scales.rows == 1 and scales.tile_rows == shape[0] and planes.group == problem.k
        defines |= _float_defines(ELEMENTS["e4m3"][0]) | {"TENSOR_SCALE": int(whole)}
        arrays = () if whole else ((0, 4 / planes.group),)
        return Weight(16, (16,), arrays, planes.nbytes, tuple(defines.items()))
    defines |= _integer_defines(planes)
    units = tuple(4 * plane.bits for plane in planes.codes)
    return Weight(32, units, _arrays(planes), planes.nbytes, tuple(defines.items()), _side_bytes(planes))


def _float_defines(code: int) -> dict[str, Define]:
    return {"ELEMENT": code, "TENSOR_SCALE": 0}


def _integer_defines(planes: Planes) -> dict[str, Define]:
    scales = planes.scales
    return {
        "ELEMENT": 0,
        "BITS": planes.bits,
        "GROUP": planes.group,
        "SUPER": planes.super,
        "ZERO": planes.zero,
        "HAS_MIN": int(planes.has_min),
        "MIN_SIGN": planes.minimum_sign,
        "HAS_SUB": int(scales.sub is not None),
        "HAS_ZEROS": int(scales.zeros is not None),
        "SCALE_BF16": int(planes.d_type == "bf16"),
    }


def _side_bytes(planes: Planes) -> int:
    scaled = planes.has_min or planes.scales.zeros is not None  # sums as float32, else as 16-bit integers
    return 4 + (4 * scaled + 2 * (planes.zero != 0)) * (2 if planes.group == 16 else 1)


def _arrays(planes: Planes) -> tuple[tuple[int, float], ...]:
    scales = planes.scales
    fields = ((scales.d, 2 / planes.super), (scales.dmin, 2 / planes.super), (scales.sub, 1 / planes.group))
    fields += ((scales.submin, 1 / planes.group), (scales.zeros, 1 / planes.group))
    return tuple((at, per_k) for at, per_k in fields if at is not None)


def _window(at: int, piece: int, chunks: int) -> int:
    """Bytes, in whole 16, that hold the piece of any chunk."""
    starts = ((at + chunk * piece) % 16 for chunk in range(chunks))
    return -(-(max(starts) + piece) // 16) * 16


def _tiles(problem: Problem, weight: Weight, device: CudaDevice) -> list[Tile]:
    """A lane has two units of a stage: of two rows where these are enough for all warps (a gate and its up row are two
    already), which spares reading activations, else of one row."""
    warps = 16
    enough = problem.n // 2 * 10 >= 9 * device.sm_count * warps
    rows = 2 if enough and not problem.gated else 1
    wide = 2 if weight.unit * 64 <= problem.k else 1
    steps = 1 if rows == 2 or problem.gated else wide
    tiles = (Tile(rows, steps, warps), Tile(1, wide, warps), Tile(1, 1, warps), Tile(rows, wide, 8), Tile(1, 1, 8))
    return list(dict.fromkeys(tiles))


def _candidate(problem: Problem, weight: Weight, tile: Tile, device: CudaDevice) -> Candidate | None:
    """The kernel of one tile, or None where its ring does not fit."""
    item_rows = tile.rows * (2 if problem.gated else 1)
    stage_k = weight.unit * 32 * tile.steps
    chunks = -(-problem.k // stage_k)
    pieces = [int(per_k * stage_k) for _, per_k in weight.arrays]
    windows = [_window(at, piece, chunks) for (at, _), piece in zip(weight.arrays, pieces, strict=True)]
    stage = item_rows * (sum(weight.plane_units) * 32 * tile.steps + sum(windows))
    is_float = dict(weight.defines)["ELEMENT"] != 0
    x_bytes = _x_bytes(problem, weight, chunks * stage_k)
    others = 4 * (problem.m * tile.warps + 1)
    staged = not is_float or x_bytes + RING_LEAST + others <= device.shared_per_block
    if not staged:
        x_bytes = 0
    target = tile.shared or device.half_shared
    room = min(device.shared_per_block, max(target, x_bytes + others + RING_LEAST)) - x_bytes - others
    items = -(-problem.n // tile.rows)
    grid = min(device.sm_count, items)
    longest = -(-items // (grid * tile.warps)) * chunks
    stages = min(STAGES, room // (tile.warps * stage), max(2, longest))
    if stages < 2 or item_rows * problem.m > 32 or (weight.side_bytes and tile.steps not in INTEGER_STEPS):
        return None
    arrays = weight.arrays or ((0, 0.0),)
    defines: dict[str, Define] = {
        "PLANE1": 0,
        "PLANE1_ROW": 0,
        **dict(weight.defines),
        **{"N": problem.n, "K": problem.k, "M": problem.m, "LDX": problem.ldx, "LDY": problem.ldy},
        **{"EPILOGUE": problem.epilogue, "NORM": int(problem.norm), "EPS": float(problem.eps)},
        **{"X": FLOAT_NAMES[problem.x], "Y": FLOAT_NAMES[problem.y]},
        **{"BIAS": int(problem.bias)},
        **{"UNIT": weight.unit, "PLANE0_UNIT": weight.plane_units[0], "PLANE1_UNIT": sum(weight.plane_units[1:])},
        **{"ROWS": tile.rows, "STEPS": tile.steps, "STAGES": stages, "STAGE_BYTES": stage, "THREADS": 32 * tile.warps},
        "PACE": max(1, PACE // (tile.warps * stage)),
        **{"GRID": grid, "X_BYTES": x_bytes, "X_STAGED": int(staged), "SCALE_ARRAYS": len(weight.arrays)},
        "SCALE_OFFSETS": ",".join(str(at) for at, _ in arrays),
        "SCALE_PIECES": ",".join(map(str, pieces)) or "0",
        "SCALE_WINDOWS": ",".join(map(str, windows)) or "0",
    }
    kernel = GpuKernel(
        name=_name(problem, tile, stages),
        template="gemv",
        language="cuda",
        source="gemv.cu",
        params=PARAMS,
        defines=tuple(sorted(defines.items())),
        threads=32 * tile.warps,
        shared=max(target, tile.warps * stages * stage + x_bytes + others),
    )
    written = problem.n * FLOAT_BYTES[problem.y] * (2 if problem.epilogue == ADD else 1)
    activations = problem.m * (problem.k * FLOAT_BYTES[problem.x] + written)
    operations = 2 * problem.m * problem.weight_rows * problem.k
    return Candidate(kernel, (grid, 1, 1), weight.nbytes + activations, operations, "f32" if is_float else "int8")


def holds_activations(format: str, k: int, m: int, device: CudaDevice) -> bool:
    """Whether m rows of k activations fit in shared memory beside a ring; if not, every warp reads them again."""
    return not FORMATS[format].is_float or 4 * m * k + RING_LEAST <= device.shared_per_block


def _x_bytes(problem: Problem, weight: Weight, span: int) -> int:
    """Shared bytes of ``span`` activations a row: float32, or int8 and the bytes beside each 32."""
    if weight.side_bytes:
        return problem.m * span // 32 * (32 + weight.side_bytes)
    span = -(-problem.k // (32 * weight.unit)) * 32 * weight.unit
    return 4 * problem.m * span


def _name(problem: Problem, tile: Tile, stages: int) -> str:
    parts = [f"gemv_{problem.format}_n{problem.n}_k{problem.k}_m{problem.m}_{EPILOGUES[problem.epilogue]}"]
    parts += ["norm"] * problem.norm + ["bias"] * problem.bias
    parts += [f"{problem.x}_{problem.y}"] * ((problem.x, problem.y) != ("f32", "f32"))
    if (problem.ldx, problem.ldy) != (problem.k, problem.n):
        parts.append(f"x{problem.ldx}_y{problem.ldy}")
    return "_".join([*parts, f"r{tile.rows}s{tile.steps}w{tile.warps}d{stages}"])
