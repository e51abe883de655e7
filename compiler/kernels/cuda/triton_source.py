"""What a Triton function is made of, read off the sources without importing Triton: the content a cache key holds.

The function's own text, and of each module below ``tapeout.compiler.kernels.cuda`` the definitions that it reaches by
name. Comments, formatting, paths and the rest of a module are left out, so a new template changes no other's key.
"""

from __future__ import annotations

import ast
import threading
from functools import lru_cache
from pathlib import Path

from tapeout.runtime.errors import TapeoutError

PACKAGE = "tapeout.compiler.kernels.cuda"
FOLDER = Path(__file__).parent
_PARSER = threading.Lock()
"""CPython 3.11 counts the depth of trees for all threads together, and raises SystemError when two parse at once."""

Definition = ast.FunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign | ast.Import | ast.ImportFrom


@lru_cache(maxsize=256)
def triton_content(source: str, folder: Path = FOLDER) -> str:
    """The text of ``module:function`` and of all that it reaches. Raises TapeoutError without such a function."""
    module, _, function = source.partition(":")
    found: dict[tuple[str, str], str] = {}
    todo = [(module, function)]
    while todo:
        place = todo.pop()
        if place in found:
            continue
        names = _definitions(place[0], folder)
        if place[1] not in names:
            raise TapeoutError(f"no Triton function is called {source}: {place[0]} defines no {place[1]}")
        definition = names[place[1]]
        found[place] = ast.unparse(definition)
        todo.extend(_reached(place[0], definition, names, folder))
    return "\n".join(f"{module}.{name}\n{text}" for (module, name), text in sorted(found.items()))


@lru_cache(maxsize=64)
def _definitions(module: str, folder: Path) -> dict[str, Definition]:
    path = folder / f"{module}.py"
    try:
        with _PARSER:
            tree = ast.parse(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise TapeoutError(f"no module of Triton kernels is called {module}") from None
    names: dict[str, Definition] = {}
    for node in tree.body:
        names.update((name, node) for name in _bound(node) if isinstance(node, Definition))
    return names


def _bound(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [alias.asname or alias.name.partition(".")[0] for alias in node.names]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)]


def _reached(module: str, definition: Definition, names: dict[str, Definition], folder: Path) -> list[tuple[str, str]]:
    """Definitions that one uses: of its own module by name, of sibling modules through what was imported."""
    if isinstance(definition, ast.Import | ast.ImportFrom):
        return []
    used = {node.id for node in ast.walk(definition) if isinstance(node, ast.Name)} & names.keys()
    reached = [(module, name) for name in used]
    for name in used:
        statement = names[name]
        if not isinstance(statement, ast.ImportFrom):
            continue
        original = next((alias.name for alias in statement.names if (alias.asname or alias.name) == name), name)
        if statement.module == PACKAGE:  # from tapeout.compiler.kernels.cuda import sibling
            fields = {
                node.attr
                for node in ast.walk(definition)
                if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == name
            }
            reached.extend((original, field) for field in fields)
        elif (statement.module or "").startswith(f"{PACKAGE}."):
            reached.append(((statement.module or "").removeprefix(f"{PACKAGE}."), original))
    return reached
