"""`tapeout compile`: resolve the source, run the passes, emit kernels and weights, seal the artifact."""

from __future__ import annotations

import contextlib
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tapeout.compiler.artifact import ArtifactWriter, check_target
from tapeout.compiler.cache import WeightCache
from tapeout.compiler.checkpoints import Checkpoint, open_source, require_weights
from tapeout.compiler.collector import collector_paused
from tapeout.compiler.devices import CpuDevice, CudaDevice, Device, load_device, one_an_architecture
from tapeout.compiler.emit.executors import Executor, make_executor
from tapeout.compiler.emit.jobs import JOURNAL, Journal
from tapeout.compiler.emit.native import Native, load_native
from tapeout.compiler.emit.pieces import Emission, WeightEntry
from tapeout.compiler.emit.weights import EmissionReport, emission_key, emit_weights, plan_emission
from tapeout.compiler.environment import Environment
from tapeout.compiler.kernels.cuda.base import Cubin
from tapeout.compiler.kernels.toolchain import Unit, build_libraries, build_steps
from tapeout.compiler.lowering.choice import KernelBuilder
from tapeout.compiler.pipeline import Memo, Results
from tapeout.compiler.plan import Json, add_errors, build_plan, canonical
from tapeout.compiler.progress import Progress, SilentProgress, steps_of
from tapeout.compiler.spec import Spec, Topology, require_one_device
from tapeout.compiler.stages import BuiltKernel, KernelEntry, MemoryPlan, Purpose, SelectedModel
from tapeout.compiler.tokenizers import build_tokenizer
from tapeout.compiler.views.text import size
from tapeout.passes import PIPELINE
from tapeout.passes.select_kernels import further_devices
from tapeout.runtime.errors import TapeoutError

WEIGHTS = "weights/rank{}.safetensors"
ENGINE = (Unit("engine.c"), Unit("sample.c"))
ARTIFACT = Purpose()
KERNEL_BYTES = 32 << 20  # more than the kernels of an artifact take, for the check of free space


def compile_spec(
    spec: Spec,
    output: Path,
    *,
    base: Path | None = None,
    plan_only: bool = False,
    force: bool = False,
    jobs: int | None = None,
    executor: str = "threads",
    cache: bool = True,
    memo: Memo | None = None,
    progress: Progress | None = None,
) -> Json:
    """Compile a spec to ``output`` and return the plan; the same input gives the same bytes.

    ``base`` is the folder that a relative ``model.source`` starts from. ``plan_only`` writes plan.json alone. ``memo``
    keeps stages between compiles of one process. ``executor`` is who writes the weights (``make_executor``), with
    ``jobs`` threads or workers. Raises TapeoutError in one sentence; an artifact that was there stays.
    """
    progress = progress or SilentProgress()
    workers = make_executor(executor, jobs)
    if not plan_only:
        check_target(output, force)
    device = load_device(spec.topology.device)
    checkpoint = open_source(spec.model.source, spec.model.config, base or Path.cwd())
    if not plan_only:
        require_weights(checkpoint)
        if isinstance(device, CudaDevice):
            require_one_device(spec.topology)
    folder = Environment.read().cache
    builder = KernelBuilder(folder / "cubins", progress)
    results = run_passes(spec, device, checkpoint, builder, memo, progress, Purpose(plan_only))
    if plan_only:
        tokenizer = build_tokenizer(checkpoint)
        plan = build_plan(spec, device, results, tokenizer.generation, tokenizer.decisions)
        _write_plan(output, plan, force)
        return plan
    needed = results.get(MemoryPlan).weights * spec.topology.count + KERNEL_BYTES
    weight_cache = WeightCache(folder / "weights") if cache else None
    emission = _plan_emission(results, checkpoint)
    new = ArtifactWriter(output, force=force, needed_bytes=needed, emission=emission_key(emission))
    with new as writer, ThreadPoolExecutor(1) as pool:
        # zig compiles in processes of its own while the tokenizer is built here
        native = pool.submit(load_native, folder / "emit")
        selected, kernels_at = results.get(SelectedModel), folder / "kernels"
        kernels = pool.submit(_kernel_files, selected, device, spec.topology, kernels_at, builder, progress)
        tokenizer = build_tokenizer(checkpoint)
        plan = build_plan(spec, device, results, tokenizer.generation, tokenizer.decisions)
        reports = _add_weights(writer, emission, native.result(), workers, weight_cache, progress)
        plan = add_errors(plan, [report.errors for report in reports])
        for name, data in {**kernels.result(), **tokenizer.files, "plan.json": canonical(plan)}.items():
            writer.add(name, data)
        final = writer.seal(plan["kernels"]["targets"])
    if weight_cache is not None:
        with contextlib.suppress(OSError):  # the artifact is whole; the next compile builds again what it cannot find
            for rank, report in enumerate(reports):
                weight_cache.record(final / WEIGHTS.format(rank), report.chunk_bytes, report.sha256, report.spans)
    return plan


