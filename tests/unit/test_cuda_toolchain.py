"""The GPU toolchain without a GPU: every template compiles and fits, and what does not is refused with its reason."""

from __future__ import annotations

import ast
import hashlib
import importlib
import re
import subprocess
from pathlib import Path

import pytest

from tapeout.compiler.devices import CudaDevice, load_device
from tapeout.compiler.kernels.cuda import nvrtc
from tapeout.compiler.kernels.cuda.base import Cubin, GpuKernel, Param, Resources
from tapeout.compiler.kernels.cuda.resources import blocks_per_sm, read_elf
from tapeout.compiler.kernels.cuda.toolchain import Rejected, build, kernel_key, rejection
from tapeout.compiler.kernels.cuda.triton_source import FOLDER, triton_content
from tapeout.compiler.kernels.cuda.triton_worker import TritonWorker
from tapeout.runtime.errors import TapeoutError

DEVICES = ["h200", "rtx-pro-6000"]
ALL_DEVICES = ["a100", "b200", "h200", "rtx-4090", "rtx-5090", "rtx-pro-6000"]

SOURCE = """
#include "shared.cuh"
extern "C" __global__ void __launch_bounds__(THREADS) TP_KERNEL(const float* x, float* y, int n) {
  __shared__ float fixed[300];
  extern __shared__ float dynamic[];
  fixed[threadIdx.x] = x[threadIdx.x]; dynamic[threadIdx.x] = OFFSET; __syncthreads();
  if (threadIdx.x < n) y[threadIdx.x] = fixed[THREADS - 1 - threadIdx.x] + dynamic[n];
}
"""
# each thread keeps 64 sums that no rule lets the compiler order or drop, in at most 32 registers
SPILLS = """
extern "C" __global__ void __launch_bounds__(1024, 2) TP_KERNEL(const float* x, float* y, int n) {
  float sum[64];
  #pragma unroll
  for (int i = 0; i < 64; i++) sum[i] = x[i * 1024 + threadIdx.x];
  for (int k = 0; k < n; k++)
    #pragma unroll
    for (int i = 0; i < 64; i++) sum[i] = sum[i] * sum[(i + 7) % 64] + x[k];
  #pragma unroll
  for (int i = 0; i < 64; i++) y[i * 1024 + threadIdx.x] = sum[i];
}
"""


def gpu(name: str) -> CudaDevice:
    device = load_device(name)
    assert isinstance(device, CudaDevice)
    return device


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "one.cu").write_text(SOURCE)
    (folder / "two.cu").write_text(SOURCE)
    (folder / "spills.cu").write_text(SPILLS)
    (folder / "shared.cuh").write_text("#define OFFSET 3.0f\n")
    return folder


def kernel(name: str = "one", *, source: str = "one.cu", threads: int = 256, shared: int = 4096) -> GpuKernel:
    params = (Param("x"), Param("y"), Param("n", "i32"))
    return GpuKernel(name, "test", "cuda", source, params, (("THREADS", threads),), threads, shared)


