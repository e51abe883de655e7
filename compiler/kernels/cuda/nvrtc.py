"""CUDA C++ to cubins with NVRTC of the nvidia-cuda-nvrtc wheel: no GPU, no driver, the same bytes anywhere."""

from __future__ import annotations

import ctypes
import importlib.metadata
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from tapeout.compiler.kernels.cuda.base import Cubin, Define, GpuKernel
from tapeout.compiler.kernels.cuda.resources import finish_cubin
from tapeout.runtime.errors import TapeoutError

SOURCES = Path(__file__).parent / "src"
PACKAGE = "nvidia-cuda-nvrtc"
ARCH_TARGETS = {"sm_80": "sm_80", "sm_89": "sm_89", "sm_90": "sm_90a", "sm_100": "sm_100a", "sm_120": "sm_120"}
"""What each architecture is compiled as: with its own instructions (wgmma, tcgen05) where it has any that we use."""

# No fast math: rotation angles and norms need accurate functions. ptxas' own report carries the spills.
FLAGS = ("--std=c++17", "-default-device", "--ptxas-options=-v")
_INCLUDE = re.compile(r'^\s*#\s*include\s+["<]([^">]+)[">]', re.MULTILINE)
_ERROR_LINES = 6


def compile_cuda(kernel: GpuKernel, arch: str, sources: Path = SOURCES) -> Cubin:
    """Compile a kernel of ``sources`` for ``arch`` (``sm_90``).

    Raises TapeoutError with the file and the compiler's first lines, when the wheel is missing, and when the compiled
    parameters are not the kernel's.
    """
    texts = source_texts(kernel.source, sources)
    data, log = _Nvrtc.load().compile(kernel.source, texts, _options(kernel, arch))
    return finish_cubin(kernel, data, log, kernel.params, kernel.shared)


def source_texts(name: str, sources: Path = SOURCES) -> dict[str, str]:
    """The texts of a source and of all that it includes, by name. Raises TapeoutError for a file that is not there."""
    texts: dict[str, str] = {}
    todo = [name]
    while todo:
        current = todo.pop()
        if current in texts:
            continue
        try:
            texts[current] = (sources / current).read_text(encoding="utf-8")
        except FileNotFoundError:
            raise TapeoutError(f"the kernel source {name} needs {current}, which is not in {sources}") from None
        todo.extend(_INCLUDE.findall(texts[current]))
    return dict(sorted(texts.items()))


def nvrtc_version() -> str:
    """Version of the installed wheel. Raises TapeoutError without one."""
    return _distribution().version


def _options(kernel: GpuKernel, arch: str) -> list[str]:
    defines = {"TP_KERNEL": kernel.name, **dict(kernel.defines)}
    macros = [f"-D{name}={_spell(value)}" for name, value in sorted(defines.items())]
    return [f"--gpu-architecture={ARCH_TARGETS[arch]}", *FLAGS, *macros]


def _spell(value: Define) -> str:
    """A define as C++ reads it; whole floats keep their point, and an f makes them single."""
    if isinstance(value, bool):
        return str(int(value))
    return f"{value!r}f" if isinstance(value, float) else str(value)


def _distribution() -> importlib.metadata.Distribution:
    try:
        return importlib.metadata.distribution(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        raise TapeoutError(
            f"compiling for a GPU needs the package {PACKAGE}, which is not there; pip install 'tapeout[compiler,gpu]'"
        ) from None


@dataclass(frozen=True)
class _Nvrtc:
    library: ctypes.CDLL

    @staticmethod
    @lru_cache(maxsize=1)
    def load() -> _Nvrtc:
        """The wheel's library. It looks for its builtins by name, so they are loaded first."""
        found = {Path(file.name).name.split(".")[0]: file for file in _distribution().files or () if ".so" in file.name}
        missing = sorted({"libnvrtc", "libnvrtc-builtins"} - found.keys())
        if missing:
            raise TapeoutError(f"the {PACKAGE} package holds no {missing[0]}.so; reinstall it")
        ctypes.CDLL(str(found["libnvrtc-builtins"].locate()), ctypes.RTLD_GLOBAL)
        return _Nvrtc(ctypes.CDLL(str(found["libnvrtc"].locate())))

    def compile(self, name: str, texts: dict[str, str], options: list[str]) -> tuple[bytes, str]:
        """The cubin and the compiler's log."""
        headers = {key: text for key, text in texts.items() if key != name}
        program = ctypes.c_void_p()
        self._check(
            self.library.nvrtcCreateProgram(
                ctypes.byref(program),
                texts[name].encode(),
                name.encode(),
                len(headers),
                _strings(headers.values()),
                _strings(headers),
            )
        )
        try:
            status = self.library.nvrtcCompileProgram(program, len(options), _strings(options))
            log = self._read(program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
            if status:
                raise TapeoutError(f"compiling {name} ({' '.join(options)}) failed: {_first_lines(log, status)}")
            return self._read(program, "CUBIN"), log
        finally:
            self.library.nvrtcDestroyProgram(ctypes.byref(program))

    def _read(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._check(getattr(self.library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
        buffer = ctypes.create_string_buffer(size.value)
        self._check(getattr(self.library, f"nvrtcGet{what}")(program, buffer))
        return buffer.raw

    def _check(self, status: int) -> None:
        if status:
            raise TapeoutError(f"NVRTC failed with error {status}")


def _strings(values: Iterable[str]) -> ctypes.Array[ctypes.c_char_p]:
    encoded = [value.encode() for value in values]
    return (ctypes.c_char_p * len(encoded))(*encoded)


def _first_lines(log: str, status: int) -> str:
    lines = [line.strip() for line in log.splitlines() if line.strip() and not line.startswith("ptxas info")]
    return "; ".join(lines[:_ERROR_LINES]) or f"NVRTC ended with error {status}"
