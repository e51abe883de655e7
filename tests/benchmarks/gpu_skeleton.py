"""Compiles the cases of gpu_shapes.py without a GPU and without weights, and lists what fills the weights elsewhere.

    python gpu_skeleton.py OUT [CASE ...] [--device h200]

Writes OUT/CASE (an artifact but for weights/rank0.safetensors) and OUT/CASE.fill.json (the geometry of every weight,
and which checkpoint tensors lie in it in which order), read by gpu_fill.py and gpu_reference.py.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

from gpu_shapes import CASES, Case, write_sparse

from tapeout.compiler import driver
from tapeout.compiler.emit.weights import EmissionReport
from tapeout.compiler.spec import Model, Quantization, Serving, Spec, Topology


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("cases", nargs="*", default=list(CASES), metavar="CASE")
    parser.add_argument("--device", default="h200")
    arguments = parser.parse_args()
    for name in arguments.cases:
        started = time.perf_counter()
        folder = compile_skeleton(CASES[name], arguments.out, arguments.device)
        nbytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        print(f"{name}: {nbytes / 1e6:.2f} MB in {time.perf_counter() - started:.1f} s", flush=True)


def compile_skeleton(case: Case, out: Path, device: str) -> Path:
    """Compile a case into ``out / case.name``, replacing what was there."""
    folder = out / case.name
    shutil.rmtree(folder, ignore_errors=True)
    with tempfile.TemporaryDirectory() as scratch:
        source = write_sparse(Path(scratch) / case.name, case.config)
        spec = Spec(
            model=Model(source=str(source), name=case.name),
            quantization=Quantization(default=case.format),
            topology=Topology(device=device),
            serving=Serving(**case.serving),
        )
        plan = compile_without_weights(spec, folder)
    (out / f"{case.name}.fill.json").write_text(json.dumps(fill_recipe(plan, case.config, case.weights_of)))
    return folder


def compile_without_weights(spec: Spec, folder: Path) -> dict[str, Any]:
    """`tapeout compile` up to the weights, which are left out of the folder and of its manifest."""
    nothing = EmissionReport(0, 0, 0, (), {}, {}, 0, 0)
    roomy = mock.patch("tapeout.compiler.artifact._check_space", lambda *_: None)
    with roomy, mock.patch.object(driver, "_add_weights", lambda *_, **__: nothing):
        plan = driver.compile_spec(spec, folder, cache=False)
    assert not (folder / driver.WEIGHTS).exists()
    return plan


def fill_recipe(plan: dict[str, Any], config: dict[str, Any], weights_of: str) -> dict[str, Any]:
    """What each weight's bytes mean: constants by value, matrices by their planes and the tensors in them."""
    from tapeout.compiler.recipes_table import NestedRecipes

    nested = NestedRecipes(plan)
    weights = [_weight(entry, nested.of(entry)[0]) for entry in plan["weights"]]
    return {"config": config, "weights_of": weights_of, "weights": weights}


def _weight(entry: dict[str, Any], recipe: dict[str, Any]) -> dict[str, Any]:
    result = {key: entry[key] for key in ("name", "shape", "format", "layout", "offset", "bytes")}
    parts = _parts(recipe)
    if parts and parts[0][0] == "":
        result["values"] = parts[0][1]
    else:
        result["tensors"] = parts
    if entry["layout"] == "planes":
        from tapeout.compiler.layouts import plane_geometry

        result["planes"] = asdict(plane_geometry(tuple(entry["shape"]), entry["format"]))
    return result


def _parts(recipe: dict[str, Any]) -> list[tuple[str, Any]]:
    """(tensor, rows) in the order they lie in a weight, or ("", values) for a constant."""
    match recipe["op"]:
        case "read":
            return [(recipe["tensor"], recipe["shape"][0])]
        case "constant":
            return [("", recipe["values"])]
        case "concat":
            return [part for each in recipe["parts"] for part in _parts(each)]
        case "convert" | "pack":
            return _parts(recipe["source"])
        case op:
            raise ValueError(f"a benchmark model has no {op} in its recipes")


if __name__ == "__main__":
    main()
