"""Recipes: immutable expressions that say how the bytes of one weight come from a checkpoint.

A recipe is built by passes and evaluated only by emission. Shape and format are inferred when it is built, so an
impossible step (a cut through a quantization block, a concatenation of unlike formats) cannot be expressed.
Every recipe is row-local: output rows depend on a known set of input rows, which is what lets emission stream.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property
from itertools import accumulate
from typing import Any, ClassVar, cast

from tapeout.compiler.formats import CARRIERS, FORMATS
from tapeout.runtime.errors import TapeoutError

Json = dict[str, Any]


@dataclass(frozen=True)
class Recipe:
    """Base of all recipes. A subclass states its ``op`` and, where they differ from its source's, shape and format."""

    op: ClassVar[str]

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape in elements: [N, K] or [K]."""
        return self.inputs[0].shape

    @property
    def format(self) -> str:
        """Name of the number format of the result, an entry of FORMATS; what an Unpack reads may be in a carrier."""
        return self.inputs[0].format

    @property
    def inputs(self) -> tuple[Recipe, ...]:
        """The recipes this one reads, in declared order."""
        found: list[Recipe] = []
        for value in self.by_field().values():
            if isinstance(value, Recipe):
                found.append(value)
            elif isinstance(value, tuple):
                found.extend(item for item in cast(tuple[Any, ...], value) if isinstance(item, Recipe))
        return tuple(found)

    def by_field(self) -> dict[str, Any]:
        """All fields by name."""
        return {name: getattr(self, name) for name in _field_names(type(self))}

    def attributes(self) -> Json:
        """What a step says besides its op and its inputs, as it stands in the plan."""
        return {name: _plain(value) for name, value in self.by_field().items() if not is_input(value)}

    def named_inputs(self) -> dict[str, Recipe | tuple[Recipe, ...]]:
        """The inputs by the names of their fields."""
        return {name: value for name, value in self.by_field().items() if is_input(value)}

    def to_json(self) -> Json:
        """Canonical JSON of the whole expression, nested."""
        return (
            {"op": self.op} | self.attributes() | {name: _plain(value) for name, value in self.named_inputs().items()}
        )

    @cached_property
    def digest(self) -> str:
        """Digest of the expression, made of those of its inputs; equal recipes have equal digests."""
        inputs = {
            name: [each.digest for each in value] if isinstance(value, tuple) else value.digest
            for name, value in self.named_inputs().items()
        }
        text = json.dumps({"op": self.op} | self.attributes() | inputs, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def reads(self) -> Iterator[Read]:
        """Every tensor this recipe reads, in declared order."""
        for recipe in self.inputs:
            yield from recipe.reads()


@cache
def _field_names(kind: type[Recipe]) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind))


def is_input(value: Any) -> bool:
    """Whether a field of a recipe is one that it reads, or several."""
    several = cast(tuple[Any, ...], value) if isinstance(value, tuple) else (value,)
    return any(isinstance(each, Recipe) for each in several)


def _plain(value: Any) -> Any:
    if isinstance(value, Recipe):
        return value.to_json()
    return [_plain(item) for item in cast(tuple[Any, ...], value)] if isinstance(value, tuple) else value


@dataclass(frozen=True)
class Read(Recipe):
    """A whole tensor of the checkpoint, by name. Matrices are [out, in] with rows contiguous."""

    op = "read"
    tensor: str
    tensor_shape: tuple[int, ...]
    tensor_format: str

    @property
    def shape(self) -> tuple[int, ...]:
        """The tensor's shape."""
        return self.tensor_shape

    @property
    def format(self) -> str:
        """The tensor's format."""
        return self.tensor_format

    def attributes(self) -> Json:
        """Name, shape and format of the tensor."""
        return {"tensor": self.tensor, "shape": list(self.shape), "format": self.format}

    def reads(self) -> Iterator[Read]:
        """Itself."""
        yield self


@dataclass(frozen=True)
class Planned(Recipe):
    """A weight of a checkpoint that is not there, by the name of its slot. It can be planned with, and not emitted."""

    op = "planned"
    slot: str
    slot_shape: tuple[int, ...]
    slot_format: str

    def __post_init__(self) -> None:
        FORMATS[self.slot_format].row_bytes(self.slot_shape[-1])

    @property
    def shape(self) -> tuple[int, ...]:
        """The slot's shape."""
        return self.slot_shape

    @property
    def format(self) -> str:
        """What the checkpoint is said to hold."""
        return self.slot_format

    def attributes(self) -> Json:
        """Name, shape and format of the slot."""
        return {"slot": self.slot, "shape": list(self.shape), "format": self.format}


