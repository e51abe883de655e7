"""Token ids of llama.cpp for varied texts, written as the goldens that tests/models/test_tokenizer_llama_cpp.py reads.

    python tests/goldens/make_tokenizer_goldens.py LIBLLAMA.SO NAME=MODEL.gguf ...

Needs a libllama of the llama.cpp that llama-cpp-python 0.3.36 vendors (the struct below is of that version).
"""

from __future__ import annotations

import ctypes
import itertools
import json
import random
import sys
from pathlib import Path

HERE = Path(__file__).parent


class ModelParams(ctypes.Structure):
    _fields_ = (
        ("devices", ctypes.c_void_p),
        ("tensor_buft_overrides", ctypes.c_void_p),
        ("n_gpu_layers", ctypes.c_int32),
        ("split_mode", ctypes.c_int),
        ("load_mode", ctypes.c_int),
        ("lazy_mode", ctypes.c_int),
        ("main_gpu", ctypes.c_int32),
        ("tensor_split", ctypes.c_void_p),
        ("progress_callback", ctypes.c_void_p),
        ("progress_callback_user_data", ctypes.c_void_p),
        ("kv_overrides", ctypes.c_void_p),
        ("vocab_only", ctypes.c_bool),
        ("check_tensors", ctypes.c_bool),
        ("use_extra_bufts", ctypes.c_bool),
        ("no_host", ctypes.c_bool),
        ("no_alloc", ctypes.c_bool),
        ("load_mtp", ctypes.c_bool),
    )


class LlamaCpp:
    """The vocabulary of one GGUF file in llama.cpp."""

    def __init__(self, library: str, model: str) -> None:
        lib = ctypes.CDLL(library)
        lib.llama_model_default_params.restype = ModelParams
        lib.llama_model_load_from_file.argtypes = (ctypes.c_char_p, ModelParams)
        lib.llama_model_load_from_file.restype = ctypes.c_void_p
        lib.llama_model_get_vocab.argtypes = (ctypes.c_void_p,)
        lib.llama_model_get_vocab.restype = ctypes.c_void_p
        self._quiet = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(lambda *_: None)
        lib.llama_log_set(self._quiet, None)
        params = lib.llama_model_default_params()
        params.vocab_only = True
        self._lib = lib
        self._vocab = ctypes.c_void_p(lib.llama_model_get_vocab(lib.llama_model_load_from_file(model.encode(), params)))

    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        data = text.encode()
        room = len(data) + 16
        ids = (ctypes.c_int32 * room)()
        count = self._lib.llama_tokenize(
            self._vocab, data, len(data), ids, room, ctypes.c_bool(add_special), ctypes.c_bool(parse_special)
        )
        assert count >= 0, count
        return list(ids[:count])

    def piece(self, token: int) -> bytes:
        buffer = ctypes.create_string_buffer(4096)
        count = self._lib.llama_token_to_piece(self._vocab, token, buffer, len(buffer), 0, ctypes.c_bool(True))
        assert count >= 0, count
        return buffer.raw[:count]


