"""What a config of DeepSeek-V4 may not say, and what its kernels refuse: one sentence each."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tapeout.compiler.models import find_family
from tapeout.runtime.errors import TapeoutError
from tapeout.runtime.sequence import PagePool

UNSUPPORTED = "which changes the mathematics and is not supported for this family"
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "biases": ({"attention_bias": True}, f"sets attention_bias = True, {UNSUPPORTED}"),
    "two shared experts": ({"n_shared_experts": 2}, f"sets n_shared_experts = 2, {UNSUPPORTED}"),
    "several keys a token": ({"num_key_value_heads": 2}, f"sets num_key_value_heads = 2, {UNSUPPORTED}"),
    "groups of experts": ({"n_group": 8}, f"sets n_group = 8, {UNSUPPORTED}"),
    "weights as they are": ({"norm_topk_prob": False}, f"sets norm_topk_prob = False, {UNSUPPORTED}"),
    "another score": ({"scoring_func": "sigmoid"}, ": scoring_func is 'sigmoid'; it must be one of sqrtsoftplus"),
    "an unknown ratio": (
        {"num_hidden_layers": 2, "compress_ratios": [0, 16]},
        ": compress_ratios must list for each of 2 layers one of 0, 4, 128",
    ),
    "too few layers": (
        {"num_hidden_layers": 3, "layer_types": ["sliding_attention"]},
        ": layer_types must list for each of 3 layers one of sliding_attention, compressed_sparse_attention, "
        "heavily_compressed_attention",
    ),
    "an unknown router": (
        {"num_hidden_layers": 1, "mlp_layer_types": ["dense"]},
        ": mlp_layer_types must list for each of 1 layers one of hash_moe, moe",
    ),
    "more rotated channels than an index head has": (
        {"qk_rope_head_dim": 256},
        ": 256 channels of a head are rotated; they must be even, and at most head_dim 512 and index_head_dim 128",
    ),
    "groups that are not equal": (
        {"num_attention_heads": 12},
        ": num_attention_heads is 12 and o_groups 8; heads must make equal groups",
    ),
    "more experts than there are": (
        {"n_routed_experts": 4},
        ": 6 of 4 experts are to be chosen; there must be at least as many, and at most 4096",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_computed_is_refused(case: str) -> None:
    said, sentence = REFUSED[case]
    with pytest.raises(TapeoutError, match=f"^config.json.*{re.escape(sentence)}$"):
        find_family(["DeepseekV4ForCausalLM"], "here").parse_hf(said)


def test_a_gguf_is_refused() -> None:
    family = find_family(["DeepseekV4ForCausalLM"], "here")
    sentence = "GGUF metadata: DeepSeek-V4 is read from safetensors alone; name a folder of those"
    with pytest.raises(TapeoutError, match=f"^{sentence}$"):
        family.parse_gguf({}, {})


def test_sequences_with_state_take_turns_in_slots() -> None:
    pool = PagePool(pages=8, page_tokens=16, max_context=64, slots=2)
    first, second, third = (pool.open() for _ in range(3))
    pool.grow(first, 1)
    pool.grow(second, 40)
    pool.grow(first, 30)
    assert (first.slot, second.slot, third.slot) == (0, 1, None)
    sentence = (
        "all 2 places for the state of a sequence are taken; close a sequence, or compile with a larger "
        "serving.max_sequences"
    )
    with pytest.raises(TapeoutError, match=f"^{re.escape(sentence)}$"):
        pool.grow(third, 1)
    pool.close(second)
    pool.grow(third, 1)
    assert (second.slot, third.slot) == (None, 1)


def test_sequences_without_state_have_no_slot() -> None:
    pool = PagePool(pages=8, page_tokens=16, max_context=64)
    sequence = pool.open()
    pool.grow(sequence, 20)
    assert sequence.slot is None
