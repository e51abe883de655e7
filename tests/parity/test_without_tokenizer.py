"""Checkpoints without a tokenizer: token ids in, token ids out, and one sentence for text."""

from __future__ import annotations

from pathlib import Path

import pytest
import witness
from test_families import build, relative_error

from tapeout.runtime import TapeoutError, load


@pytest.mark.parametrize("container", ["safetensors", "gguf"])
def test_ids_work_and_text_is_refused(container: str, tmp_path: Path) -> None:
    reference, ids = witness.llama(), witness.token_ids(20)
    if container == "gguf":
        source = tmp_path / "model.gguf"
        reference.write_gguf(source, tokenizer=False)
    else:
        source = tmp_path / "hf"
        reference.model.save_pretrained(source)
    with load(build(source, tmp_path / "artifact")) as model:
        assert relative_error(model.logits(ids), reference.logits(ids)) <= 2e-5
        assert model.eos_ids == {witness.VOCAB - 1}
        step = next(iter(model.generate(ids, max_tokens=1)))
        assert (step.token, step.text) == (reference.greedy(ids, 1)[0], "")
        with pytest.raises(TapeoutError, match="the checkpoint had no tokenizer, so the artifact takes token ids"):
            model.tokenizer.encode("Hello")
