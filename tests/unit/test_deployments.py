"""The three deployments as shipped: bytes of a rank, tokens and collectives by hand from the published shapes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tapeout.compiler.driver import compile_spec
from tapeout.compiler.spec import load_spec
from tapeout.runtime.errors import TapeoutError

SPECS = Path(__file__).parents[2] / "specs"
KIMI, GLM, V4 = "kimi-k2.5-int4-8x", "glm-5-gguf-8x", "deepseek-v4-flash-nvfp4-4x"
PAGE, GIB = 4096, 2**30
MEMORY, CONTEXT = 94 * GIB, 570_000_000  # of an RTX PRO 6000, and what its driver takes
Sizes = dict[str, tuple[int, int]]  # matrices of a kind on a rank, and bytes of them all


def planned(tmp_path: Path, name: str, *overrides: str) -> dict[str, Any]:
    spec = load_spec(SPECS / f"{name}-rtx-pro-6000.yaml", overrides)
    return compile_spec(spec, tmp_path / "plan.json", plan_only=True, force=True)


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """The plan of a spec, made once."""
    made: dict[str, dict[str, Any]] = {}

    def plan(name: str) -> dict[str, Any]:
        if name not in made:
            made[name] = planned(tmp_path_factory.mktemp(name), name)
        return made[name]

    return plan


# -- bytes of a matrix [n, k] as kernels read it; each starts on a page


def up(value: int, step: int) -> int:
    return -(-value // step) * step


def bf16(n: int, k: int) -> int:
    return up(2 * n * k, PAGE)


def f32(n: int, k: int) -> int:
    return up(4 * n * k, PAGE)


def int4_g32(n: int, k: int) -> int:
    """4 bits a value and a 16-bit scale for 32 of them; a row of scales is whole 16 bytes."""
    return up(n * (k // 2 + up(2 * k // 32, 16)), PAGE)


def q4_k(n: int, k: int) -> int:
    """4 bits a value; for 256 of them two 16-bit scales, and 8 scales and 8 minima of a byte (6 bits in a file)."""
    return up(n * (k // 2 + up(20 * k // 256, 16)), PAGE)


def q6_k(n: int, k: int) -> int:
    """4 and 2 bits a value; for 256 of them a 16-bit scale and 16 of a byte."""
    return up(n * (k // 2 + k // 4 + up(18 * k // 256, 16)), PAGE)


def q8_0(n: int, k: int) -> int:
    return up(n * (k + up(2 * k // 32, 16)), PAGE)


def fp8_block128(n: int, k: int) -> int:
    """A byte a value, a float32 for 128 x 128 of them."""
    return up(n * k + up(n, 128) // 128 * up(4 * k // 128, 16), PAGE)


def nvfp4(n: int, k: int) -> int:
    """4 bits a value, a byte for 16 of them, a float32 a row."""
    return up(n * (k // 2 + k // 16 + 4), PAGE)


# -- matrices of a rank


def times(sizes: Mapping[str, tuple[int, int]]) -> Sizes:
    """From how many there are of a kind and the bytes of one."""
    return {kind: (count, count * nbytes) for kind, (count, nbytes) in sizes.items()}


def kimi(ranks: int, groups: int = 1) -> Sizes:
    """61 layers, 64 heads padded to a multiple of the ranks, widths to 16 channels (experts to blocks of 32) a rank.

    The low-rank projections of queries and keys are whole on every rank, as are router and embedding.
    """
    hidden, q_rank, latent, rope, nope, value, experts = 7168, 1536, 512, 64, 128, 128, 384
    heads, dense, shared = up(64, ranks) // ranks, up(18432, 16 * ranks) // ranks, up(2048, 16 * ranks) // ranks
    within = ranks // groups
    expert, held = up(2048, 32 * within) // within, experts // groups
    sizes = {
        "embed_tokens": (1, bf16(163840, hidden)),
        "lm_head": (1, bf16(up(163840, 16 * ranks) // ranks, hidden)),
        "q_a_kv_a_proj_with_mqa_proj": (61, bf16(q_rank + latent + rope, hidden)),
        "q_b_proj": (61, bf16(heads * (nope + rope), q_rank)),
        "k_b_proj": (61, bf16(heads * latent, nope)),
        "v_b_proj": (61, bf16(heads * value, latent)),
        "o_proj": (61, bf16(hidden, heads * value)),
        "gate": (60, bf16(experts, hidden)),
        "mlp.gate_up_proj": (1, bf16(2 * dense, hidden)),
        "mlp.down_proj": (1, bf16(hidden, dense)),
        "experts.gate_up_proj": (60, int4_g32(held * 2 * expert, hidden)),
        "experts.down_proj": (60, int4_g32(held * hidden, expert)),
        "shared_experts.gate_up_proj": (60, bf16(2 * shared, hidden)),
        "shared_experts.down_proj": (60, bf16(hidden, shared)),
    }
    return times(sizes)


def glm() -> Sizes:
    """78 layers on 8 ranks, 3 of them dense; the index of each is whole on every rank."""
    hidden, q_rank, latent, rope, nope, value, experts, heads = 6144, 2048, 512, 64, 192, 256, 256, 8
    sizes = {
        "embed_tokens": (1, q4_k(154880, hidden)),
        "lm_head": (1, q6_k(154880 // 8, hidden)),
        "q_a_kv_a_proj_with_mqa_proj": (78, q4_k(q_rank + latent + rope, hidden)),
        "q_b_proj": (78, q4_k(heads * (nope + rope), q_rank)),
        "k_b_proj": (78, q8_0(heads * latent, nope)),
        "v_b_proj": (78, q4_k(heads * value, latent)),
        "o_proj": (78, q4_k(hidden, heads * value)),
        "indexer.wq_b": (78, q4_k(32 * 128, q_rank)),
        "indexer.wk": (78, q4_k(128, hidden)),
        "indexer.weights_proj": (78, f32(32, hidden)),
        "gate": (75, f32(experts, hidden)),
        "mlp.gate_up_proj": (3, q4_k(2 * 12288 // 8, hidden)),
        "mlp.down_proj": (3, q6_k(hidden, 12288 // 8)),
        "experts.gate_up_proj": (75, q4_k(experts * 2 * 2048 // 8, hidden)),
        "experts.down_proj": (75, q6_k(experts * hidden, 2048 // 8)),
        "shared_experts.gate_up_proj": (75, q4_k(2 * 2048 // 8, hidden)),
        "shared_experts.down_proj": (75, q6_k(hidden, 2048 // 8)),
    }
    return times(sizes)


def v4() -> Sizes:
    """43 layers on 4 ranks: 23 compress 128 tokens to an entry, 20 have 4, overlapping, and an index of their own."""
    hidden, q_rank, head, experts, streams = 4096, 1024, 512, 256, 4
    heads, groups, o_rank = 64 // 4, 8 // 4, 1024
    mixes = streams * (streams + 2)
    sizes = {
        "embed_tokens": (1, bf16(129280, hidden)),
        "lm_head": (1, bf16(129280 // 4, hidden)),
        "attn_hc.fn": (43, f32(mixes, streams * hidden)),
        "ffn_hc.fn": (43, f32(mixes, streams * hidden)),
        "hc_head.fn": (1, f32(streams, streams * hidden)),
        "q_a_kv_proj": (43, fp8_block128(q_rank + head, hidden)),
        "q_b_proj": (43, fp8_block128(heads * head, q_rank)),
        "o_a_proj": (43, fp8_block128(groups * o_rank, 64 // 8 * head)),
        "o_b_proj": (43, fp8_block128(hidden, groups * o_rank)),
        "indexer.kv_gate_proj": (20, bf16(2 * 2 * 128, hidden)),
        "indexer.q_b_proj": (20, fp8_block128(64 * 128, q_rank)),
        "scorer.weights_proj": (20, bf16(64, hidden)),
        "gate": (43, bf16(experts, hidden)),
        "experts.gate_up_proj": (43, nvfp4(experts * 2 * 2048 // 4, hidden)),
        "experts.down_proj": (43, nvfp4(experts * hidden, 2048 // 4)),
        "shared_experts.gate_up_proj": (43, fp8_block128(2 * 2048 // 4, hidden)),
        "shared_experts.down_proj": (43, fp8_block128(hidden, 2048 // 4)),
    }
    entries = 23 * bf16(2 * head, hidden) + 20 * bf16(2 * 2 * head, hidden)
    return times(sizes) | {"compressor.kv_gate_proj": (43, entries)}


def by_kind(plan: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """How many matrices of a kind a rank has, and their bytes; a kind is the end of a name that says which it is."""
    counts, sizes = Counter[str](), Counter[str]()
    for weight in plan["weights"]:
        if len(weight["shape"]) == 2:
            name = re.sub(r"^model\.(layers\.\d+\.)?(self_attn\.)?", "", weight["name"])
            kind = re.sub(r"^(mlp\.(?!gate_up|down)|compressor\.(?=indexer))", "", name)
            kind = kind.removeprefix("indexer.") if kind.startswith("indexer.scorer.") else kind
            counts[kind] += 1
            sizes[kind] += weight["bytes"]
    return {kind: (counts[kind], sizes[kind]) for kind in counts}


def vectors(plan: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [weight for weight in plan["weights"] if len(weight["shape"]) == 1]


def matrix_bytes(sizes: Sizes) -> int:
    return sum(nbytes for _, nbytes in sizes.values())


@pytest.mark.parametrize(("name", "sizes"), [(KIMI, kimi(8)), (GLM, glm()), (V4, v4())], ids=[KIMI, GLM, V4])
def test_weights_of_a_rank(name: str, sizes: Sizes, plans: Callable[[str], dict[str, Any]]) -> None:
    plan = plans(name)
    assert by_kind(plan) == sizes
    rest = plan["memory"]["weights"] - matrix_bytes(sizes)
    assert rest == sum(vector["bytes"] for vector in vectors(plan))


def test_vectors_are_float32_on_lines_of_64_bytes(plans: Callable[[str], dict[str, Any]]) -> None:
    # Kimi's: two norms a layer and one behind, those of both latents, 60 biases of the router, 32 rotary frequencies
    values = 7168 * (2 * 61 + 1) + (1536 + 512) * 61 + 384 * 60 + 32
    assert sum(vector["bytes"] for vector in vectors(plans(KIMI))) == up(4 * values, 64)
    # GLM-5's: the same, and norm and bias of 78 indices
    values = 6144 * (2 * 78 + 1) + (2048 + 512) * 78 + 2 * 128 * 78 + 256 * 75 + 32
    assert sum(vector["bytes"] for vector in vectors(plans(GLM))) == up(4 * values, 64)


def test_shapes_say_what_is_split_and_what_is_copied(plans: Callable[[str], dict[str, Any]]) -> None:
    shapes = {weight["name"]: tuple(weight["shape"]) for weight in plans(KIMI)["weights"]}
    at = "model.layers.1"
    assert shapes[f"{at}.self_attn.q_a_kv_a_proj_with_mqa_proj"] == (1536 + 512 + 64, 7168)
    assert shapes[f"{at}.self_attn.q_b_proj"] == (64 // 8 * (128 + 64), 1536)
    assert shapes[f"{at}.mlp.gate"] == (384, 7168) and shapes[f"{at}.mlp.route.bias"] == (384,)
    assert shapes[f"{at}.mlp.experts.gate_up_proj"] == (384 * 2 * 256, 7168)  # a slice of every expert
    assert shapes["model.embed_tokens"] == (163840, 7168) and shapes["lm_head"] == (20480, 7168)
    assert {len(weight["ranks"]) for weight in plans(KIMI)["weights"]} == {8}


# -- keys, values, and tokens


def test_kv_bytes_a_token(plans: Callable[[str], dict[str, Any]]) -> None:
    """One latent and one rope key of 16 bits a token and layer on every rank: heads share them."""
    assert plans(KIMI)["memory"]["kv"]["bytes_per_token"] == 61 * (512 + 64) * 2 == 70_272
    assert plans(GLM)["memory"]["kv"]["bytes_per_token"] == 78 * (512 + 64 + 128) * 2 == 109_824


V4_PAGE = 20 * (32 // 4) * (512 + 128) * 2 + 23 * 512 * 2
"""Bytes of a page of 32 tokens: 8 entries and their index keys, or room for the one that the page may end."""
V4_STATE = 43 * 128 * 512 * 4 + 23 * 128 * 2 * 512 * 4 + 20 * 8 * 2 * (1024 + 256) * 4
"""Bytes of a sequence, in float32: the windows of 128 tokens, and keys and gates of entries that are still open."""


def test_kv_of_compressed_attention(plans: Callable[[str], dict[str, Any]]) -> None:
    memory = plans(V4)["memory"]
    assert sum(cache["page_bytes"] for cache in memory["kv"]["caches"]) == V4_PAGE == 228_352
    assert sum(cache["sequence_bytes"] for cache in memory["kv"]["caches"]) == V4_STATE == 24_969_216
    assert memory["kv"]["bytes_per_token"] == 228_352 // 32
    assert memory["kv_pool"] == 4 * (131072 // 32 * V4_PAGE + V4_STATE)


@pytest.mark.parametrize(
    ("name", "page", "state", "caches", "fits"),
    [
        (KIMI, 32 * 70_272, 0, 61, 196_960),
        (GLM, 32 * 109_824, 0, 2 * 78, 248_352),
        (V4, V4_PAGE, 4 * V4_STATE, 43 + 2 * 23 + 4 * 20, 6_828_352),
    ],
    ids=[KIMI, GLM, V4],
)
def test_tokens_that_fit(
    name: str, page: int, state: int, caches: int, fits: int, plans: Callable[[str], dict[str, Any]]
) -> None:
    """Whole pages in 92 % of 94 GiB, less what the driver, weights, activations and both exchange buffers take."""
    memory = plans(name)["memory"]
    assert memory["capacity"] == 92 * MEMORY // 100 - CONTEXT
    others = memory["weights"] + memory["arena"] + 2 * memory["comm"]["buffer_bytes"]
    assert memory["total"] == others + memory["kv_pool"]
    assert len(memory["kv"]["caches"]) == caches
    room = memory["capacity"] - others - state
    assert memory["kv"]["tokens_that_fit"] == room // page * 32 == fits


def test_the_longest_context_is_the_longest(tmp_path: Path) -> None:
    plan = planned(tmp_path, KIMI, "serving.max_context=196960")
    assert plan["memory"]["kv_pool"] == 196_960 * 70_272
    assert plan["memory"]["total"] <= plan["memory"]["capacity"] < plan["memory"]["total"] + 32 * 70_272


# -- collectives


@pytest.mark.parametrize(
    ("name", "layers", "hidden", "vocabulary"),
    [(KIMI, 61, 7168, 163840), (GLM, 78, 6144, 154880), (V4, 43, 4096, 129280)],
)
def test_collectives_of_a_step(
    name: str, layers: int, hidden: int, vocabulary: int, plans: Callable[[str], dict[str, Any]]
) -> None:
    """Behind attention and behind the experts of each layer; the vocabulary's pieces side by side; all in bfloat16."""
    plan = plans(name)
    sequences = plan["memory"]["max_sequences"]
    lists = {(made["phase"], made["rows"]): made["collectives"] for made in plan["communication"]["lists"]}
    decode = [1, 2, 4] if sequences == 4 else [1]
    phases = [("prefill", 32), ("prefill", 128), ("prefill", 512), ("prefill", 2048)]
    assert list(lists) == [*phases, *(("decode", rows) for rows in decode), ("head", 1), ("head", 16)]
    for (phase, rows), found in lists.items():
        short = [(each["kind"], each["count"], each["columns"], each["bytes"]) for each in found]
        reduces = [("all_reduce", 2 * layers, hidden, 2 * rows * hidden)] if phase != "head" else []
        gathers = [("all_gather", 1, vocabulary, 2 * rows * vocabulary)] if phase != "prefill" else []
        assert short == gathers + reduces, (phase, rows)
    assert plan["memory"]["comm"]["buffer_bytes"] == 2 * 2048 * hidden


