"""ingest: a checkpoint and its family become a logical model; every tensor is consumed or ignored with a reason."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tapeout.compiler.checkpoints import CONFIG, Checkpoint
from tapeout.compiler.checkpoints.config import written_differently
from tapeout.compiler.checkpoints.quantization_config import quantization_config
from tapeout.compiler.checkpoints.quantized import weights_of
from tapeout.compiler.formats import FORMATS
from tapeout.compiler.guards import is_list, is_mapping
from tapeout.compiler.ir import Builder, Graph, Weight
from tapeout.compiler.models import find_family
from tapeout.compiler.models.base import Family, Sources
from tapeout.compiler.recipes import Convert, Divide, Planned, Recipe, joined
from tapeout.compiler.spec import Model, Stored
from tapeout.compiler.stages import Decision, LogicalModel, check_rule
from tapeout.runtime.errors import TapeoutError

_SHOWN = 8  # keys that differ
# what a config is believed without tensors that bear it out: far above any real model, and quickly planned
_MOST_LAYERS, _MOST_CHANNELS = 1024, 1 << 16


def ingest(model: Model, checkpoint: Checkpoint) -> LogicalModel:
    """Parse the config, write down the forward pass, and fill every weight slot from exactly one tensor.

    Where there is a config alone, slots get what ``model.stored`` says that its checkpoint will hold.
    """
    family = find_family(_architectures(model, checkpoint), str(checkpoint.path))
    _check_scale(checkpoint, _stated_layers(checkpoint))
    config, sources = _parse(family, checkpoint)
    _check_scale(checkpoint, config.layers, config.head_dim)
    builder, constants = Builder(), dict(family.constants(config))
    graph = builder.graph(family.forward(config, builder))
    ignored: tuple[tuple[str, str], ...] = ()
    if checkpoint.container == CONFIG:
        recipes = _planned(graph, constants, checkpoint, model.stored)
    else:
        filler = _Filler(family, sources, checkpoint, constants)
        recipes = tuple((slot.name, filler.fill(slot)) for slot in graph.weights)
        ignored = tuple(filler.leftovers(config.tied))
    return LogicalModel(
        family=family.name,
        name=model.name or _own_name(checkpoint),
        config=tuple(sorted(config.to_json().items())),
        graph=graph,
        recipes=recipes,
        container=checkpoint.container,
        tensors=len(checkpoint.tensors),
        ignored=ignored,
        vocab_size=config.vocab_size,
        max_context=config.max_context,
        decisions=_gives_way(model, checkpoint),
    )


def _gives_way(model: Model, checkpoint: Checkpoint) -> tuple[Decision, ...]:
    """What a spec says for want of a checkpoint holds no longer where there is one; recorded, with what differs."""
    if model.source is None:
        return ()
    lost: list[tuple[str, str]] = []
    if model.config is not None:
        keys = [] if checkpoint.container == "gguf" else written_differently(model.config, checkpoint.config)
        shown = ", ".join(keys[:_SHOWN]) + (f" and {len(keys) - _SHOWN} more" if keys[_SHOWN:] else "")
        differs = f"; what it has says otherwise of {shown}" if keys else ""
        lost.append(("model.config", f"stands for a checkpoint that is not there{differs}"))
    if model.stored is not None and checkpoint.container != CONFIG:
        lost.append(("model.stored", "stands for a checkpoint that is not there; tensors say their formats themselves"))
    if not lost:
        return ()
    return (Decision("ingest", "model", "model.source", "a spec that names both takes the source", tuple(lost)),)


def _planned(
    graph: Graph, constants: Mapping[str, Recipe], checkpoint: Checkpoint, stored: Stored | None
) -> tuple[tuple[str, Recipe], ...]:
    """Every slot as the checkpoint is said to hold it. Raises TapeoutError where nobody says so."""
    if stored is None and quantization_config(checkpoint) is not None:
        raise TapeoutError(
            f"{checkpoint.path}: quantization_config says that weights are quantized, and a config alone does not say "
            "which; model.stored lists their formats"
        )
    stored = stored or Stored()
    matrices = [slot.name for slot in graph.weights if len(slot.shape) == 2]
    for index, rule in enumerate(stored.rules):
        check_rule(f"model.stored.rules[{index}]", rule.match, matrices)
    return tuple((slot.name, constants.get(slot.name) or _one_planned(slot, stored)) for slot in graph.weights)


def _one_planned(slot: Weight, stored: Stored) -> Recipe:
    format = stored.format_for(slot.name) if len(slot.shape) == 2 else "f32"
    if slot.shape[-1] % FORMATS[format].block and len(slot.shape) == 2:
        raise TapeoutError(
            f"model.stored: {slot.name} has rows of {slot.shape[1]}, which are not whole blocks of {format} "
            f"({FORMATS[format].block} each); a rule can give it another format"
        )
    return Planned(slot.name, slot.shape, format)


def _architectures(model: Model, checkpoint: Checkpoint) -> list[str]:
    if model.family:
        return [model.family]
    if checkpoint.container == "gguf":
        return [str(checkpoint.config.get("general.architecture", ""))]
    listed: Any = checkpoint.config.get("architectures") or []
    if not is_list(listed):
        raise TapeoutError(f"{checkpoint.path}: config.json: architectures is {listed!r}; it must be a list of names")
    return [str(name) for name in listed]


def _parse(family: Family, checkpoint: Checkpoint) -> tuple[Any, Sources]:
    try:
        if checkpoint.container == "gguf":
            shapes = {name: info.shape for name, info in checkpoint.tensors.items()}
            config = family.parse_gguf(checkpoint.config, shapes)
            return config, family.gguf(config)
        config = family.parse_hf(checkpoint.config)
        return config, family.hf(config)
    except TapeoutError as error:
        raise TapeoutError(f"{checkpoint.path}: {error}") from error


def _stated_layers(checkpoint: Checkpoint) -> int:
    """The layers that a config says there are, read before a family makes lists of that length; 0 for none."""
    text: Any = checkpoint.config.get("text_config")
    found: list[Any] = [each.get("num_hidden_layers") for each in (checkpoint.config, text) if is_mapping(each)]
    if checkpoint.container == "gguf":
        found = [value for key, value in checkpoint.config.items() if key.endswith(".block_count")]
    return max((value for value in found if isinstance(value, int)), default=0)


def _check_scale(checkpoint: Checkpoint, layers: int, head_dim: int = 0) -> None:
    """A config far beyond its tensors, or any that there are, is refused before a program of its size is built."""
    bare = checkpoint.container == CONFIG
    if layers > (_MOST_LAYERS if bare else len(checkpoint.tensors)):
        raise _unbelievable(checkpoint, f"{layers} layers", _MOST_LAYERS)
    if head_dim and head_dim > (_MOST_CHANNELS if bare else _extent(checkpoint)):
        raise _unbelievable(checkpoint, f"{head_dim} channels a head", _MOST_CHANNELS)


def _extent(checkpoint: Checkpoint) -> int:
    return max((max(info.shape, default=0) for info in checkpoint.tensors.values()), default=0)


def _unbelievable(checkpoint: Checkpoint, claim: str, most: int) -> TapeoutError:
    says = f"{checkpoint.path}: the config says {claim}"
    if checkpoint.container == CONFIG:
        return TapeoutError(f"{says}; without a checkpoint that bears it out, at most {most} are believed")
    return TapeoutError(
        f"{says}, but the checkpoint has {len(checkpoint.tensors)} tensors of at most {_extent(checkpoint)} rows or "
        "columns; they are not of one model"
    )


def _own_name(checkpoint: Checkpoint) -> str:
    return str(checkpoint.config.get("general.name") or checkpoint.config.get("_name_or_path") or checkpoint.path.stem)


def _spellings(name: str) -> tuple[str, ...]:
    """A Hugging Face tensor name as plain and multimodal checkpoints write it."""
    return name, f"{_PART}{name}", name.replace("model.", f"model.{_PART}", 1)


_PART = "language_model."


class _Filler:
    """Finds the tensor of each slot and remembers which were used."""

    def __init__(
        self, family: Family, sources: Sources, checkpoint: Checkpoint, constants: Mapping[str, Recipe]
    ) -> None:
        self.family, self.sources, self.checkpoint, self.constants = family, sources, checkpoint, constants
        self.weights = weights_of(checkpoint)
        self.used: dict[str, str] = {}
        self.multimodal = any(_PART in name for name in checkpoint.tensors)

    def find(self, slot: str, name: str) -> tuple[str, Recipe] | None:
        """A tensor under the name a family knows it by, as any spelling of checkpoints has it."""
        found: list[tuple[str, Recipe]] = []
        for spelling in self._spellings(name):
            recipe = self.weights.find(spelling)
            if recipe is not None:
                found.append((spelling, recipe))
        if len(found) > 1:
            listed = " and ".join(spelling for spelling, _ in found)
            raise TapeoutError(
                f"{self.checkpoint.path}: {slot} could come from {listed}; a slot has exactly one source"
            )
        return found[0] if found else None

    def _spellings(self, name: str) -> Iterable[str]:
        if not self.multimodal:
            return dict.fromkeys((name, *self.sources.others(name)))
        others = (spelling for other in self.sources.others(name) for spelling in _spellings(other))
        return dict.fromkeys((*_spellings(name), *others))

    def fill(self, slot: Weight) -> Recipe:
        """The recipe of a slot, of its shape."""
        constant = self.constants.get(slot.name)
        parts = self.sources.parts(slot.name)
        if parts:
            name, recipe = self._joined(slot, parts)
        else:
            wanted = self.sources.name(slot.name)
            found = self.find(slot.name, wanted)
            if found is None:
                if constant is not None:
                    return constant
                raise self._missing(wanted, slot.shape)
            name, recipe = found
        recipe = self._adapted(slot, name, recipe)
        self.used |= {read.tensor: slot.name for read in recipe.reads()}
        return Divide(constant, recipe) if constant is not None else recipe

    def _missing(self, tensor: str, shape: tuple[int, ...]) -> TapeoutError:
        return TapeoutError(
            f"{self.checkpoint.path}: tensor {tensor} is missing; "
            f"the family {self.family.name} needs it with shape {list(shape)}"
        )

    def _joined(self, slot: Weight, names: tuple[str, ...]) -> tuple[str, Recipe]:
        """The tensors of a slot one below the other, which must be of one shape and format."""
        recipes: list[Recipe] = []
        kind: tuple[Any, ...] = ()
        for wanted in names:
            found = self.find(slot.name, wanted)
            if found is None:
                raise self._missing(wanted, (slot.shape[0] // len(names), *slot.shape[1:]))
            name, recipe = found
            kind = kind or (recipe.shape, recipe.format)
            if (recipe.shape, recipe.format) != kind:
                raise TapeoutError(
                    f"{self.checkpoint.path}: tensor {name} is {list(recipe.shape)} {recipe.format}, but "
                    f"{names[0]} is {list(kind[0])} {kind[1]}; the parts of {slot.name} share both"
                )
            recipes.append(recipe)
        return f"{names[0]} and {len(names) - 1} more", joined(recipes)

    def _adapted(self, slot: Weight, name: str, recipe: Recipe) -> Recipe:
        """The recipe in the slot's order and shape, vectors as float32."""
        shape = recipe.shape
        wrong = TapeoutError(
            f"{self.checkpoint.path}: tensor {name} has shape {list(shape)}, but the config says {list(slot.shape)}"
        )
        if len(shape) == 1 and recipe.format != "f32":
            recipe = Convert(recipe, "f32")
        try:
            adapted = self.sources.adapt(slot.name, recipe)
        except TapeoutError as error:
            if shape != slot.shape:
                raise wrong from error
            raise TapeoutError(f"{self.checkpoint.path}: tensor {name}: {error}") from error
        if adapted.shape != slot.shape:
            raise wrong
        return adapted

    def leftovers(self, tied: bool) -> Iterator[tuple[str, str]]:
        for name in self.checkpoint.tensors:
            if name in self.used or name in self.weights.checked:
                continue
            reason = self.sources.ignore(name) or self.weights.spare(name)
            if reason is None and tied and re.search(r"lm_head\.(?!bias$)\w+$", name):
                reason = "the head is tied to the embedding"
            if reason is None:
                raise TapeoutError(
                    f"{self.checkpoint.path}: tensor {name} is not part of the family {self.family.name}; every "
                    "tensor must be used or ignored for a reason, so check that the architecture is right"
                )
            yield name, reason
