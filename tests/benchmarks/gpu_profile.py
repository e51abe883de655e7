"""Where a replayed decode step spends its time, kernel by kernel, and the gaps between them. Needs torch.

torch's profiler (CUPTI) records every kernel of the process, also those of graphs that the driver replays. Kernels that
start early under programmatic dependent launch overlap, so the time a kernel costs is from the end of the one before to
its own end, and a gap is the time from an end to the next start, zero where they overlap.
"""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import gpu_engine


@dataclass(frozen=True)
class Record:
    """One kernel as the profiler saw it, in nanoseconds."""

    name: str
    start: int
    end: int


def profile_decode(model: Any, rows: int = 1, context: int = 128, steps: int = 16) -> dict[str, float]:
    """Print the gaps and the table of a decode step; the unprofiled time stands beside."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    torch.zeros(1, device="cuda")
    replays = gpu_engine.Replays(model)
    with gpu_engine.sequences(model, rows, context) as (held, tokens):
        plain = replays.seconds(held, tokens, 64)
    with gpu_engine.sequences(model, rows, context) as (held, tokens):
        replays.seconds(held, tokens, 4)
        with profile(activities=[ProfilerActivity.CUDA]) as recorded:
            profiled = replays.seconds(held, [0] * rows, steps)
    records = sorted(
        (Record(event.name(), event.start_ns(), event.start_ns() + event.duration_ns())
         for event in recorded.profiler.kineto_results.events() if _is_kernel(event)),
        key=lambda record: record.start,
    )  # fmt: skip
    planned = len(gpu_engine.decode_list(model, rows).plan)
    whole = records[-planned * steps :]
    print(f"  {model.folder.name} decode.{rows}: {planned} launches a step; {plain * 1e6:.1f} us a step, "
          f"{profiled * 1e6:.1f} us under the profiler, which saw {len(records)} kernels in {steps + 1} steps",
          flush=True)  # fmt: skip
    if len(whole) < planned * steps:
        print("    the profiler did not see every kernel of the graph: no gaps from it", flush=True)
        return {"step_s": plain}
    gaps = [b.start - a.end for a, b in itertools.pairwise(whole)]
    positive = statistics.fmean(max(gap, 0) for gap in gaps)
    print(f"    gaps: mean {positive:.0f} ns counting overlaps as zero ({statistics.fmean(gaps):.0f} ns signed), "
          f"median {statistics.median(gaps):.0f} ns, largest {max(gaps)} ns", flush=True)  # fmt: skip
    _table(whole, steps, [launch["kernel"] for launch in gpu_engine.decode_list(model, rows).plan])
    return {"step_s": plain, "gap_ns": positive, "signed_gap_ns": statistics.fmean(gaps)}


def _is_kernel(event: Any) -> bool:
    return "CUDA" in str(event.device_type()) and not event.name().startswith(("Memset", "Memcpy", "gpu_"))


def _table(records: list[Record], steps: int, kernels: list[str]) -> None:
    """What each kernel of a step costs; the n-th record of a step is its n-th launch."""
    costs: dict[str, list[int]] = defaultdict(list)
    alone: dict[str, list[int]] = defaultdict(list)
    before = records[0].start
    for index, record in enumerate(records):
        name = kernels[index % len(kernels)]
        costs[name].append(max(record.end - before, 0))
        alone[name].append(record.end - record.start)
        before = max(before, record.end)
    total = sum(sum(each) for each in costs.values())
    print("    us a step | share | launches | us each | span each | kernel")
    for name, each in sorted(costs.items(), key=lambda item: -sum(item[1]))[:14]:
        print(f"    {sum(each) / steps / 1e3:9.1f} | {100 * sum(each) / total:4.1f}% | {len(each) / steps:8.1f} | "
              f"{statistics.median(each) / 1e3:7.2f} | {statistics.median(alone[name]) / 1e3:9.2f} | {name[:80]}",
              flush=True)  # fmt: skip
