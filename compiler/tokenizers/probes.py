"""Texts on which a table must agree with the tokenizers library before it is trusted."""

from __future__ import annotations

PROBES: tuple[str, ...] = (
    "",
    " ",
    "   ",
    "\n",
    "\n\n\n",
    "\t\t x",
    "\r\n\r\n  y ",
    "Hello, world! This is a plain English sentence, followed by another one.",
    " leading space,  two   three    spaces, trailing  ",
    "I'm you're they'll we've he'd it's DON'T CAN'T I'LL 'tis ' s’s",
    "naïve café – Ünïcödé, façade; Señor Ångström’s Œuvre; e\u0301 n\u0303",
    "Привет, как дела? Γειά σου Κόσμε. שלום עולם. مرحبا بالعالم ١٢٣. हिन्दी में १२३. ไทย",
    "你好，世界！日本語のテキストとカタカナ。한국어 예제 混合 mixed 文字123",
    "😀 😃😄 👩‍👩‍👧‍👦 🏳️‍🌈 🇩🇪🇫🇷 ✈️ 𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𠮷野家",
    "3.14159 2,718,281 1e-10 0x1F4A9 1234567890 12 123 1234 ½ ² Ⅷ ① ٣",
    "def f(x):\n    return [i ** 2 for i in range(x)]\n\n\nclass A:\n\tpass\n\t\t# end",
    '#include <stdio.h>\nint main(void) { printf("%d\\n", 42); /* x */ return a && b || !c; }',
    '{"key": [1, 2.5, null, true], "nested": {"a": "b"}} https://example.com/p?q=1&r=2#f user@example.org',
    "$100 €50 !!! ??? ... --- *** === ~~~ /// a-b_c.d,e;f:g CamelCase snake_case SCREAMING_SNAKE",
    "zero\u200bwidth\u200d\u2060 \u00a0nbsp\u3000wide\u2003em",
    "\u2028line\u2029para\u0085nel \x00\x01\x1b[0m \x1c\x1f \x7f",
    "\ufeffBOM \ue000 \U000f0000 \u0378 \U00031350 \U0001fae8 ▁low ▁▁",
    "<table><td>x</td></table> <h1> <0x41> <unk> <s> </s> <pad> <bos> <eos> [INST] x [/INST]",
    "<|im_start|>user\nHi there <|im_end|>\n<|im_start|>assistant\n",
    "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|><|endoftext|>",
    "<start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n<|im_start <|im_end| im_end|>",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa supercalifragilisticexpialidocious " + "z" * 200,
    " " * 70 + "x" + "\n" * 40 + "\t" * 36,
)
