"""The stages between a spec and an artifact, each a frozen value named after what is true of it, with its verifier.

A pass maps earlier stages to a later one; the pipeline runs ``check`` on every stage right after the pass that made it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import islice, takewhile
from typing import Any

from tapeout.compiler.capture import check_capture
from tapeout.compiler.ir import Graph, check_graph
from tapeout.compiler.kernels.cuda.base import GpuKernel, Resources
from tapeout.compiler.partition.axes import Mesh
from tapeout.compiler.recipes import Recipe
from tapeout.compiler.spec import Link
from tapeout.runtime.errors import TapeoutError

Evidence = tuple[tuple[str, int | float | str], ...]


@dataclass(frozen=True)
class Decision:
    """What was chosen for a subject, why, and why each alternative lost."""

    by: str
    subject: str
    choice: str
    reason: str
    alternatives: tuple[tuple[str, str], ...] = ()
    evidence: Evidence = ()

    def to_json(self) -> dict[str, Any]:
        """As it stands in the plan."""
        return {
            "pass": self.by,
            "subject": self.subject,
            "choice": self.choice,
            "reason": self.reason,
            "alternatives": [{"choice": choice, "why": why} for choice, why in self.alternatives],
            "evidence": dict(self.evidence),
        }


@dataclass(frozen=True)
class Purpose:
    """What the passes run for: an artifact, or a plan to look at, which may also be of what no kernel serves yet."""

    plan_only: bool = False


def generalize(name: str) -> str:
    """A name with its layer number replaced by ``*``, under which equal decisions of many layers are one."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def check_rule(where: str, glob: str, weights: Sequence[str]) -> None:
    """Raises TapeoutError for a rule that names no weight, which is a mistake, most likely a misspelt glob."""
    if not any(fnmatchcase(name, glob) for name in weights):
        known = ", ".join(dict.fromkeys(generalize(name) for name in weights))
        raise TapeoutError(f"{where} {glob} matches no weight; weights are {known}")


@dataclass(frozen=True)
class LogicalModel:
    """A model as its family declares it: the program, and for every weight slot the recipe that fills it."""

    family: str
    name: str
    config: tuple[tuple[str, Any], ...]
    graph: Graph
    recipes: tuple[tuple[str, Recipe], ...]
    container: str
    tensors: int
    ignored: tuple[tuple[str, str], ...]
    vocab_size: int
    max_context: int
    decisions: tuple[Decision, ...] = ()

    def check(self) -> None:
        """Every slot has one recipe of its shape."""
        check_graph(self.graph)
        _check_recipes(self.graph, self.recipes)


@dataclass(frozen=True)
class Conversion:
    """A weight whose number format is changed at compile time."""

    weight: str
    source: str
    to: str
    rule: str


@dataclass(frozen=True)
class QuantizedModel:
    """Every weight has the number format it will be served in."""

    logical: LogicalModel
    recipes: tuple[tuple[str, Recipe], ...]
    conversions: tuple[Conversion, ...]
    decisions: tuple[Decision, ...]

    def check(self) -> None:
        """Slots and shapes are still those of the logical model."""
        _check_recipes(self.logical.graph, self.recipes)


Recipes = tuple[tuple[str, Recipe], ...]


@dataclass(frozen=True)
class ShardedModel:
    """The program of one rank of ``mesh`` and, for each rank, the recipes of its pieces of the weights."""

    quantized: QuantizedModel
    mesh: Mesh
    graph: Graph
    ranks: tuple[Recipes, ...]
    decisions: tuple[Decision, ...]

    def check(self) -> None:
        """The program is well formed, and every rank has a piece of the same shape and format for every slot."""
        check_graph(self.graph)
        _check_ranks(self.graph, self.ranks, self.mesh)


@dataclass(frozen=True)
class FusedModel:
    """Projections that read one input and share a format are one weight, its parts in declared order."""

    sharded: ShardedModel
    graph: Graph
    ranks: tuple[Recipes, ...]
    decisions: tuple[Decision, ...]

    @property
    def logical(self) -> LogicalModel:
        """The model before it was split."""
        return self.sharded.quantized.logical

    @property
    def recipes(self) -> Recipes:
        """Those of the first rank; shapes and formats are the same on all."""
        return self.ranks[0]

    def check(self) -> None:
        """The program is still well formed and every fused weight has the shape its op needs."""
        check_graph(self.graph)
        _check_ranks(self.graph, self.ranks, self.sharded.mesh)


