"""diff: each kind of change, in the words it is printed in."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from plan_example import LAYERS, example_plan, nested, pack, place, read

from tapeout.compiler.diff import compare, render
from tapeout.runtime.errors import TapeoutError

Plan = dict[str, Any]


@pytest.fixture
def before() -> Plan:
    return example_plan()


@pytest.fixture
def after() -> Plan:
    return example_plan()


def text(before: Plan, after: Plan) -> str:
    return render(compare(before, after))


def weights(plan: Plan, part: str) -> Iterator[Plan]:
    return (weight for weight in plan["weights"] if part in weight["name"])


def launches(plan: Plan, part: str) -> Iterator[Plan]:
    return (launch for graph in plan["graphs"] for launch in graph["launches"] if part in launch["op"])


def test_multiprocessors(before: Plan, after: Plan) -> None:
    before["kernels"]["multiprocessors"], after["kernels"]["multiprocessors"] = 188, 132
    assert text(before, after) == "kernels\n  multiprocessors  188 → 132"


def test_equal_plans_print_nothing(before: Plan, after: Plan) -> None:
    assert compare(before, after) == []
    assert render([]) == ""


def test_a_requantized_group_of_weights(before: Plan, after: Plan) -> None:
    after["spec"]["quantization"]["rules"] = [{"match": "*.mlp.down_proj", "format": "q8_0"}]
    for layer, weight in enumerate(weights(after, "down_proj")):
        weight["format"], weight["bytes"] = "q8_0", 940_032
        place(after, weight, pack({"op": "convert", "source": nested(after, weight)["source"], "to": "q8_0"}))
        weight["error"] = {"relative_rms": 0.001 + layer / 10_000, "max_abs": 0.25}
    for launch in launches(after, "down_proj"):
        launch["kernel"] = "linear_q8_0"
    after["kernels"]["table"].append({"name": "linear_q8_0", "template": "linear", "params": ["x"]})
    for name in ("weights", "total"):
        after["memory"][name] += LAYERS * (940_032 - 552_960)
    after["decisions"][0]["choice"] = "linear_q8_0"
    assert (
        text(before, after)
        == """\
spec
  quantization.rules[0].match   added: *.mlp.down_proj
  quantization.rules[0].format  added: q8_0
weights
  model.layers.*.mlp.down_proj (4)        q4_1 → q8_0; +1.5 MiB (+70 %)
  model.layers.*.mlp.down_proj (4) error  added: at most relative_rms 0.0013, max_abs 0.25
recipes
  model.layers.*.mlp.down_proj (4)  inserted: convert to q8_0, over read blk.*.ffn_down.weight [576, 1536] q4_1
kernels
  in the artifact                   added: linear_q8_0
  model.layers.*.mlp.down_proj (4)  linear_q4_1 → linear_q8_0
memory
  weights  3.4 MiB → 4.9 MiB; +1.5 MiB (+43 %)
  total    10.9 MiB → 12.4 MiB; +1.5 MiB (+14 %)
