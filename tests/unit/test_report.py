"""report: the page against a plan written by hand, what it escapes, what it loads, and that it does not vary."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Sequence
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from plan_example import LAYERS, example_plan, nested, pack, place, read
from tiny import compile_tiny

from tapeout.compiler import cli
from tapeout.compiler.devices import load_device
from tapeout.compiler.plan import build_plan
from tapeout.compiler.recipes_table import NestedRecipes
from tapeout.compiler.report import render_report, write_report
from tapeout.compiler.report.launches import bytes_of_list, launch_lists, reader_of
from tapeout.compiler.report.memory import ranks
from tapeout.compiler.report.passes import draw
from tapeout.compiler.report.weights import weight_groups
from tapeout.compiler.spec import Model, Spec
from tapeout.compiler.views.kinds import kind_of
from tapeout.compiler.views.recipes import describe
from tapeout.passes import PIPELINE
from tapeout.runtime.errors import TapeoutError

VOID = {"meta", "link", "input", "br", "wbr"}
BLOCKS = {"li", "p", "dt", "dd", "div", "td", "th", "summary", "h2", "h3"}


class Page(HTMLParser):
    """The text of a page, its headings, its tables as rows of cells, and every reference to something."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""
        self.headings: list[tuple[int, str]] = []
        self.rows: list[list[str]] = []
        self.references: list[str] = []
        self.titles: list[str] = []
        self.ids: list[str] = []
        self.bare: list[str] = []
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.text += " " if tag in BLOCKS else ""
        self.references += [
            values[name] or "" for name in ("src", "href", "action", "data", "poster") if name in values
        ]
        self.titles += [values["title"] or ""] if "title" in values else []
        self.ids += [values["id"] or ""] if "id" in values else []
        if tag == "th" and "scope" not in values:
            self.bare.append(self.text[-20:])
        if re.fullmatch("h[1-6]", tag):
            self.headings.append((int(tag[1]), ""))
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag not in VOID and not (tag in ("rect", "path") and self.get_starttag_text().endswith("/>")):  # type: ignore[union-attr]
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        self.text += " " if tag in BLOCKS else ""
        if tag not in VOID:
            assert self.open and self.open.pop() == tag, f"<{tag}> is not what is open"

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)

    def handle_data(self, data: str) -> None:
        if "script" in self.open or "style" in self.open:
            return
        self.text += data
        if self.headings and self.open and re.fullmatch("h[1-6]|code|small", self.open[-1]):
            level, so_far = self.headings[-1]
            self.headings[-1] = (level, so_far + data)
        if self.rows and self.rows[-1] and {"td", "th"} & set(self.open):
            self.rows[-1][-1] += data

    def row(self, first: str) -> list[str]:
        """The only table row whose first cell is this."""
        (found,) = [row for row in self.rows if row and row[0].strip() == first]
        return [cell.strip() for cell in found]


def page(*plans: dict[str, Any], names: Sequence[str] = ("one", "two")) -> Page:
    return Page(render_report(plans, PIPELINE.passes, names))


@pytest.fixture(scope="module")
def example() -> Page:
    return page(example_plan())


def test_the_figures_and_the_bars_are_the_plans(example: Page) -> None:
    # four layers of 345,600 and 552,960 bytes and a norm of 2,304; the KV pool is 6 MiB, the arena 1 MiB
    assert example.row("weights: attention")[1:3] == ["1.3 MiB", "12.1%"]
    assert example.row("weights: MLP")[1:3] == ["2.1 MiB", "19.3%"]
    assert example.row("weights: vectors")[1:3] == ["2.2 KiB", "0.0%"]
    assert example.row("KV pool: all layers")[1:3] == ["6.0 MiB", "54.9%"]
    assert example.row("arena")[1:3] == ["1.0 MiB", "9.1%"]
    assert example.row("scratch")[1:3] == ["512.0 KiB", "4.6%"]
    assert example.row("total")[1] == "10.9 MiB"
    assert {"1,382,400 bytes", "2,211,840 bytes", "11,460,864 bytes", "5,751,360"} <= set(example.titles)
    assert "rank 0: 10.9 MiB, 0.1% of the 16.0 GiB it may take" in example.text
    assert example.row("free")[1] == "16.0 GiB"
    assert "17,168,408,320 bytes" in example.titles
    assert example.row("KV tokens that would fit")[1] == "5,590,720"
    assert re.search(r"KV tokens\s*2,048\s*3,072 bytes each; 5,590,720 would fit", example.text)


