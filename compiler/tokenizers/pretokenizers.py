"""How byte-level BPE models cut text into words before merging: regular expressions by the name GGUF files give them.

The expressions are those of the models' own tokenizer.json files; each cuts the pieces that the one before left, and
what a match leaves over is a piece too. Names: the values of ``tokenizer.ggml.pre`` (public in llama.cpp).
Where llama.cpp only approximates a model's own expression (gpt-4o, tekken: case of non-ASCII letters), this is the
model's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from tapeout.runtime.errors import TapeoutError


@dataclass(frozen=True)
class PreTokenizer:
    """Expressions in order; ``whole_words`` as in TokenizerModel; ``add_bos`` when the file does not say."""

    split: tuple[str, ...]
    whole_words: bool = False
    add_bos: bool = False


CONTRACTIONS = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
LINES_AND_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
LLAMA3 = rf"{CONTRACTIONS}|{WORDS}|\p{{N}}{{1,3}}|{SYMBOLS}|{LINES_AND_SPACES}"
QWEN2 = rf"{CONTRACTIONS}|{WORDS}|\p{{N}}|{SYMBOLS}|{LINES_AND_SPACES}"
QWEN35 = (
    rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{LINES_AND_SPACES}"
)
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*%s"
CASED_REST = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{LINES_AND_SPACES}"
GPT4O = rf"{CASED.replace('%s', CONTRACTIONS + '?')}|\p{{N}}{{1,3}}|{CASED_REST}"
TEKKEN = rf"{CASED.replace('%s', '')}|\p{{N}}|{CASED_REST}"
DEEPSEEK_LETTERS = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼι"
    "ῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ"
    "𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[{DEEPSEEK_LETTERS}]+",
    r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
    r"\s+$",
    "[一-龥ࠀ-一가-퟿]+",
    r"\p{N}+",
)
DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}")
DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{LINES_AND_SPACES}",
)
FALCON = (r"[\p{P}\$\+<=>\^~\|`]+", GPT2, r"[0-9][0-9][0-9]")
DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")

_BY_NAMES: tuple[tuple[str, PreTokenizer], ...] = (
    ("default", PreTokenizer(DEFAULT)),
    ("gpt-2 phi-2 exaone4 gigachat mellum a.x-4.0 mpt olmo jais trillion granite-docling", PreTokenizer((GPT2,))),
    (
        "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2",
        PreTokenizer((r"\p{N}", GPT2)),
    ),
    (
        "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2",
        PreTokenizer((LLAMA3,), whole_words=True, add_bos=True),
    ),
    ("dbrx smaug-bpe chatglm-bpe", PreTokenizer((LLAMA3,))),
    ("glm4 glm5", PreTokenizer((LLAMA3,), whole_words=True)),
    ("qwen2 deepseek-r1-qwen kormo megrez stablelm2 hunyuan solar-open grok-2", PreTokenizer((QWEN2,))),
    ("qwen35", PreTokenizer((QWEN35,))),
    ("gpt-4o llama4 kanana2 minimax-m2", PreTokenizer((GPT4O,))),
    ("tekken", PreTokenizer((TEKKEN,), whole_words=True, add_bos=True)),
    ("deepseek-llm", PreTokenizer(DEEPSEEK_LLM)),
    ("deepseek-coder", PreTokenizer(DEEPSEEK_CODER)),
    ("deepseek-v3 hunyuan-dense joyai-llm", PreTokenizer(DEEPSEEK_V3)),
    ("falcon", PreTokenizer(FALCON)),
)

PRE_TOKENIZERS: Mapping[str, PreTokenizer] = MappingProxyType(
    {name: each for names, each in _BY_NAMES for name in names.split()}
)


def pre_tokenizer(name: str, where: str) -> PreTokenizer:
    """The pre-tokenizer that a GGUF file names. Raises TapeoutError, listing the known, for another name."""
    if name not in PRE_TOKENIZERS:
        known = ", ".join(sorted(PRE_TOKENIZERS))
        raise TapeoutError(
            f"{where}: the pre-tokenizer {name!r} of tokenizer.ggml.pre is not known here; known are {known}"
        )
    return PRE_TOKENIZERS[name]
