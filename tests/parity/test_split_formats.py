"""Quantized models split over ranks against transformers on the dequantized weights: blocks, scales and orders cut.

Formats that are multiplied with float32 activations leave nothing to rounding; with 8-bit ones a sum in another order
now and then turns a code, so that logits are compared as distributions.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import packed
import pytest
import witness
from split_runs import Floats, build, run
from test_families import TOLERANCE, relative_error
from test_quantized_checkpoints import GPTQ, MODELS
from witness import kl_divergence, token_ids

from tapeout.compiler.spec import Quantization
from tapeout.runtime import load

_SMALL = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2}
SIZES: dict[str, dict[str, int]] = {
    # 9 query heads and 3 key heads, which no other number of ranks divides
    "odd": {**_SMALL, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 128},
    # heads of 32 channels: four end with a block or a scale of 128
    "narrow": {**_SMALL, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32},
    # blocks of 256 are four heads, of which three share a key head
    "wide": {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 2, "num_attention_heads": 12,
             "num_key_value_heads": 4, "head_dim": 64},
}  # fmt: skip
PACKED: Mapping[str, tuple[dict[str, Any], packed.Pack]] = {
    **MODELS,
    "int8": (packed.config(packed.int8_args(128), "pack-quantized"), packed.int8_packer(128)),
    "act-order": ({**GPTQ, "sym": False, "desc_act": True, "group_size": 32}, packed.act_order_packer(32)),
}
FLOAT_ACTIVATIONS = ("float-quantized", "fp8-blocks", "act-order")
POSITIONS = 60


def check(got: Floats, one: Floats, expected: Floats, *, exact: bool) -> None:
    """Against transformers and against one rank."""
    if exact:
        assert relative_error(got, expected) <= TOLERANCE
        assert relative_error(got, one) <= 1e-5
    else:
        assert kl_divergence(expected, got).mean() <= 1e-3
        assert kl_divergence(one, got).mean() <= 1e-4


# counts of ranks; all need padding of heads or of the vocabulary
SPLIT_PACKED = [
    ("pack-quantized", "odd", (3, 4)),
    ("pack-quantized", "narrow", (2, 16)),
    ("pack-quantized-zeros", "narrow", (4, 6)),
    ("float-quantized", "odd", (2, 8)),
    ("fp8-blocks", "odd", (3, 4)),
    ("fp8-blocks", "narrow", (3, 16)),
    ("nvfp4", "odd", (6,)),
    ("modelopt", "narrow", (2,)),
    ("gptq", "odd", (8,)),
    ("awq", "narrow", (3,)),
    ("int8", "narrow", (2, 8)),
    ("act-order", "odd", (4, 6)),
]


@pytest.mark.parametrize(("case", "sizes", "counts"), SPLIT_PACKED)
def test_packed_checkpoints(case: str, sizes: str, counts: tuple[int, ...], tmp_path: Path) -> None:
    ids, source = token_ids(POSITIONS), tmp_path / "hf"
    expected = packed.write_model(witness.qwen3(**SIZES[sizes]), source, *PACKED[case]).logits(ids)
    with load(build(source, tmp_path / "1", 1, 1)) as model:
        one = model.logits(ids)
    for count in counts:
        got = run(build(source, tmp_path / f"{count}", count, 1), ids, tmp_path / f"{count}.out")
        check(got[0][0], one, expected, exact=case in FLOAT_ACTIVATIONS)


@pytest.mark.parametrize(
    ("kind", "counts"), [("Q8_0", (2, 6)), ("Q4_K", (2, 3)), ("Q6_K", (4,)), ("MXFP4", (8,)), ("BF16", (3,))]
)
def test_blocks_of_a_gguf(kind: str, counts: tuple[int, ...], tmp_path: Path) -> None:
    ids, source = token_ids(POSITIONS), tmp_path / "model.gguf"
    expected = witness.qwen3(**SIZES["wide"]).write_gguf(source, {"*": kind}).logits(ids)
    with load(build(source, tmp_path / "1", 1, 1)) as model:
        one = model.logits(ids)
    for count in counts:
        got = run(build(source, tmp_path / f"{count}", count, 1), ids, tmp_path / f"{count}.out")
        check(got[0][0], one, expected, exact=kind == "BF16")


@pytest.mark.parametrize(("format", "counts"), [("fp8", (2, 8)), ("fp8_block128", (3,))])
def test_what_is_converted_is_cut_first(format: str, counts: tuple[int, ...], tmp_path: Path) -> None:
    """Scales of 128 x 128 are those of one rank; a scale a matrix is that of the rank's piece, and as near."""
    reference, ids, asked = witness.qwen3(**SIZES["wide"]), token_ids(POSITIONS), Quantization(default=format)
    source, expected = reference.save_hf(tmp_path / "hf"), reference.logits(ids)
    with load(build(source, tmp_path / "1", 1, 1, asked)) as model:
        one = model.logits(ids)
    for count in counts:
        got = run(build(source, tmp_path / f"{count}", count, 1, asked), ids, tmp_path / f"{count}.out")[0][0]
        assert kl_divergence(expected, got).mean() <= 1e-2
        assert format == "fp8" or relative_error(got, one) <= 1e-5
