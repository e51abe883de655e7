"""DeepSeek-V4 (``DeepseekV4ForCausalLM``): residual streams, compressed attention, experts on every layer.

Formulas: transformers ``modeling_deepseek_v4.py``. Layers attend to a window of tokens; on most of them also to entries
that stand for several tokens each: all of them (heavily compressed), or those that an indexer selects (compressed
sparse).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tapeout.compiler.ir import Builder
from tapeout.compiler.models import experts
from tapeout.compiler.models.base import Config, Family, Fields, Rope, Sources, rope_from_hf
from tapeout.compiler.models.deepseek_v4_layers import LayerKind, layer_kinds, refuse_unknown
from tapeout.compiler.models.deepseek_v4_names import sources
from tapeout.compiler.models.experts import Experts
from tapeout.compiler.recipes import Constant, Recipe
from tapeout.runtime.errors import TapeoutError

MAIN, COMPRESS = "rotary.main", "rotary.compress"


@dataclass(frozen=True)
class DeepseekV4Config(Config):
    """``rope`` is that of layers that see their window alone, ``compress_rope`` that of all others."""

    rope: Rope
    compress_rope: Rope
    kinds: tuple[LayerKind, ...]
    experts: Experts
    limit: float
    q_rank: int
    window: int
    o_groups: int
    o_rank: int
    index_heads: int
    index_dim: int
    index_top_k: int
    streams: int
    iterations: int
    streams_eps: float


def parse_hf(raw: Mapping[str, Any]) -> DeepseekV4Config:
    """From config.json as on the hub or as transformers saves it; defaults are those of its configuration."""
    fields = Fields(raw, "config.json")
    refuse_unknown(fields)
    layers, head_dim = fields.integer("num_hidden_layers", 43), fields.integer("head_dim", 512)
    width = fields.integer("moe_intermediate_size", 2048)
    rope, compress_rope = _ropes(fields, head_dim)
    chosen = Experts(
        fields.integer("n_routed_experts", 256),
        fields.integer("num_experts_per_tok", 6),
        width,
        normalize=True,
        score="sqrt_softplus",
        bias=True,
        scale=fields.number("routed_scaling_factor", 1.5),
    )
    config = DeepseekV4Config(
        vocab_size=fields.integer("vocab_size", 129280),
        hidden=fields.integer("hidden_size", 4096),
        layers=layers,
        heads=fields.integer("num_attention_heads", 64),
        kv_heads=1,
        head_dim=head_dim,
        ffn=width,
        eps=fields.number("rms_norm_eps", 1e-6),
        max_context=fields.integer("max_position_embeddings", 1048576),
        tied=fields.flag("tie_word_embeddings", False),
        rope=rope,
        compress_rope=compress_rope,
        kinds=layer_kinds(fields, layers),
        experts=experts.checked(chosen, fields.what),
        limit=fields.positive("swiglu_limit", 10.0),
        q_rank=fields.integer("q_lora_rank", 1024),
        window=fields.integer("sliding_window", 128),
        o_groups=fields.integer("o_groups", 8),
        o_rank=fields.integer("o_lora_rank", 1024),
        index_heads=fields.integer("index_n_heads", 64),
        index_dim=fields.integer("index_head_dim", 128),
        index_top_k=fields.integer("index_topk", 512),
        streams=fields.integer("hc_mult", 4),
        iterations=fields.integer("hc_sinkhorn_iters", 20),
        streams_eps=fields.number("hc_eps", 1e-6),
    )
    _check(config, fields)
    return config


def _check(config: DeepseekV4Config, fields: Fields) -> None:
    """Raises TapeoutError for sizes that do not go together."""
    rotated = config.rope.dim
    if rotated % 2 or not 0 < rotated <= min(config.head_dim, config.index_dim):
        raise TapeoutError(
            f"{fields.what}: {rotated} channels of a head are rotated; they must be even, and at most head_dim "
            f"{config.head_dim} and index_head_dim {config.index_dim}"
        )
    if config.heads % config.o_groups:
        raise TapeoutError(
            f"{fields.what}: num_attention_heads is {config.heads} and o_groups {config.o_groups}; heads must make "
            "equal groups"
        )


def _ropes(fields: Fields, head_dim: int) -> tuple[Rope, Rope]:
    """Plain for the window alone, scaled on other layers, cos and sin only by a factor that the config states."""
    share = fields.number("partial_rotary_factor", fields.integer("qk_rope_head_dim", head_dim // 8) / head_dim)
    dim = int(head_dim * share)
    given = fields.section("rope_parameters") or fields.section("rope_scaling")
    nested = Fields(given, f"{fields.what}: rope_parameters")
    main, compress = nested.section("main"), nested.section("compress")
    if not (main and compress):
        main = {"rope_theta": fields.number("rope_theta", 10000.0)}
        compress = {**given, "rope_theta": fields.number("compress_rope_theta", 160000.0)}
    plain = Fields({k: v for k, v in fields.raw.items() if k != "partial_rotary_factor"}, fields.what)
    context = fields.integer("max_position_embeddings", 1048576)

    def rope(values: Mapping[str, Any]) -> Rope:
        kept = {key: value for key, value in values.items() if key != "partial_rotary_factor"}
        found = rope_from_hf(plain, 10000.0, dim, kept, context)
        return replace(found, attention_factor=found.attention_factor or 1.0)

    return rope(main), rope(compress)


def parse_gguf(raw: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> DeepseekV4Config:
    """There are no GGUF files of this family to read."""
    del raw, shapes
    raise TapeoutError("GGUF metadata: DeepSeek-V4 is read from safetensors alone; name a folder of those")


def hf(config: DeepseekV4Config) -> Sources:
    """Every expert has tensors of its own."""
    return sources(config.experts.count)


def constants(config: DeepseekV4Config) -> Mapping[str, Recipe]:
    """The rotary frequencies of both kinds of layers."""
    return {MAIN: Constant(config.rope.inv_freq()), COMPRESS: Constant(config.compress_rope.inv_freq())}


def forward(config: DeepseekV4Config, b: Builder) -> str:
    """Streams through attention and experts of every layer, then their weighted sum, normed, to the logits."""
    x = b.repeat("streams", b.embed("model.embed_tokens", config.vocab_size, config.hidden), config.streams)
    for layer, kind in enumerate(config.kinds):
        at = f"model.layers.{layer}"
        x = _connected(b, f"{at}.attn_hc", x, config, lambda h, at=at, kind=kind: _attended(b, at, h, config, kind))
        x = _connected(b, f"{at}.ffn_hc", x, config, lambda h, at=at, kind=kind: _routed(b, at, h, config, kind))
    x = b.select("select", x)
    x = b.hyper_mix("model.hc_head", x, _weights(b, "model.hc_head", x, config, 0), config.streams)
    x = b.rmsnorm("model.norm", x, config.eps)
    tied = "model.embed_tokens" if config.tied else ""
    return b.linear("lm_head", x, config.vocab_size, ("vocab", "hidden"), weight=tied)


def _weights(b: Builder, at: str, x: str, config: DeepseekV4Config, iterations: int) -> str:
    n = config.streams
    f = b.linear(f"{at}.fn", x, n * (n + 2) if iterations else n, ("streams", "hidden"))
    return b.hyper_weights(f"{at}.weights", x, f, streams=n, iterations=iterations, norm_eps=config.eps,
                           eps=config.streams_eps)  # fmt: skip


def _connected(b: Builder, at: str, x: str, config: DeepseekV4Config, block: Callable[[str], str]) -> str:
    """The streams after a block that reads their weighted sum."""
    weights = _weights(b, at, x, config, config.iterations)
    y = block(b.hyper_mix(f"{at}.mix", x, weights, config.streams))
    return b.hyper_join(f"{at}.streams", x, weights, y, config.streams)


def _attended(b: Builder, layer: str, x: str, config: DeepseekV4Config, kind: LayerKind) -> str:
    """One key a token that is its value too, so the output is turned back by the query's position."""
    at, rope = f"{layer}.self_attn", COMPRESS if kind.ratio else MAIN
    dims: dict[str, Any] = {"rotated": config.rope.dim, "start": config.head_dim - config.rope.dim}
    heads: dict[str, Any] = {**dims, "period": config.head_dim}
    h = b.rmsnorm(f"{layer}.input_layernorm", x, config.eps)
    fuse = f"{at}.q_a_kv_proj"
    q_a = b.linear(f"{at}.q_a_proj", h, config.q_rank, ("q_rank", "hidden"), fuse=fuse)
    kv = b.linear(f"{at}.kv_proj", h, config.head_dim, ("head_dim", "hidden"), fuse=fuse)
    q_a = b.rmsnorm(f"{at}.q_a_norm", q_a, config.eps)
    q = b.linear(f"{at}.q_b_proj", q_a, config.heads * config.head_dim, ("heads", "q_rank"))
    q = b.rotate(f"{at}.q_rope", b.unit_norm(f"{at}.q_unit", q, config.eps, config.head_dim), rope, **heads)
    kv = b.rotate(f"{at}.kv_rope", b.rmsnorm(f"{at}.kv_norm", kv, config.eps), rope, **dims)
    entries = _entries(b, f"{at}.compressor", h, config, kind, config.head_dim) if kind.ratio else ""
    selection = _selection(b, f"{at}.compressor.indexer", h, q_a, config, kind) if kind.sparse else ""
    y = b.compressed_attention(f"{at}.attention", q, kv, entries, selection, window=config.window,
                               scale=config.head_dim**-0.5, ratio=kind.ratio)  # fmt: skip
    y = b.rotate(f"{at}.o_rope", y, rope, **heads, sign=-1)
    y = b.head_linear(f"{at}.o_a_proj", y, config.o_groups, config.o_rank, ("o_rank", "heads"))
    return b.linear(f"{at}.o_b_proj", y, config.hidden, ("hidden", "o_rank"))


