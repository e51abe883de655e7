"""The spec: what to compile, from a YAML file and ``--set`` overrides to a frozen, checked value."""

from __future__ import annotations

from tapeout.compiler.spec.loader import load_spec
from tapeout.compiler.spec.schema import (
    Link,
    Model,
    Parallel,
    Quantization,
    Rule,
    Serving,
    Spec,
    Stored,
    Topology,
    json_schema,
    require_one_device,
)

__all__ = [
    "Link",
    "Model",
    "Parallel",
    "Quantization",
    "Rule",
    "Serving",
    "Spec",
    "Stored",
    "Topology",
    "json_schema",
    "load_spec",
    "require_one_device",
]
