"""Builds GPU kernels for one device on all cores, keeps them by content, and rejects what exceeds it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import queue
import tempfile
import threading
from collections.abc import Callable, Sequence, Set
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from tapeout.compiler.devices import CudaDevice
from tapeout.compiler.kernels.cuda import nvrtc, triton_build
from tapeout.compiler.kernels.cuda.base import Cubin, GpuKernel, Resources
from tapeout.compiler.kernels.cuda.resources import REGISTERS_PER_BLOCK, THREADS_PER_BLOCK, blocks_per_sm
from tapeout.compiler.kernels.cuda.triton_source import triton_content
from tapeout.compiler.kernels.cuda.triton_worker import TritonWorker
from tapeout.runtime.errors import TapeoutError

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Rejected:
    """A kernel that the device cannot run well, and why in words."""

    reason: str


Outcome = Cubin | Rejected


def build(
    kernels: Sequence[GpuKernel],
    device: CudaDevice,
    cache: Path,
    progress: Progress | None = None,
    *,
    sources: Path = nvrtc.SOURCES,
) -> dict[str, Outcome]:
    """The compiled kernels by name, or why ``device`` cannot use one; in the order of ``kernels``.

    Compiled kernels are kept in ``cache``, one file each, by the digest of all that goes into them. ``progress`` is
    called with (kernels done, kernels in all) from worker threads. Raises TapeoutError for a kernel that does not
    compile and for two kernels of one name.
    """
    unique = _by_name(kernels)
    run = _Build(device, cache.absolute(), sources, _Counter(len(unique), progress))
    run.cache.mkdir(parents=True, exist_ok=True)
    with contextlib.closing(run.workers), ThreadPoolExecutor(_jobs()) as pool:
        # Triton takes ten times as long, so it goes first
        ordered = sorted(unique.values(), key=lambda kernel: (kernel.language != "triton", kernel.name))
        futures = {kernel.name: pool.submit(run.outcome, kernel) for kernel in ordered}
        try:
            finished, _ = wait(futures.values(), return_when=FIRST_EXCEPTION)
        finally:  # nothing is left to cancel, or something failed, or the user has had enough
            pool.shutdown(wait=True, cancel_futures=True)
        failed = [future for future in finished if future.exception()]
        if failed:
            min(failed, key=lambda future: str(future.exception())).result()
        return {name: futures[name].result() for name in unique}


def compiler_versions(languages: Set[str]) -> dict[str, str]:
    """The compilers of these languages with their versions: what, besides the spec, decides a cubin's bytes."""
    versions = {"cuda": ("nvrtc", nvrtc.nvrtc_version), "triton": ("triton", triton_build.triton_version)}
    return {name: version() for language, (name, version) in sorted(versions.items()) if language in languages}


def rejection(kernel: GpuKernel, resources: Resources, device: CudaDevice) -> str | None:
    """Why ``device`` cannot use a compiled kernel, or None."""
    if kernel.threads > THREADS_PER_BLOCK:
        return f"needs {kernel.threads:,} threads a block; {device.name} has {THREADS_PER_BLOCK:,}"
    if resources.shared > device.shared_per_block:
        return _too_much_shared(resources.shared, device)
    if resources.registers * kernel.threads > REGISTERS_PER_BLOCK:
        return (
            f"needs {resources.registers} registers in each of {kernel.threads} threads; "
            f"{device.name} has {REGISTERS_PER_BLOCK:,} a block"
        )
    if resources.spill_bytes:
        return f"spills {resources.spill_bytes:,} bytes a thread to memory with {resources.registers} registers"
    if not blocks_per_sm(device, kernel.threads, resources.registers, resources.shared):
        return f"no block of it fits on a multiprocessor of {device.name}"
    return None


def kernel_key(kernel: GpuKernel, arch: str, sources: Path = nvrtc.SOURCES) -> str:
    """Digest of all that a cubin's bytes follow from: source content, configuration, architecture, compiler version."""
    if kernel.language == "cuda":
        content: object = nvrtc.source_texts(kernel.source, sources)
        compiler = ["nvrtc", nvrtc.nvrtc_version(), nvrtc.ARCH_TARGETS[arch], *nvrtc.FLAGS]
    else:
        content = triton_content(kernel.source)
        compiler = ["triton", triton_build.triton_version()]
    document = [_ENTRY_VERSION, arch, compiler, asdict(kernel), content]
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


