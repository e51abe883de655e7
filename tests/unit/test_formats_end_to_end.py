"""A model converted to each kind of format runs as the float32 model of the values that its weights stand for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import small_model
import tile16_reference as witness

from tapeout.compiler.driver import compile_spec
from tapeout.compiler.formats import FORMATS
from tapeout.compiler.spec import Model, Quantization, Serving, Spec
from tapeout.runtime import load

CONFIG = {**small_model.CONFIG, "hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))  # rows that may share an e4m3 scale
IDS = list(range(3, 90, 2))
Floats = npt.NDArray[np.float32]


def logits(source: Path, out: Path, format: str) -> Floats:
    serving = Serving(max_context=128, kv_dtype="f32")
    compile_spec(Spec(model=Model(source=str(source)), quantization=Quantization(default=format), serving=serving), out)
    with load(out) as model:
        return model.logits(IDS).astype(np.float32)


def stands_for(arrays: small_model.Arrays, format: str) -> small_model.Arrays:
    """The values after a conversion, decoded by the witness."""
    encode, out = FORMATS[format].encode, dict(arrays)
    fused = FUSED if FORMATS[format].tiles else ()
    assert encode is not None
    for name, values in arrays.items():
        part = name.split(".")[-2]
        group = next((names for names in fused if part in names), (part,))
        if values.ndim == 1 or part != group[0]:
            continue
        names = [name.replace(part, each) for each in group]
        rows = witness.dequantize(format, encode(np.concatenate([arrays[each] for each in names])))
        ends = np.cumsum([len(arrays[each]) for each in names])
        out |= dict(zip(names, np.split(rows, ends[:-1]), strict=True))
    return out


@pytest.mark.parametrize("format", ["int4_g64", "int4_g128_zp", "mxfp4", "nvfp4", "fp8", "fp8_row", "fp8_block128"])
def test_a_converted_model_is_that_of_its_values(format: str, tmp_path: Path) -> None:
    arrays = small_model.tensors(CONFIG)
    small_model.write_folder(tmp_path / "model", arrays, CONFIG)
    small_model.write_folder(tmp_path / "values", stands_for(arrays, format), CONFIG)
    expected = logits(tmp_path / "values", tmp_path / "f32", "keep").astype(np.float64)
    found = logits(tmp_path / "model", tmp_path / format, format)
    error = np.abs(found - expected).max() / expected.std()
    # activations are float32 beside e4m3 numbers, else of 8 bits
    assert error <= (2e-5 if format.startswith("fp8") else 0.15), error