FIXED = (
    "",
    " ",
    "  ",
    "   ",
    "\t",
    "\n",
    "\n\n",
    "\n\n\n",
    "\t\n",
    "\r\n",
    "\r\n\r\n  x",
    "Hello world",
    " Hello world",
    "Hello World",
    " Hello World!",
    "Hello, world!",
    " this is 🦙.cpp",
    "w048 7tuijk dsdfhu",
    "The quick brown fox jumps over the lazy dog.",
    "  leading and   inner    spaces and trailing   ",
    " " * 40 + "x" + " " * 33,
    "\t" * 35 + "tabs" + "\t\t",
    "\n" * 37 + "lines" + "\n \n  \n",
    "naïve café – Ünïcödé, façade; Señor Ångström’s Œuvre",
    "e\u0301 a\u0300 n\u0303 combining vs é à ñ",
    "Привет, как дела? Это тест.",
    "Γειά σου Κόσμε",
    "שלום עולם",
    "مرحبا بالعالم ١٢٣",
    "हिन्दी में पाठ १२३",
    "ไทยไม่มีช่องว่าง",
    "你好，世界！今天天气很好。",
    "日本語のテキストとカタカナ",
    "한국어 텍스트 예제",
    "混合 mixed 文字 text 123 数字",
    "𠮷野家 𝔘𝔫𝔦𝔠𝔬𝔡𝔢",
    "😀 😃😄 👩‍👩‍👧‍👦 🏳️‍🌈 🇩🇪🇫🇷 ✈️",
    "3.14159 2,718,281 1e-10 0x1F4A9 1234567890 12 123 1234",
    "½ ² ³ Ⅷ ① ٣",
    "I'm you're they'll we've he'd it's DON'T CAN'T I'LL",
    "'s 't ' s’s",
    "def f(x):\n    return [i ** 2 for i in range(x)]\n\n\nclass A:\n\tpass\n",
    '#include <stdio.h>\nint main(void) { printf("%d\\n", 42); return 0; }',
    "if (a && b || !c) { d += e->f; } // comment\n\t\t/* block */",
    "SELECT * FROM users WHERE id = 1; -- drop",
    '{"key": [1, 2.5, null, true], "nested": {"a": "b"}}',
    "https://example.com/path?query=1&other=two#fragment",
    "user@example.org C:\\Windows\\System32 /usr/local/bin",
    "$100 €50 £20 ¥3000 ₿0.1",
    "!!! ??? ... --- *** === ~~~ ///",
    "a-b_c.d,e;f:g",
    "CamelCaseIdentifier snake_case_identifier SCREAMING_SNAKE",
    "ﬁ ligature Å vs Å ﷺ",
    "zero\u200bwidth\u200djoiner\u2060 \u00a0nbsp\u3000ideographic\u2003em",
    "\u2028line\u2029para\u0085nel",
    "control \x00\x01\x02 \x1b[31mred\x1b[0m \x1c\x1d\x1e\x1f \x7f",
    "\ufeffBOM at the start",
    "private \ue000 \uf8ff \U000f0000 unassigned \U0003fffd \u0378",
    "late \U00031350 \U0001fae8 \U0002ebf0 \U0001e4d0 \u1c89",
    "▁lower ▁▁ block",
    "<table><tr><td>cell</td></tr></table> <h1>title</h1> > </x",
    "<a> </a> >\u2581</ > </",
    "<0x41> <0x0A> <unk> <s> </s> <pad>",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "<|endoftext|><|im_end|>",
    "text <|im_end|> text<|im_end|>",
    " <|im_start|> ",
    "<start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n",
    "<bos>Hello<eos> <unused12> <unused6200>",
    "<|im_start <|im_start| |im_start|>",
    "<|eot_id|><|start_header_id|>user<|end_header_id|>",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "supercalifragilisticexpialidocious pneumonoultramicroscopicsilicovolcanoconiosis",
    "x" * 300,
    "abc " * 50,
    "好" * 60,
)
POOLS = (
    "abcdefghijklmnopqrstuvwxyz",
    "ABCXYZ 'stremldv’",
    "0123456789",
    "  \t\n\r\u00a0\u3000",
    '.,;:!?-_()[]{}<>/|@#$%^&*+=~`"\\',
    "éèüßñçøåæœÀÈÜ",
    "\u0300\u0301\u0308\u093e\u0e31",
    "абвгдеёжзийклмнопрстуфхцчшщъыьэюя",
    "αβγδεζηθ",
    "你好世界中文字符一二三",
    "ひらがなカタカナ",
    "한국어",
    "🙂🚀❤️👍🏽👨‍💻",
    "½²Ⅷ①٣१",
    "\u200b\u200d\ue000\u0378",
)


def random_texts(count: int, seed: int = 20261130) -> list[str]:
    source = random.Random(seed)
    texts = []
    for _ in range(count):
        pools = source.sample(POOLS, source.randint(1, 4))
        words = [
            "".join(source.choices(source.choice(pools), k=source.randint(1, 9))) for _ in range(source.randint(1, 14))
        ]
        texts.append(source.choice(("", " ", " ", "\n")).join(words))
    return texts


def main(library: str, *models: str) -> None:
    texts = [
        *FIXED,
        *(a + b for a, b in itertools.product(("Hello", " 12", "é", "\n"), (" ", "  ", "\n", "'s"))),
        *random_texts(250),
    ]
    for model in models:
        name, path = model.split("=", 1)
        witness = LlamaCpp(library, path)
        cases = [
            {
                "text": text,
                "plain": witness.encode(text, add_special=True, parse_special=False),
                "special": witness.encode(text, add_special=False, parse_special=True),
            }
            for text in texts
        ]
        source = random.Random(7)
        tokens = [*range(300), *(source.randrange(49000) for _ in range(300))]
        pieces = [[token, witness.piece(token).hex()] for token in tokens]
        lines = ",\n".join(json.dumps(case, ensure_ascii=True) for case in cases)
        out = HERE / f"tokenizer_{name}.json"
        out.write_text(f'{{"pieces": {json.dumps(pieces)},\n"cases": [\n{lines}\n]}}\n', encoding="utf-8")
        sys.stdout.write(f"{out.name}: {len(cases)} texts, {out.stat().st_size} bytes\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
