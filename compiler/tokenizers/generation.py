"""What a model's files say about ending, beginning and sampling a text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

Json = dict[str, Any]
# Tokens that end a turn or a text, by their texts.
END_TOKENS = (
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|eom_id|>",
    "<EOT>",
    "[EOT]",
    "[EOS]",
    "<|end_of_text|>",
    "<end_of_utterance>",
    "<｜end▁of▁sentence｜>",
)
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "do_sample")


def ids_of(value: Any) -> list[int]:
    """Token ids under a key that holds an id, a list of ids, or nothing."""
    values = value if isinstance(value, list) else [value]  # pyright: ignore[reportUnknownVariableType]
    return [each for each in values if isinstance(each, int) and not isinstance(each, bool) and each >= 0]  # pyright: ignore[reportUnknownVariableType]


def end_tokens(special: Mapping[str, int]) -> list[int]:
    """Ids of the control tokens that are known to end a turn or a text, by their texts.

    In the Harmony format ``<|end|>`` closes one message of an answer, not the answer.
    """
    found = {text: special[text] for text in END_TOKENS if text in special}
    if "<|return|>" in found and "<|call|>" in found:
        found.pop("<|end|>", None)
    return list(found.values())


def generation(
    bos: int | None,
    eos: Iterable[int],
    *,
    add_bos: bool,
    pad: int | None,
    texts: Mapping[int, str],
    sampling: Mapping[str, Any] | None = None,
) -> Json:
    """The generation section of a plan; the same goes into generation.json."""
    ends = sorted(set(eos))
    out: Json = {
        "bos_token_id": bos,
        "eos_token_ids": ends,
        "pad_token_id": pad,
        "add_bos": add_bos and bos is not None,
        "bos_token": texts.get(bos, "") if bos is not None else "",
        "eos_token": next((texts[end] for end in eos if end in texts), ""),
    }
    found = {key: sampling[key] for key in SAMPLING if sampling and isinstance(sampling.get(key), int | float)}
    return {**out, "sampling": found} if found else out
