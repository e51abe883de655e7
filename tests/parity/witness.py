"""Tiny random checkpoints and their reference logits, made with transformers and gguf-py alone.

A ``Witness`` holds a float32 eager transformers model. It can be saved as a safetensors folder and as a GGUF; where the
GGUF is quantized, ``write_gguf`` answers with the witness of the dequantized weights.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]

ROPE: dict[str, dict[str, Any]] = {
    "none": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.0},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 64},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
}  # fmt: skip

EOS = "<|endoftext|>"
VOCAB = 320
_PIECES = ("th", "he", "in", "er", "an", "re", "on", "at", "en", "nd", "ti", "es", "or", "te", "of", "ed", "is", "it",
           "al", "ar", "st", "to", "nt", "ng", "se", "ha", "as", "ou", "io", "le", "ve", "co", "me", "de", "hi", "ri",
           "ro", "ic", "ne", "ea", "ra", "ce", "li", "ch", "ll", "be", "ma", "si", "om", "ur")  # fmt: skip


@dataclass(frozen=True)
class Witness:
    """One tiny model: ``arch`` is the GGUF architecture, ``model`` a transformers model in float32, eager."""

    arch: str
    model: Any

    def logits(self, ids: Sequence[int]) -> Floats:
        """Reference logits, float32 [len(ids), vocab]."""
        import torch

        with torch.no_grad():
            return self.model(torch.tensor([list(ids)]), use_cache=False).logits[0].numpy()

    def greedy(self, ids: Sequence[int], count: int) -> list[int]:
        """The next ``count`` tokens, greedily."""
        out = list(ids)
        for _ in range(count):
            out.append(int(self.logits(out)[-1].argmax()))
        return out[len(ids) :]

    def save_hf(self, folder: Path, *, sharded: bool = False) -> Path:
        """A checkpoint folder as on the hub; ``sharded`` splits the weights over several files with an index."""
        self.model.save_pretrained(folder, max_shard_size="60KB" if sharded else "5GB")
        write_tokenizer(folder)
        return folder

    def write_gguf(self, path: Path, formats: Mapping[str, str] | None = None, *, tokenizer: bool = True) -> Witness:
        """The same model as a GGUF. ``formats`` maps globs of GGUF tensor names to formats of the matrices.

        The first glob that fits decides, F32 without one. Answers with the witness of what the file holds.
        """
        import gguf

        config, state = self.model.config, self.model.state_dict()
        writer = gguf.GGUFWriter(path, self.arch)
        write_metadata(writer, self.arch, config, tokenizer)
        names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[self.arch.upper()], config.num_hidden_layers)
        held = copy.deepcopy(self.model)
        for source, values in state.items():
            if source == "lm_head.weight" and config.tie_word_embeddings:
                continue
            for part, rows in _parts(source, values):
                name = names.get_name(part, try_suffixes=(".weight", ".bias"))
                assert name, part
                self._add(writer, name, (source, rows), values.float().numpy(), formats or {}, held)
        _rope_freqs(writer, self.model)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return Witness(self.arch, held)

    def _add(
        self, writer: Any, name: str, at: tuple[str, Any], values: Floats, formats: Mapping[str, str], held: Any
    ) -> None:
        import gguf
        import torch

        source, rows = at
        heads = _paired_heads(self.arch, source, self.model.config)
        stored = pairs_from_halves(values, heads) if heads else values[rows]
        if self.arch == "gemma3" and source.endswith("norm.weight"):
            stored = stored + 1
        kind = (
            next((to for glob, to in formats.items() if fnmatchcase(name, glob)), "F32") if values.ndim > 1 else "F32"
        )
        if kind == "F32":
            writer.add_tensor(name, np.ascontiguousarray(stored, np.float32))
            return
        wanted = gguf.GGMLQuantizationType[kind]
        raw = blocks(stored.reshape(-1, stored.shape[-1]), wanted).reshape(*stored.shape[:-1], -1)
        writer.add_tensor(name, raw, raw_dtype=wanted)
        back = gguf.quants.dequantize(raw, wanted).astype(np.float32)
        back = halves_from_pairs(back, heads) if heads else back
        held.state_dict()[source][rows].copy_(torch.from_numpy(np.ascontiguousarray(back)))


def write_view(writer: Any, name: str, view: Any, formats: Mapping[str, str]) -> None:
    """A tensor of a GGUF from (a view of) one of a model, which then holds what the file holds; formats as above."""
    import gguf
    import torch

    values = np.ascontiguousarray(view.float().numpy(), np.float32)
    fitting = (to for glob, to in formats.items() if fnmatchcase(name, glob))
    kind = next(fitting, "F32") if values.ndim > 1 and not name.endswith(".bias") else "F32"
    if kind == "F32":
        writer.add_tensor(name, values)
        return
    wanted = gguf.GGMLQuantizationType[kind]
    raw = blocks(values.reshape(-1, values.shape[-1]), wanted)
    writer.add_tensor(name, raw.reshape(*values.shape[:-1], -1), raw_dtype=wanted)
    view.copy_(torch.from_numpy(gguf.quants.dequantize(raw, wanted).astype(np.float32).reshape(values.shape)))


def _parts(source: str, values: Any) -> list[tuple[str, Any]]:
    """What a GGUF calls the parts of a tensor of transformers, and which part each is: experts' gate and up."""
    if not source.endswith(".gate_up_proj"):
        return [(f"{source}.weight" if source.endswith("experts.down_proj") else source, ...)]
    half = values.shape[1] // 2
    names = (source.replace("gate_up_proj", f"{part}_proj.weight") for part in ("gate", "up"))
    return list(zip(names, (np.s_[:, :half], np.s_[:, half:]), strict=True))


