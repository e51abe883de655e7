"""`tapeout eval` end to end on tiny models: perplexity and divergence as torch has them on transformers' logits."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import witness
from tokenizers import Tokenizer
from torch.nn.functional import cross_entropy, kl_div

from tapeout.compiler import cli
from tapeout.compiler.driver import compile_spec
from tapeout.compiler.evaluation import Evaluation, evaluate
from tapeout.compiler.spec import Model, Quantization, Serving, Spec
from tapeout.runtime import load
from tapeout.runtime.errors import TapeoutError

PROSE = Path(__file__).parents[1] / "texts" / "prose.txt"
CONTEXT = 96


def build(source: Path, output: Path, **quantization: Any) -> Path:
    serving = Serving.model_validate({"kv_dtype": "f32", "max_context": 128, "page_tokens": 16, "prefill_chunk": 64})
    spec = Spec(model=Model(source=str(source)), quantization=Quantization(**quantization), serving=serving)
    compile_spec(spec, output, cache=False)
    return output


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint ``hf`` whose model begins texts with a token, its artifacts ``f32`` and ``q8_0``, and ``text``."""
    root = tmp_path_factory.mktemp("eval")
    hf = witness.llama().save_hf(root / "hf")
    config = json.loads((hf / "tokenizer_config.json").read_bytes())
    (hf / "tokenizer_config.json").write_text(json.dumps({**config, "add_bos_token": True}))
    build(hf, root / "f32")
    build(hf, root / "q8_0", default="q8_0")
    (root / "text").write_text(PROSE.read_text("utf-8")[:400], "utf-8")
    return root


def windows(folder: Path) -> list[list[int]]:
    """As documented, by the tokenizers library: the begin token, then the next tokens of the text."""
    ids = Tokenizer.from_file(str(folder / "hf" / "tokenizer.json")).encode((folder / "text").read_text("utf-8")).ids
    return [[witness.VOCAB - 1, *ids[at : at + CONTEXT - 1]] for at in range(0, len(ids), CONTEXT - 1)]


@pytest.fixture(scope="module")
def found(folder: Path) -> Evaluation:
    """Both artifacts beside transformers."""
    names = [folder / "f32", folder / "q8_0"]
    return evaluate(names, folder / "text", against=str(folder / "hf"), context=CONTEXT)


def test_perplexity_is_that_of_transformers(folder: Path, found: Evaluation) -> None:
    model, parts = witness.llama(), windows(folder)
    losses = torch.cat([
        cross_entropy(torch.from_numpy(model.logits(ids)[:-1]).double(), torch.tensor(ids[1:]), reduction="none")
        for ids in parts
    ])  # fmt: skip
    assert len(parts) > 2 and found.positions == found.tokens == len(losses) and found.windows == len(parts)
    assert found.reference is not None
    for result, tolerance in ((found.reference, 1e-9), (found.artifacts[0], 1e-5)):
        assert result.perplexity.value == pytest.approx(float(losses.mean().exp()), rel=tolerance)
        error = result.perplexity.value * float(losses.std()) / math.sqrt(len(losses))
        assert result.perplexity.standard_error == pytest.approx(error, rel=1e-4)


def test_divergence_is_that_of_torch(folder: Path, found: Evaluation) -> None:
    reference, divergences, same, after = witness.llama(), list[Any](), list[Any](), list[int]()
    with load(folder / "q8_0") as model:
        for ids in windows(folder):
            p, q = torch.from_numpy(reference.logits(ids)[:-1]).double(), torch.from_numpy(model.logits(ids)[:-1])
            q = q.double()
            divergences.append(kl_div(q.log_softmax(-1), p.log_softmax(-1), reduction="none", log_target=True).sum(-1))
            same.append(p.argmax(-1) == q.argmax(-1))
            after += ids[1:]
    kl, exact, quantized = torch.cat(divergences), found.artifacts[0].divergence, found.artifacts[1].divergence
    assert exact is not None and quantized is not None
    assert exact.max < 1e-8 and exact.top1 == 1
    # the bound is float32 noise of two runs of transformers
    for value, expected in (
        (quantized.mean, kl.mean()),
        (quantized.median, kl.quantile(0.5)),
        (quantized.p99, kl.quantile(0.99)),
        (quantized.max, kl.max()),
    ):
        assert value == pytest.approx(float(expected), rel=1e-3)
    assert quantized.top1 == pytest.approx(float(torch.cat(same).double().mean()))
    worst = quantized.worst[0]
    assert (worst.position, worst.token) == (int(kl.argmax()), after[int(kl.argmax())])
    text = (folder / "text").read_text("utf-8")
    assert worst.text in text and worst.before in text


def test_an_artifact_as_the_reference_and_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [str(folder / "q8_0"), "--text", str(folder / "text"), "--context", str(CONTEXT), "--json"]
    assert cli.main(["eval", *words, "--against", str(folder / "q8_0")]) == 0
    (same,) = json.loads(capsys.readouterr().out)["artifacts"]
    assert (same["divergence"]["max"], same["divergence"]["top1"], same["speed"]) == (0, 1, None)
    assert same["weights"]["bytes"] == (folder / "q8_0" / "weights" / "rank0.safetensors").stat().st_size - header(
        folder / "q8_0"
    )


def header(artifact: Path) -> int:
    """Bytes of a weights file that are no weights: its length field and JSON header."""
    start = (artifact / "weights" / "rank0.safetensors").read_bytes()[:8]
    return 8 + int.from_bytes(start, "little")


def test_speed(folder: Path) -> None:
    (result,) = evaluate([folder / "f32"], folder / "text", context=CONTEXT, threads=1, speed=True).artifacts
    assert result.divergence is None and result.speed is not None
    assert (result.speed.threads, result.speed.prefill_tokens, result.speed.decode_tokens) == (1, 128, 127)
    assert min(*result.speed.prefill_tok_s_runs, *result.speed.decode_tok_s_runs) > 0


def test_what_transformers_cannot_open_is_one_sentence(folder: Path, tmp_path: Path) -> None:
    hf = witness.llama().save_hf(tmp_path / "hf")
    config = json.loads((hf / "config.json").read_bytes())
    (hf / "config.json").write_text(json.dumps({**config, "model_type": "nothing", "architectures": ["Nothing"]}))
    with pytest.raises(TapeoutError) as caught:
        evaluate([folder / "f32"], folder / "text", against=str(hf), context=CONTEXT)
    version = transformers.__version__
    assert str(caught.value).startswith(f"{hf}: transformers {version} cannot load this checkpoint as a reference (")
    assert "\n" not in str(caught.value)


def test_a_reference_of_another_vocabulary(folder: Path, tmp_path: Path) -> None:
    other = witness.llama(vocab_size=witness.VOCAB + 64).save_hf(tmp_path / "hf")
    with pytest.raises(TapeoutError, match=r"has a vocabulary of 384, .*f32 one of 320; only models of one vocabulary"):
        evaluate([folder / "f32"], folder / "text", against=str(other), context=CONTEXT)