def _entries(b: Builder, at: str, h: str, config: DeepseekV4Config, kind: LayerKind, width: int) -> str:
    """What stands for every ``ratio`` tokens; on sparse layers it overlaps with the tokens before them."""
    fuse, columns = f"{at}.kv_gate_proj", 2 * width if kind.sparse else width
    c = b.linear(f"{at}.kv_proj", h, columns, ("head_dim", "hidden"), fuse=fuse)
    g = b.linear(f"{at}.gate_proj", h, columns, ("head_dim", "hidden"), fuse=fuse)
    return b.compress(f"{at}.entries", c, g, COMPRESS, ratio=kind.ratio, overlap=kind.sparse, rotated=config.rope.dim,
                      eps=config.eps)  # fmt: skip


def _selection(b: Builder, at: str, h: str, q_a: str, config: DeepseekV4Config, kind: LayerKind) -> str:
    """The entries of each row by an attention of the indexer's own over entries of its own."""
    heads, dim = config.index_heads, config.index_dim
    entries = _entries(b, at, h, config, kind, dim)
    q = b.linear(f"{at}.q_b_proj", q_a, heads * dim, ("index_heads", "q_rank"))
    q = b.rotate(f"{at}.q_rope", q, COMPRESS, rotated=config.rope.dim, start=dim - config.rope.dim, period=dim)
    weights = b.linear(f"{at}.scorer.weights_proj", h, heads, ("index_weights", "hidden"))
    return b.select_entries(f"{at}.selection", q, weights, entries, ratio=kind.ratio, top_k=config.index_top_k,
                            scale=(heads * dim) ** -0.5)  # fmt: skip