# an epsilon that shows: with 1e-6 a norm that takes another one differs by less than the tolerance
_SHAPED_LIKE_LLAMA: dict[str, Any] = {"num_hidden_layers": 4, "rms_norm_eps": 1e-3}


def llama(*, rope: str = "none", tied: bool = False, bias: bool = False, seed: int = 0, **sizes: Any) -> Witness:
    """A tiny LlamaForCausalLM, randomised; ``rope`` names a row of ROPE, ``sizes`` override config fields."""
    from transformers import LlamaConfig, LlamaForCausalLM

    fields = {**common(), "num_hidden_layers": 4, "head_dim": 16, "tie_word_embeddings": tied,
              "attention_bias": bias, "mlp_bias": bias, **sizes}  # fmt: skip
    config = LlamaConfig(**fields, rope_parameters={**ROPE[rope], "rope_theta": 5e5})
    return Witness("llama", randomised(LlamaForCausalLM, config, seed))


def mistral(*, rope: str = "none", seed: int = 0, **sizes: Any) -> Witness:
    """A tiny MistralForCausalLM with a window of 8, randomised."""
    from transformers import MistralConfig, MistralForCausalLM

    fields = {**common(), **_SHAPED_LIKE_LLAMA, "head_dim": 16, "sliding_window": 8, **sizes}
    config = MistralConfig(**fields, rope_parameters={**ROPE[rope], "rope_theta": 1e4})
    return Witness("llama", randomised(MistralForCausalLM, config, seed))


def qwen2(*, rope: str = "none", tied: bool = False, seed: int = 0, **sizes: Any) -> Witness:
    """A tiny Qwen2ForCausalLM, randomised."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    fields = {**common(), **_SHAPED_LIKE_LLAMA, "tie_word_embeddings": tied, **sizes}
    config = Qwen2Config(**fields, rope_parameters={**ROPE[rope], "rope_theta": 1e6})
    return Witness("qwen2", randomised(Qwen2ForCausalLM, config, seed))


def qwen3(*, rope: str = "none", tied: bool = False, bias: bool = False, seed: int = 0, **sizes: Any) -> Witness:
    """A tiny Qwen3ForCausalLM whose heads are wider than hidden / heads, randomised."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    fields = {**common(), **_SHAPED_LIKE_LLAMA, "head_dim": 32, "tie_word_embeddings": tied, "attention_bias": bias}
    config = Qwen3Config(**{**fields, **sizes}, rope_parameters={**ROPE[rope], "rope_theta": 1e6})
    return Witness("qwen3", randomised(Qwen3ForCausalLM, config, seed))


def mixtral(*, rope: str = "none", seed: int = 0, **sizes: Any) -> Witness:
    """A tiny MixtralForCausalLM with 2 of 5 experts, randomised."""
    from transformers import MixtralConfig, MixtralForCausalLM

    fields = {**common(), **_SHAPED_LIKE_LLAMA, "head_dim": 16, "num_local_experts": 5, **sizes}
    config = MixtralConfig(**fields, rope_parameters={**ROPE[rope], "rope_theta": 1e6})
    return Witness("llama", randomised(MixtralForCausalLM, config, seed))


