"""What families with a mixture of experts share: sizes, tensor names of both containers, and the routed MLP."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tapeout.compiler.ir import Builder
from tapeout.compiler.models.base import Fields, Sources
from tapeout.compiler.recipes import Flatten, Recipe
from tapeout.runtime.errors import TapeoutError

MOST = 4096
GGUF_NAMES = {
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
}
"""What ``names.gguf_names`` is to add for the routed experts of a layer."""
GATING_SOFTMAX, GATING_SOFTMAX_CHOSEN = 1, 3
"""Of ``expert_gating_func`` (llama.cpp's llama-hparams.h): over all experts, or over the chosen."""
HF_PROJECTIONS = {"gate_proj": "gate_proj", "up_proj": "up_proj", "down_proj": "down_proj"}


@dataclass(frozen=True)
class Experts:
    """``count`` experts of ``width`` channels, ``top_k`` for each row, chosen as ``Builder.route`` says."""

    count: int
    top_k: int
    width: int
    normalize: bool
    score: str = "softmax"
    bias: bool = False
    groups: int = 1
    top_groups: int = 1
    group_score: str = "max"
    scale: float = 1.0


def checked(experts: Experts, what: str) -> Experts:
    """The experts. Raises TapeoutError where not every row could choose as many as it is to."""
    if not experts.top_k <= experts.count <= MOST:
        raise TapeoutError(
            f"{what}: {experts.top_k} of {experts.count} experts are to be chosen; there must be at least as many, and "
            f"at most {MOST}"
        )
    open_experts = experts.count // experts.groups * experts.top_groups
    if experts.count % experts.groups or experts.top_groups > experts.groups or experts.top_k > open_experts:
        raise TapeoutError(
            f"{what}: {experts.top_k} of {experts.count} experts are to be chosen from {experts.top_groups} of "
            f"{experts.groups} groups; groups must be equal, and the open ones must hold as many experts"
        )
    return experts


def hf_experts(fields: Fields, *, count: int, top_k: int, width: int, normalize: bool) -> Experts:
    """Softmax routing by config.json; the numbers are the family's defaults where keys are missing."""
    given = fields.integer("num_local_experts", fields.integer("num_experts", count))
    if fields.integer("num_experts", given) != given:
        raise TapeoutError(f"{fields.what}: num_experts and num_local_experts differ")
    chosen = fields.integer("num_experts_per_tok", top_k)
    return checked(Experts(given, chosen, width, normalize), fields.what)


def gguf_experts(fields: Fields, arch: str, width: int, gating: int = GATING_SOFTMAX) -> Experts:
    """Softmax routing with weights that are normalised, as llama.cpp has it for every file of these architectures.

    ``gating`` is the function that these have, where a file states one.
    """
    keys = ("expert_shared_count", "expert_shared_feed_forward_length", "expert_group_used_count",
            "interleave_moe_layer_step", "expert_group_scale", "experts_per_group")  # fmt: skip
    fields.refuse(*(f"{arch}.{key}" for key in keys))
    if fields.integer(f"{arch}.expert_gating_func", gating, least=0) not in (0, gating):
        raise fields.unsupported(f"{arch}.expert_gating_func")
    if not fields.flag(f"{arch}.expert_weights_norm", True):
        raise fields.unsupported(f"{arch}.expert_weights_norm")
    count, chosen = fields.integer(f"{arch}.expert_count"), fields.integer(f"{arch}.expert_used_count")
    width = fields.integer(f"{arch}.expert_feed_forward_length", width)
    if fields.number(f"{arch}.expert_weights_scale", 1.0) not in (0, 1):
        raise fields.unsupported(f"{arch}.expert_weights_scale")
    return checked(Experts(count, chosen, width, normalize=True), fields.what)


def hf_sources(
    base: Sources, count: int, block: str = "mlp", projections: Mapping[str, str] = HF_PROJECTIONS
) -> Sources:
    """Sources whose experts are tensors of their own; ``block`` and ``projections`` are what a container calls them."""

    def name(slot: str) -> str:
        return base.name(re.sub(r"(?<=\.)mlp(?=\.)", block, slot))

    def parts(slot: str) -> tuple[str, ...]:
        match = re.fullmatch(r"(.+)\.mlp\.experts\.(\w+_proj)", slot)
        if match is None:
            return base.parts(slot)
        at = f"{match[1]}.{block}.experts"
        return tuple(f"{at}.{expert}.{projections[match[2]]}.weight" for expert in range(count))

    return replace(base, name=name, parts=parts)


def gguf_adapt(adapt: Callable[[str, Recipe], Recipe]) -> Callable[[str, Recipe], Recipe]:
    """``adapt`` for a GGUF, which stacks the experts of a projection in one tensor."""

    def stacked(slot: str, recipe: Recipe) -> Recipe:
        return Flatten(recipe) if ".mlp.experts." in slot and not slot.endswith(".bias") else adapt(slot, recipe)

    return stacked


def routed_mlp(b: Builder, at: str, x: str, hidden: int, experts: Experts, act: str = "silu", limit: float = 0.0,
               bias: bool = False) -> str:  # fmt: skip
    """The weighted sum of down(act(gate) * up) over the experts chosen for each row, [rows, hidden]."""
    logits = b.linear(f"{at}.gate", x, experts.count, ("experts", "hidden"))
    choice: dict[str, Any] = {key: getattr(experts, key) for key in ("groups", "top_groups", "group_score", "scale")}
    route = b.route(f"{at}.route", logits, top_k=experts.top_k, score=experts.score, normalize=experts.normalize,
                    bias=experts.bias, **choice)  # fmt: skip
    return chosen_mlp(b, at, x, route, hidden, experts, act, limit, bias)


def chosen_mlp(b: Builder, at: str, x: str, route: str, hidden: int, experts: Experts, act: str = "silu",
               limit: float = 0.0, bias: bool = False) -> str:  # fmt: skip
    """The same for a route that is there."""
    fuse, axes = f"{at}.experts.gate_up_proj", ("experts ffn", "hidden")
    gate, up = (
        b.expert_linear(f"{at}.experts.{part}_proj", x, route, experts.count, experts.width, axes, bias=bias, fuse=fuse)
        for part in ("gate", "up")
    )
    h = b.gated(f"{at}.experts.act", gate, up, act, limit)
    down = f"{at}.experts.down_proj"
    return b.expert_sum(down, h, route, experts.count, hidden, ("experts hidden", "ffn"), bias=bias)