def _routed(b: Builder, layer: str, x: str, config: DeepseekV4Config, kind: LayerKind) -> str:
    """The chosen experts and the shared one; on hash layers the token alone chooses."""
    at, chosen, limit = f"{layer}.mlp", config.experts, config.limit
    h = b.rmsnorm(f"{layer}.post_attention_layernorm", x, config.eps)
    if kind.by_token:
        logits = b.linear(f"{at}.gate", h, chosen.count, ("experts", "hidden"))
        route = b.route_by_token(f"{at}.route", logits, config.vocab_size, top_k=chosen.top_k, score=chosen.score,
                                 normalize=chosen.normalize, scale=chosen.scale)  # fmt: skip
        routed = experts.chosen_mlp(b, at, h, route, config.hidden, chosen, limit=limit)
    else:
        routed = experts.routed_mlp(b, at, h, config.hidden, chosen, limit=limit)
    shared = f"{at}.shared_experts"
    gate, up = (
        b.linear(f"{shared}.{part}_proj", h, chosen.width, ("ffn", "hidden"), fuse=f"{shared}.gate_up_proj")
        for part in ("gate", "up")
    )
    h = b.gated(f"{shared}.act", gate, up, "silu", limit)
    return b.add(at, routed, b.linear(f"{shared}.down_proj", h, config.hidden, ("hidden", "ffn")))


FAMILY = Family("deepseek_v4", parse_hf, parse_gguf, hf, hf, constants, forward)
