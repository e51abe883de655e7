"""assign_formats: each weight keeps its number format or gets the one that the spec's rules ask for."""

from __future__ import annotations

from tapeout.compiler.formats import FORMATS
from tapeout.compiler.recipes import Convert, Recipe, stored_format
from tapeout.compiler.spec import Quantization
from tapeout.compiler.stages import Conversion, Decision, LogicalModel, QuantizedModel, check_rule, merge_decisions
from tapeout.runtime.errors import TapeoutError

# What a default gives way to where its blocks do not divide a row: the smallest that is at least as exact.
FALLBACKS = ("q8_0", "bf16")
# What the default leaves alone by the axis of its rows, and why.
SENSITIVE = {
    "experts": "it chooses experts, and rounding it changes the choice",
    "index_weights": "it weighs the heads of an index, and rounding it changes which keys are seen",
    "streams": "it weighs the residual streams, which carry everything, and is small",
}


def assign_formats(logical: LogicalModel, quantization: Quantization) -> QuantizedModel:
    """Vectors stay float32; matrices follow ``quantization`` (the first matching rule wins, else the default)."""
    recipes: list[tuple[str, Recipe]] = []
    conversions: list[Conversion] = []
    decisions: list[Decision] = []
    _check_rules(logical, quantization)
    slots = logical.graph.slots
    for name, recipe in logical.recipes:
        if len(recipe.shape) == 1:
            recipes.append((name, recipe))
            continue
        wanted, rule = quantization.format_for(name)
        why = SENSITIVE.get(slots[name].axes[0])
        if rule == "default" and why and FORMATS[recipe.format].is_float:
            decisions.append(Decision("assign_formats", name, recipe.format, *_kept(why, wanted)))
            recipes.append((name, recipe))
            continue
        decision = _choose(name, recipe, wanted, rule, quantization)
        decisions.append(decision)
        if decision.choice != recipe.format:
            conversions.append(Conversion(name, recipe.format, decision.choice, rule))
            recipes.append((name, Convert(recipe, decision.choice)))
        else:
            recipes.append((name, recipe))
    return QuantizedModel(logical, tuple(recipes), tuple(conversions), merge_decisions(decisions))


def _kept(why: str, wanted: str) -> tuple[str, tuple[tuple[str, str], ...]]:
    """Why the default leaves a sensitive weight alone, and what it would have been."""
    reason = f"kept as the checkpoint has it: {why}"
    other = ((wanted, "a rule that names it can ask for it"),)
    return reason, other if wanted != "keep" else ()


def _check_rules(logical: LogicalModel, quantization: Quantization) -> None:
    """A rule that names no weight is a mistake, most likely a misspelt glob."""
    matrices = [name for name, recipe in logical.recipes if len(recipe.shape) == 2]
    for index, rule in enumerate(quantization.rules):
        check_rule(f"quantization.rules[{index}]", rule.match, matrices)


def _choose(name: str, recipe: Recipe, wanted: str, rule: str, quantization: Quantization) -> Decision:
    source = recipe.format
    if quantization.activations == "f32" and wanted == "keep" and not FORMATS[source].is_float:
        why = "kernels for quantized weights take 8-bit activations"
        reason = "activations are float32, so the weight is dequantized at compile time"
        return Decision("assign_formats", name, "f32", reason, ((source, why),))
    stored = stored_format(recipe)
    quantized = stored not in FORMATS or not FORMATS[stored].is_float
    if wanted in ("keep", source):
        read = f"the numbers of {stored}, which no kernel here reads; a rule can ask for a smaller format"
        reason = read if quantized and source == "f32" else "kept as the checkpoint has it"
        return Decision("assign_formats", name, source, reason)
    if quantized and wanted != "f32" and not quantization.allow_requantize:
        raise TapeoutError(
            f"{name} is {stored} in the checkpoint and {rule} asks for {wanted}, but "
            "quantization.allow_requantize is false; set it to true or let the rule keep the weight"
        )
    if recipe.shape[1] % FORMATS[wanted].block == 0:
        return Decision(
            "assign_formats", name, wanted, f"asked for by {rule}", ((source, "the checkpoint's own format"),)
        )
    return _fall_back(name, recipe, wanted, rule)


def _fall_back(name: str, recipe: Recipe, wanted: str, rule: str) -> Decision:
    k, block = recipe.shape[1], FORMATS[wanted].block
    finer = (f"int4_g{group}" for group in (64, 32)) if wanted.startswith("int4") else ()
    legal = [other for other in (*finer, *FALLBACKS) if k % FORMATS[other].block == 0]
    why = f"rows of {k} are not whole blocks of {block}"
    if rule != "default":
        raise TapeoutError(
            f"quantization.{rule} asks for {wanted} on {name}, but {why}; "
            f"formats that fit: {', '.join([*legal, 'f16', 'f32'])}"
        )
    return Decision("assign_formats", name, legal[0], f"the default {wanted} does not fit", ((wanted, why),))
