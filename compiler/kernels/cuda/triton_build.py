"""Triton templates to cubins, without a GPU, a driver or torch.

A compiled Triton kernel takes, behind the declared parameters, pointers to global and to profiling scratch memory; our
kernels use neither, so a launch passes two nulls (``TRAILING_POINTERS``).
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import io
import tempfile
from collections.abc import Generator
from typing import Any

from tapeout.compiler.kernels.cuda.base import Cubin, GpuKernel, Param
from tapeout.compiler.kernels.cuda.resources import finish_cubin
from tapeout.runtime.errors import TapeoutError

TRAILING_POINTERS = 2
_PACKAGE = "tapeout.compiler.kernels.cuda"
_DTYPES = {"f32": "fp32", "f16": "fp16", "f64": "fp64", "fp8": "fp8e4nv"}
"""Our names of types where Triton's differ."""
_PDL_SINCE = 90
_ERROR_LINES = 6


def compile_triton(kernel: GpuKernel, arch: str) -> Cubin:
    """Compile ``module:function`` for ``arch`` (``sm_90``) in this process.

    Constexpr arguments come from ``defines``; PDL and ARCH, where the function has them and defines do not, say whether
    it runs under programmatic dependent launch and for which architecture. Raises TapeoutError when Triton is missing,
    refuses the kernel, or makes another kernel than the template declares.
    """
    triton_version()
    with _quiet() as printed:
        try:
            compiled = _compile(kernel, int(arch.removeprefix("sm_")))
        except TapeoutError:
            raise
        except Exception as error:
            said = first_lines(str(error)) or repr(error)
            raise TapeoutError(f"compiling {kernel.source} of {kernel.name} for {arch} failed: {said}") from error
    metadata = compiled.metadata
    if metadata.num_warps * 32 != kernel.threads:
        raise TapeoutError(
            f"kernel {kernel.name} declares {kernel.threads} threads, but Triton made it for {metadata.num_warps * 32}"
        )
    if metadata.global_scratch_size or metadata.profile_scratch_size:
        raise TapeoutError(f"kernel {kernel.name} needs global scratch memory from Triton, which no launch provides")
    params = (*kernel.params, *(Param(f"scratch{index}") for index in range(TRAILING_POINTERS)))
    return finish_cubin(kernel, compiled.asm["cubin"], printed.getvalue(), params, metadata.shared)


def triton_version() -> str:
    """Version of the installed package. Raises TapeoutError without one."""
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        raise TapeoutError(
            "compiling for a GPU needs the triton package, which is not installed; pip install 'tapeout[compiler,gpu]'"
        ) from None


def _compile(kernel: GpuKernel, capability: int) -> Any:
    triton = _load("triton")  # 0.5 s and 100 MB, of which only a build of GPU kernels has use
    module, _, name = kernel.source.partition(":")
    function: Any = getattr(_load(f"{_PACKAGE}.{module}"), name)
    if not hasattr(function, "cache_key"):
        raise TapeoutError(
            f"{kernel.source} was imported for Triton's interpreter (TRITON_INTERPRET); unset it to compile"
        )
    pdl = kernel.pdl and capability >= _PDL_SINCE
    defines: dict[str, Any] = dict(kernel.defines)
    names = [str(argument) for argument in function.arg_names]
    constants = {"PDL": pdl, "ARCH": capability, **defines}
    constants = {argument: constants[argument] for argument in names if argument in constants}
    _check_arguments(kernel, names, constants)
    types = {param.name: _triton_type(param) for param in kernel.params}
    signature = {argument: types.get(argument, "constexpr") for argument in names}
    aligned = {(names.index(p.name),): [["tt.divisibility", 16]] for p in kernel.params if p.type == "ptr"}
    options = {"num_warps": kernel.threads // 32, "launch_pdl": pdl, **dict(kernel.options)}
    target = _load("triton.backends.compiler").GPUTarget("cuda", capability, 32)
    source = _load("triton.compiler").ASTSource(fn=function, signature=signature, constexprs=constants, attrs=aligned)
    with _own_cache(triton.knobs):
        return triton.compile(source, target=target, options=options)


def _load(module: str) -> Any:
    """A module without types, imported when it is needed."""
    return importlib.import_module(module)


def _check_arguments(kernel: GpuKernel, names: list[str], constants: dict[str, Any]) -> None:
    params = [param.name for param in kernel.params]
    unknown = sorted({name for name, _ in kernel.defines} - set(names))
    if unknown:
        raise TapeoutError(f"kernel {kernel.name}: {kernel.source} has no argument {', '.join(unknown)}")
    rest = [name for name in names if name not in constants]
    if rest != params:
        raise TapeoutError(
            f"kernel {kernel.name}: {kernel.source} takes {', '.join(rest)}, but its template declares "
            f"{', '.join(params)}"
        )


def _triton_type(param: Param) -> str:
    if param.type == "ptr":
        return f"*{_DTYPES.get(param.dtype, param.dtype)}"
    return _DTYPES.get(param.type, param.type)


@contextlib.contextmanager
def _own_cache(knobs: Any) -> Generator[None]:
    """Triton writes each step to its cache folder: a temporary one here, and no source paths into the cubin."""
    with tempfile.TemporaryDirectory(prefix="tapeout-triton-") as folder, contextlib.ExitStack() as stack:
        for group in (knobs.cache, knobs.compilation, knobs.nvidia):
            stack.enter_context(group.scope())
        knobs.cache.dir = folder
        knobs.compilation.disable_line_info = True
        knobs.nvidia.dump_ptxas_log = True
        yield


@contextlib.contextmanager
def _quiet() -> Generator[io.StringIO]:
    """What Triton prints, the assembler's report in it, instead of printing it."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        yield printed


def first_lines(text: str) -> str:
    """The beginning of a compiler's message, in one line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return "; ".join(lines[:_ERROR_LINES])