def qwen3_moe(*, rope: str = "none", normalize: bool = True, seed: int = 0, **sizes: Any) -> Witness:
    """A tiny Qwen3MoeForCausalLM with 3 of 8 experts, randomised."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    fields = {**common(), **_SHAPED_LIKE_LLAMA, "head_dim": 32, "num_experts": 8, "num_experts_per_tok": 3,
              "moe_intermediate_size": 32, "norm_topk_prob": normalize, **sizes}  # fmt: skip
    config = Qwen3MoeConfig(**fields, rope_parameters={**ROPE[rope], "rope_theta": 1e6})
    return Witness("qwen3moe", randomised(Qwen3MoeForCausalLM, config, seed))


def gemma3(*, rope: str = "none", seed: int = 0, **sizes: Any) -> Witness:
    """A tiny Gemma3ForCausalLM with 6 layers (the last full, the others with a window of 8), randomised."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    fields = {**common(), "num_hidden_layers": 6, "head_dim": 32, "sliding_window": 8, "query_pre_attn_scalar": 32,
              "rms_norm_eps": 1e-6, **sizes}  # fmt: skip
    ropes = {"full_attention": {**ROPE[rope], "rope_theta": 1e6},
             "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}  # fmt: skip
    return Witness("gemma3", randomised(Gemma3ForCausalLM, Gemma3TextConfig(**fields, rope_parameters=ropes), seed))


def token_ids(count: int, *, seed: int = 1, vocab: int = VOCAB) -> list[int]:
    """Random token ids."""
    return np.random.default_rng(seed).integers(0, vocab, count).tolist()


def kl_divergence(reference: Floats, other: Floats) -> npt.NDArray[np.float64]:
    """KL(reference ‖ other) in nats at each position, from logits [positions, vocab], in float64."""

    def log_softmax(values: Floats) -> npt.NDArray[np.float64]:
        shifted = values.astype(np.float64) - values.max(-1, keepdims=True)
        return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))

    p, q = log_softmax(reference), log_softmax(other)
    return (np.exp(p) * (p - q)).sum(-1)