@dataclass(frozen=True)
class Rows(Recipe):
    """Rows [start, stop) of the input."""

    op = "rows"
    source: Recipe
    start: int
    stop: int

    def __post_init__(self) -> None:
        _check_range("rows", self.start, self.stop, self.source.shape[0], self.source)
        _check_tiles(f"rows from {self.start}", (self.start,), self.source.format)

    @property
    def shape(self) -> tuple[int, ...]:
        """The rows that are kept."""
        return (self.stop - self.start, *self.source.shape[1:])


@dataclass(frozen=True)
class Columns(Recipe):
    """Columns [start, stop) of a matrix; both ends must fall on block boundaries of its format."""

    op = "columns"
    source: Recipe
    start: int
    stop: int

    def __post_init__(self) -> None:
        if len(self.source.shape) != 2:
            raise TapeoutError(f"a column cut needs a matrix, got shape {list(self.source.shape)}")
        _check_range("columns", self.start, self.stop, self.source.shape[1], self.source)
        _check_columns(f"columns {self.start}:{self.stop}", (self.start, self.stop), self.source.format)

    @property
    def shape(self) -> tuple[int, ...]:
        """The columns that are kept."""
        return (self.source.shape[0], self.stop - self.start)


def _check_columns(what: str, ends: tuple[int, ...], format: str, *, scales: bool = True) -> None:
    known = FORMATS[format]
    block = known.tiles[1] or known.block if known.tiles and scales else known.block
    if any(end % block for end in ends):
        raise TapeoutError(f"{what} cut through a block of {format}; cuts must be multiples of {block}")


def _check_tiles(what: str, starts: tuple[int, ...], format: str) -> None:
    """Refuse what would bring rows under one scale that were encoded under several."""
    tiles = FORMATS[format].tiles
    if tiles and any(start % tiles[0] if tiles[0] else 0 for start in starts):
        raise TapeoutError(
            f"{what} cut through a scale of {format}, which {tiles[0]} rows share; cuts must be multiples of {tiles[0]}"
        )


def _check_range(what: str, start: int, stop: int, count: int, source: Recipe) -> None:
    if not 0 <= start < stop <= count:
        raise TapeoutError(f"{what} {start}:{stop} do not lie in the {count} {what} of {list(source.shape)}")


@dataclass(frozen=True)
class Concat(Recipe):
    """The inputs one below the other (along rows), in declared order. All must share columns and format."""

    op = "concat"
    parts: tuple[Recipe, ...]

    def __post_init__(self) -> None:
        if not self.parts:
            raise TapeoutError("a concatenation needs at least one part")
        shapes = [part.shape for part in self.parts]  # once, since parts may be hundreds of experts
        if len({(shape[1:], part.format) for shape, part in zip(shapes, self.parts, strict=True)}) > 1:
            listed = ", ".join(f"{list(part.shape)} {part.format}" for part in self.parts)
            raise TapeoutError(f"a concatenation needs parts of one width and format, got {listed}")
        format, starts = self.parts[0].format, list(accumulate(shape[0] for shape in shapes))
        if FORMATS[format].tiles == (0, 0) and len(self.parts) > 1:
            raise TapeoutError(f"{format} has one scale a tensor; concatenate before converting, not after")
        _check_tiles(f"parts that start in rows {starts[:-1]}", tuple(starts[:-1]), format)

    @property
    def shape(self) -> tuple[int, ...]:
        """All rows of all parts."""
        return (self.ends[-1], *self.parts[0].shape[1:])

    @property
    def format(self) -> str:
        """That of all parts."""
        return self.parts[0].format

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """The row after the last of each part, rising."""
        return tuple(accumulate(part.shape[0] for part in self.parts))


def joined(parts: Sequence[Recipe], groups: int = 1) -> Recipe:
    """The parts one below the other, or interleaved by ``groups``.

    Where rows share scales, the whole is converted instead of every part. Packed parts under a scale each become
    one matrix with a scale a row, which holds the same numbers.
    """
    first = parts[0]
    if len(parts) > 1 and all(isinstance(part, Unpack) and part.to == "fp8" for part in parts):
        return joined([replace(part, to="fp8_row") for part in parts if isinstance(part, Unpack)], groups)
    if isinstance(first, Convert) and FORMATS[first.format].tiles:
        sources = [part.source for part in parts if isinstance(part, Convert)]
        assert len(sources) == len(parts), [part.op for part in parts]
        return Convert(joined(sources, groups), first.to)
    return Concat(tuple(parts)) if groups == 1 else Interleave(tuple(parts), groups)


