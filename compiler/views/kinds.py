"""What the weights of a rank are for, and how many bytes each purpose takes."""

from __future__ import annotations

from collections import Counter

from tapeout.compiler.views.plan_file import Plan

KINDS = ("experts", "attention", "MLP", "embedding and head", "other matrices", "vectors")


def kind_of(weight: Plan) -> str:
    """What a weight is for, by its name and axes."""
    name, axes = f".{weight['name']}.", weight.get("axes") or ()
    if len(weight["shape"]) < 2:
        return "vectors"
    if "vocab" in axes:
        return "embedding and head"
    inside = (("experts", ".experts."), ("attention", ".self_attn."), ("MLP", ".mlp."))
    return next((kind for kind, part in inside if part in name), "other matrices")


def bytes_by_kind(plan: Plan) -> dict[str, int]:
    """Bytes of a rank's weights by purpose, with the padding behind each; in the order of KINDS."""
    taken: Counter[str] = Counter()
    for weight in plan["weights"]:
        taken[kind_of(weight)] += weight["bytes"]
    return {kind: taken[kind] for kind in KINDS if taken[kind]}