_ENTRY_VERSION = 1  # of the cache's files and of what their resources mean


def _jobs() -> int:
    return max(1, len(os.sched_getaffinity(0)))


def _by_name(kernels: Sequence[GpuKernel]) -> dict[str, GpuKernel]:
    unique: dict[str, GpuKernel] = {}
    for kernel in kernels:
        if unique.setdefault(kernel.name, kernel) != kernel:
            raise TapeoutError(f"two different kernels are called {kernel.name}")
    return unique


def _too_much_shared(shared: int, device: CudaDevice) -> str:
    return f"needs {shared:,} bytes of shared memory a block; {device.name} has {device.shared_per_block:,}"


class _Counter:
    def __init__(self, total: int, progress: Progress | None) -> None:
        self.total, self.progress, self.done, self.lock = total, progress, 0, threading.Lock()

    def step(self) -> None:
        with self.lock:
            self.done += 1
            if self.progress is not None:
                self.progress(self.done, self.total)


class _Workers:
    """Triton's processes, started when first needed and then kept until the build ends."""

    def __init__(self) -> None:
        self.idle: queue.SimpleQueue[TritonWorker] = queue.SimpleQueue()

    def compile(self, kernel: GpuKernel, arch: str) -> Cubin:
        try:
            worker = self.idle.get_nowait()
        except queue.Empty:
            worker = TritonWorker()
        try:
            return worker.compile(kernel, arch)
        finally:
            self.idle.put(worker)

    def close(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self.idle.get_nowait().close()


class _Build:
    """One run: for what it compiles and where results are kept."""

    def __init__(self, device: CudaDevice, cache: Path, sources: Path, counter: _Counter) -> None:
        self.device, self.cache, self.sources, self.counter = device, cache, sources, counter
        self.workers = _Workers()

    def outcome(self, kernel: GpuKernel) -> Outcome:
        """The kernel, or why not; dynamic shared memory is checked before anything is compiled."""
        if kernel.shared > self.device.shared_per_block:
            result: Outcome = Rejected(_too_much_shared(kernel.shared, self.device))
        else:
            cubin = self._compiled(kernel)
            reason = rejection(kernel, cubin.resources, self.device)
            result = Rejected(reason) if reason else self._placed(kernel, cubin)
        self.counter.step()
        return result

    def _placed(self, kernel: GpuKernel, cubin: Cubin) -> Cubin:
        taken = cubin.resources
        resident = blocks_per_sm(self.device, kernel.threads, taken.registers, taken.shared)
        return replace(cubin, resources=replace(taken, blocks_per_sm=resident))

    def _compiled(self, kernel: GpuKernel) -> Cubin:
        path = self.cache / f"{kernel_key(kernel, self.device.arch, self.sources)}.kernel"
        known = _load(path)
        if known is not None:
            return known
        if kernel.language == "cuda":
            cubin = nvrtc.compile_cuda(kernel, self.device.arch, self.sources)
        else:
            cubin = self.workers.compile(kernel, self.device.arch)
        _store(path, cubin)
        return cubin


def _store(path: Path, cubin: Cubin) -> None:
    """One line of JSON, then the cubin; put in place whole."""
    head = {"sha256": hashlib.sha256(cubin.data).hexdigest(), "resources": asdict(cubin.resources)}
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix="new-", delete=False) as out:
        out.write(json.dumps(head).encode() + b"\n" + cubin.data)
    os.replace(out.name, path)


def _load(path: Path) -> Cubin | None:
    """What was kept, or None when there is nothing or it is damaged."""
    try:
        head, _, data = path.read_bytes().partition(b"\n")
        document = json.loads(head)
        if document["sha256"] != hashlib.sha256(data).hexdigest():
            return None
        return Cubin(data, Resources(**document["resources"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