def test_segments_add_up_to_what_a_rank_holds() -> None:
    results = compile_tiny()
    plan = json.loads(json.dumps(build_plan(Spec(model=Model(source="tiny")), load_device("cpu"), results, {}, [])))
    (rank,) = ranks(plan)
    assert sum(segment.bytes for segment in rank.segments) == rank.total == plan["memory"]["total"]
    assert "KV pool: layer.*" in [segment.label for segment in rank.segments]
    assert Page(render_report([plan], PIPELINE.passes)).row("total")[0] == "total"


def test_formats(example: Page) -> None:
    assert example.row("q4_1")[1:] == ["3.4 MiB", "99.9%", "", "8", "5,750,784", "5.00"]
    assert example.row("f32 (vectors)")[1:] == ["2.2 KiB", "0.1%", "", "1", "576", "32.00"]


def test_weights_say_where_each_byte_comes_from_and_lies(example: Page) -> None:
    down = example.row("model.layers.*.mlp.down_proj 0-3")
    assert down[1:] == ["q4_1", "2.1 MiB", "", "540.0 KiB", "576×1536", "tile16"]
    words = " ".join(example.text.split())
    assert (
        "recipe and place lay out as tile16 concatenate 3 parts, in this order reorder rotary pairs into halves, "
        "9 heads read blk.*.attn_q.weight 576×576 q4_1 reorder rotary pairs into halves, 3 heads "
        "read blk.*.attn_k.weight 192×576 q4_1 read blk.*.attn_v.weight 192×576 q4_1 axes: heads, hidden "
        "offsets in the file, by layer: 0 0 "
        "1 898,560 2 1,797,120 3 2,695,680"
    ) in words
    assert "lay out as raw read output_norm.weight 576 f32 axes: hidden offset in the file: 3,594,240" in words


def test_weights_that_differ_in_more_than_their_number_stay_apart() -> None:
    plan = example_plan()
    plan["weights"][3]["format"] = "q8_0"
    place(plan, plan["weights"][5], pack(read("blk.1.ffn_down.weight", [576, 1536], "q4_1")))
    plan["weights"][7]["error"] = {"relative_rms": 0.0125, "max_abs": 0.5}
    down = [group for group in weight_groups(plan) if group.name.endswith("mlp.down_proj")]
    assert [(group.name, group.numbers, group.format) for group in down] == [
        ("model.layers.*.mlp.down_proj", "0, 3", "q4_1"),
        ("model.layers.1.mlp.down_proj", "", "q8_0"),
        ("model.layers.2.mlp.down_proj", "", "q4_1"),
    ]
    assert down[0].error == "relative RMS error 0.0125, largest 0.5"
    assert down[2].recipes[0][1].below[0].tensor == "blk.1.ffn_down.weight"  # layer 2 reads the tensor of another


def test_experts_of_a_layer_are_told_once() -> None:
    parts = [read(f"model.layers.3.mlp.experts.{n}.w1.weight", [8, 4], "bf16") for n in (8, 9, 10, 11)]
    other = read("model.layers.3.mlp.shared.w1.weight", [8, 4], "bf16")
    steps = describe({"op": "concat", "parts": [*parts, other]}, 3)
    assert steps.text == "concatenate 5 parts, in this order"
    assert [(step.tensor, step.times, step.numbers) for step in steps.below] == [
        ("model.layers.*.mlp.experts.#.w1.weight", 4, "8-11"),
        ("model.layers.*.mlp.shared.w1.weight", 1, ""),
    ]