decisions
  select_kernels model.layers.*.mlp.down_proj  linear_q4_1 → linear_q8_0"""
    )


def test_the_order_of_a_fused_weight(before: Plan, after: Plan) -> None:
    for weight in weights(after, "2.self_attn.qkv"):
        place(after, weight, pack({"op": "concat", "parts": nested(after, weight)["source"]["parts"][::-1]}))
    assert text(before, after) == (
        "recipes\n  model.layers.2.self_attn.qkv_proj  concat: order "
        "[blk.*.attn_q.weight, blk.*.attn_k.weight, blk.*.attn_v.weight] → "
        "[blk.*.attn_v.weight, blk.*.attn_k.weight, blk.*.attn_q.weight]"
    )


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        (pack(read("blk.1.ffn_down.weight", [576, 1536], "q4_1"), "raw"), "pack: layout tile16 → raw"),
        (
            pack(read("blk.1.ffn_up.weight", [576, 1536], "q4_1")),
            "read blk.*.ffn_down.weight [576, 1536] q4_1 → read blk.*.ffn_up.weight [576, 1536] q4_1",
        ),
        (
            read("blk.1.ffn_down.weight", [576, 1536], "q4_1"),
            "removed: pack layout tile16, over read blk.*.ffn_down.weight",
        ),
        (
            pack({"op": "constant", "values": [1.0]}),
            "read blk.*.ffn_down.weight [576, 1536] q4_1 → constant values [1.0]",
        ),
    ],
)
def test_the_step_at_which_a_recipe_departs(before: Plan, after: Plan, recipe: Plan, words: str) -> None:
    for weight in weights(after, "1.mlp.down_proj"):
        place(after, weight, recipe)
    assert text(before, after).startswith(f"recipes\n  model.layers.1.mlp.down_proj  {words}")


def test_parts_and_fields_inside_a_recipe(before: Plan, after: Plan) -> None:
    for weight in weights(after, "qkv_proj"):
        recipe = nested(after, weight)
        recipe["source"]["parts"][0]["heads"] = 3
        place(after, weight, recipe)
    assert text(before, after) == "recipes\n  model.layers.*.self_attn.qkv_proj (4)  halves_from_pairs: heads 9 → 3"
    for weight in weights(after, "qkv_proj"):
        recipe = nested(after, weight)
        del recipe["source"]["parts"][1:]
        place(after, weight, recipe)
    assert (
        "concat: parts [blk.*.attn_q.weight, blk.*.attn_k.weight, blk.*.attn_v.weight] → [blk.*.attn_q.weight]"
        in text(before, after)
    )


def test_places_in_the_table_of_recipes_mean_nothing(before: Plan, after: Plan) -> None:
    for weight in reversed(after["weights"]):
        place(after, weight, nested(after, weight))
    assert after["weights"][0]["ranks"] != before["weights"][0]["ranks"]
    assert compare(before, after) == []
    after["weights"][2]["note"] = "x"
    assert text(before, after) == "other\n  weights  differs in details that have no effect on what is run"


def test_a_rank_whose_recipe_departs(before: Plan, after: Plan) -> None:
    halves = [{"op": "rows", "source": read("w", [8], "f32"), "start": at, "stop": at + 4} for at in (0, 4)]
    others = [halves[0], halves[1] | {"start": 5}]
    for plan, ranks in ((before, halves), (after, others)):
        place(plan, plan["weights"][-1], *map(pack, ranks))
    assert text(before, after) == "recipes\n  model.norm  on rank 1: rows: start 4 → 5"
    place(after, after["weights"][-1], pack(halves[0]))
    assert text(before, after) == "recipes\n  1 of 9 weights  for 2 → 1 ranks, on each as before"


def test_a_rope_table_names_the_first_value(before: Plan, after: Plan) -> None:
    for plan, base in ((before, 10_000.0), (after, 100_000.0)):
        values = [base ** (-i / 32) for i in range(32)]
        weight = copy.deepcopy(plan["weights"][-1]) | {"name": "rope"}
        place(plan, weight, {"op": "constant", "values": values})
        plan["weights"].append(weight)
    assert "rope  constant: values [1] 0.749" in text(before, after)
    assert ", 31 of 32 differ" in text(before, after)


def test_weights_added_and_moved(before: Plan, after: Plan) -> None:
    extra = copy.deepcopy(after["weights"][0]) | {"name": "lm_head", "bytes": 2048}
    after["weights"].insert(0, extra)
    for weight in after["weights"][1:]:
        weight["offset"] += 2048
    assert text(before, after) == (
        "weights\n"
        "  lm_head              added: q4_1 960×576 tile16; 2.0 KiB\n"
        "  9 of 9 kept weights  lie at other offsets in the file"
    )


def test_buckets_and_launches(before: Plan, after: Plan) -> None:
    after["graphs"].append({"name": "decode.4", "phase": "decode", "rows": 4, "launches": []})
    for launch in launches(after, "qkv_proj"):
        launch["args"]["bias"] = 1
    after["graphs"][0]["launches"].insert(0, {"kernel": "quantize_x8", "op": "model.embed", "args": {}})
    after["graphs"][1]["launches"][2]["args"]["y"] = ["arena", 64]
    swapped = after["graphs"][1]["launches"]
    swapped[0], swapped[1] = swapped[1], swapped[0]
    assert (
        text(before, after)
        == """\
graphs
  prefill.256                            prefill of up to 256 rows, 9 launches → prefill of up to 256 rows, 10 launches
  decode.4                               added: decode of up to 4 rows, 0 launches
  model.embed                            added: quantize_x8; in prefill.256
  model.layers.*.self_attn.qkv_proj (4)  bias 0 → bias 1
  launch order                           differ in decode.1
  addresses                              differ in decode.1"""
    )


def test_memory_buffers_generation_and_unknown_sections(before: Plan, after: Plan) -> None:
    after["memory"]["kv"]["dtype"] = "f32"
    after["memory"]["buffers"][0]["bytes"] += 64
    after["memory"]["buffers"][1]["offset"] = 128
    after["generation"]["eos_token_ids"] = [2, 7]
    after["tokenizer"] = {"kind": "bpe"}
    after["tapeout_version"] = "0.2.0"
    after["model"]["config"]["hidden_size"] = 577
    assert (
        text(before, after)
        == """\
