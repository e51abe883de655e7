"""Builds the native library of a CPU target from C sources with the pinned ziglang wheel, byte for byte reproducibly.

The library is linked without libc: its few undefined symbols (memcpy, pthread_create, …) resolve in the process that
loads it, which always holds a C library, so one file serves glibc and musl and no stub libraries are built.
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from tapeout.compiler.zig import Zig, find_zig
from tapeout.runtime.errors import TapeoutError

SOURCES = Path(__file__).parent / "cpu"
TARGETS = {"x86_64_v3": "x86_64_v3", "x86_64_v4": "x86_64_v4+avx512vnni"}
"""Library targets and the -mcpu of each, the most widely available first."""
_PER_TARGET = frozenset(
    {"attention.c", "compressed.c", "select_entries.c", "index.c", "latent.c", "linear.c", "linear_grouped.c"}
)
"""Sources that gain from wider instructions; the others are compiled once, for the narrowest target of the build."""

_PREFIX_HEADER = "#include <immintrin.h>\n#include <stddef.h>\n#include <stdint.h>\n#include <string.h>\n"
# Contraction stays off: a fused multiply-add is written as an intrinsic, so results do not follow the optimizer's mood.
_FLAGS = (
    *("-O3", "-target", "x86_64-linux-gnu.2.17", "-std=gnu11", "-g0", "-fPIC", "-fvisibility=hidden"),
    *("-fno-math-errno", "-ffp-contract=off", "-fno-trapping-math", "-fno-sanitize=all", "-fno-stack-protector"),
    *("-fomit-frame-pointer", "-fno-unwind-tables", "-fno-asynchronous-unwind-tables", "-fno-ident"),
    *("-Wall", "-Wextra", "-Werror", "-Wno-unused-function"),
)
_LINK = ("-target", "x86_64-linux-gnu.2.17", "-shared", "-nostdlib", "-s", "-Wl,-z,undefs", "-Wl,--build-id=none")
_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Unit:
    """One translation unit: a C file of ``compiler/kernels/cpu`` and the macros it is compiled with."""

    source: str
    defines: tuple[tuple[str, str], ...] = ()


def build_libraries(
    units: Sequence[Unit],
    kernels: Sequence[str],
    targets: Sequence[str],
    cache: Path,
    progress: Progress | None = None,
    *,
    sources: Path = SOURCES,
) -> dict[str, bytes]:
    """The shared libraries, one a target, as bytes.

    ``kernels`` are kernel names in the plan's order; each must be defined by one of the units as
    ``tp_kernel_<name>``. Objects are kept in ``cache`` by the digest of all that goes into them. ``progress`` is called
    with (steps done, steps in all) from worker threads. Raises TapeoutError with the compiler's first lines if a source
    does not compile, and for an unknown target.
    """
    for target in targets:
        if target not in TARGETS:
            raise TapeoutError(f"no toolchain target is called {target!r}; there are {', '.join(TARGETS)}")
    ordered = tuple(dict.fromkeys(units))
    build = _Build(sources, cache, find_zig(), _Counter(build_steps(ordered, targets), progress))
    cache = cache.absolute()
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="build-", dir=cache) as scratch:
        build.scratch = Path(scratch)
        with ThreadPoolExecutor(max_workers=max(2, len(os.sched_getaffinity(0)))) as pool:
            headers = {target: pool.submit(build.prefix_header, target) for target in targets}
            objects = {
                (target, unit): pool.submit(build.compile, unit, target, headers[target])
                for unit in sorted(ordered, key=build.size, reverse=True)  # the longest first
                for target in targets
                if target == _compiled_for(unit, target, targets)
            }
            table = pool.submit(build.table, kernels, targets[0])
            _raise_first([*objects.values(), table], pool)
            linked = {
                target: pool.submit(
                    build.link,
                    [
                        *(objects[_compiled_for(unit, target, targets), unit].result() for unit in ordered),
                        table.result(),
                    ],
                    target,
                )
                for target in targets
            }
            return {target: future.result() for target, future in linked.items()}


def build_steps(units: Sequence[Unit], targets: Sequence[str]) -> int:
    """How many steps ``build_libraries`` reports: objects, the kernel table and the libraries."""
    return (
        len({(unit, _compiled_for(unit, target, targets)) for unit in units for target in targets}) + 1 + len(targets)
    )


def _compiled_for(unit: Unit, target: str, targets: Sequence[str]) -> str:
    """The target whose object of ``unit`` goes into the library for ``target``."""
    return target if unit.source in _PER_TARGET else min(targets, key=list(TARGETS).index)


def _raise_first(futures: list[Future[Path]], pool: ThreadPoolExecutor) -> None:
    """Raise what failed, the first in order of its words: of all that ran, so that it is the same every time."""
    finished, _ = wait(futures, return_when=FIRST_EXCEPTION)
    if not any(future.exception() for future in finished):
        return
    pool.shutdown(wait=True, cancel_futures=True)
    failed = [future for future in futures if not future.cancelled() and future.exception()]
    min(failed, key=lambda future: str(future.exception())).result()


class _Counter:
    def __init__(self, total: int, progress: Progress | None) -> None:
        self.total = total
        self.progress = progress
        self.done = 0
        self.lock = threading.Lock()

    def step(self) -> None:
        with self.lock:
            self.done += 1
            if self.progress is not None:
                self.progress(self.done, self.total)


class _Build:
    """One run of the toolchain: where sources are, where results are kept."""

    def __init__(self, sources: Path, cache: Path, zig: Zig, counter: _Counter) -> None:
        self.sources = sources
        self.cache = cache.absolute()
        self.zig = zig
        self.counter = counter
        self.scratch = cache

    def size(self, unit: Unit) -> int:
        """Characters that the compiler reads of our own sources: a guess at what compiling costs."""
        return sum(map(len, self._texts(unit.source)))

    def prefix_header(self, target: str) -> Path:
        """The intrinsics headers, parsed once a target: they cost more than most of our sources."""
        stamp = self.zig.folder / "lib" / "include" / "immintrin.h"
        # A precompiled header checks the files it came from, so its key holds where and when they were written.
        key = self._key("pch", target, _PREFIX_HEADER, str(stamp), str(stamp.stat().st_mtime_ns), str(self.cache))
        path = self.cache / f"{key}.pch"
        source = self.cache / f"{key}.h"
        if not path.exists() or not source.exists():
            source.write_text(_PREFIX_HEADER)
            self._run(["-x", "c-header", str(source)], target, path, f"the intrinsics header for {target}")
        return path

    def compile(self, unit: Unit, target: str, header: Future[Path]) -> Path:
        """The object of one unit."""
        defines = [f"-D{name}={value}" for name, value in unit.defines]
        key = self._key("unit", target, unit.source, *defines, *self._texts(unit.source))
        path = self.cache / f"{key}.o"
        if not path.exists():
            what = " ".join([unit.source, *defines])
            self._run(["-include-pch", str(header.result()), *defines, "-c", unit.source], target, path, what)
        self.counter.step()
        return path

    def table(self, kernels: Sequence[str], target: str) -> Path:
        """The object of the generated kernel table: pointers to the kernels, in the plan's order."""
        hidden = '__attribute__((visibility("hidden")))'
        text = "".join(
            [
                '#include "tapeout_cpu.h"\n',
                *(f"extern {hidden} const tp_kernel tp_kernel_{name};\n" for name in sorted(set(kernels))),
                f"extern {hidden} const tp_kernel *const tp_kernels[];\nextern {hidden} const int tp_kernel_count;\n",
                "const tp_kernel *const tp_kernels[] = {",
                *(f"&tp_kernel_{name}, " for name in kernels),
                f"0}};\nconst int tp_kernel_count = {len(kernels)};\n",
            ]
        )
        path = self.cache / f"{self._key('table', target, text, *self._texts('tapeout_cpu.h'))}.o"
        if not path.exists():
            source = self.scratch / f"table-{target}.c"
            source.write_text(text)
            self._run(["-I.", "-c", str(source)], target, path, "the kernel table")
        self.counter.step()
        return path

    def link(self, objects: list[Path], target: str) -> bytes:
        """The shared library."""
        key = self._key("link", target, *_LINK, *(path.stem for path in objects))
        path = self.cache / f"{key}.so"
        if not path.exists():
            names = [path.name for path in objects]
            failure = f"linking the kernels for {target} failed"
            self.zig.cc([*_LINK, *names], path, scratch=self.scratch, cwd=self.cache, failure=failure)
        self.counter.step()
        return path.read_bytes()

    def _key(self, *parts: str) -> str:
        text = "\0".join((self.zig.version, *_FLAGS, *parts))
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def _texts(self, name: str) -> list[str]:
        """Names and texts of a source and of all it includes, each once."""
        seen: dict[str, str] = {}
        todo = [name]
        while todo:
            current = todo.pop()
            if current in seen:
                continue
            try:
                seen[current] = (self.sources / current).read_text(encoding="utf-8")
            except FileNotFoundError:
                raise TapeoutError(
                    f"the kernel source {name} needs {current}, which is not in {self.sources}"
                ) from None
            todo.extend(_INCLUDE.findall(seen[current]))
        return [part for item in sorted(seen.items()) for part in item]

    def _run(self, arguments: list[str], target: str, output: Path, what: str) -> None:
        flags = [*_FLAGS, f"-mcpu={TARGETS[target]}", *arguments]
        failure = f"compiling {what} for {target} failed"
        self.zig.cc(flags, output, scratch=self.scratch, cwd=self.sources, failure=failure)