@pytest.mark.parametrize("numbers", [(9, 8), (8, 8), (8, 10, 9)])
def test_an_order_that_is_not_that_of_the_numbers_is_told(numbers: tuple[int, ...]) -> None:
    parts = [read(f"model.layers.3.mlp.experts.{n}.w1.weight", [8, 4], "bf16") for n in numbers]
    told = [step.tensor for step in describe({"op": "concat", "parts": parts}).below]
    assert told == [f"model.layers.3.mlp.experts.{n}.w1.weight" for n in numbers]


def test_a_template_reads_as_its_parts_do() -> None:
    plan = example_plan()
    tensor = ["model.layers.3.mlp.experts.", ".w1.weight"]
    plan["recipes"] += [
        {"op": "read", "tensor": tensor, "shape": [8, 4], "format": "bf16"},
        {"op": "concat", "inputs": {"parts": {"each": len(plan["recipes"]), "from": 2, "to": 6}}},
    ]
    plan["weights"][0]["ranks"] = [len(plan["recipes"]) - 1]
    (recipe,) = NestedRecipes(plan).of(plan["weights"][0])
    parts = [read(tensor[0] + str(number) + tensor[1], [8, 4], "bf16") for number in range(2, 6)]
    assert describe(recipe, 3) == describe({"op": "concat", "parts": parts}, 3)
    assert [(step.tensor, step.times, step.numbers) for step in describe(recipe, 3).below] == [
        ("model.layers.*.mlp.experts.#.w1.weight", 4, "2-5")
    ]


def test_parts_of_two_experts_are_not_told_as_one() -> None:
    def unpack(codes: int, scales: int) -> dict[str, Any]:
        tensors = (("codes", codes, "packed"), ("scales", scales, "scale"))
        named = {kind: read(f"experts.w.{n}.{name}", [8, 4], "i32") for kind, n, name in tensors}
        return {"op": "unpack", "packing": "int4", "to": "int4_g32"} | named

    for pairs, told in (((0, 0), (1, 1)), 1), (((0, 0), (1, 2)), 2):
        steps = describe({"op": "concat", "parts": [unpack(*pair) for pair in pairs]}).below
        assert [step.times for step in steps] == ([2] if told == 1 else [1, 1])


def test_inputs_of_different_kinds_are_named() -> None:
    codes, scales = read("w.weight_packed", [8, 4], "i32"), read("w.weight_scale", [8, 1], "bf16")
    steps = describe({"op": "unpack", "packing": "int4", "to": "int4_g32", "codes": codes, "scales": scales})
    assert steps.text == "unpack int4 into int4_g32"
    assert [(step.role, step.tensor) for step in steps.below] == [
        ("codes", "w.weight_packed"),
        ("scales", "w.weight_scale"),
    ]


@pytest.mark.parametrize(
    ("name", "axes", "kind"),
    [
        ("model.layers.0.mlp.experts.down_proj", ["experts hidden", "ffn"], "experts"),
        ("model.layers.0.mlp.shared_experts.down_proj", ["hidden", "ffn"], "MLP"),
        ("model.layers.0.mlp.gate", ["experts", "hidden"], "MLP"),
        ("model.layers.0.self_attn.kv_b_proj", ["heads", "latent"], "attention"),
        ("lm_head", ["vocab", "hidden"], "embedding and head"),
        ("model.hc_head.fn", ["streams", "hidden"], "other matrices"),
    ],
)
def test_kinds_of_weights(name: str, axes: list[str], kind: str) -> None:
    assert kind_of({"name": name, "axes": axes, "shape": [2, 2]}) == kind


