"""What each layer of DeepSeek-V4 is, as config.json of the hub and of transformers say it, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tapeout.compiler.guards import is_list
from tapeout.compiler.models.base import Fields
from tapeout.runtime.errors import TapeoutError

_SLIDING, _SPARSE, _HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
_BY_RATIO = {0: _SLIDING, 4: _SPARSE, 128: _HEAVY}
_BY_TOKEN = {"hash_moe": True, "moe": False}
_UNSUPPORTED = ("attention_bias", "mlp_bias", "attn_logit_softcapping", "final_logit_softcapping", "logit_scale",
                "embedding_multiplier", "residual_multiplier", "expert_groups")  # fmt: skip


@dataclass(frozen=True)
class LayerKind:
    """``ratio`` tokens make an entry (0: the layer sees its window alone); whether an indexer selects entries, and
    whether the token chooses the experts."""

    ratio: int
    sparse: bool
    by_token: bool


def refuse_unknown(fields: Fields) -> None:
    """Raises TapeoutError for settings that change the mathematics."""
    fields.refuse(*_UNSUPPORTED)
    fields.choice("hidden_act", {"silu": "silu"}, "silu")
    fields.choice("scoring_func", {"sqrtsoftplus": "sqrt_softplus"}, "sqrtsoftplus")
    ones = ("num_key_value_heads", "n_shared_experts", "n_group", "topk_group")
    for key in ones:
        if fields.raw.get(key) not in (None, 1):
            raise fields.unsupported(key)
    if not fields.flag("norm_topk_prob", True):
        raise fields.unsupported("norm_topk_prob")


def layer_kinds(fields: Fields, layers: int) -> tuple[LayerKind, ...]:
    """One a layer, by ``layer_types`` or the hub's ``compress_ratios``, and ``mlp_layer_types`` or ``num_hash_layers``.

    Raises TapeoutError for kinds that are not known and for lists of another length.
    """
    rates = Fields(fields.section("compress_rates"), f"{fields.what}: compress_rates")
    ratios = {
        _SLIDING: 0,
        _SPARSE: fields.integer("compress_rate_csa", rates.integer(_SPARSE, 4)),
        _HEAVY: fields.integer("compress_rate_hca", rates.integer(_HEAVY, 128)),
    }
    kinds, by_token = _attention(fields, layers), _by_token(fields, layers)
    return tuple(LayerKind(ratios[k], k == _SPARSE, t) for k, t in zip(kinds, by_token, strict=True))


def _attention(fields: Fields, layers: int) -> Sequence[str]:
    if "layer_types" in fields:
        return [str(kind) for kind in _listed(fields, "layer_types", layers, (_SLIDING, _SPARSE, _HEAVY))]
    if "compress_ratios" in fields:  # one more for each layer of multi-token prediction
        return [_BY_RATIO[ratio] for ratio in _listed(fields, "compress_ratios", layers, tuple(_BY_RATIO))]
    return [_HEAVY if layer < 2 or layer % 2 == 0 else _SPARSE for layer in range(layers)]


def _by_token(fields: Fields, layers: int) -> Sequence[bool]:
    if "mlp_layer_types" in fields:
        return [_BY_TOKEN[kind] for kind in _listed(fields, "mlp_layer_types", layers, tuple(_BY_TOKEN))]
    hashed = fields.integer("num_hash_layers", 3, least=0)
    return [layer < hashed for layer in range(layers)]


def _listed(fields: Fields, key: str, layers: int, legal: tuple[Any, ...]) -> Sequence[Any]:
    """The first ``layers`` of a list, all of which must be legal."""
    found: Any = fields.raw.get(key)
    if not is_list(found) or len(found) < layers or any(each not in list(legal) for each in found[:layers]):
        known = ", ".join(str(each) for each in legal)
        raise TapeoutError(f"{fields.what}: {key} must list for each of {layers} layers one of {known}")
    return found[:layers]
