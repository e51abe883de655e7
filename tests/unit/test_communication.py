"""What ranks hand to one another: costs by hand, the slowest link, and the launch lists that a CPU really has."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tiny import CONFIG, compile_tiny

from tapeout.compiler.checkpoints.config import written_config
from tapeout.compiler.devices import CudaDevice, load_device
from tapeout.compiler.driver import compile_spec
from tapeout.compiler.spec import Link, Model, Serving, Spec, Topology, load_spec
from tapeout.compiler.stages import CommunicationPlan, FusedModel
from tapeout.passes.plan_communication import costs_us, plan_communication, slowest_link
from tapeout.runtime.errors import TapeoutError

BUS = Link(devices=(0, 1), gb_s=50, latency_us=2)  # 50,000 bytes a us
HIDDEN, VOCAB, LAYERS = 64, 128, 2


def fused(count: int) -> FusedModel:
    """A tiny model cut for so many ranks."""
    return compile_tiny(written_config(CONFIG), topology=Topology(count=count)).get(FusedModel)


# -- costs


def test_costs_by_hand() -> None:
    """Of 20,000 bytes over 8 ranks: one shot takes in 7 x 20,000, two shots 7/8 of it twice, with a message each."""
    costs = costs_us("all_reduce", 20_000, 8, BUS)
    assert costs == {"one-shot": pytest.approx(2 + 2.8), "two-shot": pytest.approx(2 * 2 + 2 * 0.35)}
    assert costs_us("all_gather", 20_000, 8, BUS) == {"one-shot": pytest.approx(2 + 0.35)}


def test_one_shot_is_cheaper_up_to_19_kilobytes_on_8_ranks() -> None:
    """2 + 7 t = 4 + 1.75 t at t = 2 / 5.25 us, which are 19,047.6 bytes."""
    for nbytes, cheaper in ((19_047, "one-shot"), (19_048, "two-shot")):
        costs = costs_us("all_reduce", nbytes, 8, BUS)
        assert min(costs, key=costs.__getitem__) == cheaper


def test_two_ranks_never_take_two_shots() -> None:
    """Either way each takes in the other's operand, and two shots are two messages."""
    for nbytes in (1, 10**4, 10**9, 10**12):
        costs = costs_us("all_reduce", nbytes, 2, BUS)
        assert costs["two-shot"] - costs["one-shot"] == pytest.approx(2, rel=1e-3)


@pytest.mark.parametrize("ranks", [3, 4, 8, 16])
def test_more_bytes_never_turn_back_to_one_shot(ranks: int) -> None:
    choices: list[str] = []
    for power in range(8, 28):
        costs = costs_us("all_reduce", 1 << power, ranks, BUS)
        choices.append(min(costs, key=costs.__getitem__))
    assert [key for key, _ in itertools.groupby(choices)] == ["one-shot", "two-shot"]


# -- links


def gpus(count: int, *links: Link, device: str = "rtx-pro-6000") -> Link:
    profile = load_device(device)
    assert isinstance(profile, CudaDevice)
    return slowest_link(profile, Topology(device=device, count=count, links=links))


def test_the_least_rate_and_the_longest_latency_decide() -> None:
    links = (Link(devices=(0, 1, 2, 3), gb_s=50, latency_us=2), Link(devices=(4, 5, 6, 7), gb_s=50, latency_us=2),
             Link(devices=(0, 4), gb_s=20, latency_us=1), Link(devices=(1, 5), gb_s=300, latency_us=9))  # fmt: skip
    slow = gpus(8, *links)
    assert (slow.devices, slow.gb_s, slow.latency_us) == (tuple(range(8)), 20, 9)
    numbers = random.Random(3)
    for _ in range(5):
        assert gpus(8, *numbers.sample(links, 4)) == slow