def test_launches_by_phase_with_the_bytes_they_read(example: Page) -> None:
    lists = launch_lists(example_plan())
    assert [(one.names, one.phase, one.launches) for one in lists] == [
        (("prefill.256",), "prefill", 9),
        (("decode.1",), "decode", 9),
    ]
    rows = [(row.layers, row.kernel, row.op, row.numbers, row.bytes) for row in lists[1].rows]
    assert rows == [
        ("0-3", "linear_q4_1", "model.layers.*.self_attn.qkv_proj", "960×576", 4 * 345_600),
        ("0-3", "linear_q4_1", "model.layers.*.mlp.down_proj", "576×1536", 4 * 552_960),
        ("", "rmsnorm_f32", "model.norm", "k 576", 2304),
    ]
    assert "decode, 9 launches, 3.4 MiB of weights read" in example.text


def test_an_embedding_is_read_by_the_row_and_experts_by_the_choice() -> None:
    plan = example_plan()
    plan["weights"][0] |= {"name": "embed", "axes": ["vocab", "hidden"], "shape": [1000, 576], "bytes": 1_000_000}
    plan["weights"][1] |= {"name": "mlp.experts.up", "axes": ["experts ffn", "hidden"], "bytes": 640_000}
    plan["kernels"]["table"].append({"name": "embed_q4_1", "template": "embed", "params": ["w"]})
    plan["decisions"][0] |= {"subject": "mlp.experts.up", "evidence": {"experts": 64, "top_k": 6}}
    look_up = {"kernel": "embed_q4_1", "op": "embed", "args": {"w": ["weight", "embed"]}}
    head = {"kernel": "linear_q4_1", "op": "lm_head", "args": {"w": ["weight", "embed"]}}
    chosen = {"kernel": "grouped_q4_1", "op": "mlp.experts.up", "args": {"w": ["weight", "mlp.experts.up"]}}
    by_name = {"kernel": "grouped", "op": "other", "args": chosen["args"] | {"experts": 64, "top_k": 6}}
    reader = reader_of(plan)
    for rows in (1, 4, 4096):  # what a launch says itself needs no decision
        of_both = (bytes_of_list(reader, {"rows": rows, "launches": [launch]}) for launch in (chosen, by_name))
        assert len(set(of_both)) == 1
    for rows, read_ in ((1, (1000, 60_000)), (4, (4000, 240_000)), (4096, (1_000_000, 640_000))):
        assert bytes_of_list(reader, {"rows": rows, "launches": [look_up]}) == read_[0]
        assert bytes_of_list(reader, {"rows": rows, "launches": [chosen]}) == read_[1]
        assert bytes_of_list(reader, {"rows": rows, "launches": [head]}) == 1_000_000


def plan_of_ranks() -> dict[str, Any]:
    """Two ranks: eight collectives in a list of four rows, and times predicted for a link."""
    plan = example_plan()
    plan["spec"]["topology"] |= {"count": 2, "links": [{"devices": [0, 1], "gb_s": 50.0, "latency_us": 2.0}]}
    plan["memory"] |= {"comm": {"buffer_bytes": 1 << 20, "ranks": 2}, "total": plan["memory"]["total"] + (2 << 20)}
    for weight in plan["weights"]:
        place(plan, weight, *(nested(plan, weight) for _ in range(2)))
    kinds = ("all_gather", "all_reduce")
    plan["kernels"]["table"] += [{"name": name, "template": "collective", "params": ["x", "k"]} for name in kinds]
    plan["graphs"][1] |= {"rows": 4, "name": "decode.4"}
    for layer in range(LAYERS):
        for name in kinds:
            op = f"model.layers.{layer}.mlp.{name}"
            plan["graphs"][1]["launches"].append({"kernel": name, "op": op, "args": {"x": ["arena", 0], "k": 576}})
    made = {"columns": 576, "count": LAYERS, "bytes": 4608}
    plan["communication"] = {
        "ranks": 2,
        "link": {"gb_s": 50.0, "latency_us": 2.0},
        "lists": [
            {
                "phase": "decode",
                "rows": 4,
                "collectives": [
                    made | {"kind": "all_gather", "algorithm": "one-shot", "us": 2.5},
                    made | {"kind": "all_reduce", "algorithm": "two-shot", "us": 350.25},
                ],
            },
            {"phase": "head", "rows": 1, "collectives": []},
        ],
    }
    return plan


