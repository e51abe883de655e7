"""inspect and explain: the text they print for a small plan."""

from __future__ import annotations

import random
from collections.abc import Callable
from io import StringIO
from typing import Any

import pytest
from plan_example import example_plan, pack, place, read
from rich.console import Console

from tapeout.compiler.views import print_decisions, print_plan, print_summary, print_weights
from tapeout.compiler.views.launches import condense
from tapeout.compiler.views.text import change_of_size, group_label, indices, ranges, size, wildcard
from tapeout.runtime.errors import TapeoutError


def printed(function: Callable[..., None], *args: object) -> str:
    """What a view prints, without the blanks that pad lines."""
    out = Console(file=StringIO(), width=120, highlight=False)
    function(*args, out)
    return "\n".join(line.rstrip() for line in out.file.getvalue().splitlines())  # type: ignore[attr-defined]


SUMMARY = """\
model       tiny (llama)
parameters  5,751,360, vocabulary of 49,152
source      pypi:pkg/tiny.gguf
checkpoint  gguf, 17 of 18 tensors used, 1 ignored: rope_freqs.weight
device      1 × cpu
context     2,048 tokens, 1 at a time
KV pages    64 of 32 tokens in f16, 3,072 bytes a token; 5,590,720 tokens would fit

Memory
weights    3.4 MiB       3,596,544 B  ████████████▌
kv pool    6.0 MiB       6,291,456 B  ██████████████████████
arena      1.0 MiB       1,048,576 B  ███▋
scratch  512.0 KiB         524,288 B  █▉
total     10.9 MiB      11,460,864 B  0.1 % of 16.0 GiB
free      16.0 GiB  17,168,408,320 B

Weights
attention  1.3 MiB  1,382,400 B  ███████████████▍
MLP        2.1 MiB  2,211,840 B  ████████████████████████▋
vectors    2.2 KiB      2,304 B  ▏

Formats
format         weights  parameters    bytes  bits/weight  share
q4_1                 8   5,750,784  3.4 MiB         5.00  99.9%
f32 (vectors)        1         576  2.2 KiB        32.00   0.1%
all                  9   5,751,360  3.4 MiB         5.00"""

REST = """\

Kernels for x86_64_v3, x86_64_v4
kernel       prefill  decode  parameters
linear_q4_1        8       8  x, w, y, n, k, bias
rmsnorm_f32        1       1  x, weight, y, k, eps

prefill.256, decode.1: 9 launches
layers  kernel       op
0-3     linear_q4_1  model.layers.*.self_attn.qkv_proj  960×576
0-3     linear_q4_1  model.layers.*.mlp.down_proj       576×1536
        rmsnorm_f32  model.norm                         k 576

2 decisions; tapeout explain prints them."""


def test_summary() -> None:
    assert printed(print_summary, example_plan()) == SUMMARY


def test_whole_plan() -> None:
    assert printed(print_plan, example_plan()) == SUMMARY + "\n" + REST


def test_context_left_to_the_model_is_read_off_the_pool() -> None:
    plan = example_plan()
    plan["spec"]["serving"]["max_context"] = None
    assert "context     2,048 tokens, 1 at a time" in printed(print_summary, plan)


def test_weight_recipe() -> None:
    assert printed(print_weights, example_plan(), "model.layers.1.self_attn.*") == (
        "model.layers.1.self_attn.qkv_proj  [960, 576] q4_1, tile16, 345,600 bytes (337.5 KiB)\n"
        "├── bytes 898,560 to 1,244,160 of the data in weights/rank0.safetensors\n"
        "├── axes: heads, hidden\n"
        "└── lay out as tile16\n"
        "    └── concatenate 3 parts, in this order\n"
        "        ├── reorder rotary pairs into halves, 9 heads\n"
        "        │   └── read blk.1.attn_q.weight 576×576 q4_1\n"
        "        ├── reorder rotary pairs into halves, 3 heads\n"
        "        │   └── read blk.1.attn_k.weight 192×576 q4_1\n"
        "        └── read blk.1.attn_v.weight 192×576 q4_1"
    )


def on_rank(plan: dict[str, Any], name: str, rank: int) -> str:
    return printed(lambda out: print_weights(plan, name, out, rank=rank))


def test_a_weight_on_every_rank_and_on_one() -> None:
    plan = example_plan()
    at = "model.layers.1.self_attn.qkv_proj"
    weight = next(each for each in plan["weights"] if each["name"] == at)
    source = {"op": "read", "tensor": "w", "shape": [8, 4], "format": "f32"}
    place(plan, weight, *({"op": "rows", "source": source, "start": cut, "stop": cut + 4} for cut in (0, 4, 4)))
    assert printed(print_weights, plan, at).split("\n")[1:] == [
        "├── bytes 898,560 to 1,244,160 of the data in weights/rankR.safetensors, R = 0-2",
        "├── axes: heads, hidden",
        "├── rank 0",
        "│   └── rows 0 to 4",
        "│       └── read w 8×4 f32",
        "└── ranks 1-2",
        "    └── rows 4 to 8",
        "        └── read w 8×4 f32",
    ]
    assert on_rank(plan, at, 0).endswith("└── rows 0 to 4\n    └── read w 8×4 f32")
    assert "of the data in weights/rank2.safetensors" in on_rank(plan, at, 2)
    for wrong in (3, -1):
        expected = f"--rank {wrong}: there is no such rank; the plan has ranks 0 to 2"
        with pytest.raises(TapeoutError, match=f"^{expected}$"):
            print_weights(plan, at, rank=wrong)
    with pytest.raises(TapeoutError, match=r"^--rank 1: there is no such rank; the plan has rank 0 alone$"):
        print_weights(plan, "model.norm", rank=1)
    plan["memory"]["comm"] = {"ranks": 3, "buffer_bytes": 64}
    assert "Memory of each of 3 ranks" in printed(print_summary, plan)