def test_predicted_times(plans: Callable[[str], dict[str, Any]]) -> None:
    """50 GB/s are 50,000 bytes a us; a message takes 2 us. One shot: 7 operands come in. Two: 7/8 of one, twice."""
    lists = plans(KIMI)["communication"]["lists"]
    gather, reduce = next(made["collectives"] for made in lists if made["phase"] == "decode")
    assert (reduce["algorithm"], reduce["us"]) == ("one-shot", round(2 + 7 * 14_336 / 50_000, 3))
    assert (gather["algorithm"], gather["us"]) == ("one-shot", round(2 + 7 / 8 * 327_680 / 50_000, 3))
    (reduce,) = next(made["collectives"] for made in lists if made["rows"] == 2048)
    assert (reduce["algorithm"], reduce["us"]) == ("two-shot", round(4 + 2 * 7 / 8 * 29_360_128 / 50_000, 3))


# -- other splits, and refusals


def test_whole_experts_take_the_same_bytes_as_slices_of_all(tmp_path: Path) -> None:
    plan = planned(tmp_path, KIMI, "topology.parallel.expert=8")
    assert by_kind(plan) == kimi(8) == kimi(8, 8)
    shapes = {weight["name"]: tuple(weight["shape"]) for weight in plan["weights"]}
    assert shapes["model.layers.1.mlp.experts.gate_up_proj"] == (48 * 2 * 2048, 7168)
    assert shapes["model.layers.1.mlp.experts.down_proj"] == (48 * 7168, 2048)