version
  tapeout_version  0.1.0 → 0.2.0
model
  config.hidden_size  576 → 577
memory
  kv.dtype         f16 → f32
  buffers resized  1: hidden in prefill.256
  buffers moved    1: hidden in decode.1
generation
  eos_token_ids  [2] → [2, 7]
tokenizer
  kind  added: bpe"""
    )


def test_arguments_that_are_neither_weights_nor_addresses(before: Plan, after: Plan) -> None:
    for plan, first, field in ((before, 4, "tokens"), (after, 8, "positions")):
        for graph in plan["graphs"]:
            args = {"comm": ["comm", 0], "first": ["rank", [2, first]], "ids": ["step", field]}
            graph["launches"][-1]["args"] |= args
    assert text(before, before) == ""
    assert text(before, after) == (
        "graphs\n  model.norm  first rank [2, 4], ids step tokens → first rank [2, 8], ids step positions"
    )


def test_what_only_one_launch_says(before: Plan, after: Plan) -> None:
    after["graphs"][0]["launches"][-1]["output"] = {"arg": "y"}
    assert text(before, after) == "graphs\n  model.norm  - → output.arg y; in prefill.256"


def exchange(rows: int, *made: tuple[str, int, int, str, float | None]) -> Plan:
    names = ("kind", "count", "columns", "algorithm")
    entries = [
        dict(zip(names, (kind, count, columns, algorithm), strict=True))
        | {"bytes": 2 * rows * columns}
        | ({} if us is None else {"us": us})
        for kind, count, columns, algorithm, us in made
    ]
    return {"phase": "decode", "rows": rows, "collectives": entries}


def test_collectives(before: Plan, after: Plan) -> None:
    gather = ("all_gather", 1, 32, "one-shot", 2.25)
    before["communication"] = {
        "ranks": 8,
        "link": {"gb_s": 50.0, "latency_us": 2.0},
        "lists": [
            exchange(1, gather, ("all_reduce", 122, 16, "one-shot", 4.0)),
            exchange(2, gather, ("all_reduce", 122, 16, "one-shot", 4.0)),
            exchange(4, ("all_reduce", 122, 16, "two-shot", 8.5)),
        ],
    }
    after["communication"] = {
        "ranks": 4,
        "link": {"gb_s": 900.0, "latency_us": 1.0},
        "lists": [
            exchange(1, gather, ("all_reduce", 122, 16, "two-shot", 3.0)),
            exchange(2, gather, ("all_reduce", 122, 16, "two-shot", 3.0)),
            exchange(8, ("all_reduce", 122, 16, "two-shot", 10.0)),
        ],
    }
    assert text(before, after).split("\n") == [
        "communication",
        "  ranks       8 → 4",
        "  link        50 GB/s, 2 us a message → 900 GB/s, 1 us a message",
        "  all_reduce  one-shot, 4.0 us each → two-shot, 3.0 us each; -122.0 us a step",
        "  decode.4    removed: 122 all_reduce of 128 bytes, 1.0 ms",
        "  decode.8    added: 122 all_reduce of 256 bytes, 1.2 ms",
    ]


def test_a_collective_of_some_lists(before: Plan, after: Plan) -> None:
    reduce = ("all_reduce", 8, 16, "one-shot", None)
    before["communication"] = {"ranks": 2, "lists": [exchange(1, reduce), exchange(2, reduce, reduce)]}
    wide = ("all_reduce", 9, 32, "one-shot", None)
    after["communication"] = {"ranks": 2, "lists": [exchange(1, wide), exchange(2, reduce)]}
    assert text(before, after).split("\n") == [
        "communication",
        "  decode.1 all_reduce  8 times, 16 columns, 32 bytes → 9 times, 32 columns, 64 bytes",
        "  all_reduce 2         removed: 8 all_reduce of 64 bytes",
    ]


def test_a_weight_of_a_plan_without_weights(before: Plan, after: Plan) -> None:
    for plan, rows in ((before, 4), (after, 8)):
        for weight in plan["weights"]:
            slot = {"op": "planned", "slot": weight["name"], "shape": [rows, 4], "format": "bf16"}
            place(plan, weight, pack({"op": "concat", "parts": [slot, slot]}))
    assert (
        "recipes\n  model.layers.*.self_attn.qkv_proj (4)  planned model.layers.*.self_attn.qkv_proj [4, 4] bf16 → "
        in (text(before, after))
    )


def experts(plan: Plan, numbers: Sequence[int], projection: str = "up") -> None:
    parts = [read(f"model.layers.0.mlp.experts.{n}.{projection}.weight", [8, 4], "bf16") for n in numbers]
    place(plan, plan["weights"][-1], pack({"op": "concat", "parts": parts}))


def test_experts_are_told_by_their_number(before: Plan, after: Plan) -> None:
    experts(before, range(384))
    experts(after, range(48), "down")
    each = "model.layers.*.mlp.experts.*"
    assert text(before, after) == (
        f"recipes\n  model.norm  concat: parts [384 × {each}.up.weight] → [48 × {each}.down.weight]"
    )


def test_experts_in_another_order(before: Plan, after: Plan) -> None:
    experts(before, range(8))
    experts(after, [1, 0, *range(2, 8)])
    assert text(before, after) == "recipes\n  model.norm  concat: 8 parts in another order"


def test_weights_that_more_ranks_hold_alike_are_one_line(before: Plan, after: Plan) -> None:
    after["weights"] += [after["weights"][-1] | {"name": f"model.norm_{n}"} for n in "abc"]
    before["weights"] += [before["weights"][-1] | {"name": f"model.norm_{n}"} for n in "abc"]
    for weight in after["weights"]:
        weight["ranks"] = weight["ranks"] * 2
    assert text(before, after) == "recipes\n  12 of 12 weights  for 1 → 2 ranks, on each as before"


def test_caches_by_name(before: Plan, after: Plan) -> None:
    for plan, size in ((before, 4096), (after, 8192)):
        names = [f"layer.{index}" for index in range(3 if plan is before else 2)]
        caches = [{"name": name, "offset": 0, "page_bytes": size, "sequence_bytes": 0} for name in names]
        plan["memory"]["kv"]["caches"] = caches
    after["memory"]["kv"]["caches"].append({"name": "ring", "offset": 9, "page_bytes": 0, "sequence_bytes": 64})
    assert text(before, after) == (
        "memory\n  caches added    1: ring in the KV pool\n  caches removed  1: layer.2 in the KV pool\n"
        "  caches resized  2: layer.*"
    )
    after["memory"]["kv"]["caches"] = [dict(cache, offset=4096) for cache in before["memory"]["kv"]["caches"]]
    assert text(before, after) == "other\n  memory  differs in details that have no effect on what is run"


def test_decisions(before: Plan, after: Plan) -> None:
    after["decisions"][0]["evidence"] = {"bytes": 1, "weights": 4}
    del after["decisions"][1]
    after["decisions"].append({"pass": "fuse_weights", "subject": "qkv", "choice": "fused", "reason": "one input"})
    assert (
        text(before, after)
        == """\