def test_without_links_the_profile_says_what_joins_the_devices() -> None:
    """PCIe 5 x16, raw; an H200 has NVLink, of 450 GB/s one way."""
    assert gpus(4).gb_s == 63
    assert gpus(8, device="h200").gb_s == 450
    assert gpus(4).latency_us == 2.0


def test_a_slower_link_is_what_the_plan_counts_with() -> None:
    links = (Link(devices=(0, 1), gb_s=50, latency_us=2), Link(devices=(1, 2, 3), gb_s=10, latency_us=4))
    plan = plan_communication(
        fused(4), load_device("rtx-pro-6000"), Topology(device="rtx-pro-6000", count=4, links=links), Serving()
    )
    assert plan.link is not None and (plan.link.gb_s, plan.link.latency_us) == (10, 4)
    (decode,) = (made for made in plan.exchanges if made.phase == "decode")
    reduce = next(made for made in decode.collectives if made.kind == "all_reduce")
    # three operands of 64 values of bfloat16, at 10,000 bytes a us
    assert (reduce.algorithm, reduce.us) == ("one-shot", pytest.approx(4 + 3 * 128 / 10_000))


@pytest.mark.parametrize(
    ("links", "message"),
    [
        ("[{devices: [0, 1], gb_s: 50}, {devices: [2, 3], gb_s: 50}]",
         ":4: topology: no way over links leads from device 0 to device 2; add the link that joins them"),
        ("[{devices: [1, 2, 3], gb_s: 50}]",
         ":4: topology: no way over links leads from device 0 to device 1; add the link that joins them"),
        ("[{devices: [0, 1, 2, 4], gb_s: 50}]",
         ":4: topology: links[0] names device 4, but count is 4; devices are 0, 1, 2, 3"),
        ("[{devices: [0, 1, 2, 0, 3], gb_s: 50}]",
         ":4: topology.links[0].devices: names device 0 twice; a link joins different devices"),
        ("[{devices: [0], gb_s: 50}]", ":4: topology.links[0].devices: needs at least 2 entries, got [0] (a list)"),
        ("[{devices: [0, 1, -1], gb_s: 50}]", ":4: topology.links[0].devices[2]: -1 is too small; the least is 0"),
        ("[{devices: [0, 1, 2, 3], gb_s: .inf}]", ":4: topology.links[0].gb_s: Infinity is not a finite number"),
        ("[{devices: [0, 1, 2, 3], gb_s: 0}]", ":4: topology.links[0].gb_s: 0 is too small; it must be more than 0.0"),
        ("[{devices: [0, 1, 2, 3], gb_s: 50, latency_us: .nan}]",
         ":4: topology.links[0].latency_us: NaN is not a finite number"),
        ("[{devices: [0, 1, 2, 3]}]", ":4: topology.links[0].gb_s: required, but missing"),
    ],
)  # fmt: skip
def test_links_that_cannot_be_are_refused(links: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "spec.yaml"
    file.write_text(f"model: {{source: a}}\ntopology:\n  count: 4\n  links: {links}\n  device: rtx-pro-6000\n")
    with pytest.raises(TapeoutError) as refused:
        load_spec(file)
    said = str(refused.value).removeprefix(str(file))
    assert said == message or said == message.replace(":4: topology: ", ":2: topology: ")


def test_a_chain_of_links_joins_in_any_order() -> None:
    links = [Link(devices=(device, device + 1), gb_s=50) for device in range(7)]
    numbers = random.Random(11)
    for _ in range(20):
        assert len(Topology(count=8, links=tuple(numbers.sample(links, 7))).links) == 7


def test_links_of_a_cpu_are_refused() -> None:
    topology = Topology(count=2, links=(BUS,))
    with pytest.raises(TapeoutError) as refused:
        plan_communication(fused(2), load_device("cpu"), topology, Serving())
    assert str(refused.value) == (
        "topology.links joins GPUs, and the ranks of cpu, topology.device, share memory; leave links out"
    )


# -- lists


def test_one_rank_has_nothing_to_say() -> None:
    plan = plan_communication(fused(1), load_device("h200"), Topology(device="h200"), Serving())
    assert plan == CommunicationPlan(1, None, (), ())


def test_lists_of_a_gpu() -> None:
    """Prefill in steps of four from 32 rows, decode by powers of two with its head, heads of 1 and 16 rows."""
    serving = Serving(max_context=256, prefill_chunk=200, max_sequences=3)
    topology = Topology(device="h200", count=2)
    plan = plan_communication(fused(2), load_device("h200"), topology, serving)
    assert [(made.phase, made.rows) for made in plan.exchanges] == [
        *(("prefill", 32), ("prefill", 50), ("prefill", 200)),
        *(("decode", 1), ("decode", 2), ("decode", 3)),
        *(("head", 1), ("head", 16)),
    ]
    for exchange in plan.exchanges:
        found = {made.kind: (made.count, made.nbytes) for made in exchange.collectives}
        reduces = {"all_reduce": (2 * LAYERS, 2 * exchange.rows * HIDDEN)} if exchange.phase != "head" else {}
        gathers = {"all_gather": (1, 2 * exchange.rows * VOCAB)} if exchange.phase != "prefill" else {}
        assert found == reduces | gathers
        assert all(made.us is not None for made in exchange.collectives)


def emitted(launches: list[dict[str, Any]], rows: int) -> Counter[tuple[Any, ...]]:
    """Collectives of a list by kind, columns and bytes of the result, and algorithm, as its launches say them."""
    found = Counter[tuple[Any, ...]]()
    for launch in launches:
        arguments = launch["args"]
        if launch["kernel"] == "all_reduce":
            columns, algorithm = arguments["k"], "two-shot" if arguments["two_shot"] else "one-shot"
        elif launch["kernel"] == "all_gather":
            columns, algorithm = arguments["columns"], "one-shot"
        else:
            continue
        found[launch["kernel"], columns, 4 * rows * columns, algorithm] += 1
    return found


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "MixtralForCausalLM"])
def test_the_section_says_what_the_launch_lists_of_a_cpu_do(count: int, architecture: str, tmp_path: Path) -> None:
    """In float32; lists of 256 rows of 64 values are 64 KiB, from which on ranks take two shots."""
    config = {**CONFIG, "architectures": [architecture], "num_local_experts": 4, "num_experts_per_tok": 2}
    if architecture == "LlamaForCausalLM":
        del config["num_local_experts"], config["num_experts_per_tok"]
    serving = Serving(max_context=256, max_sequences=2, prefill_chunk=256)
    spec = Spec(model=Model(config=config), topology=Topology(count=count), serving=serving)
    plan = compile_spec(spec, tmp_path / "plan.json", plan_only=True)
    said = {
        (made["phase"], made["rows"]): Counter(
            {(each["kind"], each["columns"], each["bytes"], each["algorithm"]): each["count"]
             for each in made["collectives"]}
        )
        for made in plan["communication"]["lists"]
    }  # fmt: skip
    assert said == {(made["phase"], made["rows"]): emitted(made["launches"], made["rows"]) for made in plan["graphs"]}
    assert said["prefill", 256] == {("all_reduce", HIDDEN, 4 * 256 * HIDDEN, "two-shot"): 2 * LAYERS}
    assert said["prefill", 32] == {("all_reduce", HIDDEN, 4 * 32 * HIDDEN, "one-shot"): 2 * LAYERS}
    assert said["head", 1] == {("all_gather", VOCAB, 4 * VOCAB, "one-shot"): 1}
    assert all("us" not in each for made in plan["communication"]["lists"] for each in made["collectives"])
    assert plan["communication"]["ranks"] == count and "link" not in plan["communication"]
    # the largest that a rank hands over: a list's rows of the hidden width
    assert plan["memory"]["comm"] == {"ranks": count, "buffer_bytes": 4 * 256 * HIDDEN}
