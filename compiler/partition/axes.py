"""How the axes of a model are cut over ranks: equal pieces after padding, and what each rank's piece of a weight is."""

from __future__ import annotations

from dataclasses import dataclass

from tapeout.compiler.formats import FORMATS
from tapeout.compiler.recipes import Columns, Convert, GroupRows, PadColumns, PadRows, Recipe, Rows


@dataclass(frozen=True)
class Mesh:
    """``count`` ranks that split heads, feed-forward and vocabulary; experts go to ``expert`` groups of them.

    Rank r belongs to expert group r // (count / expert); inside a group the ranks split every expert's feed-forward.
    """

    count: int
    expert: int = 1

    @property
    def within(self) -> int:
        """Ranks that share the experts of a group."""
        return self.count // self.expert

    def expert_group(self, rank: int) -> int:
        """Which of the groups of experts a rank holds."""
        return rank // self.within

    def expert_piece(self, rank: int) -> int:
        """Which piece of its experts' feed-forward a rank holds."""
        return rank % self.within


@dataclass(frozen=True)
class Cut:
    """An axis in ``pieces`` equal pieces, after each (period, padded) of ``pads`` has filled up its periods with zeros.

    ``copies`` neighbouring ranks hold the same piece, from piece ``first`` on. Padding adds heads or channels that
    contribute nothing.
    """

    pieces: int
    pads: tuple[tuple[int, int], ...] = ()
    copies: int = 1
    first: int = 0

    def piece(self, rank: int) -> int:
        """Which piece a rank holds."""
        return (self.first + rank // self.copies) % self.pieces

    def padded(self, elements: int) -> int:
        """How many elements there are with the padding."""
        for period, padded in self.pads:
            elements = elements // period * padded
        return elements

    def local(self, elements: int) -> int:
        """Elements of one piece."""
        return self.padded(elements) // self.pieces


def up(value: int, step: int) -> int:
    """The least multiple of ``step`` that is not below ``value``."""
    return -(-value // step) * step


def row_unit(format: str) -> int:
    """Rows that a cut must be a multiple of: those that share a scale."""
    tiles = FORMATS[format].tiles
    return tiles[0] or 1 if tiles else 1


def column_unit(format: str) -> int:
    """Columns that a cut must be a multiple of: a block, or those that share a scale."""
    known = FORMATS[format]
    return known.tiles[1] or known.block if known.tiles else known.block


def width_over(width: int, pieces: int, unit: int) -> Cut:
    """The cut of a width into pieces that are multiples of ``unit``."""
    return Cut(pieces, ((width, up(width, unit * pieces)),)) if pieces > 1 else Cut(1)


def rows_of(recipe: Recipe, cut: Cut, rank: int, *, unit: int = 1, period: int = 0) -> Recipe:
    """A rank's rows, of an axis with ``unit`` rows an element; with a ``period`` (in rows) it repeats all over.

    Where rows share scales that a conversion is to make, what is converted is cut, since a cut may go through a scale.
    """
    if isinstance(recipe, Convert) and FORMATS[recipe.to].tiles:
        return Convert(rows_of(recipe.source, cut, rank, unit=unit, period=period), recipe.to)
    for before, after in cut.pads:
        if before != after:
            recipe = PadRows(recipe, before * unit, after * unit)
    if cut.pieces == 1:
        return recipe
    whole = cut.padded(period) if period else recipe.shape[0]
    local, piece = whole // cut.pieces, cut.piece(rank)
    if period:
        return GroupRows(recipe, whole, piece * local, (piece + 1) * local)
    return Rows(recipe, piece * local, (piece + 1) * local)


def columns_of(recipe: Recipe, cut: Cut, rank: int, *, unit: int = 1) -> Recipe:
    """A rank's columns, of an axis with ``unit`` columns an element; see ``rows_of``."""
    if isinstance(recipe, Convert) and FORMATS[recipe.to].tiles:
        return Convert(columns_of(recipe.source, cut, rank, unit=unit), recipe.to)
    for before, after in cut.pads:
        if before != after:
            recipe = PadColumns(recipe, before * unit, after * unit)
    if cut.pieces == 1:
        return recipe
    local, piece = recipe.shape[1] // cut.pieces, cut.piece(rank)
    return Columns(recipe, piece * local, (piece + 1) * local)