decisions
  select_kernels model.layers.*.mlp.down_proj  linear_q4_1 as before, but evidence (bytes 552960 → 1) changed
  plan_memory kv_pool                          removed: f16, pages of 32 tokens
  fuse_weights qkv                             added: fused; because one input"""
    )


def test_output_stays_short_for_many_layers(before: Plan, after: Plan) -> None:
    for plan in (before, after):
        one = next(weights(plan, "0.mlp.down_proj"))
        plan["weights"] = [copy.deepcopy(one) | {"name": f"model.layers.{i}.mlp.down_proj"} for i in range(60)]
    for weight in after["weights"][10:40]:
        weight["format"] = "q8_0"
    lines = text(before, after).splitlines()
    assert len(lines) == 2 and "model.layers.*.mlp.down_proj (30 of 60: 10-39)" in lines[1]


def _paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from _paths(value[key], (*path, key))
    else:
        yield path


@pytest.mark.parametrize("seed", range(20))
def test_any_changed_leaf_is_reported(before: Plan, seed: int) -> None:
    """No change is silent, wherever in the plan it is."""
    rng = random.Random(seed)
    paths = [path for path in _paths(before) if path != ("format_version",)]
    for path in rng.sample(paths, 40):
        after = example_plan()
        node: Any = after
        for key in path[:-1]:
            node = node[key]
        old = node[path[-1]]
        node[path[-1]] = old + 1 if isinstance(old, int | float) else f"{old}x"
        if path[-1] in ("name", "graph", "op") or (path[-1] == 0 and isinstance(old, str)):
            continue  # renaming makes something else of it; covered above
        try:
            assert text(before, after), path
        except TapeoutError as error:  # a place in the table of recipes that is none
            assert "it is damaged" in str(error), path