def test_experts_are_told_once() -> None:
    plan = example_plan()
    parts = [read(f"model.layers.3.mlp.experts.{n}.w1.weight", [8, 4], "bf16") for n in range(384)]
    place(plan, plan["weights"][-1], pack({"op": "concat", "parts": parts}))
    assert printed(print_weights, plan, "model.norm").endswith(
        "└── lay out as tile16\n"
        "    └── concatenate 384 parts, in this order\n"
        "        └── 384 alike, # = 0-383: read model.layers.3.mlp.experts.#.w1.weight 8×4 bf16"
    )


def test_unknown_weight_names_close_ones() -> None:
    with pytest.raises(TapeoutError, match=r"no weight is called model\.nrom; close: model\.norm"):
        print_weights(example_plan(), "model.nrom")


EXPLAINED = """\
select_kernels
  model.layers.*.mlp.down_proj → linear_q4_1
      because reads the fewest bytes
      not linear_f32: reads 6.4 times the bytes
      evidence: bytes 552,960, weights 4"""


@pytest.mark.parametrize("subject", ["model.layers.3.mlp.down_proj", "*down_proj", "down_proj", "select_kernels"])
def test_explain_finds_a_subject_by_name_glob_or_part(subject: str) -> None:
    assert printed(print_decisions, example_plan(), subject) == EXPLAINED


def test_explain_everything() -> None:
    text = printed(print_decisions, example_plan(), None)
    assert text == EXPLAINED + ("\n\nplan_memory\n  kv_pool → f16, pages of 32 tokens\n      because serving.kv_dtype")


def test_explain_unknown_subject_lists_the_known() -> None:
    with pytest.raises(TapeoutError, match=r"no decision is about wings; subjects: model\S*down_proj, kv_pool"):
        print_decisions(example_plan(), "wings")


def _launch(op: str, kernel: str = "k", **numbers: int) -> dict[str, object]:
    return {"kernel": kernel, "op": op, "args": {"x": ["arena", 0], **numbers}}


def test_launch_lists_show_in_which_layers_a_launch_occurs() -> None:
    launches = [_launch("embed")]
    for layer in range(12):
        launches += [_launch(f"l.{layer}.a"), _launch(f"l.{layer}.b", window=0 if layer % 6 == 5 else 512)]
        launches += [_launch(f"l.{layer}.b"), _launch(f"l.{layer}.c")] if layer == 3 else [_launch(f"l.{layer}.c")]
    launches.append(_launch("head"))
    entries = condense(launches)
    shown = [(entry.line.op, entry.line.numbers, ranges(entry.layers)) for entry in entries]
    assert shown == [
        ("embed", "", ""),
        ("l.*.a", "", "0-11"),
        ("l.*.b", "window 512", "0-4, 6-10"),
        ("l.*.b", "", "3, 5, 11"),
        ("l.*.c", "", "0-11"),
        ("head", "", ""),
    ]


@pytest.mark.parametrize("seed", range(10))
def test_every_layer_keeps_its_order_in_a_condensed_list(seed: int) -> None:
    rng = random.Random(seed)
    launches = [_launch(f"l.{layer}.{rng.choice('abc')}") for layer in range(8) for _ in range(rng.randrange(1, 6))]
    entries = condense(launches)
    for layer in range(8):
        own = [wildcard(str(launch["op"])) for launch in launches if indices(str(launch["op"])) == (layer,)]
        assert [entry.line.op for entry in entries if layer in entry.layers] == own


def test_graphs_with_other_launches_get_their_own_table() -> None:
    plan = example_plan()
    plan["graphs"][1]["launches"][0]["kernel"] = "linear_q8_0"
    text = printed(print_plan, plan)
    assert "prefill.256: 9 launches" in text and "decode.1: 9 launches" in text
    assert "0       linear_q8_0" in text and "1-3     linear_q4_1" in text


def test_text_helpers() -> None:
    assert [size(n) for n in (0, 1023, 1024, 1536 << 20, -2048)] == ["0 B", "1023 B", "1.0 KiB", "1.5 GiB", "-2.0 KiB"]
    assert change_of_size(1 << 20, 3 << 19) == "+512.0 KiB (+50 %)"
    assert change_of_size(1000, 990) == "-10 B (-1 %)"
    assert change_of_size(1 << 20, (1 << 20) + 1) == "+1 B"
    assert wildcard("model.layers.3.mlp.experts.12") == "model.layers.*.mlp.experts.*"
    assert wildcard("blk.0.attn_q2.weight") == "blk.*.attn_q2.weight"
    assert indices("a.3.b.4") == (3, 4)
    assert ranges([4, 0, 1, 2, 6]) == "0-2, 4, 6"
    names = [f"l.{i}.a" for i in range(4)]
    assert group_label(names, names) == "l.*.a (4)"
    assert group_label(names[1:3], names) == "l.*.a (2 of 4: 1-2)"
    assert group_label(names[:1], names) == "l.0.a"