def test_collectives_have_a_section_where_there_are_any(example: Page) -> None:
    assert "Collectives" not in example.text
    found = page(plan_of_ranks())
    assert "predicted for the slowest link, 50 GB/s, 2 us a message" in found.text
    (gather,) = (row for row in found.rows if row[0] == "decode.4")
    assert gather[1:8] == ["all_gather", "one-shot", "4", "576", "4.5 KiB", "2.5 us", "10.0 us"]
    assert found.row("all_reduce")[1:7] == ["two-shot", "4", "576", "4.5 KiB", "350.2 us", "1.4 ms"]
    assert ["0-3", "all_reduce", "model.layers.*.mlp.all_reduce", "4"] in found.rows
    assert re.search(r"collectives a token\s*1\.4 ms\s*predicted", found.text)
    assert re.search(r"links\s*devices 0-1: 50 GB/s, 2 us a message", found.text)
    assert "each of ranks 0-1: 12.9 MiB" in found.text
    assert found.row("communication")[1:3] == ["2.0 MiB", "15.5%"]


def test_collectives_of_a_cpu_have_no_times() -> None:
    plan = plan_of_ranks()
    del plan["communication"]["link"]
    for made in plan["communication"]["lists"][0]["collectives"]:
        del made["us"]
    found = page(plan)
    assert "predicted" not in found.text
    assert found.row("all_reduce") == ["all_reduce", "two-shot", "4", "576", "4.5 KiB"]


@pytest.mark.parametrize("turned", [False, True])
def test_one_rank_beside_several(turned: bool) -> None:
    plans = [example_plan(), plan_of_ranks()]
    found = page(*(reversed(plans) if turned else plans))
    assert re.search(rf"Plan {'B' if turned else 'A'}: one rank, which hands nothing to others", found.text)
    assert re.search(rf"collectives a token\s*{'A 1.4 ms' if turned else 'A -'}", found.text)
    told = "4 all_gather of 4,608 bytes, 4 all_reduce of 4,608 bytes, 1.4 ms"
    assert ["decode.4", *([told, "", ""] if turned else ["", told, ""])] in found.rows


def test_the_bar_is_as_long_as_what_a_rank_may_take() -> None:
    plan = example_plan()
    total = plan["memory"]["total"]
    plan["memory"]["capacity"] = 2 * total
    html = render_report([plan], PIPELINE.passes)
    shown = [float(width) for width in re.findall(r'<span class="[^"]*" style="width: ([\d.]+)%"', html)]
    assert sum(shown) == pytest.approx(50, abs=0.01)
    assert f"free<br>{total / (1 << 20):.1f} MiB" in html
    plan["memory"]["capacity"] = 100 * total  # all of it would be a speck
    shown = re.findall(r'<span class="[^"]*" style="width: ([\d.]+)%"', render_report([plan], PIPELINE.passes))
    assert sum(map(float, shown)) == pytest.approx(100, abs=0.01)


def test_a_cache_has_one_colour_in_both_plans() -> None:
    plans = [example_plan(), example_plan()]
    for plan, names in zip(plans, (("layer.0", "layer.1"), ("layer.0.index", "layer.0", "layer.1")), strict=True):
        plan["memory"]["kv"]["caches"] = [{"name": n, "page_bytes": 4096, "sequence_bytes": 0} for n in names]
    html = render_report(plans, PIPELINE.passes, ["one", "two"])
    of_cache = {
        cache: {*re.findall(rf'class="kv (shade\d)"[^>]*title="KV pool: {re.escape(cache)}:', html)}
        for cache in ("layer.*", "layer.*.index")
    }
    assert of_cache == {"layer.*": {"shade0"}, "layer.*.index": {"shade2"}}


