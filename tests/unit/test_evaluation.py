"""`tapeout eval` without a model: the numbers against torch, windows, sentences, the table and the command."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from torch.nn.functional import cross_entropy, kl_div

from tapeout.compiler import cli
from tapeout.compiler.evaluation import Divergence, Evaluation, Position, Result, Speed, evaluate, print_evaluation
from tapeout.compiler.evaluation.measure import Perplexity, Scores, perplexity, score
from tapeout.compiler.evaluation.subjects import Subject, Weights, check_comparable, open_reference
from tapeout.compiler.evaluation.windows import Window, context_of, cut, read_text
from tapeout.runtime.errors import TapeoutError

VOCAB = 50


def logits(seed: int, positions: int = 70, spread: float = 4.0) -> np.ndarray:
    """Random ones; 70 positions are more than one strip of them."""
    return (spread * np.random.default_rng(seed).standard_normal((positions, VOCAB))).astype(np.float32)


def test_losses_and_divergences_equal_torch() -> None:
    p, q = logits(1), logits(1) + logits(2, spread=0.3)
    targets = np.random.default_rng(3).integers(0, VOCAB, len(p)).tolist()
    scores = score(q, targets, p)
    p64, q64 = (torch.from_numpy(each).double().log_softmax(-1) for each in (p, q))
    losses = cross_entropy(torch.from_numpy(q).double(), torch.tensor(targets), reduction="none")
    np.testing.assert_allclose(scores.losses, losses.numpy(), rtol=1e-12)
    divergences = kl_div(q64, p64, reduction="none", log_target=True).sum(-1)
    np.testing.assert_allclose(scores.kl, divergences.numpy(), rtol=1e-10)
    assert scores.kl.min() > 0
    assert scores.same.tolist() == (p64.argmax(-1) == q64.argmax(-1)).tolist()
    assert 0 < scores.same.mean() < 1


def test_divergence_is_measured_from_the_reference() -> None:
    p, q = logits(1), logits(2)
    targets = [0] * len(p)
    assert not np.allclose(score(q, targets, p).kl, score(p, targets, q).kl)
    assert score(p, targets, p).kl.max() == 0


def test_large_logits_do_not_overflow() -> None:
    shifted = score(logits(1) + np.float32(3e4), [1] * 70, logits(1))
    np.testing.assert_allclose(shifted.kl, 0, atol=1e-4)  # float32 rounds the sum


def test_perplexity_and_its_standard_error() -> None:
    losses = np.log(np.array([2.0, 4.0, 8.0]))
    found = perplexity(losses)
    assert found.value == pytest.approx(4)
    assert found.standard_error == pytest.approx(4 * np.log(2) / 3**0.5)  # the sample deviation of 1, 2, 3 is 1


def test_a_uniform_model_has_the_vocabulary_as_perplexity() -> None:
    found = perplexity(score(np.zeros((70, VOCAB), np.float32), [7] * 70).losses)
    assert (found.value, found.standard_error) == pytest.approx((VOCAB, 0))


def test_windows_join_in_order() -> None:
    parts = [score(logits(seed), [0] * 70, logits(9)) for seed in (1, 2)]
    joined = Scores.join(parts)
    assert joined.kl.tolist() == [*parts[0].kl, *parts[1].kl]
    assert (len(joined.losses), len(joined.same)) == (140, 140)


def test_windows_lie_side_by_side_and_every_token_but_their_first_counts() -> None:
    assert cut(range(10, 20), [], 4, "t") == [
        Window((10, 11, 12, 13), 1),
        Window((14, 15, 16, 17), 5),
        Window((18, 19), 9),
    ]
    assert cut(range(10, 19), [], 4, "t")[-1] == Window((14, 15, 16, 17), 5)  # one token left predicts nothing


def test_a_begin_token_starts_every_window() -> None:
    windows = cut(range(10, 17), [1], 4, "t")
    assert windows == [Window((1, 10, 11, 12), 0), Window((1, 13, 14, 15), 3), Window((1, 16), 6)]
    assert [token for window in windows for token in window.targets] == list(range(10, 17))


@pytest.mark.parametrize(("asked", "longest", "context"), [(None, 2048, 512), (None, 300, 300), (64, 300, 64)])
def test_context(asked: int | None, longest: int, context: int) -> None:
    assert context_of(asked, longest) == context


@pytest.mark.parametrize("asked", [1, 301, -5])
def test_a_context_that_does_not_fit(asked: int) -> None:
    expected = (
        f"windows of {asked} tokens do not fit: they take at least 2 tokens, and at most the 300 of the shortest "
        "context that an artifact here was planned for"
    )
    with pytest.raises(TapeoutError) as caught:
        context_of(asked, 300)
    assert str(caught.value) == expected


def test_a_short_text() -> None:
    with pytest.raises(TapeoutError) as caught:
        cut([5, 6, 7], [1], 8, "t.txt")
    assert str(caught.value) == (
        "t.txt: is too short: 3 tokens, where one window takes 7; give a longer text or a smaller --context"
    )


def test_texts_that_cannot_be_read(tmp_path: Path) -> None:
    none, bad = tmp_path / "none.txt", tmp_path / "bad.txt"
    bad.write_bytes(b"abc\xff")
    expected = {
        none: f"{none}: cannot be read (No such file or directory); --text takes a file of plain text",
        tmp_path: f"{tmp_path}: cannot be read (Is a directory); --text takes a file of plain text",
        bad: f"{bad}: is not UTF-8 (byte 3); --text takes a file of plain text in UTF-8",
    }
    for path, sentence in expected.items():
        with pytest.raises(TapeoutError) as caught:
            evaluate([tmp_path / "no-artifact"], path)
        assert str(caught.value) == sentence


def test_line_ends_stay(tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(b"a\r\nb")
    assert read_text(tmp_path / "t") == "a\r\nb"


class StandIn:
    """A model with a tokenizer of one token a character, from ``base``."""

    def __init__(self, base: int) -> None:
        self.base, self.tokenizer = base, self

    def encode(self, text: str) -> list[int]:
        return [ord(char) - self.base for char in text]


def subject(name: str, vocab: int = 128, base: int = 0, values: np.ndarray | None = None) -> Subject:
    model: Any = StandIn(base)
    return Subject(name, vocab, lambda _ids: np.zeros((1, 1), np.float32) if values is None else values, model)


def test_only_models_of_one_vocabulary_and_one_tokenizer_are_compared() -> None:
    assert check_comparable([subject("a"), replace(subject("b"), model=None)], "AB") == [65, 66]
    with pytest.raises(TapeoutError) as caught:
        check_comparable([subject("a", 49_152), subject("b", 262_144)], "x")
    assert str(caught.value) == (
        "b: has a vocabulary of 262,144, a one of 49,152; only models of one vocabulary can be compared"
    )
    with pytest.raises(TapeoutError) as caught:
        check_comparable([subject("a"), subject("b", base=1)], "x")
    assert str(caught.value) == (
        "b: reads the text as other tokens than a does; only models of one tokenizer can be compared"
    )


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_logits_that_are_not_finite(value: float) -> None:
    values = logits(1)
    values[41, 3] = value
    with pytest.raises(TapeoutError) as caught:
        subject("a", values=values).finite_logits(range(70))
    assert str(caught.value) == (
        "a: the logits at position 41 of a window are not all finite, so it has no perplexity here; tapeout verify "
        "finds the op that breaks them"
    )
    values[41, 3] = 0
    values[-1] = value  # predicts a token that the window does not have
    assert len(subject("a", values=values).finite_logits(range(70))) == 69


def test_a_reference_that_is_nothing(tmp_path: Path) -> None:
    from contextlib import ExitStack

    with pytest.raises(TapeoutError, match="nothing is there"), ExitStack() as stack:
        open_reference(str(tmp_path / "none"), None, stack)


def example(against: bool = True, speed: bool = True) -> Evaluation:
    worst = Position(position=1234, token=42, text=" France", before="the capital of", kl=0.5)
    divergence = Divergence(mean=1e-3, median=5e-4, p99=0.1, max=0.5, top1=0.975, worst=(worst,))
    rates = Speed.of([{"threads": 2, "prefill_tokens": 512, "decode_tokens": 128, "prefill_tok_s": p, "decode_tok_s": d}
                      for p, d in ((900.0, 200.0), (1100.0, 100.0), (1000.0, 300.0))])  # fmt: skip
    one = Result(
        "artifacts/one",
        Weights(("q4_1", "q8_0"), 96_699_776, 5.75),
        Perplexity(28.0151, 1.9449),
        divergence if against else None,
        rates if speed else None,
    )
    reference = Result("m.gguf in transformers", None, Perplexity(27.9, 1.9), None)
    return Evaluation("t.txt", 1761, 512, 4, 1757, reference if against else None, (one,))


TABLE = """\
               formats      weights  bits/weight      perplexity   KL mean    median      99 %       max   top-1  prefill  decode