@collector_paused()
def run_passes(
    spec: Spec,
    device: Device,
    checkpoint: Checkpoint,
    builder: KernelBuilder,
    memo: Memo | None,
    progress: Progress,
    purpose: Purpose = ARTIFACT,
) -> Results:
    """The pipeline over a spec's sections and an opened checkpoint."""
    with progress.task("planning", len(PIPELINE.passes)) as task:
        inputs = (spec.model, spec.quantization, spec.topology, spec.serving, device, checkpoint, builder, purpose)
        return PIPELINE.run(*inputs, memo=memo, callback=lambda name, reused: task.advance(1))


def _write_plan(output: Path, plan: Json, force: bool) -> None:
    target = output if output.suffix == ".json" else output / "plan.json"
    if target.exists() and not force:
        raise TapeoutError(f"{target}: exists already; choose another place or pass --force")
    if (target.parent / "manifest.json").exists():
        raise TapeoutError(f"{target.parent}: is a whole artifact, whose plan is not replaced; choose another folder")
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.tmp-{os.getpid()}")
    try:
        partial.write_bytes(canonical(plan))
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)


def _kernel_files(
    selected: SelectedModel,
    device: Device,
    topology: Topology,
    cache: Path,
    builder: KernelBuilder,
    progress: Progress,
) -> dict[str, bytes]:
    """The compiled kernels by their path in the artifact: one library a CPU target, or one cubin a GPU kernel."""
    if isinstance(device, CudaDevice):
        used = [kernel.kernel for kernel in selected.kernels if isinstance(kernel, BuiltKernel)]
        return {
            f"kernels/{each.arch}/{name}.cubin": cubin.data
            for each in one_an_architecture((device, *further_devices(device, topology)))
            for name, cubin in builder.build(used, each).items()
            if isinstance(cubin, Cubin)
        }
    assert isinstance(device, CpuDevice)
    entries = [kernel for kernel in selected.kernels if isinstance(kernel, KernelEntry)]
    units = list(dict.fromkeys([*ENGINE, *(Unit(kernel.source, kernel.defines) for kernel in entries)]))
    names = [kernel.name for kernel in entries]
    with progress.task("kernels", build_steps(units, device.targets)) as task:
        libraries = build_libraries(units, names, device.targets, cache, steps_of(task))
    return {f"kernels/cpu-{target}.so": data for target, data in libraries.items()}


def _plan_emission(results: Results, checkpoint: Checkpoint) -> Emission:
    """Every weight with its place, which is the same on all ranks, and each rank's recipe."""
    memory, selected = results.get(MemoryPlan), results.get(SelectedModel)
    weights = {weight.name: weight for weight in selected.weights}
    entries = [
        WeightEntry(place.name, weights[place.name].recipe, place.offset, place.nbytes, weights[place.name].further)
        for place in memory.places
    ]
    return plan_emission(entries, checkpoint)


def _add_weights(
    writer: ArtifactWriter,
    emission: Emission,
    native: Native,
    executor: Executor,
    cache: WeightCache | None,
    progress: Progress,
) -> list[EmissionReport]:
    """One file of weights a rank, and what emission says of each."""
    names = [WEIGHTS.format(rank) for rank in range(emission.ranks)]
    journal = Journal(writer.path(JOURNAL), writer.emission)
    with progress.task("weights", emission.nbytes * emission.ranks, unit="B") as task:
        reports = emit_weights(
            emission,
            [writer.path(name) for name in names],
            native,
            journal,
            executor=executor,
            cache=cache,
            progress=steps_of(task),
        )
        reused, built, continued = (
            sum(counts) for counts in zip(*((each.reused, each.built, each.continued) for each in reports), strict=True)
        )
        went_on = f", {size(continued)} were there from before" if continued else ""
        task.note(f"{reused} reused, {built} built{went_on}")
    for name, report in zip(names, reports, strict=True):
        writer.add_weights(name, report)
    return reports