def test_layers_of_a_plan_without_weights_are_one_line() -> None:
    plan = example_plan()
    for weight in plan["weights"]:
        whole = {"op": "planned", "slot": weight["name"], "shape": [1920, 576], "format": "bf16"}
        place(plan, weight, pack({"op": "rows", "start": 0, "stop": 960, "source": whole}))
    groups = weight_groups(plan)
    assert [(group.name, group.numbers) for group in groups] == [
        ("model.layers.*.self_attn.qkv_proj", "0-3"),
        ("model.layers.*.mlp.down_proj", "0-3"),
        ("model.norm", ""),
    ]
    words = " ".join(page(plan).text.split())
    assert "rows 0 to 960 planned model.layers.*.mlp.down_proj 1920×576 bf16" in words


def test_a_plan_that_nothing_can_run_says_so(example: Page) -> None:
    assert "not yet" not in example.text
    plan = example_plan()
    plan["kernels"]["table"] = [{"name": "linear", "template": "none", "params": ["w"]}]
    plan["decisions"][0]["alternatives"] = [{"choice": "kernels of the device", "why": "no kernel rotates"}]
    assert re.search(r"runs\s*not yet; no kernel rotates", page(plan).text)


def test_recipes_of_all_ranks_are_told() -> None:
    plan = example_plan()
    norm = plan["weights"][-1]
    whole = read("output_norm.weight", [1152], "f32")
    halves = ({"op": "rows", "start": start, "stop": start + 576, "source": whole} for start in (0, 576))
    place(plan, norm, *(pack(half, "raw") for half in halves))
    place(plan, plan["weights"][0], *(nested(plan, plan["weights"][0]) for _ in range(2)))
    words = " ".join(page(plan).text.split())
    assert (
        "rank 0 lay out as raw rows 0 to 576 read output_norm.weight 1152 f32 "
        "rank 1 lay out as raw rows 576 to 1152 read output_norm.weight 1152 f32"
    ) in words
    assert "ranks 0-1 lay out as tile16 concatenate 3 parts" in words


def test_decisions_by_pass_with_what_lost(example: Page) -> None:
    words = " ".join(example.text.split())
    assert (
        "select_kernels 1 model.layers.*.mlp.down_proj → linear_q4_1 because reads the fewest bytes not linear_f32: "
        "reads 6.4 times the bytes bytes 552,960 weights 4 plan_memory 1 kv_pool → f16, pages of 32 tokens because "
        "serving.kv_dtype"
    ) in words
    assert {"decisions-select_kernels", "decisions-plan_memory"} <= set(example.ids)


def test_equal_decisions_share_one_entry() -> None:
    plan = example_plan()
    plan["decisions"].append(copy.deepcopy(plan["decisions"][0]) | {"subject": "lm_head"})
    words = " ".join(page(plan).text.split())
    assert "select_kernels 2 model.layers.*.mlp.down_proj, lm_head → linear_q4_1" in words


def test_the_graph_of_passes_is_that_of_the_pipeline(example: Page) -> None:
    for info in PIPELINE.passes:
        row = example.row(info.name)
        assert set(row[1].split(", ")) == {kind.__name__ for _, kind in info.reads}
        assert row[2] == info.writes.__name__
    drawing = draw(PIPELINE.passes, ["select_kernels", "select_kernels"])
    assert len(drawing.edges) == PIPELINE.graph.number_of_edges()
    assert [node.decisions for node in drawing.nodes if node.name == "select_kernels"] == [2]
    lanes = [edge for edge in drawing.edges if edge.lane]
    for one in lanes:  # edges in one lane do not meet
        assert all(
            one is two or one.lane != two.lane or not (one.top < two.bottom and two.top < one.bottom) for two in lanes
        )