@dataclass(frozen=True)
class Collective:
    """``count`` equal collectives of a step: columns of the result, its bytes, and the predicted time of one in us."""

    kind: str
    columns: int
    count: int
    nbytes: int
    algorithm: str
    us: float | None = None


@dataclass(frozen=True)
class Exchange:
    """What the ranks hand to one another in one launch list."""

    phase: str
    rows: int
    collectives: tuple[Collective, ...]


@dataclass(frozen=True)
class CommunicationPlan:
    """All collectives. ``link`` is what they have to pass on GPUs; nothing for one rank."""

    ranks: int
    link: Link | None
    exchanges: tuple[Exchange, ...]
    decisions: tuple[Decision, ...]


def _check_ranks(graph: Graph, ranks: tuple[Recipes, ...], mesh: Mesh) -> None:
    assert len(ranks) == mesh.count, "a rank has no weights"
    formats = [recipe.format for _, recipe in ranks[0]]
    for recipes in ranks:
        _check_recipes(graph, recipes)
        assert [recipe.format for _, recipe in recipes] == formats, "ranks hold a weight in different formats"


def _check_recipes(graph: Graph, recipes: Recipes) -> None:
    filled = dict(recipes)
    assert len(filled) == len(recipes), "a weight slot is filled twice"
    assert filled.keys() == graph.slots.keys(), (
        f"slots and recipes differ: {sorted(filled.keys() ^ graph.slots.keys())}"
    )
    for name, recipe in recipes:
        assert recipe.shape == graph.slots[name].shape, (
            f"{name}: {recipe.shape} fills a slot of {graph.slots[name].shape}"
        )


@dataclass(frozen=True)
class PackedWeight:
    """One weight as it will lie in the artifact. ``recipe`` ends in a Pack; ``nbytes`` excludes alignment.

    ``further`` are the recipes of the ranks after the first, which take as many bytes.
    """

    name: str
    recipe: Recipe
    axes: tuple[str, ...]
    layout: str
    nbytes: int
    further: tuple[Recipe, ...] = ()


@dataclass(frozen=True)
class Span:
    """An argument that points ``column`` floats into a buffer of the arena."""

    buffer: str
    column: int = 0


@dataclass(frozen=True)
class WeightRef:
    """An argument that points at a weight."""

    weight: str


@dataclass(frozen=True)
class KvRef:
    """An argument that points at a cache of the KV pool, by its place among the caches."""

    cache: int


@dataclass(frozen=True)
class Capacity:
    """An argument that is the number of rows a launch list is planned for, times ``terms``."""

    terms: int = 1


@dataclass(frozen=True)
class AtLeast:
    """An argument that is 1 in launch lists planned for at least ``rows`` rows, and 0 in others."""

    rows: int


@dataclass(frozen=True)
class SizeOf:
    """An argument that is the planned size of a buffer in bytes."""

    buffer: str


@dataclass(frozen=True)
class StepRef:
    """An argument that points at a field of the step: what the host says of each step, in device memory."""

    field: str


@dataclass(frozen=True)
class CommRef:
    """An argument that points at the rank's communicator."""


@dataclass(frozen=True)
class RankOf:
    """An argument that follows from the rank: ``times`` its number divided by ``ranks``, rounded down."""

    ranks: int
    times: int


Arg = Span | WeightRef | KvRef | Capacity | AtLeast | SizeOf | StepRef | CommRef | RankOf | int | float


@dataclass(frozen=True)
class Produced:
    """Which columns of a launch's output hold the value of which logical op."""

    op: str
    start: int
    stop: int


@dataclass(frozen=True)
class Launch:
    """One kernel call with symbolic addresses. ``output`` is the argument that ``produces`` refers to.

    ``grid`` is the number of thread blocks; CPU kernels cut their work themselves and have none.
    """

    kernel: str
    op: str
    args: tuple[tuple[str, Arg], ...]
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    produces: tuple[Produced, ...] = ()
    output: str = ""
    grid: tuple[int, int, int] | None = None


@dataclass(frozen=True)
class Program:
    """A launch list before it has addresses: a bucket of at most ``rows`` rows, its buffers holding ``capacity``."""

    phase: str
    rows: int
    launches: tuple[Launch, ...]
    capacity: int = 0

    @property
    def name(self) -> str:
        """As the plan calls the list."""
        return f"{self.phase}.{self.rows}"

    @property
    def held(self) -> int:
        """Rows that the buffers of this list hold."""
        return max(self.capacity, self.rows)


