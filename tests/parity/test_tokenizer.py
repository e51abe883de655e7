"""Tables against the tokenizers library, on small tokenizers trained here; and what happens to those no table holds."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from tapeout.compiler.checkpoints import Checkpoint
from tapeout.compiler.tokenizers import TokenizerFiles, build_tokenizer
from tapeout.compiler.tokenizers.charclasses import translate
from tapeout.compiler.tokenizers.pretokenizers import PRE_TOKENIZERS, QWEN2
from tapeout.compiler.tokenizers.probes import PROBES
from tapeout.runtime.errors import TapeoutError
from tapeout.runtime.tokenizer import LibraryTokenizer, load_tokenizer

CORPUS = (
    "The quick brown fox jumps over the lazy dog. It's what they'd have done; we're sure THEY'LL agree.\n",
    "def tokens(text):\n    return [word for word in text.split('  ') if len(word) > 12345]\n\n\tpass\n",
    "naïve café Señor Ångström Œuvre e\u0301te\u0301 приве́т как дела"
    " 你好世界今天天气 日本語テキスト 한국어 😀👍🏽 ½²٣\u00a0\u3000",
)
SPECIALS = ("<|im_start|>", "<|im_end|>", "<pad>")
# that of gpt-oss's tokenizer.json (o200k_base of tiktoken), which is `gpt-4o` in a GGUF
O200K = "|".join((
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
))  # fmt: skip


def texts(count: int = 150) -> list[str]:
    source = random.Random(3)
    alphabet = "".join(CORPUS) + "\r\t \u2028\x00\x1c'’(){}#$<|>_0123456789"
    pieces = [*(source.choice(alphabet) for _ in range(400)), *SPECIALS, *"".join(CORPUS).split(" "), "  ", "\n\n"]
    return [*PROBES, *("".join(source.choices(pieces, k=source.randint(1, 30))) for _ in range(count))]


def byte_level(*steps: Any, normalizer: Any = None, use_regex: bool = False, ignore_merges: bool = False) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*steps, last]) if steps else last
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=[*SPECIALS], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False), AddedToken("   ", normalized=False)])
    return tokenizer


def isolated(pattern: str) -> Any:
    return pre_tokenizers.Split(Regex(pattern), "isolated")


def sentencepiece(*, prefix: bool = False, whole: bool = True) -> Tokenizer:
    """SentencePiece BPE as transformers makes it of scores: each way to make a token is a merge, best token first."""
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    trained.train_from_iterator(CORPUS * 3, trainers.BpeTrainer(vocab_size=400, show_progress=False))
    learned = sorted(trained.get_vocab().items(), key=lambda item: item[1])
    control = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    # Nothing has an "é", so that bytes are needed; "the" can be made in two ways.
    texts = [*control, *(text for text, _ in learned if "é" not in text), "th", "he", "the"]
    vocab = {text: token for token, text in enumerate(dict.fromkeys(texts))}
    merges = [
        (text[:at], text[at:])
        for text in list(vocab)[len(control) :]
        for at in range(1, len(text))
        if text[:at] in vocab and text[at:] in vocab
    ]
    if not whole:
        made = ["".join(merge) for merge in merges]
        merges.pop(next(at for at, text in enumerate(made) if made.count(text) > 1))
    model = models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    replace = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace]) if prefix else replace
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    tokenizer.add_special_tokens(["<s>", "</s>", *SPECIALS])
    tokenizer.add_tokens([AddedToken("\n\n", normalized=False)])
    return tokenizer


def build(tokenizer: Tokenizer, folder: Path, config: dict[str, Any] | None = None, **files: Any) -> TokenizerFiles:
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    names = [path.name for path in folder.iterdir() if path.name.startswith("tokenizer")]
    checkpoint = Checkpoint(
        "safetensors",
        folder,
        {},
        config or {},
        files.get("generation_config", {}),
        {name: folder / name for name in names},
    )
    built = build_tokenizer(checkpoint)
    for name, data in built.files.items():
        (folder / name).write_bytes(data)
    return built


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "gpt2": lambda: byte_level(use_regex=True),
    "smollm": lambda: byte_level(pre_tokenizers.Digits(individual_digits=True), use_regex=True),
    "llama3": lambda: byte_level(isolated(PRE_TOKENIZERS["llama-bpe"].split[0]), ignore_merges=True),
    "qwen2": lambda: byte_level(isolated(QWEN2), normalizer=normalizers.NFC()),
    "o200k": lambda: byte_level(isolated(O200K)),
    "deepseek": lambda: byte_level(*map(isolated, PRE_TOKENIZERS["deepseek-v3"].split)),
    "sentencepiece": sentencepiece,
    "sentencepiece with a prefix": lambda: sentencepiece(prefix=True),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_table_gives_the_ids_of_the_library(kind: str, tmp_path: Path) -> None:
    library = KINDS[kind]()
    built = build(library, tmp_path)
    assert [decision["choice"] for decision in built.decisions] == ["tokenizer.bin"], built.decisions
    table = load_tokenizer(tmp_path)
    assert table.vocab_size == library.get_vocab_size()
    wrong: list[tuple[str, bool]] = []
    for text in texts():
        for special in (False, True):
            library.encode_special_tokens = not special
            if table.encode(text, special=special) != library.encode(text, add_special_tokens=False).ids:
                wrong.append((text, special))
    assert wrong == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_table_decodes_as_the_library_does(kind: str, tmp_path: Path) -> None:
    library = KINDS[kind]()
    build(library, tmp_path)
    table = load_tokenizer(tmp_path)
    for text in texts(60):
        ids = library.encode(text, add_special_tokens=False).ids
        for skip in (False, True):
            assert table.decode(ids, skip_special=skip) == library.decode(ids, skip_special_tokens=skip), text


@pytest.mark.parametrize("kind", KINDS)
def test_the_library_behind_our_interface_agrees(kind: str, tmp_path: Path) -> None:
    library = KINDS[kind]()
    build(library, tmp_path)
    pieces = "sentencepiece" if kind.startswith("sentencepiece") else "byte_level"
    table, ours = load_tokenizer(tmp_path), LibraryTokenizer((tmp_path / "tokenizer.json").read_bytes(), pieces=pieces)
    for text in texts(60):
        assert table.encode(text, special=True) == ours.encode(text, special=True)
        assert table.control_texts(text) == ours.control_texts(text)
    for token in range(-1, table.vocab_size + 2):
        assert table.token_bytes(token) == ours.token_bytes(token)
        assert table.is_special(token) == ours.is_special(token)


def test_gpt_4o_of_a_gguf_splits_as_o200k_does() -> None:
    ours, theirs = (isolated(pattern) for pattern in (*PRE_TOKENIZERS["gpt-4o"].split, O200K))
    for text in texts(400):
        assert ours.pre_tokenize_str(text) == theirs.pre_tokenize_str(text)


@pytest.mark.parametrize("name", {each.split: name for name, each in PRE_TOKENIZERS.items()}.values())
def test_a_translated_expression_splits_as_the_librarys_does(name: str) -> None:
    import re
    from bisect import bisect_right

    split = PRE_TOKENIZERS[name].split
    steps = pre_tokenizers.Sequence([isolated(pattern) for pattern in split])
    classes = translate(split)
    patterns = [re.compile(pattern) for pattern in classes.patterns]
    everything = [chr(code) for code in range(0x20000) if not 0xD800 <= code < 0xE000]
    for text in (*texts(40), "a".join(everything[::7]), " ".join(everything[3::11])):
        starts = classes.starts.tolist()
        codes = [ord(char) for char in text]
        seen = "".join(
            chr(code if code < 128 else 128 + int(classes.classes[bisect_right(starts, code) - 1])) for code in codes
        )
        pieces = [seen]
        for pattern in patterns:
            pieces = [word for piece in pieces for word in pattern.split(piece) if word]
        assert list(map(len, pieces)) == [len(word) for word, _ in steps.pre_tokenize_str(text)]


def gguf(tokenizer: Tokenizer, pre: str, **more: Any) -> Checkpoint:
    state = json.loads(tokenizer.to_str())
    tokens = [text for text, _ in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])]
    types = [3 if text in SPECIALS else 4 if text in ("<tool>", "   ") else 1 for text in tokens]
    merges = [" ".join(pair) for pair in state["model"]["merges"]]
    keys = {"model": "gpt2", "pre": pre, "tokens": tokens, "token_type": types, "merges": merges, **more}
    return Checkpoint("gguf", Path("x.gguf"), {}, {f"tokenizer.ggml.{key}": value for key, value in keys.items()})


def test_metadata_of_a_gguf_gives_the_same_tokenizer(tmp_path: Path) -> None:
    library = KINDS["smollm"]()
    built = build_tokenizer(gguf(library, "smollm", eos_token_id=1, add_bos_token=False))
    for name, data in built.files.items():
        (tmp_path / name).write_bytes(data)
    assert set(built.files) == {"generation.json", "tokenizer.bin", "tokenizer.json"}
    table, written = load_tokenizer(tmp_path), Tokenizer.from_str(built.files["tokenizer.json"].decode())
    assert table.eos_ids == {1}
    for text in texts():
        library.encode_special_tokens = written.encode_special_tokens = False
        ids = library.encode(text, add_special_tokens=False).ids
        assert table.encode(text, special=True) == ids == written.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize(
    ("tokenizer", "why"),
    [
        (Tokenizer(models.WordLevel({"a": 0}, unk_token="a")), "its model is WordLevel, not BPE"),
        (sentencepiece(whole=False), "leave out a way to make"),
        (byte_level(pre_tokenizers.Whitespace()), "has a step Whitespace"),
        (byte_level(normalizer=normalizers.Lowercase()), "its normalizer is Lowercase"),
        (byte_level(isolated(r"\b\w+")), r"uses \b"),
    ],
)
def test_other_kinds_run_through_the_library(tokenizer: Tokenizer, why: str, tmp_path: Path) -> None:
    built = build(tokenizer, tmp_path)
    (decision,) = built.decisions
    assert decision["choice"] == "tokenizer.json" and "tokenizer.bin" not in built.files
    assert why in decision["alternatives"][0]["why"]
    ours = load_tokenizer(tmp_path)
    ids = tokenizer.encode("a b <pad>", add_special_tokens=False).ids
    assert ours.encode("a b <pad>", special=True) == ids
    assert ours.decode([*ids, 10**6]) == tokenizer.decode(ids)


def test_special_tokens_that_can_overlap_have_no_table(tmp_path: Path) -> None:
    tokenizer = byte_level()
    tokenizer.add_special_tokens([">>A<<", "<<B>>"])
    (decision,) = build(tokenizer, tmp_path).decisions
    assert "can overlap in a text" in decision["alternatives"][0]["why"]


def test_every_declared_end_token_ends_a_generation(tmp_path: Path) -> None:
    tokenizer = byte_level()
    tokenizer.add_special_tokens(["<s>"])
    begin = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", begin)])
    sampling = {"eos_token_id": [5, 6], "temperature": 0.6, "top_k": 20}
    named = {
        "eos_token": {"content": "<pad>"},
        "bos_token": "<s>",
        "chat_template": [{"name": "default", "template": "x"}],
    }
    built = build(
        tokenizer, tmp_path, {"eos_token_id": 7, "bos_token_id": 3}, tokenizer_config=named, generation_config=sampling
    )
    assert built.generation == {
        "bos_token_id": begin,
        "eos_token_ids": [1, 2, 5, 6, 7],  # 1 is <|im_end|>, 2 is <pad>
        "pad_token_id": None,
        "add_bos": True,
        "bos_token": "<s>",
        "eos_token": "<pad>",
        "sampling": {"temperature": 0.6, "top_k": 20},
    }
    assert built.files["chat_template.jinja"] == b"x"
    assert load_tokenizer(tmp_path).encode("a")[0] == begin
    assert load_tokenizer(tmp_path).encode("a", add_bos=False) == tokenizer.encode("a", add_special_tokens=False).ids


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"pre": "martian"},
            r"x\.gguf: the pre-tokenizer 'martian' of tokenizer\.ggml\.pre is not known here; known are ",
        ),
        ({"model": "rwkv"}, r"x\.gguf: the tokenizer kind 'rwkv' of tokenizer\.ggml\.model is not known here"),
        ({"tokens": None}, r"x\.gguf: tokenizer\.ggml\.tokens is missing or no array"),
        ({"tokens": [1, 2]}, r"x\.gguf: tokenizer\.ggml\.tokens must hold strings only"),
        ({"token_type": [1]}, r"x\.gguf: tokenizer\.ggml\.token_type has 1 entries for \d+ tokens"),
        ({"tokens": []}, r"x\.gguf: tokenizer\.ggml\.tokens is empty"),
        (
            {"merges": ["ab"]},
            r"x\.gguf: its tokenizer cannot be used: the merge 'ab' is not two texts; tokenizer\.json",
        ),
        ({"merges": ["a bogus"]}, r"x\.gguf: its tokenizer cannot be used: the merge 'a' \+ 'bogus' names "),
        ({"merges": None}, r"x\.gguf: tokenizer\.ggml\.merges is missing or no array"),
        ({"model": "llama", "scores": [0.0]}, r"x\.gguf: tokenizer\.ggml\.scores has 1 entries for \d+ tokens"),
    ],
)
def test_broken_metadata_end_in_one_sentence(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(TapeoutError, match=says):
        build_tokenizer(gguf(byte_level(), **{"pre": "smollm", **changes}))


def test_a_folder_without_a_tokenizer_says_what_would_work(tmp_path: Path) -> None:
    with pytest.raises(TapeoutError, match=r"has no tokenizer\.json; a folder checkpoint needs one .* GGUF"):
        config = tmp_path / "tokenizer_config.json"
        build_tokenizer(Checkpoint("safetensors", tmp_path, {}, {}, tokenizer_files={config.name: config}))


def test_a_checkpoint_without_any_tokenizer_file_gives_ids_alone(tmp_path: Path) -> None:
    built = build_tokenizer(Checkpoint("safetensors", tmp_path, {}, {"eos_token_id": [7, 5]}))
    assert sorted(built.files) == ["generation.json"]
    assert built.generation["eos_token_ids"] == [5, 7]
    assert built.decisions[0]["choice"] == "none"


def test_a_damaged_table_ends_in_one_sentence(tmp_path: Path) -> None:
    data = build(byte_level(), tmp_path).files["tokenizer.bin"]
    for broken in (b"", data[:100], b"x" + data[1:], data.replace(b'"split"', b'"spilt"'), data[: len(data) // 2]):
        (tmp_path / "tokenizer.bin").write_bytes(broken)
        with pytest.raises(TapeoutError, match=r"tokenizer\.bin"):
            load_tokenizer(tmp_path)


def test_an_artifact_without_tokenizer_files_knows_no_text(tmp_path: Path) -> None:
    with pytest.raises(TapeoutError, match=r"generation\.json: is missing"):
        load_tokenizer(tmp_path)
    (tmp_path / "generation.json").write_text("{}")
    with pytest.raises(TapeoutError, match="the checkpoint had no tokenizer"):
        load_tokenizer(tmp_path).encode("Hello")
