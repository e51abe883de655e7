"""plan_communication: what the ranks of a step hand to one another, by which algorithm, and what that costs."""

from __future__ import annotations

from collections import Counter

from tapeout.compiler.devices import CudaDevice, Device
from tapeout.compiler.ir import COLLECTIVES
from tapeout.compiler.kernels import collective
from tapeout.compiler.lowering.buckets import cpu_buckets, cuda_buckets
from tapeout.compiler.spec import Link, Serving, Topology
from tapeout.compiler.stages import Collective, CommunicationPlan, Decision, Exchange, FusedModel
from tapeout.runtime.errors import TapeoutError

GPU_VALUE, CPU_VALUE = 2, 4  # bytes of a value that GPUs (bf16) and CPUs (float32) exchange


def plan_communication(fused: FusedModel, device: Device, topology: Topology, serving: Serving) -> CommunicationPlan:
    """Every collective of every launch list. Costs are predicted for GPUs alone, from their slowest link.

    Raises TapeoutError for links of a CPU.
    """
    ranks = topology.count
    if topology.links and not isinstance(device, CudaDevice):
        raise TapeoutError(
            f"topology.links joins GPUs, and the ranks of {device.name}, topology.device, share memory; leave links out"
        )
    if ranks == 1:
        return CommunicationPlan(1, None, (), ())
    on_gpu = isinstance(device, CudaDevice)
    link = slowest_link(device, topology) if isinstance(device, CudaDevice) else None
    context = serving.context_for(fused.logical.max_context)
    body, head = _collectives(fused)
    lists = {"prefill": body, "decode": body + head if on_gpu else body, "head": head}
    exchanges: list[Exchange] = []
    for phase, rows in cuda_buckets(serving, context) if on_gpu else cpu_buckets(serving, context):
        kinds = sorted(lists[phase].items())
        made = (_collective(kind, columns, count, rows, ranks, link) for (kind, columns), count in kinds)
        exchanges.append(Exchange(phase, rows, tuple(made)))
    return CommunicationPlan(ranks, link, tuple(exchanges), _decide(exchanges, ranks, link) if link else ())


def slowest_link(device: CudaDevice, topology: Topology) -> Link:
    """What a collective of all ranks has to pass: the least rate and the longest latency of the links."""
    if topology.links:
        everyone = tuple(range(topology.count))
        rate, latency = min(link.gb_s for link in topology.links), max(link.latency_us for link in topology.links)
        return Link(devices=everyone, gb_s=rate, latency_us=latency)
    return Link(devices=tuple(range(topology.count)), gb_s=device.nvlink_gb_s or device.pcie_gb_s)


def _collectives(fused: FusedModel) -> tuple[Counter[tuple[str, int]], Counter[tuple[str, int]]]:
    """How many of each kind and width there are in the body of a step and in its head."""
    found: tuple[Counter[tuple[str, int]], Counter[tuple[str, int]]] = Counter(), Counter()
    part = 0
    for op in fused.graph.ops:
        part = 1 if op.kind == "select" else part
        if op.kind in COLLECTIVES:
            found[part][op.kind, op.width] += 1
    return found


def _collective(kind: str, columns: int, count: int, rows: int, ranks: int, link: Link | None) -> Collective:
    """``nbytes`` are those of the result, which every rank has afterwards."""
    nbytes = rows * columns * (GPU_VALUE if link else CPU_VALUE)
    if link is None:
        two = kind == "all_reduce" and rows >= collective.two_shot_rows(columns)
        return Collective(kind, columns, count, nbytes, "two-shot" if two else "one-shot")
    times = costs_us(kind, nbytes, ranks, link)
    algorithm = min(times, key=lambda name: times[name])
    return Collective(kind, columns, count, nbytes, algorithm, times[algorithm])


def costs_us(kind: str, nbytes: int, ranks: int, link: Link) -> dict[str, float]:
    """Microseconds of one collective by algorithm, each a few messages and the bytes that come in at a rank.

    One-shot: everybody's operand goes to everybody. Two-shot: reduce-scatter, then all-gather, each rank the owner of
    one piece.
    """
    byte_us = 1e-3 / link.gb_s
    gathered = (ranks - 1) / ranks * nbytes * byte_us
    if kind == "all_gather":
        return {"one-shot": link.latency_us + gathered}
    return {
        "one-shot": link.latency_us + (ranks - 1) * nbytes * byte_us,
        "two-shot": 2 * link.latency_us + 2 * gathered,
    }


def _decide(exchanges: list[Exchange], ranks: int, link: Link) -> tuple[Decision, ...]:
    """One decision an algorithm, with the range of sizes it was chosen for; of CPUs the lowering says it."""
    reduces = [made for exchange in exchanges for made in exchange.collectives if made.kind == "all_reduce"]
    decisions: list[Decision] = []
    for algorithm in sorted({made.algorithm for made in reduces}):
        sizes = sorted({made.nbytes for made in reduces if made.algorithm == algorithm})
        other = "two-shot" if algorithm == "one-shot" else "one-shot"
        subject = (
            f"all_reduce of {sizes[0]:,} to {sizes[-1]:,} bytes" if sizes[1:] else f"all_reduce of {sizes[0]:,} bytes"
        )
        times = costs_us("all_reduce", sizes[-1], ranks, link)
        reason = "predicted to be faster over the slowest link, at the largest of these sizes"
        evidence = (("us", round(times[algorithm], 2)), ("gb_s", link.gb_s), ("latency_us", link.latency_us))
        why = f"predicted {times[other]:.1f} us"
        decisions.append(Decision("plan_communication", subject, algorithm, reason, ((other, why),), evidence))
    return tuple(decisions)