def template_modules() -> list[str]:
    """Modules with an ``examples`` function, found in their text: importing them imports Triton."""
    found: list[str] = []
    for path in sorted(FOLDER.glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if any(isinstance(node, ast.FunctionDef) and node.name == "examples" for node in tree.body):
            found.append(path.stem)
    return found


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("module", template_modules())
def test_every_template_compiles_and_fits(module: str, device: str, tmp_path: Path) -> None:
    kernels = importlib.import_module(f"tapeout.compiler.kernels.cuda.{module}").examples()
    results = build(kernels, gpu(device), tmp_path)
    refused = {name: result.reason for name, result in results.items() if isinstance(result, Rejected)}
    assert refused == {}
    assert kernels and list(results) == [kernel.name for kernel in kernels]
    for result in results.values():
        assert isinstance(result, Cubin)
        assert result.resources.blocks_per_sm >= 1
        assert not re.search(rb"/(home|root|tmp|usr|work)/", result.data), "a path in the cubin"


# -- compiling


@pytest.mark.parametrize("arch", nvrtc.ARCH_TARGETS)
def test_what_is_read_off_a_cubin_is_what_cuobjdump_reads(arch: str, sources: Path, tmp_path: Path) -> None:
    cubin = nvrtc.compile_cuda(kernel(), arch, sources)
    path = tmp_path / "one.cubin"
    path.write_bytes(cubin.data)
    tool = FOLDER.joinpath(importlib.import_module("triton").__path__[0], "backends", "nvidia", "bin", "cuobjdump")
    printed = subprocess.run([tool, "-res-usage", path], capture_output=True, text=True, check=True).stdout
    shown = dict(re.findall(r"(REG|STACK|SHARED):(\d+)", printed))
    reserved = (
        1024 if arch in ("sm_90", "sm_100", "sm_120") else 0
    )  # what the system takes; it counts here and there not
    taken = cubin.resources
    assert (taken.symbol, taken.registers, taken.stack_bytes) == ("one", int(shown["REG"]), int(shown["STACK"]))
    assert taken.shared == int(shown["SHARED"]) - reserved + 4096 == 300 * 4 + 4096
    assert taken.dynamic_shared == 4096
    assert read_elf(cubin.data).parameters == (8, 8, 4)


def test_the_same_input_gives_the_same_bytes(sources: Path, tmp_path: Path) -> None:
    first = nvrtc.compile_cuda(kernel(), "sm_90", sources)
    elsewhere = tmp_path / "elsewhere" / "deeper"
    elsewhere.mkdir(parents=True)
    for path in sources.iterdir():
        (elsewhere / path.name).write_bytes(path.read_bytes())
    assert nvrtc.compile_cuda(kernel(), "sm_90", elsewhere) == first
    assert nvrtc.compile_cuda(kernel("other"), "sm_90", sources).resources.symbol == "other"


def test_a_compile_error_names_file_and_line(sources: Path) -> None:
    (sources / "bad.cu").write_text('extern "C" __global__ void TP_KERNEL(float* y) {\n  y[0] = nowhere;\n}\n')
    with pytest.raises(
        TapeoutError, match=r'compiling bad\.cu .* failed: bad\.cu\(2\): error: .*"nowhere" is undefined'
    ):
        nvrtc.compile_cuda(kernel(source="bad.cu"), "sm_90", sources)


def test_an_include_that_is_not_there_is_named(sources: Path) -> None:
    (sources / "one.cu").write_text("#include <cuda_fp16.h>\n" + SOURCE)
    with pytest.raises(TapeoutError, match=r"one\.cu needs cuda_fp16\.h, which is not in "):
        nvrtc.compile_cuda(kernel(), "sm_90", sources)


def test_parameters_that_the_source_does_not_take_are_refused(sources: Path) -> None:
    wrong = GpuKernel("one", "test", "cuda", "one.cu", (Param("x"), Param("y")), (("THREADS", 256),), 256)
    with pytest.raises(TapeoutError, match=r"one\.cu takes parameters of \[8, 8, 4\] bytes, but .* declares \[8, 8\]"):
        nvrtc.compile_cuda(wrong, "sm_90", sources)


# -- rejection


def test_shared_memory_is_checked_before_anything_is_compiled(sources: Path, tmp_path: Path) -> None:
    (sources / "one.cu").write_text("not even C++")
    results = build([kernel(shared=131_072)], gpu("rtx-pro-6000"), tmp_path / "cache", sources=sources)
    reason = "needs 131,072 bytes of shared memory a block; rtx-pro-6000 has 101,376"
    assert results == {"one": Rejected(reason)}
    assert list((tmp_path / "cache").iterdir()) == []


def test_static_shared_memory_counts_too(sources: Path, tmp_path: Path) -> None:
    device = gpu("rtx-pro-6000")
    results = build([kernel(shared=device.shared_per_block - 1199)], device, tmp_path, sources=sources)
    assert results["one"] == Rejected("needs 101,377 bytes of shared memory a block; rtx-pro-6000 has 101,376")


def test_spills_are_refused(sources: Path, tmp_path: Path) -> None:
    spiller = kernel("spills", source="spills.cu", threads=1024, shared=0)
    (result,) = build([spiller], gpu("h200"), tmp_path, sources=sources).values()
    assert isinstance(result, Rejected)
    assert re.fullmatch(r"spills [\d,]+ bytes a thread to memory with 32 registers", result.reason)


@pytest.mark.parametrize(
    ("threads", "registers", "shared", "reason"),
    [
        (2048, 16, 0, "needs 2,048 threads a block; h200 has 1,024"),
        (512, 255, 0, "needs 255 registers in each of 512 threads; h200 has 65,536 a block"),
        (128, 32, 232_449, "needs 232,449 bytes of shared memory a block; h200 has 232,448"),
        (256, 255, 232_448, None),
    ],
)
def test_reasons(threads: int, registers: int, shared: int, reason: str | None) -> None:
    taken = Resources("one", registers, shared, 0, 0, 0)
    assert rejection(kernel(threads=threads), taken, gpu("h200")) == reason


@pytest.mark.parametrize(
    ("device", "threads", "registers", "shared", "blocks"),
    [
        # NVIDIA's occupancy calculator: registers go to a warp in 256s and live in four files, blocks cost 1 KiB more
        ("h200", 128, 32, 0, 16),  # threads
        ("h200", 32, 16, 0, 32),  # blocks
        ("h200", 256, 65, 0, 3),  # registers: 72 × 32 a warp, 7 warps in each of 4 files
        ("h200", 128, 168, 0, 3),
        ("h200", 1024, 64, 0, 1),
        ("h200", 128, 64, 100_000, 2),
        ("h200", 128, 64, 232_448, 1),
        ("h200", 128, 64, 115_712, 2),  # 113 KiB and 1 more, twice
        ("h200", 128, 64, 115_713, 1),
        ("rtx-pro-6000", 128, 32, 0, 12),
        ("rtx-pro-6000", 32, 16, 0, 24),
        ("rtx-pro-6000", 1024, 32, 0, 1),
        ("rtx-pro-6000", 256, 32, 50_176, 2),
        ("rtx-pro-6000", 128, 64, 101_377, 0),
        ("a100", 96, 40, 0, 16),  # 3 warps a block, 51 of 1280 registers would fit undivided
    ],
)
def test_blocks_a_multiprocessor_holds(device: str, threads: int, registers: int, shared: int, blocks: int) -> None:
    assert blocks_per_sm(gpu(device), threads, registers, shared) == blocks


# -- the cache


def test_each_kernel_is_an_entry_of_its_own(sources: Path, tmp_path: Path) -> None:
    cache, device = tmp_path / "cache", gpu("h200")
    steps: list[tuple[int, int]] = []
    first = build([kernel()], device, cache, sources=sources)
    kept = {path: path.stat().st_mtime_ns for path in cache.iterdir()}
    more = [kernel(), kernel("two", source="two.cu"), kernel("three", threads=128)]
    second = build(more, device, cache, lambda done, total: steps.append((done, total)), sources=sources)
    assert second["one"] == first["one"]
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    assert len(list(cache.iterdir())) == 3
    assert steps == [(1, 3), (2, 3), (3, 3)]


def test_a_hit_needs_no_compiler(sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = build([kernel()], gpu("h200"), tmp_path, sources=sources)
    monkeypatch.setattr(nvrtc, "compile_cuda", lambda *_: pytest.fail("compiled again"))
    assert build([kernel()], gpu("h200"), tmp_path, sources=sources) == first


def test_a_damaged_entry_is_built_again(sources: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    first = build([kernel()], gpu("h200"), cache, sources=sources)
    (entry,) = cache.iterdir()
    whole = entry.read_bytes()
    for broken in (b"", b"{}\n", whole[:-1], whole[:-1] + bytes([whole[-1] ^ 1])):
        entry.write_bytes(broken)
        assert build([kernel()], gpu("h200"), cache, sources=sources) == first
        assert entry.read_bytes() == whole


def test_the_key_follows_content_and_nothing_else(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = kernel_key(kernel(), "sm_90", sources)
    elsewhere = tmp_path / "elsewhere"
    sources.rename(elsewhere)
    assert kernel_key(kernel(), "sm_90", elsewhere) == key
    (elsewhere / "two.cu").write_text("another kernel")
    (elsewhere / "unused.cuh").write_text("another header")
    assert kernel_key(kernel(), "sm_90", elsewhere) == key
    changed = {key, kernel_key(kernel(), "sm_120", elsewhere), kernel_key(kernel(threads=128), "sm_90", elsewhere)}
    (elsewhere / "shared.cuh").write_text("#define OFFSET 4.0f\n")
    changed.add(kernel_key(kernel(), "sm_90", elsewhere))
    monkeypatch.setattr(nvrtc, "nvrtc_version", lambda: "99")
    changed.add(kernel_key(kernel(), "sm_90", elsewhere))
    assert len(changed) == 5


def test_two_kernels_of_one_name_are_refused(sources: Path, tmp_path: Path) -> None:
    with pytest.raises(TapeoutError, match="two different kernels are called one"):
        build([kernel(), kernel(threads=128)], gpu("h200"), tmp_path, sources=sources)


def test_one_kernel_that_does_not_compile_ends_the_build(sources: Path, tmp_path: Path) -> None:
    (sources / "two.cu").write_text("nonsense")
    with pytest.raises(TapeoutError, match=r"compiling two\.cu"):
        build([kernel(), kernel("two", source="two.cu")], gpu("h200"), tmp_path, sources=sources)


# -- Triton

TEMPLATE = '''
"""A template."""
import triton
import triton.language as tl
from tapeout.compiler.kernels.cuda import triton_help
from tapeout.compiler.kernels.cuda.triton_more import twice as doubled

WIDTH = 4  # how wide

@triton.jit
def helper(x):
    return doubled(x) * WIDTH

@triton.jit
def main(x, y, N: tl.constexpr):
    """Stores."""
    tl.store(y, helper(tl.load(x)) + triton_help.constant(N))

@triton.jit
def other(x):
    return x
'''
HELP = "def constant(n):\n    return n\n\ndef unused():\n    return 1\n"
MORE = "FACTOR = 2\n\ndef twice(x):\n    return x * FACTOR\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in (("triton_main", TEMPLATE), ("triton_help", HELP), ("triton_more", MORE)):
        (tmp_path / f"{name}.py").write_text(text)
    return tmp_path


def content(folder: Path, name: str, old: str, new: str) -> str:
    changed = folder.parent / f"changed-{hashlib.sha256((name + new).encode()).hexdigest()[:8]}"
    changed.mkdir()
    for path in folder.glob("*.py"):
        text = path.read_text()
        assert path.stem != name or old in text
        (changed / path.name).write_text(text.replace(old, new) if path.stem == name else text)
    return triton_content("triton_main:main", changed)


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        ("triton_main", "WIDTH = 4", "WIDTH = 5"),
        ("triton_main", "doubled(x) * WIDTH", "doubled(x) + WIDTH"),
        ("triton_main", "tl.load(x)", "tl.load(x + 1)"),
        ("triton_help", "return n", "return n + 1"),
        ("triton_more", "FACTOR = 2", "FACTOR = 3"),
    ],
)
def test_a_triton_kernels_content_holds_what_it_reaches(folder: Path, module: str, old: str, new: str) -> None:
    assert content(folder, module, old, new) != triton_content("triton_main:main", folder)


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        ("triton_main", "return x\n", "return x + 1\n"),
        ("triton_main", "# how wide", "# how wide it is"),
        ("triton_help", "return 1", "return 2"),
    ],
)
def test_and_nothing_else(folder: Path, module: str, old: str, new: str) -> None:
    assert content(folder, module, old, new) == triton_content("triton_main:main", folder)


