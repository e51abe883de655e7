"""Models split over ranks against transformers: every family, its heads, experts and vocabulary cut and padded."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import witness_latent
from test_families import CASES, TOLERANCE, relative_error, until_eos
from witness import token_ids

from tapeout.compiler.driver import compile_spec
from tapeout.compiler.spec import Model, Quantization, Serving, Spec, Topology
from tapeout.runtime import TapeoutError, load
from tapeout.runtime.ranks import run_ranks

# name, ranks, groups of experts
SPLITS = [
    ("llama", 2, 1),
    ("llama-tied", 3, 1),  # heads, feed-forward and vocabulary padded
    ("llama-biases", 4, 1),  # two ranks share a key head; biases of sums are added once
    ("qwen2-seven-heads-of-one-kv-head", 4, 1),  # query heads of a shared key head padded
    ("qwen3-windows", 8, 1),
    ("gemma3", 2, 1),
    ("mixtral", 2, 1),
    ("qwen3-moe", 4, 2),
    ("gpt-oss", 2, 1),
    ("deepseek-v2", 2, 2),
    ("deepseek-v3", 4, 2),
    ("kimi-k2.5", 2, 1),
    ("deepseek-v3.2", 4, 4),
    ("glm-5", 2, 1),
    ("deepseek-v4", 2, 2),
]
POSITIONS = 100
PROMPT = 20
SERVING = {"kv_dtype": "f32", "max_context": 512, "max_sequences": 2, "page_tokens": 16, "prefill_chunk": 64}

RUN = """
import json, sys
import numpy as np
from tapeout.runtime import load
artifact, ids, prompt, out = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
with load(artifact, threads=1) as model:
    logits = model.logits(ids)
    tokens = [step.token for step in model.generate(ids[:prompt], max_tokens=12)]
    np.savez(f"{out}/{model.backend.rank}.npz", logits=logits, tokens=tokens)
"""


def build(source: Path, output: Path, count: int, expert: int, quantization: Quantization | None = None) -> Path:
    topology = Topology.model_validate({"count": count, "parallel": {"expert": expert}})
    spec = Spec(model=Model(source=str(source)), quantization=quantization or Quantization(), topology=topology,
                serving=Serving.model_validate(SERVING))  # fmt: skip
    compile_spec(spec, output, cache=False)
    return output


def run(artifact: Path, ids: list[int], out: Path) -> list[tuple[np.ndarray, list[int]]]:
    """Logits and greedy tokens of every rank."""
    comm = json.loads((artifact / "plan.json").read_bytes())["memory"]["comm"]
    out.mkdir()
    words = [sys.executable, "-c", RUN, str(artifact), json.dumps(ids), str(PROMPT), str(out)]
    assert run_ranks(comm["ranks"], words, comm["buffer_bytes"]) == 0
    found = [np.load(out / f"{rank}.npz") for rank in range(comm["ranks"])]
    return [(each["logits"], each["tokens"].tolist()) for each in found]


@pytest.mark.parametrize(("case", "count", "expert"), SPLITS)
def test_ranks_compute_what_transformers_does(case: str, count: int, expert: int, tmp_path: Path) -> None:
    reference, ids = CASES[case](), token_ids(POSITIONS)
    artifact = build(reference.save_hf(tmp_path / "hf"), tmp_path / "artifact", count, expert)
    results = run(artifact, ids, tmp_path / "out")
    logits, tokens = results[0]
    assert relative_error(logits, reference.logits(ids)) <= TOLERANCE
    for other, chosen in results[1:]:
        assert np.array_equal(other, logits), "ranks must hold the same bits"
        assert chosen == tokens
    one = build(tmp_path / "hf", tmp_path / "one", 1, 1)
    with load(one) as model:
        assert relative_error(logits, model.logits(ids)) <= 1e-5
        assert tokens == until_eos(reference, ids[:PROMPT], model)


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


@pytest.mark.parametrize("case", ["llama", "qwen3-moe"])
def test_quantized_ranks_hold_pieces_of_the_same_blocks(case: str, tmp_path: Path) -> None:
    """With float32 activations nothing is rounded but the weights, which no cut changes."""
    reference, ids = CASES[case](), token_ids(POSITIONS)
    held = reference.write_gguf(tmp_path / "model.gguf", {"*": "Q8_0"})
    exact = Quantization(activations="f32")
    artifact = build(tmp_path / "model.gguf", tmp_path / "artifact", 2, 1, exact)
    assert relative_error(run(artifact, ids, tmp_path / "out")[0][0], held.logits(ids)) <= TOLERANCE


def test_every_byte_of_a_rank_says_where_it_is_from(tmp_path: Path) -> None:
    artifact = build(CASES["llama"]().save_hf(tmp_path / "hf"), tmp_path / "artifact", 2, 1)
    plan = json.loads((artifact / "plan.json").read_bytes())
    weight = next(each for each in plan["weights"] if each["name"].endswith("0.mlp.down_proj"))
    cuts = [recipe["source"] for recipe in (weight["recipe"], *weight["further_ranks"])]
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