def test_headings_are_in_order_and_headers_name_their_scope(example: Page) -> None:
    for plans in ((example_plan(),), (example_plan(), changed_plan())):
        found = page(*plans)
        levels = [level for level, _ in found.headings]
        assert levels[0] == 1
        assert levels.count(1) == 1
        assert all(after <= before + 1 for before, after in pairwise(levels))
        assert found.bare == []
        assert len(set(found.ids)) == len(found.ids)


HOSTILE = "<script>alert(1)</script>\"'&<img src=x onerror=alert(2)>{{ 7 * 7 }}]]>"


def test_hostile_names_are_text() -> None:
    plan = plan_of_ranks()
    for made in plan["communication"]["lists"][0]["collectives"]:
        made |= {"kind": HOSTILE, "algorithm": HOSTILE}
    plan["communication"]["lists"][0]["phase"] = HOSTILE
    plan["spec"]["topology"]["device"] = HOSTILE
    plan["memory"]["kv"]["caches"] = [{"name": HOSTILE, "page_bytes": 4096, "sequence_bytes": 0}]
    plan["model"]["name"] = HOSTILE
    plan["spec"]["model"]["source"] = HOSTILE
    weight = plan["weights"][-1]
    weight |= {
        "name": HOSTILE,
        "format": HOSTILE,
        "layout": HOSTILE,
        "axes": [HOSTILE],
        "error": {"relative_rms": 1.0, "max_abs": 1.0},
    }
    place(plan, weight, {"op": HOSTILE, "field": HOSTILE, "source": read(HOSTILE, [576], HOSTILE)})
    plan["graphs"][0] |= {"name": HOSTILE, "phase": HOSTILE}
    plan["graphs"][1]["launches"][-1] |= {"op": HOSTILE, "kernel": HOSTILE}
    plan["decisions"][0] = {
        "pass": HOSTILE,
        "subject": HOSTILE,
        "choice": HOSTILE,
        "reason": HOSTILE,
        "alternatives": [{"choice": HOSTILE, "why": HOSTILE}],
        "evidence": {HOSTILE: HOSTILE},
    }
    for plans in ((plan,), (example_plan(), plan)):
        html = render_report(plans, PIPELINE.passes, (HOSTILE, HOSTILE))
        assert html.count("<script>") == 1
        assert "<img" not in html
        found = Page(html)
        assert found.text.count(HOSTILE) >= 20
        assert HOSTILE in [text for _, text in found.headings] or len(plans) == 2
        assert all(reference.startswith(("#", "data:,")) for reference in found.references)


def test_the_page_loads_nothing() -> None:
    html = render_report([example_plan()], PIPELINE.passes)
    found = Page(html)
    assert [name for name in found.references if not name.startswith("#")] == ["data:,"]
    assert re.findall(r"https?:|//[a-z]|@import|url\((?!#)|fetch\(|XMLHttp|WebSocket|import\(", html) == []
    assert "default-src 'none'" in html


def test_links_inside_the_page_lead_somewhere(example: Page) -> None:
    assert {name[1:] for name in example.references if name.startswith("#")} - set(example.ids) == set()


def changed_plan() -> dict[str, Any]:
    plan = example_plan()
    plan["spec"]["serving"]["max_sequences"] = 4
    more = 940_032 - plan["weights"][1]["bytes"]
    plan["memory"]["weights"] += more
    plan["memory"] |= {"kv_pool": 25_165_824, "total": plan["memory"]["total"] + 18_874_368 + more}
    plan["graphs"][1]["launches"][0]["kernel"] = "linear_f32"
    plan["weights"][1] |= {"format": "q8_0", "bytes": 940_032}
    plan["decisions"][0] |= {"choice": "linear_f32"}
    return plan


