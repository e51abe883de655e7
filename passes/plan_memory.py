"""plan_memory: weights, KV pool and activations get their places, exact to the byte, or the spec is refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from tapeout.compiler.devices import CpuDevice, CudaDevice, Device
from tapeout.compiler.ir import COLLECTIVES
from tapeout.compiler.layouts import LINE, PAGE, PLANE, plan_offsets
from tapeout.compiler.spec import Serving, Topology
from tapeout.compiler.stages import (
    STEP,
    Buffer,
    Cache,
    Decision,
    GraphMemory,
    Launch,
    MemoryPlan,
    Placement,
    Program,
    SelectedModel,
    WeightPlace,
)
from tapeout.runtime.backend import FLOAT_BYTES
from tapeout.runtime.errors import TapeoutError

SCRATCH = 256 * 1024  # TP_SCRATCH of tapeout_cpu.h, a thread
GIB = 2**30


def plan_memory(selected: SelectedModel, device: Device, topology: Topology, serving: Serving) -> MemoryPlan:
    """Place everything. Raises TapeoutError when the device is too small, with what would fit."""
    context = serving.context_for(selected.fused.logical.max_context)
    most = max(program.held for program in selected.programs if program.phase != "head")
    pinned, start = _place_pinned(selected.buffers, most)
    graphs = tuple(_place(selected, program, pinned, start) for program in selected.programs)
    spans = plan_offsets([w.nbytes for w in selected.weights], line=PLANE if selected.step else LINE)
    places = tuple(WeightPlace(w.name, offset, size) for w, (offset, size) in zip(selected.weights, spans, strict=True))
    pages = serving.max_sequences * -(-context // serving.page_tokens)
    ends = list(accumulate(_cache_bytes(cache, pages, serving.max_sequences) for cache in selected.caches))
    own, memory = device.context if isinstance(device, CudaDevice) else 0, memory_of_rank(device, topology)
    plan = MemoryPlan(
        weights=sum(place.nbytes for place in places),
        kv_pool=ends[-1],
        arena=_round(max(p.offset + p.nbytes for graph in graphs for p in graph.placements), PAGE),
        scratch=SCRATCH * device.threads if isinstance(device, CpuDevice) else 0,
        capacity=serving.share_of(memory) - own,
        max_context=context,
        max_sequences=serving.max_sequences,
        page_tokens=serving.page_tokens,
        pages=pages,
        cache_offsets=(0, *ends[:-1]),
        places=places,
        graphs=graphs,
        comm_buffer=_comm_buffer(selected),
        decisions=_decide(selected, serving, context),
        step_offset=pinned[STEP][0] if selected.step else None,
        context=own,
    )
    plan = replace(plan, tokens_that_fit=_tokens_that_fit(plan, selected))
    if plan.total > plan.capacity:
        raise _too_large(plan, serving, device, topology)
    return plan


def memory_of_rank(device: Device, topology: Topology) -> int:
    """Bytes of the device of a rank; ranks on a CPU share one machine's."""
    memory = topology.memory or device.memory
    return memory // topology.count if isinstance(device, CpuDevice) else memory


def _comm_buffer(selected: SelectedModel) -> int:
    """Bytes that a rank of several needs to hand its part of the largest collective to the others; 0 for one."""
    kinds = {buffer.name: buffer.kind for buffer in selected.buffers}
    sizes = [
        FLOAT_BYTES[kinds[launch.reads[0]]] * program.held * columns
        for program in selected.programs
        for launch in program.launches
        if launch.kernel in COLLECTIVES
        for name, columns in launch.args
        if name == "k" and isinstance(columns, int)
    ]
    return _round(max(sizes, default=0), LINE)


def _cache_bytes(cache: Cache, pages: int, sequences: int) -> int:
    """Its pages and the state of its sequences, in whole pages of memory."""
    return _round(pages * cache.page_bytes + sequences * cache.sequence_bytes, PAGE)


