"""The runtime stands alone: what it may import, what a fresh interpreter loads, and how long that takes."""

from __future__ import annotations

import ast
import json
import statistics
import subprocess
import sys
from pathlib import Path

import tapeout.compiler
import tapeout.passes
import tapeout.runtime

RUNTIME = Path(tapeout.runtime.__file__).parent
FOREIGN = {
    *("torch", "triton", "pydantic", "networkx", "onnx", "gguf", "safetensors", "transformers"),
    *("typer", "rich", "ruamel"),
    *("tapeout.compiler", "tapeout.passes", "tapeout.specs"),
}


def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
    return found


def breaks(name: str, banned: set[str]) -> bool:
    return any(name == each or name.startswith(f"{each}.") for each in banned)


def test_the_runtime_imports_nothing_of_the_compiler() -> None:
    modules = RUNTIME.rglob("*.py")
    assert not {f"{path.name}: {name}" for path in modules for name in imports(path) if breaks(name, FOREIGN)}


def test_the_compiler_does_not_import_passes_but_where_it_drives_them() -> None:
    root = Path(tapeout.compiler.__file__).parent
    drivers = {"driver.py", "app.py"}
    found = {p.name for p in root.rglob("*.py") if any(breaks(name, {"tapeout.passes"}) for name in imports(p))}
    assert found <= drivers


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_a_fresh_interpreter_loads_neither_compiler_nor_heavy_libraries() -> None:
    loaded = json.loads(run("import json, sys, tapeout.runtime; print(json.dumps(sorted(sys.modules)))"))
    assert not [name for name in loaded if breaks(name, FOREIGN | {"numpy", "tokenizers", "jinja2"})]


def test_importing_the_runtime_costs_no_more_than_numpy_and_fifty_milliseconds() -> None:
    clock = "import time; t = time.perf_counter(); import {}; print(time.perf_counter() - t)"
    times = {name: [float(run(clock.format(name))) for _ in range(5)] for name in ("numpy", "tapeout.runtime")}
    assert statistics.median(times["tapeout.runtime"]) <= statistics.median(times["numpy"]) + 0.05
