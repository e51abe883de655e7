"""Models split over ranks against transformers: every family, its heads, experts and vocabulary cut and padded."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
import witness
import witness_experts
import witness_latent
from split_runs import PROMPT, build, run
from test_families import CASES, TOLERANCE, relative_error, until_eos
from witness import Witness, token_ids

from tapeout.compiler.recipes_table import NestedRecipes
from tapeout.runtime import TapeoutError, load

Splits = Sequence[tuple[int, int]]
"""Ranks, and groups of experts."""

POSITIONS = 100
DENSE: Splits = [(2, 1), (4, 1), (8, 1)]
EXPERTS: Splits = [*DENSE, (2, 2), (4, 2), (4, 4), (8, 2), (8, 4)]
MODELS: Mapping[str, tuple[Callable[[], Witness], Splits]] = {
    **{name: (CASES[name], DENSE) for name in ("llama", "qwen2", "qwen3", "mistral", "gemma3")},
    **{
        name: (CASES[name], EXPERTS)
        for name in ("qwen3-moe", "deepseek-v2", "deepseek-v3", "deepseek-v3.2", "deepseek-v4", "kimi-k2.5", "glm-5")
    },
    "mixtral": (lambda: witness.mixtral(num_local_experts=8), EXPERTS),
    "gpt-oss": (lambda: witness_experts.gpt_oss(num_local_experts=8), EXPERTS),
    "llama-tied": (CASES["llama-tied"], [(3, 1)]),  # heads, feed-forward and vocabulary padded
    "llama-biases": (CASES["llama-biases"], [(4, 1)]),  # two ranks share a key head; biases of sums are added once
    "qwen2-seven-heads-of-one-kv-head": (CASES["qwen2-seven-heads-of-one-kv-head"], [(4, 1)]),  # its query heads padded
    "qwen3-windows": (CASES["qwen3-windows"], [(16, 1)]),
    "mixtral-five-experts": (CASES["mixtral"], [(2, 1)]),
    "gpt-oss-five-experts": (CASES["gpt-oss"], [(5, 5)]),
}


@pytest.mark.parametrize("case", MODELS)
def test_ranks_compute_what_transformers_does(case: str, tmp_path: Path) -> None:
    make, splits = MODELS[case]
    reference, ids = make(), token_ids(POSITIONS)
    source, expected = reference.save_hf(tmp_path / "hf"), reference.logits(ids)
    with load(build(source, tmp_path / "one", 1, 1)) as model:
        one, greedy = model.logits(ids), until_eos(reference, ids[:PROMPT], model)
    for count, expert in splits:
        name = f"{count}.{expert}"
        (logits, tokens), *others = run(build(source, tmp_path / name, count, expert), ids, tmp_path / f"{name}.out")
        assert relative_error(logits, expected) <= TOLERANCE, name
        assert relative_error(logits, one) <= 1e-5, name
        assert tokens == greedy, name
        assert len(others) == count - 1
        for other, chosen in others:
            assert np.array_equal(other, logits), f"{name}: ranks must hold the same bits"
            assert chosen == tokens, name


def test_a_rank_holds_any_number_of_pairs(tmp_path: Path) -> None:
    """Half of the experts: some steps have few enough pairs for results apart, from more rows than one rank would."""
    reference = witness_latent.deepseek_v2(topk_method="greedy", num_experts_per_tok=6)
    artifact = build(reference.save_hf(tmp_path / "hf"), tmp_path / "artifact", 2, 2)
    for length in range(17, 26):
        ids = token_ids(length)
        logits = run(artifact, ids, tmp_path / f"{length}")[0][0]
        assert relative_error(logits, reference.logits(ids)) <= TOLERANCE, length


def test_routed_and_shared_experts_share_an_all_reduce(tmp_path: Path) -> None:
    reference = CASES["deepseek-v3"]()
    artifact = build(reference.save_hf(tmp_path / "hf"), tmp_path / "artifact", 2, 1)
    plan = json.loads((artifact / "plan.json").read_bytes())
    decode = next(graph for graph in plan["graphs"] if graph["phase"] == "decode")
    reduced = [launch["op"] for launch in decode["launches"] if launch["kernel"].startswith("all_reduce")]
    assert len(reduced) == 2 * reference.model.config.num_hidden_layers, reduced


def test_every_byte_of_a_rank_says_where_it_is_from(tmp_path: Path) -> None:
    artifact = build(CASES["llama"]().save_hf(tmp_path / "hf"), tmp_path / "artifact", 2, 1)
    plan = json.loads((artifact / "plan.json").read_bytes())
    weight = next(each for each in plan["weights"] if each["name"].endswith("0.mlp.down_proj"))
    cuts = [recipe["source"] for recipe in NestedRecipes(plan).of(weight)]
    assert [(cut["op"], cut["start"], cut["stop"]) for cut in cuts] == [("columns", 0, 48), ("columns", 48, 96)]
    files = sorted(path.name for path in (artifact / "weights").iterdir())
    assert files == ["rank0.safetensors", "rank1.safetensors"]


def test_the_command_starts_the_ranks(tmp_path: Path) -> None:
    artifact = build(CASES["llama"]().save_hf(tmp_path / "hf"), tmp_path / "artifact", 2, 1)
    with pytest.raises(TapeoutError, match="was planned for 2 ranks, and this process is none of them"):
        load(artifact)
    words = [sys.executable, "-m", "tapeout.runtime", str(artifact), "--prompt=-", "--max-tokens=4", "--json"]
    ended = subprocess.run(words, input="The", capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    result = json.loads(ended.stdout)
    assert len(result["tokens"]) == 4 and result["prompt_tokens"] > 0


REFUSED = [
    (
        "mixtral",
        2,
        2,
        "topology.parallel.expert is 2, and 5 experts do not make as many equal groups; legal degrees: 1 (+5 % padding "
        "and replication)",
    ),
]


@pytest.mark.parametrize(("case", "count", "expert", "message"), REFUSED)
def test_what_cannot_be_split(case: str, count: int, expert: int, message: str, tmp_path: Path) -> None:
    source = CASES[case]().save_hf(tmp_path / "hf")
    with pytest.raises(TapeoutError) as caught:
        build(source, tmp_path / "artifact", count, expert)
    assert str(caught.value) == message
