"""Tokenizers built from the metadata of real GGUF files, against the ids that llama.cpp gives (see tests/goldens)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tapeout.compiler.checkpoints import open_checkpoint
from tapeout.compiler.tokenizers import build_tokenizer
from tapeout.runtime.tokenizer import Tokenizer, load_tokenizer

pytestmark = pytest.mark.models
GOLDENS = Path(__file__).parents[1] / "goldens"
MODELS = ("smollm2", "gemma3")


@pytest.fixture(scope="module", params=MODELS)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def built(name: str, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    files = build_tokenizer(open_checkpoint(request.getfixturevalue(f"{name}_gguf")))
    folder = tmp_path_factory.mktemp(name)
    for file, data in files.files.items():
        (folder / file).write_bytes(data)
    return files, folder


@pytest.fixture(scope="module")
def tokenizer(built: tuple[Any, Path]) -> Tokenizer:
    return load_tokenizer(built[1])


@pytest.fixture(scope="module")
def golden(name: str) -> dict[str, Any]:
    return json.loads((GOLDENS / f"tokenizer_{name}.json").read_text("utf-8"))


def test_plain_text(tokenizer: Tokenizer, golden: dict[str, Any]) -> None:
    wrong = [case["text"] for case in golden["cases"] if tokenizer.encode(case["text"]) != case["plain"]]
    assert wrong == []


def test_text_with_control_tokens(tokenizer: Tokenizer, golden: dict[str, Any]) -> None:
    ids = {case["text"]: tokenizer.encode(case["text"], add_bos=False, special=True) for case in golden["cases"]}
    assert [case["text"] for case in golden["cases"] if ids[case["text"]] != case["special"]] == []


def test_bytes_of_tokens(tokenizer: Tokenizer, golden: dict[str, Any]) -> None:
    assert [token for token, piece in golden["pieces"] if tokenizer.token_bytes(token).hex() != piece] == []


def test_decoding_gives_the_text_back(tokenizer: Tokenizer, golden: dict[str, Any], name: str) -> None:
    lost = [case["text"] for case in golden["cases"] if tokenizer.decode(case["plain"]) != case["text"]]
    # SmolLM2 has no tokens for some control bytes; SentencePiece writes a literal U+2581 as it writes a space.
    assert all(("\x01" in text) if name == "smollm2" else ("\u2581" in text) for text in lost)


def test_ids_beyond_the_vocabulary_decode_to_nothing(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode([tokenizer.vocab_size, tokenizer.vocab_size + 64, -1]) == ""
    assert tokenizer.token_bytes(tokenizer.vocab_size) == b""


def test_generation_settings(built: tuple[Any, Path], name: str) -> None:
    wanted = {
        "smollm2": {"bos_token_id": 1, "eos_token_ids": [0, 2], "add_bos": False, "pad_token_id": 2},
        "gemma3": {"bos_token_id": 2, "eos_token_ids": [1, 106], "add_bos": True, "pad_token_id": 0},
    }
    assert wanted[name].items() <= built[0].generation.items()
    assert ("chat_template.jinja" in built[0].files) == (name == "smollm2")


def test_the_table_is_chosen_and_why_is_recorded(built: tuple[Any, Path]) -> None:
    (decision,) = built[0].decisions
    assert decision["choice"] == "tokenizer.bin"
    assert decision["alternatives"][0]["choice"] == "tokenizer.json"


def test_the_same_file_gives_the_same_bytes(built: tuple[Any, Path], name: str, request: pytest.FixtureRequest) -> None:
    again = build_tokenizer(open_checkpoint(request.getfixturevalue(f"{name}_gguf")))
    assert again.files == built[0].files


def test_a_table_takes_few_pages(built: tuple[Any, Path], name: str) -> None:
    # What is mapped counts as resident once it is touched; Gemma's 262,144 tokens must stay small beside its weights.
    assert len(built[0].files["tokenizer.bin"]) < {"smollm2": 1 << 21, "gemma3": 8 << 20}[name]