reference                                         27.900 ± 1.900
artifacts/one  q4_1, q8_0  92.2 MiB         5.75  28.015 ± 1.945  1.00e-03  5.00e-04  1.00e-01  5.00e-01  97.5 %     1000     200

1,757 positions of t.txt (1,761 tokens in 4 windows of up to 512): every token of a window but its first
KL(reference ‖ artifact) in nats; top-1: the same best token
reference: m.gguf in transformers
prefill of 512 and decode of 128 tokens on 2 threads, in tokens a second: medians of 3 rounds over all artifacts
artifacts/one: worst at token 1,234, ' France' after 'the capital of': KL 5.00e-01"""  # noqa: E501


def printed(evaluation: Evaluation) -> str:
    out = Console(file=StringIO(), width=140, highlight=False)
    print_evaluation(evaluation, out)
    return "\n".join(line.rstrip() for line in out.file.getvalue().splitlines())  # type: ignore[attr-defined]


def test_the_table() -> None:
    assert printed(example()) == TABLE
    plain = printed(example(against=False, speed=False))
    assert "KL" not in plain and "tok/s" not in plain and "28.015 ± 1.945" in plain


def test_weights_of_a_plan() -> None:
    plan = {
        "weights": [
            {"shape": [4, 32], "format": "q8_0", "bytes": 136},
            {"shape": [8, 32], "format": "bf16", "bytes": 512},
            {"shape": [32], "format": "f32", "bytes": 128},
        ]
    }
    assert Weights.of(plan) == Weights(("bf16", "q8_0"), 776, 8 * 776 / 416)


def test_the_command_passes_its_options_on(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    calls: list[tuple[Any, ...]] = []

    def stand_in(artifacts: Sequence[Path], text: Path, **options: Any) -> Evaluation:
        calls.append((artifacts, text, options))
        return example()

    monkeypatch.setattr("tapeout.compiler.evaluation.evaluate", stand_in)
    words = ["--text", "t.txt", "--against", "m.gguf", "--context", "64", "--threads", "1", "--speed"]
    assert cli.main(["eval", "a", "b", *words, "--json"]) == 0
    (artifacts, text, options), found = calls[0], json.loads(capsys.readouterr().out)
    del options["progress"]
    assert (artifacts, text) == ([Path("a"), Path("b")], Path("t.txt"))
    assert options == {"against": "m.gguf", "context": 64, "threads": 1, "speed": True}
    assert found["reference"]["perplexity"] == {"value": 27.9, "standard_error": 1.9}
    assert found["artifacts"][0]["divergence"]["worst"][0]["text"] == " France"
    assert found["artifacts"][0]["speed"]["decode_tok_s_runs"] == [200.0, 100.0, 300.0]
    assert cli.main(["eval", "a", "--text", "t.txt"]) == 0
    assert "every token of a window but its first" in capsys.readouterr().out


def test_the_command_needs_a_text(capsys: Any) -> None:
    assert cli.main(["eval", "a"]) == 2
    assert "--text" in capsys.readouterr().err
    assert cli.main(["eval", "--help"]) == 0
    assert "Every token of a window counts but its first" in " ".join(capsys.readouterr().out.split())
