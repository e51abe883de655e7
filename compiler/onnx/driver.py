"""`tapeout export-onnx`: resolve the source, ingest it, and write the logical program with its weights in float32."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tapeout.compiler.artifact import canonical_json
from tapeout.compiler.checkpoints import Checkpoint, open_source, require_weights
from tapeout.compiler.checkpoints.onnx import MODEL
from tapeout.compiler.emit.evaluate import Evaluator
from tapeout.compiler.emit.native import load_native
from tapeout.compiler.environment import Environment
from tapeout.compiler.onnx.model import program_model
from tapeout.compiler.onnx.weights import DATA, PAGE, external_initializers, float_bytes, inline_initializers
from tapeout.compiler.progress import Progress, SilentProgress
from tapeout.compiler.spec import Model, Spec, load_spec
from tapeout.compiler.stages import LogicalModel
from tapeout.compiler.views.plan_file import load_plan
from tapeout.passes.assign_formats import assign_formats
from tapeout.passes.ingest import ingest
from tapeout.runtime.errors import TapeoutError

MAX_INLINE = 2_000_000_000  # a protobuf message ends at 2 GiB


def export_onnx(
    spec: Spec, output: Path, *, base: Path | None = None, external: bool = False, progress: Progress | None = None
) -> Path:
    """Write ``output``/model.onnx, and with ``external`` or above 2 GB model.onnx.data; answers with the model's path.

    Weights are the numbers that the spec's formats hold, as float32. ``base`` is the folder that a relative
    ``model.source`` starts from. Raises TapeoutError in one sentence; nothing is left behind then.
    """
    if output.exists():
        raise TapeoutError(f"{output}: exists already; choose another folder for the ONNX model")
    checkpoint = open_source(spec.model.source, spec.model.config, base or Path.cwd())
    evaluator, logical = open_model(require_weights(checkpoint), spec.model)
    quantized = assign_formats(logical, spec.quantization)
    model, writer = program_model(logical.graph, _metadata(spec, logical))
    weights = {writer.weight(slot): recipe for slot, recipe in quantized.recipes}
    total = sum(map(float_bytes, weights.values()))
    external = external or total > MAX_INLINE
    task = (progress or SilentProgress()).task("weights", total, unit="B")
    with _new_folder(output, total + len(weights) * PAGE + model.ByteSize()) as folder, task:
        if external:
            made = external_initializers(evaluator, weights, folder / DATA, task.advance)
        else:
            made = inline_initializers(evaluator, weights, task.advance)
        model.graph.initializer.extend(made)
        (folder / MODEL).write_bytes(model.SerializeToString(deterministic=True))
    return output / MODEL


def load_any_spec(path: Path, overrides: Sequence[str], source: str | None = None) -> Spec:
    """The spec at ``path``, or that of the artifact there; ``source`` replaces its checkpoint. Raises TapeoutError."""
    if not path.is_dir():
        return load_spec(path, [*overrides, *([f"model.source={source}"] if source else [])])
    if overrides:
        raise TapeoutError(f"{path}: is an artifact, whose spec is settled; --set goes with a spec file")
    spec = Spec.model_validate(load_plan(path)["spec"])
    return spec.model_copy(update={"model": spec.model.model_copy(update={"source": source})}) if source else spec


def open_model(checkpoint: Checkpoint, section: Model) -> tuple[Evaluator, LogicalModel]:
    """A checkpoint as a logical model, and what evaluates its recipes."""
    native = load_native(Environment.read().cache / "emit")
    return Evaluator(checkpoint, native), ingest(section, checkpoint)


def _metadata(spec: Spec, logical: LogicalModel) -> dict[str, str]:
    resolved = spec.resolved()
    return {
        "tapeout.model": logical.name,
        "tapeout.family": logical.family,
        "tapeout.source": str(resolved["model"]["source"]),
        "tapeout.spec_sha256": hashlib.sha256(canonical_json(resolved)).hexdigest(),
    }


@contextmanager
def _new_folder(output: Path, needed: int) -> Generator[Path]:
    """A temporary folder beside ``output`` that takes its place when all went well, and goes when not."""
    folder = output.with_name(f".{output.name}.tmp-{os.getpid()}")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(output.parent).free
        if free < needed:
            raise TapeoutError(
                f"{output.parent}: the ONNX model needs {needed / 1e6:.1f} MB and {free / 1e6:.1f} MB are free there; "
                "free some space or choose another folder"
            )
        folder.mkdir()
        yield folder
        folder.rename(output)
    except OSError as error:
        blocked = isinstance(error, FileExistsError | NotADirectoryError)
        reason = "a part of the path is a file" if blocked else error.strerror
        raise TapeoutError(f"{output}: cannot be written ({reason}); choose another folder") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
