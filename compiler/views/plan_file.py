"""Reading a plan from an artifact folder or a plan.json."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from tapeout.compiler.guards import is_mapping
from tapeout.compiler.views.plan_check import check_plan
from tapeout.runtime.errors import TapeoutError
from tapeout.runtime.manifest import FORMAT_VERSION, MANIFEST, parse_manifest

Plan = dict[str, Any]

_SECTIONS = ("spec", "model", "weights", "recipes", "kernels", "memory", "communication", "graphs", "decisions")
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def load_plan(path: Path) -> Plan:
    """The plan of an artifact. Raises TapeoutError when there is none, it is damaged, or it is of a newer format."""
    file = path / "plan.json" if path.is_dir() else path
    try:
        text = file.read_bytes()
        if path.is_dir() and (path / MANIFEST).is_file():
            parse_manifest(path).verify([file.name])
        plan: Any = json.loads(text)
        _require_text(text, plan)
    except OSError as error:
        raise TapeoutError(f"{file}: {error.strerror}; give an artifact folder or its plan.json") from error
    except (ValueError, RecursionError) as error:
        raise TapeoutError(f"{file}: not a plan: {error}") from error
    if not is_mapping(plan) or "format_version" not in plan:
        raise TapeoutError(f"{file}: not a plan: it has no format_version")
    if plan["format_version"] != FORMAT_VERSION:
        version = plan["format_version"]
        raise TapeoutError(f"{file}: plan format {version}, but this version reads format {FORMAT_VERSION}")
    missing = [name for name in _SECTIONS if name not in plan]
    if missing:
        raise TapeoutError(f"{file}: not a plan: sections are missing: {', '.join(missing)}")
    try:
        check_plan(plan)
    except TapeoutError as error:
        raise TapeoutError(f"{file}: {error}") from error
    return plan


def param_names(kernel: Plan) -> list[str]:
    """Names of a kernel's arguments; those of GPU kernels stand beside their types."""
    return [param if isinstance(param, str) else param[0] for param in kernel["params"]]


def _require_text(text: bytes, plan: Any) -> None:
    """Refuse halves of a surrogate pair, which JSON can spell and no file or terminal can hold. Raises ValueError."""
    if _SURROGATE.search(text):
        json.dumps(plan, ensure_ascii=False).encode()
