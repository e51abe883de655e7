"""The toolchain: same bytes from anywhere, objects kept by content, errors in the compiler's words."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import pytest

from tapeout.compiler import zig
from tapeout.compiler.kernels.toolchain import SOURCES, Unit, build_libraries
from tapeout.runtime.errors import TapeoutError

ENGINE = """
#include "tapeout_cpu.h"
extern __attribute__((visibility("hidden"))) const tp_kernel *const tp_kernels[];
extern __attribute__((visibility("hidden"))) const int tp_kernel_count;
__attribute__((visibility("default"))) const char *name(int i) { return i < tp_kernel_count ? tp_kernels[i]->name : 0; }
const char *file(void) { return __FILE__; }
"""
KERNEL = """
#include "shape.h"
static int tasks(const tp_launch *l, const tp_step *s) { (void)l; return s->rows; }
static void run(const tp_launch *l, const tp_step *s, int task, void *scratch) {
    (void)s, (void)scratch;
    memset(TP_PTR(char, l, 0) + task * SIZE, 0, SIZE);
}
#define NAME_OF(x) #x
#define DEFINE(n) const tp_kernel tp_kernel_##n = {NAME_OF(n), tasks, run};
#define EXPAND(n) DEFINE(n)
EXPAND(NAME)
"""
UNITS = [Unit("engine.c"), Unit("kernel.c", (("NAME", "one"),)), Unit("kernel.c", (("NAME", "two"),))]


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    return make_sources(tmp_path / "sources")


def make_sources(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "tapeout_cpu.h").write_bytes((SOURCES / "tapeout_cpu.h").read_bytes())
    (folder / "engine.c").write_text(ENGINE)
    (folder / "shape.h").write_text('#include "tapeout_cpu.h"\n#define SIZE 64\n')
    (folder / "kernel.c").write_text(KERNEL)
    return folder


def build(
    sources: Path, cache: Path, kernels: list[str], targets: tuple[str, ...] = ("x86_64_v3",)
) -> dict[str, bytes]:
    return build_libraries(UNITS, kernels, targets, cache, sources=sources)


def test_the_table_follows_the_plans_order(sources: Path, tmp_path: Path) -> None:
    for order in (["two", "one"], ["one", "two", "one"]):
        path = tmp_path / f"{len(order)}.so"
        path.write_bytes(build(sources, tmp_path / "cache", order)["x86_64_v3"])
        library = ctypes.CDLL(str(path))
        library.name.restype = ctypes.c_char_p
        assert [library.name(i) for i in range(len(order) + 1)] == [*(name.encode() for name in order), None]
        with pytest.raises(AttributeError):
            _ = library.file


def test_bytes_do_not_depend_on_path_folder_or_cache(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    targets = ("x86_64_v3", "x86_64_v4")
    first = build(sources, tmp_path / "cache", ["one", "two"], targets)
    other = make_sources(tmp_path / "somewhere" / "else" / "quite long")
    monkeypatch.chdir(other)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    assert build(other, Path("another cache"), ["one", "two"], targets) == first
    assert build(sources, tmp_path / "cache", ["one", "two"], targets) == first
    for data in first.values():
        assert str(tmp_path).encode() not in data


def test_only_what_changed_is_compiled_again(sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    real = zig.subprocess.run

    def spy(command: list[str], **options: object) -> object:
        compiled.append(" ".join(part for part in command if part.endswith(".c") or part.startswith("-DNAME")))
        return real(command, **options)

    monkeypatch.setattr(zig.subprocess, "run", spy)
    cache, steps = tmp_path / "cache", list[tuple[int, int]]()
    build_libraries(UNITS, ["one"], ["x86_64_v3"], cache, lambda *step: steps.append(step), sources=sources)
    assert steps == [(i, 5) for i in range(1, 6)]
    compiled.clear()
    build(sources, cache, ["one"])
    assert compiled == []
    (sources / "shape.h").write_text('#include "tapeout_cpu.h"\n#define SIZE 128\n')
    build(sources, cache, ["one"])
    assert sorted(compiled) == ["", "-DNAME=one kernel.c", "-DNAME=two kernel.c"]  # and a link
    compiled.clear()
    os.utime(sources / "engine.c", (0, 0))
    build(sources, cache, ["one"])
    assert compiled == []
    leftovers = [path.name for path in cache.iterdir() if path.name.startswith("build-")]
    assert leftovers == []


def test_an_error_names_the_source_and_the_target(sources: Path, tmp_path: Path) -> None:
    (sources / "kernel.c").write_text('#include "shape.h"\nint broken( { }\n')
    with pytest.raises(TapeoutError) as caught:
        build(sources, tmp_path / "cache", ["one"])
    text = str(caught.value)
    assert text.startswith("compiling kernel.c -DNAME=one for x86_64_v3 failed: kernel.c:2")
    assert "\n" not in text


def test_a_kernel_that_no_unit_defines_fails_at_the_link(sources: Path, tmp_path: Path) -> None:
    with pytest.raises(TapeoutError, match=r"linking the kernels for x86_64_v3 failed: .*tp_kernel_three"):
        build(sources, tmp_path / "cache", ["one", "three"])


def test_an_unknown_target_and_a_missing_header(sources: Path, tmp_path: Path) -> None:
    with pytest.raises(TapeoutError, match="no toolchain target is called 'arm'; there are x86_64_v3, x86_64_v4"):
        build(sources, tmp_path / "cache", ["one"], ("arm",))
    (sources / "shape.h").unlink()
    with pytest.raises(TapeoutError, match=r"the kernel source kernel\.c needs shape\.h, which is not in "):
        build(sources, tmp_path / "cache", ["one"])


def test_a_missing_compiler_is_one_sentence(sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zig.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(TapeoutError, match=r"needs the ziglang package, which is not installed; pip install"):
        build(sources, tmp_path / "cache", ["one"])