def pairs_from_halves(values: Floats, heads: int) -> Floats:
    """Rows of q or k as GGUF's llama architecture orders them: row j*d/2 + i of a head becomes row 2i + j."""
    rows = values.reshape(heads, 2, values.shape[0] // heads // 2, -1)
    return rows.swapaxes(1, 2).reshape(values.shape)


def halves_from_pairs(values: Floats, heads: int) -> Floats:
    """The inverse of ``pairs_from_halves``."""
    rows = values.reshape(heads, values.shape[0] // heads // 2, 2, -1)
    return rows.swapaxes(1, 2).reshape(values.shape)


def byte_alphabet() -> list[str]:
    """The 256 characters that byte-level BPE writes bytes as, in byte order."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spare = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(spare)) for byte in range(256)]


def vocabulary() -> tuple[list[str], list[str]]:
    """VOCAB tokens (the bytes, a few merges, fillers, the end token) and the merges."""
    merges = [f"{piece[0]} {piece[1]}" for piece in _PIECES]
    tokens = [*byte_alphabet(), *_PIECES]
    tokens += [f"<filler{i}>" for i in range(VOCAB - len(tokens) - 1)]
    return [*tokens, EOS], merges


def write_tokenizer(folder: Path) -> None:
    """tokenizer.json and tokenizer_config.json of the tiny byte-level BPE."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens, merges = vocabulary()
    table = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=table, merges=[(m[0], m[2]) for m in merges]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(EOS, special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOS, "bos_token": EOS}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def common() -> dict[str, Any]:
    return {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
            "num_key_value_heads": 2, "max_position_embeddings": 1024, "bos_token_id": VOCAB - 1,
            "eos_token_id": VOCAB - 1, "pad_token_id": None}  # fmt: skip


def randomised(kind: Any, config: Any, seed: int) -> Any:
    """Default initialisation hides mistakes: norms 1 + 0.3n (Gemma 0.3n), biases 0.3n, matrices 0.15n, embedding n."""
    import torch

    model = kind._from_config(config, attn_implementation="eager").eval().float()
    model.generation_config.pad_token_id = None
    rng = np.random.default_rng(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = rng.standard_normal(tuple(parameter.shape)).astype(np.float32)
            if name.endswith("norm.weight"):
                noise = 0.3 * noise + (0 if "Gemma3" in kind.__name__ else 1)
            elif parameter.ndim == 1:
                noise = 0.3 * noise
            elif not name.endswith("embed_tokens.weight"):
                noise = 0.15 * noise * (64 / parameter.shape[-1]) ** 0.5
            parameter.copy_(torch.from_numpy(noise))
    return model


def _paired_heads(arch: str, source: str, config: Any) -> int:
    if arch != "llama":
        return 0
    owner = source.rsplit(".", 1)[0]
    if owner.endswith("q_proj"):
        return config.num_attention_heads
    return config.num_key_value_heads if owner.endswith("k_proj") else 0


def write_metadata(writer: Any, arch: str, config: Any, tokenizer: bool) -> None:
    """The keys of a GGUF that follow from a config of transformers, and the tokenizer's."""
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if hasattr(config, "head_dim"):  # as converters do: only what config.json states
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if getattr(config, "num_local_experts", None):
        writer.add_expert_count(config.num_local_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if arch in ("qwen3moe", "gpt-oss"):
        writer.add_expert_feed_forward_length(getattr(config, "moe_intermediate_size", config.intermediate_size))
    writer.add_vocab_size(config.vocab_size)
    rope = config.rope_parameters
    if arch == "gemma3":
        writer.add_sliding_window(config.sliding_window)
        writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
        rope = rope["full_attention"]
    else:
        writer.add_rope_dimension_count(head_dim)
        _windows(writer, config)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_string(f"{arch}.rope.scaling.type", rope["rope_type"])
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    write_vocabulary(writer, tokenizer)


def write_vocabulary(writer: Any, tokenizer: bool = True) -> None:
    """The tokenizer's keys of a GGUF; without one, only the end token."""
    writer.add_eos_token_id(VOCAB - 1)
    if not tokenizer:
        writer.add_tokenizer_model("no_vocab")
        return
    tokens, merges = vocabulary()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token == EOS else 1 for token in tokens])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(len(tokens) - 1)
    writer.add_add_bos_token(False)


def _windows(writer: Any, config: Any) -> None:
    """The window, and which layers have it where not all do."""
    window, kinds = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    if window is not None:
        writer.add_sliding_window(window)
    if window is not None and kinds is not None and writer.arch != "gpt-oss":  # its converters leave the pattern out
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in kinds])


def _rope_freqs(writer: Any, model: Any) -> None:
    """What converters write for llama3 scaling: the divisors of the unscaled inverse frequencies."""
    rope, config = model.config.rope_parameters, model.config
    if rope.get("rope_type") == "llama3":
        plain = 1.0 / rope["rope_theta"] ** (np.arange(0, config.head_dim, 2) / config.head_dim)
        writer.add_tensor(
            "rope_freqs.weight", (plain / model.model.rotary_emb.inv_freq.double().numpy()).astype(np.float32)
        )


def blocks(values: Floats, kind: Any) -> npt.NDArray[np.uint8]:
    """Quantized by gguf-py; k-quants, which it only dequantizes, become random blocks of about the same spread."""
    import gguf

    if kind.name not in _K_QUANTS:
        return gguf.quants.quantize(np.ascontiguousarray(values), kind)
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(values.shape)
    raw = rng.integers(0, 256, (values.size // elements, size), np.uint8)
    spread = float(values.std())
    for offset, scale in _K_QUANTS[kind.name]:
        jitter = rng.uniform(0.8, 1.2, len(raw)).astype(np.float32)
        raw[:, offset : offset + 2] = (spread * scale * jitter).astype("<f2").view(np.uint8).reshape(-1, 2)
    return raw.reshape(values.shape[0], -1)


# byte offsets of the f16 scale (and minimum) of a super-block, and what makes random codes spread by about 1 around 0
_K_QUANTS = {
    "Q2_K": [(80, 0.083), (82, 0.125)],
    "Q3_K": [(108, 0.023)],
    "Q4_K": [(0, 0.004), (2, 0.03)],
    "Q5_K": [(0, 0.002), (2, 0.031)],
    "Q6_K": [(208, 0.00073)],
}