@dataclass(frozen=True)
class Buffer:
    """A piece of the arena: ``per_row`` bytes for each of at most ``max_rows`` rows. Pinned ones outlive their list.

    ``kind`` is f32, bf16 or f16 (row-major, ``columns`` wide), x8 (tapeout_cpu.h, in ``terms`` terms) or scratch.
    """

    name: str
    per_row: int
    kind: str = "f32"
    columns: int = 0
    pinned: bool = False
    max_rows: int | None = None
    terms: int = 1

    def nbytes(self, rows: int) -> int:
        """Bytes for a launch list of ``rows`` rows, rounded up to a cache line."""
        return -(-self.per_row * min(rows, self.max_rows or rows) // 64) * 64


@dataclass(frozen=True)
class KernelEntry:
    """A kernel the artifact carries: its parameters in ABI order, and the C file and macros it comes from."""

    name: str
    template: str
    params: tuple[str, ...]
    source: str
    defines: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class BuiltKernel:
    """A GPU kernel that was compiled for every architecture of the artifact, and what it takes on each."""

    kernel: GpuKernel
    resources: tuple[tuple[str, Resources], ...]


@dataclass(frozen=True)
class StepLayout:
    """The step in device memory: fields with their sizes in bytes, and the most rows, sequences and pages it holds."""

    rows: int
    segments: int
    out_rows: int
    max_pages: int
    fields: tuple[tuple[str, int], ...]

    def places(self) -> dict[str, tuple[int, int]]:
        """Offset and size of every field; each starts on 64 bytes."""
        places: dict[str, tuple[int, int]] = {}
        offset = 0
        for name, size in self.fields:
            places[name] = (offset, size)
            offset += -(-size // 64) * 64
        return places

    @property
    def nbytes(self) -> int:
        """Bytes of the whole step."""
        return sum(-(-size // 64) * 64 for _, size in self.fields)


@dataclass(frozen=True)
class Cache:
    """What one layer keeps of the past: ``page_bytes`` for every page of tokens, ``sequence_bytes`` for a sequence.

    ``pages`` pages lie first, then the state of each of ``max_sequences`` sequences.
    """

    name: str
    page_bytes: int
    sequence_bytes: int = 0


@dataclass(frozen=True)
class SelectedModel:
    """Kernels are chosen, and the closed set of launch lists is known.

    Prefill and decode lists work on all rows of a step, head lists on the rows whose logits are wanted. On a GPU
    (``step`` is set) a decode list is a whole step with its head and its sampling, and a sample list follows a head;
    the lists need ``multiprocessors``, since blocks of a launch may wait for one another.
    """

    fused: FusedModel
    kernels: tuple[KernelEntry | BuiltKernel, ...]
    weights: tuple[PackedWeight, ...]
    buffers: tuple[Buffer, ...]
    programs: tuple[Program, ...]
    logits: str
    caches: tuple[Cache, ...]
    decisions: tuple[Decision, ...]
    step: StepLayout | None = None
    multiprocessors: int = 0

    def token_bytes(self, page_tokens: int) -> int:
        """Bytes of the KV pool that one token takes, rounded down where several tokens share an entry."""
        return sum(cache.page_bytes for cache in self.caches) // page_tokens

    def check(self) -> None:
        """Launches use known kernels, weights and buffers, and read only what was written."""
        known = {kernel_name(kernel): set(kernel_params(kernel)) for kernel in self.kernels}
        places = {weight.name for weight in self.weights} | {buffer.name for buffer in self.buffers}
        kept = {buffer.name for buffer in self.buffers if buffer.pinned}
        for program in self.programs:
            written = set(kept) if program.phase in ("head", "sample") else kept & {STEP, PARTIAL}
            for launch in program.launches:
                assert {name for name, _ in launch.args} == known[launch.kernel], f"{launch.op}: {launch.kernel}"
                for _, arg in launch.args:
                    assert not isinstance(arg, WeightRef) or arg.weight in places, f"{launch.op}: {arg}"
                    assert not isinstance(arg, Span) or arg.buffer in places, f"{launch.op}: {arg}"
                unread = set(launch.reads) - written
                assert not unread, f"{launch.op} reads {sorted(unread)} before anything is written there"
                written.update(launch.writes)
            assert program.phase != "head" or self.logits in written, f"{program.name} writes no logits"


STEP = "step"
PARTIAL = "partial"


def kernel_name(kernel: KernelEntry | BuiltKernel) -> str:
    """The name a launch calls a kernel by."""
    return kernel.kernel.name if isinstance(kernel, BuiltKernel) else kernel.name


def kernel_params(kernel: KernelEntry | BuiltKernel) -> tuple[str, ...]:
    """Names of a kernel's arguments, in ABI order."""
    return tuple(p.name for p in kernel.kernel.params) if isinstance(kernel, BuiltKernel) else kernel.params


@dataclass(frozen=True)
class Placement:
    """Where a buffer lies in the arena and from which to which launch of its list it is needed."""

    buffer: str
    offset: int
    nbytes: int
    first: int
    last: int


@dataclass(frozen=True)
class GraphMemory:
    """The buffers of one launch list."""

    name: str
    phase: str
    rows: int
    placements: tuple[Placement, ...]


@dataclass(frozen=True)
class WeightPlace:
    """Where a weight lies in the data section of the weights file; ``nbytes`` includes its padding."""

    name: str
    offset: int
    nbytes: int


@dataclass(frozen=True)
class MemoryPlan:
    """Every byte the process will hold, apart from the code itself."""

    weights: int
    kv_pool: int
    arena: int
    scratch: int
    capacity: int
    max_context: int
    max_sequences: int
    page_tokens: int
    pages: int
    cache_offsets: tuple[int, ...]
    places: tuple[WeightPlace, ...]
    graphs: tuple[GraphMemory, ...]
    decisions: tuple[Decision, ...]
    step_offset: int | None = None
    comm_buffer: int = 0
    """Of one rank, of two that it uses in turn; 0 where there is one rank."""
    context: int = 0
    """What the device's driver takes for itself, beside the plan; ``capacity`` is without it."""
    tokens_that_fit: int = 0
    """Tokens that the pool could hold if it took all of ``capacity`` that nothing else needs; 0 for no pages."""

    @property
    def total(self) -> int:
        """All planned bytes of a rank."""
        return self.weights + self.kv_pool + self.arena + self.scratch + 2 * self.comm_buffer

    def check(self) -> None:
        """No two buffers that live at the same time overlap, everything lies in the arena, and all fits the device."""
        assert self.total <= self.capacity
        for graph in self.graphs:
            ordered = sorted(graph.placements, key=lambda place: place.first)
            for index, a in enumerate(ordered):
                assert a.offset >= 0 and a.offset + a.nbytes <= self.arena, f"{graph.name}: {a.buffer} leaves the arena"
                for b in takewhile(lambda b, last=a.last: b.first <= last, islice(ordered, index + 1, None)):
                    apart_in_space = a.offset + a.nbytes <= b.offset or b.offset + b.nbytes <= a.offset
                    assert apart_in_space, f"{graph.name}: {a.buffer} and {b.buffer} overlap"


@dataclass(frozen=True)
class LaunchList:
    """One bucket: every argument resolved to an offset or a number."""

    name: str
    phase: str
    rows: int
    launches: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True)
class GraphPlan:
    """The closed set of launch lists."""

    lists: tuple[LaunchList, ...]
    decisions: tuple[Decision, ...]
    templates: tuple[tuple[str, str], ...] = ()
    """The template of each GPU kernel by its name; none on a CPU, whose lists are not captured."""

    def check(self) -> None:
        """At least one list of each phase, names are unique, and GPU lists are safe to capture."""
        names = [entry.name for entry in self.lists]
        assert len(set(names)) == len(names)
        for entry in self.lists if self.templates else ():
            check_capture(entry.name, entry.launches, dict(self.templates))
        assert {entry.phase for entry in self.lists} >= {"prefill", "decode", "head"}


def merge_decisions(decisions: Iterable[Decision]) -> tuple[Decision, ...]:
    """Decisions that differ only in their layer become one; ``evidence`` counts them."""
    merged: dict[tuple[Any, ...], list[Decision]] = {}
    for decision in decisions:
        key = (
            decision.by,
            generalize(decision.subject),
            decision.choice,
            decision.reason,
            decision.alternatives,
            decision.evidence,
        )
        merged.setdefault(key, []).append(decision)
    result: list[Decision] = []
    for same in merged.values():
        first = same[0]
        subject = generalize(first.subject) if len(same) > 1 else first.subject
        evidence = (*first.evidence, ("weights", len(same))) if len(same) > 1 else first.evidence
        result.append(Decision(first.by, subject, first.choice, first.reason, first.alternatives, evidence))
    return tuple(result)