NO_LINKS = "topology.links=[]"
REFUSED = {
    "a fraction that leaves nothing": (
        ("serving.memory_fraction=0.55",),
        "the model does not fit in memory at any context: on each of 8 ranks weights 78,239,815,808 + KV pool "
        "9,210,691,584 + arena 146,800,640 + scratch 0 + communication 58,720,256 bytes need 87,656,028,288, but "
        "54,942,452,300 are there at serving.memory_fraction 0.55 of 94.00 GiB, which is 21.89 GiB too little even "
        "without KV; the smallest that holds it is 0.88; raise topology.count, topology.memory or use smaller formats",
    ),
    "a fraction that is a little short": (
        ("serving.memory_fraction=0.87",),
        "serving.max_context 131072 with max_sequences 1 does not fit in memory: on each of 8 ranks weights "
        "78,239,815,808 + KV pool 9,210,691,584 + arena 146,800,640 + scratch 0 + communication 58,720,256 bytes need "
        "87,656,028,288, but 87,240,606,366 are there at serving.memory_fraction 0.87 of 94.00 GiB, which leaves 8.19 "
        "GiB for KV; the smallest that holds it is 0.88; the longest context that fits is 125152",
    ),
    "a context that is too long": (
        ("serving.max_context=262144",),
        "serving.max_context 262144 with max_sequences 1 does not fit in memory: on each of 8 ranks weights "
        "78,239,815,808 + KV pool 18,421,383,168 + arena 146,800,640 + scratch 0 + communication 58,720,256 bytes need "
        "96,866,719,872, but 92,287,192,939 are there at serving.memory_fraction 0.92 of 94.00 GiB, which leaves 12.89 "
        "GiB for KV; the smallest that holds it is 0.97; the longest context that fits is 196960",
    ),
    "six ranks": (
        ("topology.count=6", NO_LINKS),
        "the model does not fit in memory at any context: on each of 6 ranks weights 107,516,156,032 + KV pool "
        "9,210,691,584 + arena 146,800,640 + scratch 0 + communication 58,720,256 bytes need 116,932,368,512, but "
        "92,287,192,939 are there at serving.memory_fraction 0.92 of 94.00 GiB, which is 14.37 GiB too little even "
        "without KV; raise topology.count, topology.memory or use smaller formats",
    ),
    "a link to a device that is not there": (
        ('topology.links=[{"devices": [0, 8], "gb_s": 50}]',),
        "SPEC: topology: links[0] names device 8, but count is 8; devices are 0, 1, 2, 3, 4, 5, 6, 7",
    ),
    "devices that no link joins": (
        ('topology.links=[{"devices": [0, 1, 2, 3], "gb_s": 50}, {"devices": [4, 5, 6, 7], "gb_s": 50}]',),
        "SPEC: topology: no way over links leads from device 0 to device 4; add the link that joins them",
    ),
    "groups that do not divide the ranks": (
        ("topology.parallel.expert=5",),
        "SPEC: topology: parallel.expert is 5, which does not divide count, 8; legal degrees: 1, 2, 4, 8",
    ),
    "more groups than experts": (
        ("topology.parallel.expert=8", "model.config.text_config.n_routed_experts=4",
         "model.config.text_config.num_experts_per_tok=2"),
        "topology.parallel.expert is 8, more groups than the model has experts, 4; legal degrees: 1 (+101 % padding "
        "and replication), 2 (+101 %), 4 (+101 %)",
    ),
    "a context beyond the model's": (
        ("serving.max_context=262145",),
        "serving.max_context is 262145, but the model's positions end at 262144; set serving.max_context to 262144 or "
        "less",
    ),
    "links of CPUs": (
        ("topology.device=cpu",),
        "topology.links joins GPUs, and the ranks of cpu, topology.device, share memory; leave links out",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_does_not_fit_is_refused_in_one_sentence(what: str, tmp_path: Path) -> None:
    overrides, message = REFUSED[what]
    with pytest.raises(TapeoutError) as refused:
        planned(tmp_path, KIMI, *overrides)
    assert re.sub(r"^\S+yaml:\d+: ", "SPEC: ", str(refused.value)) == message
    assert not list(tmp_path.iterdir())


def test_the_figures_of_the_refusals_by_hand() -> None:
    """Those that are not ours to choose: weights but for 4.1 MB of vectors, the capacity, and the least fraction."""
    others = 146_800_640 + 58_720_256
    small = 4 * (7168 * 123 + 2048 * 61 + 384 * 60 + 32)
    assert matrix_bytes(kimi(8)) + small == 78_239_815_808 and matrix_bytes(kimi(6)) + small == 107_516_156_032
    assert 131_072 * 70_272 == 9_210_691_584 and 262_144 * 70_272 == 18_421_383_168
    assert [part * MEMORY // 100 - CONTEXT for part in (55, 87, 92)] == [54_942_452_300, 87_240_606_366, 92_287_192_939]
    needed = 78_239_815_808 + 9_210_691_584 + others + CONTEXT
    assert needed - CONTEXT == 87_656_028_288
    assert 87 * MEMORY < 100 * needed <= 88 * MEMORY
    left = 0.55 * MEMORY - (needed - 9_210_691_584)
    assert round(left / GIB, 2) == -21.89