def joins_with(recipe: Recipe, groups: int = 1) -> str:
    """What recipes that can be ``joined`` agree in: the format, and what it is converted from where that matters.

    Scales that come from the checkpoint stay as they are, so its parts join only where their tiles meet.
    """
    tiles = FORMATS[recipe.format].tiles
    if tiles and isinstance(recipe, Convert):
        return f"{recipe.to} from {joins_with(recipe.source, groups)}"
    apart = tiles and (not tiles[0] or recipe.shape[0] // groups % tiles[0])
    return f"{recipe.format} {recipe.digest}" if apart else recipe.format


PER_CODE = {
    "pack-quantized": (1, 8),
    "pack-quantized-8": (1, 4),
    "int-quantized": (1, 1),
    "fp8": (1, 1),
}
"""Rows and columns of a matrix for each of its codes, where these are [rows, columns]."""


@dataclass(frozen=True)
class Unpack(Recipe):
    """A matrix [N, K] that another tool packed in tensors of its own, in the format ``to``: its codes and scales.

    ``packing`` says how:

    - pack-quantized: ``codes`` i32 [N, K/8], ``scales`` [N, groups], ``zeros`` i32 [N/8, groups];
    - pack-quantized-8: ``codes`` i32 [N, K/4], ``scales`` [N, groups]; int-quantized: ``codes`` i8 [N, K];
    - gptq, gptq_v2: ``codes`` i32 [K/8, N], ``scales`` [groups, N], ``zeros`` i32 [groups, N/8];
    - awq: ``codes`` i32 [K, N/8], ``scales`` [groups, N], ``zeros`` i32 [groups, N/8];
    - fp8: ``codes`` e4m3 [N, K], ``scales`` of the tensor, of each row or of each 128 x 128 block;
    - mxfp4: ``codes`` [..., N, K/2] bytes, ``scales`` [..., N, K/32]; mxfp4-blocks: ``codes`` u8 [E, N, K/32, 16];
    - nvfp4, nvfp4-divided: ``codes`` u8 [N, K/2], ``scales`` e4m3 [N, K/16] and the ``tensor_scale`` that multiplies
      (or divides) them; gguf-nvfp4: ``codes`` with their scales [..., N, K], ``tensor_scale`` one, or one a matrix;
    - gguf-floats: ``codes`` [..., N, K] of a GGUF type that is read as the numbers it stands for; ``to`` is f32.

    But for GGUF, a stack of matrices becomes one matrix, one below the other. ``order`` [K] is the group of each column
    where groups are not neighbours (act-order), in which case ``to`` is f32.
    """

    op = "unpack"
    packing: str
    to: str
    codes: Read
    scales: Read | None
    zeros: Read | None = None
    tensor_scale: Read | None = None
    order: Read | None = None

    def __post_init__(self) -> None:
        FORMATS[self.to].row_bytes(self.shape[-1])

    @property
    def shape(self) -> tuple[int, ...]:
        """The matrix, not what it is packed in; of a GGUF the stack of them, as of its other tensors."""
        if self.packing.startswith("gguf-"):
            return self.codes.shape
        *stack, first, second = self.codes.shape
        match self.packing:
            case "gptq" | "gptq_v2":
                shape = (second, 8 * first)
            case "awq":
                shape = (8 * second, first)
            case "mxfp4" | "nvfp4" | "nvfp4-divided":
                shape = (math.prod(stack) * first, 2 * second // CARRIERS[self.codes.format].block)
            case "mxfp4-blocks":
                shape = (math.prod(stack), 2 * first * second)
            case _:
                rows, columns = PER_CODE[self.packing]
                shape = (rows * first, columns * second)
        return shape

    @property
    def format(self) -> str:
        """The format that holds the same numbers."""
        return self.to

    @property
    def inputs(self) -> tuple[Read, ...]:
        """The tensors, those that there are."""
        tensors = (self.codes, self.scales, self.zeros, self.tensor_scale, self.order)
        return tuple(tensor for tensor in tensors if tensor is not None)

    @property
    def stored(self) -> str:
        """What the checkpoint has, in words: the format, or what is read as floats for want of one."""
        if self.to != "f32":
            return self.to
        return self.codes.format if self.packing == "gguf-floats" else f"{self.packing} in act-order"


def stored_format(recipe: Recipe) -> str:
    """What the checkpoint has: the recipe's format, or the one that is read as float32 since none here holds it."""
    while recipe.inputs and not isinstance(recipe, Unpack):
        recipe = recipe.inputs[0]
    return recipe.stored if isinstance(recipe, Unpack) else recipe.format


@dataclass(frozen=True)
class Flatten(Recipe):
    """A stack of matrices [E, N, K] as one matrix [E * N, K]: experts, or the heads of a split projection."""

    op = "flatten"
    source: Recipe

    def __post_init__(self) -> None:
        if len(self.source.shape) != 3:
            raise TapeoutError(f"a stack of matrices has three axes, got shape {list(self.source.shape)}")
        _check_group_tiles("a stack", self.source.shape[1], self.source.format)

    @property
    def shape(self) -> tuple[int, ...]:
        """The matrices one below the other."""
        count, rows, k = self.source.shape
        return (count * rows, k)


@dataclass(frozen=True)
class GroupRows(Recipe):
    """Rows [start, stop) of every group of ``period`` rows: one projection of several that a checkpoint interleaves."""

    op = "group_rows"
    source: Recipe
    period: int
    start: int
    stop: int

    def __post_init__(self) -> None:
        if self.source.shape[0] % self.period:
            raise TapeoutError(f"{self.source.shape[0]} rows do not make groups of {self.period}")
        _check_range("rows", self.start, self.stop, self.period, self.source)
        if (self.start, self.stop) != (0, self.period):
            _check_tiles("rows of every group", (self.period, self.start, self.stop), self.source.format)

    @property
    def shape(self) -> tuple[int, ...]:
        """The rows that are kept."""
        return (self.source.shape[0] // self.period * (self.stop - self.start), *self.source.shape[1:])


@dataclass(frozen=True)
class PadRows(Recipe):
    """Every group of ``period`` rows filled up with rows of zeros to ``padded``: heads or channels of nothing.

    Bytes of zeros are zeros in every format.
    """

    op = "pad_rows"
    source: Recipe
    period: int
    padded: int

    def __post_init__(self) -> None:
        if self.source.shape[0] % self.period or self.padded < self.period:
            raise TapeoutError(
                f"{self.source.shape[0]} rows do not make groups of {self.period} to pad to {self.padded}"
            )
        if self.period != self.source.shape[0]:  # behind all rows, a scale may end within its tile as it does now
            _check_tiles("padded groups of rows", (self.period, self.padded), self.source.format)

    @property
    def shape(self) -> tuple[int, ...]:
        """With the rows of zeros."""
        return (self.source.shape[0] // self.period * self.padded, *self.source.shape[1:])


@dataclass(frozen=True)
class PadColumns(Recipe):
    """Every group of ``period`` columns filled up with zeros to ``padded``; both are whole blocks of the format."""

    op = "pad_columns"
    source: Recipe
    period: int
    padded: int

    def __post_init__(self) -> None:
        if len(self.source.shape) != 2 or self.source.shape[1] % self.period or self.padded < self.period:
            raise TapeoutError(
                f"shape {list(self.source.shape)} does not make groups of {self.period} columns to pad to {self.padded}"
            )
        inside = self.period != self.source.shape[1]  # see PadRows
        what = f"columns padded from {self.period} to {self.padded}"
        _check_columns(what, (self.period, self.padded), self.format, scales=inside)

    @property
    def shape(self) -> tuple[int, ...]:
        """With the columns of zeros."""
        return (self.source.shape[0], self.source.shape[1] // self.period * self.padded)


@dataclass(frozen=True)
class TransposeGroups(Recipe):
    """Each of ``groups`` equal groups of rows transposed: [groups * K, N] becomes [groups * N, K]. Floats only."""

    op = "transpose_groups"
    source: Recipe
    groups: int

    def __post_init__(self) -> None:
        if not FORMATS[self.source.format].is_float:
            raise TapeoutError(f"blocks of {self.source.format} cannot be transposed; convert to a float format first")
        if len(self.source.shape) != 2 or self.source.shape[0] % self.groups:
            raise TapeoutError(f"shape {list(self.source.shape)} does not make {self.groups} groups to transpose")

    @property
    def shape(self) -> tuple[int, ...]:
        """Rows and columns of each group exchanged."""
        rows, columns = self.source.shape
        return (self.groups * columns, rows // self.groups)


@dataclass(frozen=True)
class Interleave(Recipe):
    """Group by group, the rows of every part: gate and up of each expert become neighbours.

    All parts are cut in ``groups`` equal groups of rows, and share columns and format.
    """

    op = "interleave"
    parts: tuple[Recipe, ...]
    groups: int

    def __post_init__(self) -> None:
        Concat(self.parts)
        for part in self.parts:
            if part.shape[0] % self.groups:
                raise TapeoutError(f"{part.shape[0]} rows do not make {self.groups} groups")
            _check_group_tiles("groups of rows", part.shape[0] // self.groups, part.format)

    @property
    def shape(self) -> tuple[int, ...]:
        """All rows of all parts."""
        return (self._rows, *self.parts[0].shape[1:])

    @property
    def format(self) -> str:
        """That of all parts."""
        return self.parts[0].format

    @cached_property
    def _rows(self) -> int:
        return sum(part.shape[0] for part in self.parts)


def _check_group_tiles(what: str, rows: int, format: str) -> None:
    _check_tiles(f"{what} of {rows} rows", (rows,), format)


@dataclass(frozen=True)
class Integers(Recipe):
    """A table of whole numbers from 0 and below ``limit``, ids say, as float32, which holds them up to 2^24."""

    op = "integers"
    source: Read
    limit: int

    def __post_init__(self) -> None:
        if self.source.format not in ("i32", "i64"):
            raise TapeoutError(f"a table of whole numbers is i32 or i64, got {self.source.format}")

    @property
    def format(self) -> str:
        """Always f32."""
        return "f32"


@dataclass(frozen=True)
class Vector(Recipe):
    """A float32 matrix as one vector, row after row: small tables that no product reads."""

    op = "vector"
    source: Recipe

    def __post_init__(self) -> None:
        if len(self.source.shape) != 2 or self.source.format != "f32":
            raise TapeoutError(f"a vector is made of a f32 matrix, got {list(self.source.shape)} {self.source.format}")

    @property
    def shape(self) -> tuple[int, ...]:
        """One axis."""
        return (math.prod(self.source.shape),)


@dataclass(frozen=True)
class HalvesFromPairs(Recipe):
    """Undo the row order that GGUF's ``llama`` class gives q and k (``permute`` of llama.cpp's convert_hf_to_gguf.py).

    Within each of ``heads`` equal groups of d rows, input row 2i + j becomes output row j * d/2 + i, so that rotary
    embedding pairs element i with element i + d/2.
    """

    op = "halves_from_pairs"
    source: Recipe
    heads: int

    def __post_init__(self) -> None:
        _check_tiles("rows in another order", (1,), self.source.format)
        if self.source.shape[0] % (2 * self.heads):
            raise TapeoutError(f"{self.source.shape[0]} rows do not make {self.heads} heads of an even size")


@dataclass(frozen=True)
class Convert(Recipe):
    """The input in another number format: decoded to float32 and, unless ``to`` is f32, encoded again."""

    op = "convert"
    source: Recipe
    to: str

    def __post_init__(self) -> None:
        target = FORMATS[self.to]
        if target.encode is None:
            can = ", ".join(name for name, known in FORMATS.items() if known.encode is not None)
            raise TapeoutError(f"nothing here writes the format {self.to}; formats that can be written: {can}")
        target.row_bytes(self.source.shape[-1])

    @property
    def format(self) -> str:
        """The format asked for."""
        return self.to


@dataclass(frozen=True)
class AddOne(Recipe):
    """A float32 vector plus one: Gemma's norm weights in safetensors are stored as w - 1."""

    op = "add_one"
    source: Recipe

    def __post_init__(self) -> None:
        if self.source.format != "f32":
            raise TapeoutError(f"adding one needs f32, got {self.source.format}")


@dataclass(frozen=True)
class Divide(Recipe):
    """One float32 vector divided by another: inverse frequencies by GGUF's ``rope_freqs``."""

    op = "divide"
    numerator: Recipe
    denominator: Recipe

    def __post_init__(self) -> None:
        kinds = [(part.shape, part.format) for part in (self.numerator, self.denominator)]
        if kinds[0] != kinds[1] or kinds[0][1] != "f32":
            raise TapeoutError(f"a division needs two f32 vectors of one length, got {kinds}")


@dataclass(frozen=True)
class Constant(Recipe):
    """A small float32 vector that comes from the config alone (rotary frequencies)."""

    op = "constant"
    values: tuple[float, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """One axis."""
        return (len(self.values),)

    @property
    def format(self) -> str:
        """Always f32."""
        return "f32"


@dataclass(frozen=True)
class Pack(Recipe):
    """The last step of a weight: the byte layout that a kernel reads. ``layout`` names an entry of LAYOUTS."""

    op = "pack"
    source: Recipe
    layout: str
