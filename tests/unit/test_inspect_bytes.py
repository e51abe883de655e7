"""inspect against the files: what it says of every weight of every rank, followed in numpy, gives the file's bytes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import small_model
from rich.console import Console

from tapeout.compiler.driver import compile_spec
from tapeout.compiler.spec import Model, Serving, Spec, Topology
from tapeout.compiler.views import load_plan, print_weights

Array = npt.NDArray[np.float32]
Tensors = Mapping[str, Array]

EXPERTS, FFN, HIDDEN, HEAD = 4, 96, 64, 16
CONFIG = {
    **small_model.CONFIG,
    "architectures": ["MixtralForCausalLM"],
    "num_attention_heads": 6,
    "num_key_value_heads": 3,  # not a multiple of two ranks: a fourth of zeros, with its two query heads
    "num_local_experts": EXPERTS,
    "num_experts_per_tok": 2,
}


def checkpoint() -> dict[str, Array]:
    tensors = {name: each for name, each in small_model.tensors(CONFIG).items() if ".mlp." not in name}
    rng = np.random.default_rng(1)
    for layer in range(CONFIG["num_hidden_layers"]):
        at = f"model.layers.{layer}.block_sparse_moe"
        shapes = {f"{at}.gate.weight": (EXPERTS, HIDDEN)}
        for expert in range(EXPERTS):
            shapes |= {f"{at}.experts.{expert}.{name}.weight": (FFN, HIDDEN) for name in ("w1", "w3")}
            shapes[f"{at}.experts.{expert}.w2.weight"] = (HIDDEN, FFN)
        tensors |= {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    return tensors


@dataclass
class Step:
    """A line of the tree that inspect prints, and those below it."""

    text: str
    below: list[Step] = field(default_factory=list)


@dataclass
class Weight:
    """What inspect says of a weight on one rank."""

    name: str
    shape: tuple[int, ...]
    layout: str
    start: int
    stop: int
    file: str
    recipe: Step


def said(plan: dict[str, Any], rank: int) -> Iterator[Weight]:
    out = Console(file=StringIO(), width=200, highlight=False)
    print_weights(plan, "*", out, rank=rank)
    for block in re.split(r"\n(?=\w)", out.file.getvalue().strip()):  # type: ignore[attr-defined]
        head, place, *rest = (line.rstrip() for line in block.split("\n"))
        name, shape, layout, taken = re.fullmatch(r"(\S+)  \[(.*)\] f32, (\w+), ([\d,]+) bytes .*", head).groups()  # type: ignore[union-attr]
        start, stop, file = re.fullmatch(r"├── bytes ([\d,]+) to ([\d,]+) of the data in (\S+)", place).groups()  # type: ignore[union-attr]
        number = [int(text.replace(",", "")) for text in (start, stop, taken)]
        assert number[1] - number[0] == number[2]
        yield Weight(name, tuple(map(int, shape.split(","))), layout, *number[:2], file, tree(rest))


def tree(lines: list[str]) -> Step:
    """The tree, without what stands beside the recipe."""
    steps: list[tuple[int, Step]] = [(0, Step(""))]
    for line in lines:
        depth, step = re.search(r"[^ │├└─]", line).start(), Step(line.lstrip(" │├└─"))  # type: ignore[union-attr]
        while steps[-1][0] >= depth:
            steps.pop()
        steps[-1][1].below.append(step)
        steps.append((depth, step))
    (recipe,) = (step for step in steps[0][1].below if not step.text.startswith("axes: "))
    return recipe


def cut(source: Array, start: int, stop: int, period: int) -> Array:
    return np.concatenate([group[start:stop] for group in groups_of(source, period)])


def filled_up(source: Array, period: int, padded: int) -> Array:
    zeros = ((0, padded - period), (0, 0))[: source.ndim]
    return np.concatenate([np.pad(group, zeros) for group in groups_of(source, period)])


def interleaved(parts: list[Array], groups: int) -> Array:
    return np.concatenate([group for each in zip(*(np.split(p, groups) for p in parts), strict=True) for group in each])


MEANING: dict[str, Callable[..., Array]] = {
    "lay out as raw": lambda parts: parts[0],
    "lay out as tile16": lambda parts: parts[0],
    "concatenate N parts, in this order": lambda parts, count: np.concatenate(parts),
    "interleave N parts, each in N groups of rows": lambda parts, count, groups: interleaved(parts, groups),
    "rows N to N": lambda parts, start, stop: parts[0][start:stop],
    "columns N to N": lambda parts, start, stop: parts[0][:, start:stop],
    "rows N to N of every N": lambda parts, *numbers: cut(parts[0], *numbers),
    "every N rows filled up with zeros to N": lambda parts, *numbers: filled_up(parts[0], *numbers),
    "every N columns filled up with zeros to N": lambda parts, *numbers: filled_up(parts[0].T, *numbers).T,
}


def followed(step: Step, tensors: Tensors) -> Array:
    """The matrix that a recipe stands for, one numpy expression a step."""
    if step.text.startswith("read "):
        name, shape = step.text.split(" ")[1:3]
        assert tensors[name].shape == tuple(map(int, shape.split("×")))
        return tensors[name]
    parts = [followed(each, tensors) for child in step.below for each in unfolded(child)]
    numbers = [int(number) for number in re.findall(r"\b\d+\b", step.text)]
    counted = re.match(r"\w+ (\d+) parts", step.text)
    assert len(parts) == (int(counted[1]) if counted else 1)
    return MEANING[re.sub(r"\b\d+\b", "N", step.text)](parts, *numbers)


def groups_of(source: Array, rows: int) -> list[Array]:
    return np.split(source, len(source) // rows)


def unfolded(step: Step) -> list[Step]:
    """Inputs that are told once, each by itself."""
    found = re.match(r"([\d,]+) alike, # = (\d+)-(\d+): ", step.text)
    if not found:
        return [step]
    numbers = range(int(found[2]), int(found[3]) + 1)
    assert len(numbers) == int(found[1])
    return [numbered(Step(step.text[found.end() :], step.below), number) for number in numbers]


def numbered(step: Step, number: int) -> Step:
    return Step(step.text.replace("#", str(number)), [numbered(child, number) for child in step.below])


def values(data: bytes, shape: tuple[int, ...], layout: str) -> Array:
    """float32 bytes of a layout, by its description in compiler/layouts.py; tile16 is [tile][k][16 rows]."""
    count = int(np.prod(shape))
    if layout == "raw":
        return np.frombuffer(data, np.float32)[:count].reshape(shape)
    rows, k = shape
    tiles = -(-rows // 16)
    packed = np.frombuffer(data, np.float32)[: tiles * 16 * k].reshape(tiles, k, 16)
    return packed.transpose(0, 2, 1).reshape(tiles * 16, k)[:rows]


def data_of(path: Path) -> bytes:
    """The bytes behind the header of a safetensors file."""
    whole = path.read_bytes()
    return whole[8 + int.from_bytes(whole[:8], "little") :]


@pytest.fixture(scope="module", params=[1, 2], ids=["tensor", "expert"])
def artifact(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """The model on two ranks, which share every expert or have half of them each; and how many groups of them."""
    folder = tmp_path_factory.mktemp("split")
    source = small_model.write_folder(folder / "model", checkpoint(), CONFIG)
    topology = Topology.model_validate({"count": 2, "parallel": {"expert": request.param}})
    spec = Spec(model=Model(source=str(source)), topology=topology, serving=Serving(max_context=64))
    compile_spec(spec, folder / "artifact", cache=False)
    return folder / "artifact", request.param


def test_every_byte_of_every_rank_is_what_inspect_says(artifact: tuple[Path, int]) -> None:
    folder, _ = artifact
    plan, tensors = load_plan(folder), checkpoint()
    for rank in range(2):
        data, end = data_of(folder / "weights" / f"rank{rank}.safetensors"), 0
        for weight in said(plan, rank):
            assert (weight.file, weight.start) == (f"weights/rank{rank}.safetensors", end)
            end = weight.stop
            if weight.name == "model.rotary_emb":
                assert weight.recipe.below[0].text == "8 numbers that follow from the config"
                continue
            found = values(data[weight.start : weight.stop], weight.shape, weight.layout)
            expected = followed(weight.recipe, tensors)
            assert found.shape == expected.shape, weight.name
            assert np.array_equal(found, expected), weight.name
        assert end == len(data)


def cuts(tensors: Tensors, rank: int, groups: int) -> dict[str, Array]:
    """Weights of each kind as a rank should have them, cut by hand: padded, whole, interleaved, of experts."""
    at = "model.layers.1.block_sparse_moe.experts"
    gate, up, down = (
        [tensors[f"{at}.{expert}.{name}.weight"] for expert in range(EXPERTS)] for name in ("w1", "w3", "w2")
    )
    if groups == 2:  # two experts each, whole
        own = range(2 * rank, 2 * rank + 2)
        gate, up, down = ([each[expert] for expert in own] for each in (gate, up, down))
    else:  # half of the channels of each
        half = slice(FFN // 2 * rank, FFN // 2 * (rank + 1))
        gate, up, down = [each[half] for each in gate], [each[half] for each in up], [each[:, half] for each in down]
    attention = "model.layers.1.self_attn"
    q, k, v = (tensors[f"{attention}.{name}_proj.weight"] for name in "qkv")
    q = np.concatenate([q, np.zeros((2 * HEAD, HIDDEN), np.float32)])  # of the key head that is added
    k, v = (np.concatenate([each, np.zeros((HEAD, HIDDEN), np.float32)]) for each in (k, v))
    parts = [each[len(each) // 2 * rank : len(each) // 2 * (rank + 1)] for each in (q, k, v)]
    return {
        "model.norm": tensors["model.norm.weight"],
        "model.layers.1.self_attn.qkv_proj": np.concatenate(parts),
        "model.layers.1.mlp.experts.gate_up_proj": np.concatenate(
            [each for pair in zip(gate, up, strict=True) for each in pair]
        ),
        "model.layers.1.mlp.experts.down_proj": np.concatenate(down),
    }


def test_weights_cut_by_hand(artifact: tuple[Path, int]) -> None:
    folder, groups = artifact
    plan, tensors = load_plan(folder), checkpoint()
    for rank in range(2):
        found = {weight.name: weight for weight in said(plan, rank)}
        for name, expected in cuts(tensors, rank, groups).items():
            assert np.array_equal(followed(found[name].recipe, tensors), expected), name
            data = data_of(folder / found[name].file)[found[name].start : found[name].stop]
            assert np.array_equal(values(data, found[name].shape, found[name].layout), expected), name
