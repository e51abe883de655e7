"""Recipes over stacks of matrices (experts, heads) against numpy, in strips, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import save_file

from tapeout.compiler.checkpoints import open_checkpoint
from tapeout.compiler.emit.evaluate import ErrorSums, Evaluator
from tapeout.compiler.emit.native import load_native
from tapeout.compiler.environment import Environment
from tapeout.compiler.recipes import (
    Concat,
    Convert,
    Flatten,
    GroupRows,
    Integers,
    Interleave,
    Read,
    Recipe,
    TransposeGroups,
    Unpack,
    Vector,
    joined,
    stored_format,
)
from tapeout.runtime.errors import TapeoutError

E, N, K = 3, 8, 64
RNG = np.random.default_rng(5)
STACK = RNG.standard_normal((E, N, K)).astype(np.float32)
UP = RNG.standard_normal((E * 4, K)).astype(np.float32)
GATE = RNG.standard_normal((E * 2, K)).astype(np.float32)
VECTOR = RNG.standard_normal(E * 4).astype(np.float32)
IDS = RNG.integers(0, 9, (7, 3))

stack = Read("stack", STACK.shape, "f32")
up, gate, vector = Read("up", UP.shape, "f32"), Read("gate", GATE.shape, "f32"), Read("vector", VECTOR.shape, "f32")

ids, short_ids = Read("ids", IDS.shape, "i64"), Read("short_ids", IDS.shape, "i32")

CASES: dict[str, tuple[Recipe, npt.NDArray[np.float32]]] = {
    "flatten": (Flatten(stack), STACK.reshape(E * N, K)),
    "a matrix as a vector": (Vector(up), UP.reshape(-1)),
    "a table of ids": (Integers(ids, 9), IDS.astype(np.float32)),
    "a table of short ids as a vector": (Vector(Integers(short_ids, 9)), IDS.astype(np.float32).reshape(-1)),
    "every second row": (GroupRows(up, 2, 1, 2), UP[1::2]),
    "rows of every head": (GroupRows(up, 4, 1, 3), UP.reshape(E, 4, K)[:, 1:3].reshape(-1, K)),
    "elements of every group": (GroupRows(vector, 4, 2, 4), VECTOR.reshape(E, 4)[:, 2:].reshape(-1)),
    "transposed by group": (TransposeGroups(Flatten(stack), E), STACK.swapaxes(1, 2).reshape(E * K, N)),
    "transposed whole": (TransposeGroups(up, 1), UP.T),
    "interleaved": (
        Interleave((gate, up), E),
        np.concatenate([GATE.reshape(E, 2, K), UP.reshape(E, 4, K)], axis=1).reshape(-1, K),
    ),
    "every second row of a transposed stack": (
        GroupRows(TransposeGroups(Flatten(stack), E), 2, 0, 1),
        STACK.swapaxes(1, 2).reshape(E * K, N)[::2],
    ),
    "a transposed stack as halves": (
        Convert(TransposeGroups(Flatten(stack), E), "f16"),
        STACK.swapaxes(1, 2).reshape(E * K, N).astype(np.float16),
    ),
}


@pytest.fixture(scope="module")
def evaluator(tmp_path_factory: pytest.TempPathFactory) -> Evaluator:
    folder = tmp_path_factory.mktemp("stack")
    tensors = {"stack": STACK, "up": UP, "gate": GATE, "vector": VECTOR, "ids": IDS, "short_ids": IDS.astype(np.int32)}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    return Evaluator(open_checkpoint(folder), load_native(Environment.read().cache / "emit"))


@pytest.mark.parametrize("strip", [1, 3, 5, 1000])
@pytest.mark.parametrize("case", CASES)
def test_rows_equal_numpy_in_strips_of_any_size(case: str, strip: int, evaluator: Evaluator) -> None:
    recipe, expected = CASES[case]
    assert recipe.shape == expected.shape
    count = len(expected)
    starts = range(0, count, strip)
    strips = [evaluator.rows(recipe, start, min(start + strip, count), ErrorSums()) for start in starts]
    assert np.concatenate(strips).tobytes() == np.ascontiguousarray(expected).tobytes()


ORIGINS: dict[str, tuple[Recipe, str, int]] = {
    "flatten": (Flatten(stack), "stack", 17),
    "rows of every head": (GroupRows(up, 4, 1, 3), "up", 9),
    "interleaved": (Interleave((gate, up), E), "up", 9),
}


@pytest.mark.parametrize("case", ORIGINS)
def test_a_value_that_does_not_fit_is_named_by_its_tensor_and_row(case: str, tmp_path: Path) -> None:
    recipe, tensor, row = ORIGINS[case]
    values = {"stack": STACK.copy(), "up": UP.copy(), "gate": GATE}
    values[tensor].reshape(-1, K)[row, 7] = 1e6
    save_file(values, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    evaluator = Evaluator(open_checkpoint(tmp_path), load_native(Environment.read().cache / "emit"))
    with pytest.raises(TapeoutError, match=f"row {row} of tensor '{tensor}' cannot be stored as f16"):
        evaluator.rows(Convert(recipe, "f16"), 0, recipe.shape[0], ErrorSums())


REFUSED: dict[str, tuple[Callable[[], Recipe], str]] = {
    "a matrix as a stack": (lambda: Flatten(up), "a stack of matrices has three axes, got shape [12, 64]"),
    "numbers that are not whole": (lambda: Integers(up, 9), "a table of whole numbers is i32 or i64, got f32"),
    "a vector of whole numbers": (lambda: Vector(ids), "a vector is made of a f32 matrix, got [7, 3] i64"),
    "groups that do not divide": (lambda: GroupRows(up, 5, 0, 1), "12 rows do not make groups of 5"),
    "rows outside of a group": (lambda: GroupRows(up, 4, 3, 5), "rows 3:5 do not lie in the 4 rows of [12, 64]"),
    "blocks transposed": (
        lambda: TransposeGroups(Read("q", (4, 64), "q8_0"), 2),
        "blocks of q8_0 cannot be transposed; convert to a float format first",
    ),
    "transposed groups that do not divide": (
        lambda: TransposeGroups(up, 5),
        "shape [12, 64] does not make 5 groups to transpose",
    ),
    "interleaved groups that do not divide": (lambda: Interleave((gate, up), 4), "6 rows do not make 4 groups"),
    "interleaved formats": (
        lambda: Interleave((gate, Read("q", (12, 64), "q8_0")), 3),
        "a concatenation needs parts of one width and format, got [6, 64] f32, [12, 64] q8_0",
    ),
    "scales of 128 rows over stacks of 8": (
        lambda: Flatten(Read("stack", (E, N, 128), "fp8_block128")),
        "a stack of 8 rows cut through a scale of fp8_block128, which 128 rows share; cuts must be multiples of 128",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_expressed(case: str) -> None:
    make, message = REFUSED[case]
    with pytest.raises(TapeoutError) as caught:
        make()
    assert str(caught.value) == message


def test_parts_under_a_scale_each_join_with_a_scale_a_row() -> None:
    scale = Read("scale", (1,), "f32")
    parts = [Unpack("fp8", "fp8", Read(name, (4, 64), "e4m3"), scale) for name in "ab"]
    whole = joined(parts)
    assert (whole.shape, whole.format) == ((8, 64), "fp8_row")
    assert joined(parts[:1]).format == "fp8"


def test_what_is_read_as_floats_still_counts_as_quantized() -> None:
    packed = Flatten(Unpack("gguf-floats", "f32", Read("q", (2, 4, 256), "iq2_xxs"), None))
    assert (packed.format, stored_format(packed)) == ("f32", "iq2_xxs")
    assert stored_format(Convert(Read("q", (4, 64), "q8_0"), "f32")) == "q8_0"
    assert stored_format(up) == "f32"


def test_parts_of_one_tensor_are_read_once_each() -> None:
    kept = [GroupRows(up, 4, 0, 1), GroupRows(up, 4, 1, 4)]
    assert sum(recipe.shape[0] for recipe in kept) == UP.shape[0]
    assert [read.tensor for read in Concat((gate, up)).reads()] == ["gate", "up"]
