"""gpt-oss as on the hub: experts in MXFP4, gate and up in turns, the rest bfloat16."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import witness_experts
from test_families import TOLERANCE, build, decoded_logits, relative_error
from witness import Witness, kl_divergence, token_ids

from tapeout.compiler.checkpoints import open_checkpoint
from tapeout.compiler.emit.evaluate import ErrorSums, Evaluator
from tapeout.compiler.emit.native import load_native
from tapeout.compiler.environment import Environment
from tapeout.compiler.spec import Model, Quantization
from tapeout.compiler.verify.reference import Reference
from tapeout.passes.ingest import ingest
from tapeout.runtime import load
from tapeout.runtime.errors import TapeoutError


def checkpoint(folder: Path, top_k: int) -> Witness:
    return witness_experts.gpt_oss(num_experts_per_tok=top_k).save_mxfp4(folder)


def test_experts_are_bit_for_bit_what_transformers_reads(tmp_path: Path) -> None:
    held = checkpoint(tmp_path, 2).model.state_dict()
    source = open_checkpoint(tmp_path)
    recipes = dict(ingest(Model(source=str(tmp_path)), source).recipes)
    native = load_native(Environment.read().cache / "emit")
    evaluator = Evaluator(source, native)
    for layer in range(4):
        at = f"model.layers.{layer}.mlp.experts"
        gate_up, bias = held[f"{at}.gate_up_proj"].transpose(1, 2), held[f"{at}.gate_up_proj_bias"]
        wanted = {
            "gate_proj": (gate_up[:, 0::2], bias[:, 0::2]),
            "up_proj": (gate_up[:, 1::2], bias[:, 1::2]),
            "down_proj": (held[f"{at}.down_proj"].transpose(1, 2), held[f"{at}.down_proj_bias"]),
        }
        for name, (weights, biases) in wanted.items():
            recipe = recipes[f"{at}.{name}"]
            assert recipe.format == "mxfp4"
            data = evaluator.rows(recipe, 0, recipe.shape[0], ErrorSums())
            got = native.decode("mxfp4", data, recipe.shape[1])
            np.testing.assert_array_equal(got, weights.reshape(-1, weights.shape[-1]).numpy())
            vector = evaluator.rows(recipes[f"{at}.{name}.bias"], 0, biases.numel(), ErrorSums())
            np.testing.assert_array_equal(vector.view("<f4").ravel(), biases.reshape(-1).numpy())


# with all experts chosen, since a choice between two that are close turns when activations are rounded to 8 bits
@pytest.mark.parametrize(("activations", "top_k"), [("f32", 2), ("int8", 5)])
def test_logits_follow_transformers(activations: str, top_k: int, tmp_path: Path) -> None:
    held, ids = checkpoint(tmp_path / "hf", top_k), token_ids(80)
    expected = held.logits(ids)
    quantization = Quantization.model_validate({"activations": activations})
    with load(build(tmp_path / "hf", tmp_path / "artifact", quantization)) as model:
        for logits in (model.logits(ids), decoded_logits(model, ids)):
            if activations == "f32":
                assert relative_error(logits, expected) <= TOLERANCE
            else:
                assert kl_divergence(expected, logits).mean() <= 5e-3


def test_a_gguf_that_transformers_cannot_read_is_no_reference(tmp_path: Path) -> None:
    """transformers 5.24 takes the length of a key for the scaling of the rotation."""
    file = tmp_path / "model.gguf"
    witness_experts.gpt_oss().write_gguf(file)
    sentence = r"transformers \S+ cannot load this checkpoint as a reference \(.*\); verify with --witness onnx needs"
    with pytest.raises(TapeoutError, match=f"^{file}: {sentence} no transformers$"):
        Reference.open(file, "gguf")