def test_a_function_that_is_not_there_is_named(folder: Path) -> None:
    with pytest.raises(
        TapeoutError, match="no Triton function is called triton_main:nope: triton_main defines no nope"
    ):
        triton_content("triton_main:nope", folder)
    with pytest.raises(TapeoutError, match="no module of Triton kernels is called triton_nope"):
        triton_content("triton_nope:main", folder)


def test_triton_gives_the_same_bytes_in_another_process_and_writes_nothing_at_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # which must not reach the compiler
    attention = importlib.import_module("tapeout.compiler.kernels.cuda.attention")
    smallest = next(each for each in attention.examples() if each.language == "triton")
    cubins: list[Cubin] = []
    for _ in range(2):
        worker = TritonWorker()
        cubins.append(worker.compile(smallest, "sm_120"))
        worker.close()
    assert cubins[0] == cubins[1]
    assert read_elf(cubins[0].data).parameters == (8,) * (len(smallest.params) + 2)
    assert list(tmp_path.iterdir()) == []


def test_a_triton_template_and_its_declaration_must_agree() -> None:
    attention = importlib.import_module("tapeout.compiler.kernels.cuda.attention")
    good = next(each for each in attention.examples() if each.language == "triton")
    worker = TritonWorker()
    wrong = GpuKernel(good.name, "test", "triton", good.source, good.params[:-1], good.defines, good.threads)
    with pytest.raises(TapeoutError, match="but its template declares"):
        worker.compile(wrong, "sm_90")
    unknown = GpuKernel(good.name, "test", "triton", good.source, good.params, (*good.defines, ("NOPE", 1)), 128)
    with pytest.raises(TapeoutError, match="has no argument NOPE"):
        worker.compile(unknown, "sm_90")
    worker.close()