def test_two_plans_are_compared_beside_both_bars() -> None:
    found = page(example_plan(), changed_plan(), names=("small", "large"))
    assert "A small" in found.text
    assert "B large" in found.text
    assert found.row("KV pool: all layers")[1:] == ["6.0 MiB", "24.0 MiB", "+18.0 MiB (+300 %)"]
    sums = [row[1:] for row in found.rows if row[0] == "total"]
    assert sums == [["10.9 MiB", "29.3 MiB", "+18.4 MiB (+168 %)"]] * 2  # below the bars, and as diff has it
    assert found.text.count("it may take") == 2
    assert found.row("serving.max_sequences")[1:] == ["1", "4", ""]
    assert found.row("kv_pool")[1:] == ["6.0 MiB", "24.0 MiB", "+18.0 MiB (+300 %)"]
    assert ["model.layers.0.mlp.down_proj", "q4_1", "q8_0", "+378.0 KiB (+70 %)"] in found.rows
    assert ["select_kernels model.layers.*.mlp.down_proj", "linear_q4_1", "linear_f32", ""] in found.rows
    assert "All decisions of B" in found.text


def test_equal_plans_differ_in_nothing() -> None:
    found = page(example_plan(), example_plan())
    assert found.text.count("no change from A to B") == 5
    assert "Effect" not in found.text


def test_equal_plans_give_equal_bytes() -> None:
    plan = example_plan()
    shuffled = dict(reversed(list(copy.deepcopy(plan).items())))
    assert render_report([plan], PIPELINE.passes) == render_report([shuffled], PIPELINE.passes)


def test_a_large_plan_stays_small() -> None:
    plan = example_plan()
    layers = 61
    plan["weights"], plan["graphs"][1]["launches"] = [], []
    for layer in range(layers):
        for part in range(12):
            name = f"model.layers.{layer}.mlp.experts.part{part}"
            experts = [read(f"model.layers.{layer}.mlp.experts.{n}.w{part}.weight", [8, 4], "bf16") for n in range(64)]
            weight = {
                "name": name,
                "shape": [512, 4],
                "format": "bf16",
                "layout": "tile16",
                "axes": ["experts", "hidden"],
            }
            weight |= {"offset": 4096 * (12 * layer + part), "bytes": 4096}
            place(plan, weight, pack({"op": "concat", "parts": experts}))
            plan["weights"].append(weight)
        for step in range(50):
            op = f"model.layers.{layer}.mlp.experts.part{step % 12}"
            args = {"w": ["weight", op], "n": 512, "k": 4 + step, "x": ["arena", 64 * layer]}
            plan["graphs"][1]["launches"].append({"kernel": "linear_q4_1", "op": op, "args": args})
    html = render_report([plan], PIPELINE.passes)
    assert len(html) < 100_000
    found = Page(html)
    assert "decode, 3,050 launches" in found.text
    assert "64 alike, # = 0-63: read model.layers.*.mlp.experts.#.w0.weight 8×4 bf16" in " ".join(found.text.split())


def test_the_command_writes_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "plan.json").write_text(json.dumps(example_plan()))
    (tmp_path / "two.json").write_text(json.dumps(changed_plan()))
    one, two, output = str(tmp_path / "one"), str(tmp_path / "two.json"), tmp_path / "plan.html"
    assert cli.main(["report", one, "-o", str(output)]) == 0
    assert capsys.readouterr().out == f"wrote {output}\n"
    assert output.read_text("utf-8") == render_report([example_plan()], PIPELINE.passes)
    assert cli.main(["report", one, two, "-o", str(output)]) == 0
    assert output.read_text("utf-8") == render_report(
        [example_plan(), changed_plan()], PIPELINE.passes, ["one", "two.json"]
    )


def test_a_report_is_not_written_over_a_plan(tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps(example_plan()))
    with pytest.raises(TapeoutError) as caught:
        write_report([plan], plan, PIPELINE.passes)
    assert str(caught.value) == (
        f"-o {plan}: a report is an HTML file, so its name ends in .html; -o plan.html would do"
    )
    assert json.loads(plan.read_text()) == example_plan()