def _round(size: int, step: int) -> int:
    return -(-size // step) * step


def _place_pinned(buffers: Sequence[Buffer], rows: int) -> tuple[dict[str, tuple[int, int]], int]:
    """Buffers that pass values from one launch list to the next have one address in all of them."""
    places: dict[str, tuple[int, int]] = {}
    offset = 0
    for buffer in buffers:
        if buffer.pinned:
            places[buffer.name] = (offset, buffer.nbytes(rows))
            offset += buffer.nbytes(rows)
    return places, offset


def lifetimes(launches: Sequence[Launch]) -> dict[str, tuple[int, int]]:
    """First and last launch that touches each buffer."""
    spans: dict[str, tuple[int, int]] = {}
    for index, launch in enumerate(launches):
        for name in (*launch.reads, *launch.writes):
            first, _ = spans.get(name, (index, index))
            spans[name] = (first, index)
    return spans


def _place(selected: SelectedModel, program: Program, pinned: dict[str, tuple[int, int]], start: int) -> GraphMemory:
    """Greedy by size: each buffer goes to the lowest place free during its life; logits outlive their list."""
    launches, rows = program.launches, program.held
    buffers = {buffer.name: buffer for buffer in selected.buffers}
    spans = lifetimes(launches)
    if program.phase == "head":
        spans[selected.logits] = (spans[selected.logits][0], len(launches))
    placed = [Placement(name, *pinned[name], 0, len(launches)) for name in pinned if name in spans]
    waiting = sorted(
        (name for name in spans if name not in pinned), key=lambda name: (-buffers[name].nbytes(rows), name)
    )
    taken: list[list[tuple[int, int]]] = [[] for _ in range(len(launches) + 1)]  # [low, high) at each launch
    for place in placed:
        _take(taken, place)
    for name in waiting:
        size, (first, last) = buffers[name].nbytes(rows), spans[name]
        offset = start
        for low, high in sorted({span for each in taken[first : last + 1] for span in each}):
            if offset + size <= low:
                break
            offset = max(offset, high)
        placed.append(Placement(name, offset, size, first, last))
        _take(taken, placed[-1])
    placed.sort(key=lambda p: (p.first, p.buffer))
    return GraphMemory(program.name, program.phase, program.rows, tuple(placed))


def _take(taken: list[list[tuple[int, int]]], place: Placement) -> None:
    for each in taken[place.first : place.last + 1]:
        each.append((place.offset, place.offset + place.nbytes))


def _decide(selected: SelectedModel, serving: Serving, context: int) -> tuple[Decision, ...]:
    evidence = (("bytes_per_token", selected.token_bytes(serving.page_tokens)), ("max_context", context),
                ("max_sequences", serving.max_sequences))  # fmt: skip
    state = sum(cache.sequence_bytes for cache in selected.caches)
    evidence += (("bytes_per_sequence", state),) if state else ()
    other = "f32" if serving.kv_dtype == "f16" else "f16"
    why = "twice the bytes a token" if other == "f32" else "rounds keys and values to 11 bits"
    return (Decision("plan_memory", "kv_pool", f"{serving.kv_dtype}, pages of {serving.page_tokens} tokens",
                     "serving.kv_dtype and serving.page_tokens", ((other, why),), evidence),)  # fmt: skip


def _tokens_that_fit(plan: MemoryPlan, selected: SelectedModel) -> int:
    """Whole pages in what the rest leaves of the capacity."""
    page = sum(cache.page_bytes for cache in selected.caches)
    state = sum(cache.sequence_bytes for cache in selected.caches) * plan.max_sequences
    room = plan.capacity - (plan.total - plan.kv_pool)
    pages = max(room - state, 0) // page if page else 0
    while pages and sum(_cache_bytes(cache, pages, plan.max_sequences) for cache in selected.caches) > room:
        pages -= 1  # rounding takes less than a page of memory a cache
    return pages * plan.page_tokens


def _too_large(plan: MemoryPlan, serving: Serving, device: Device, topology: Topology) -> TapeoutError:
    """What does not fit, and what would: a shorter context, a larger share of the memory, or more of it."""
    ranks, memory = topology.count, memory_of_rank(device, topology)
    fits = plan.tokens_that_fit // plan.max_sequences // plan.page_tokens * plan.page_tokens
    parts = [("weights", plan.weights), ("KV pool", plan.kv_pool), ("arena", plan.arena), ("scratch", plan.scratch)]
    parts += [("communication", 2 * plan.comm_buffer)] if ranks > 1 else []
    needs = (
        f"{f'on each of {ranks} ranks ' if ranks > 1 else ''}{' + '.join(f'{name} {size:,}' for name, size in parts)} "
        f"bytes need {plan.total:,}, but {max(plan.capacity, 0):,} are there {_limit(plan, serving, memory)}"
    )
    if fits > 0:
        return TapeoutError(
            f"serving.max_context {plan.max_context} with max_sequences {plan.max_sequences} does not fit in "
            f"memory: {needs}; the longest context that fits is {fits}"
        )
    split = ranks > 1 and isinstance(device, CudaDevice)  # more ranks on a CPU have no more memory
    more = "topology.count, topology.memory" if split else "topology.memory"
    return TapeoutError(
        f"the model does not fit in memory at any context: {needs}; raise {more} or use smaller formats"
    )


def _limit(plan: MemoryPlan, serving: Serving, memory: int) -> str:
    """What the capacity follows from, and the share of the memory that would do."""
    fraction = serving.memory_fraction
    if fraction is None:
        return "after serving.headroom"
    left = kv_room(memory, plan.total - plan.kv_pool + plan.context, fraction) / GIB
    leaves = f"leaves {left:.2f} GiB for KV" if left >= 0 else f"is {-left:.2f} GiB too little even without KV"
    said = f"at serving.memory_fraction {fraction:g} of {memory / GIB:.2f} GiB, which {leaves}"
    least = -(-100 * (plan.total + plan.context) // memory) / 100
    return f"{said}; the smallest that holds it is {least:g}" if least <= 1 else said


def kv_room(memory: int, rest: int, fraction: float) -> float:
    """Bytes for KV when a process may take ``fraction`` of ``memory`` and everything else needs ``rest`` of it."""
    return fraction * memory - rest
