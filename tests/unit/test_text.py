"""Streaming text: characters that span tokens, stop strings that span tokens, and chat templates' own limits."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tapeout.runtime.chat import chat_ids, render_chat
from tapeout.runtime.errors import TapeoutError
from tapeout.runtime.text import StopStrings, StreamDecoder


class ByteTokenizer:
    """Tokens 0 to 255 are bytes, 256 and above are control tokens."""

    vocab_size, bos_id, eos_ids = 258, None, frozenset({256})

    def encode(self, text: str, *, add_bos: bool = True, special: bool = False) -> list[int]:
        if special and "<stop>" in text:
            before, after = text.split("<stop>", 1)
            return [*before.encode(), 256, *self.encode(after, special=True)]
        return list(text.encode())

    def decode(self, ids: list[int], *, skip_special: bool = True) -> str:
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) if token < 256 else b"<stop>"

    def is_special(self, token: int) -> bool:
        return token >= 256

    def control_texts(self, text: str) -> list[str]:
        return ["<stop>"] * text.count("<stop>")


def stream(ids: list[int], **options: bool) -> list[str]:
    decoder = StreamDecoder(ByteTokenizer(), **options)
    return [*(decoder.push(token) for token in ids), decoder.flush()]


def test_a_character_comes_out_with_its_last_byte() -> None:
    assert stream(list("a€😀".encode())) == ["a", "", "", "€", "", "", "", "😀", ""]


def test_an_unfinished_character_comes_out_at_the_end() -> None:
    assert stream(list("é".encode())[:1]) == ["", "\ufffd"]


def test_bytes_that_are_no_text_become_replacement_characters() -> None:
    assert "".join(stream([0x61, 0xFF, 0xC3, 0x28])) == "a\ufffd\ufffd("


def test_control_tokens_are_left_out_unless_wanted() -> None:
    assert "".join(stream([0x61, 256, 0x62])) == "ab"
    assert "".join(stream([0x61, 256, 0x62], skip_special=False)) == "a<stop>b"


def test_a_control_token_does_not_cut_a_character() -> None:
    first, second = "é".encode()
    assert "".join(stream([first, 256, second])) == "é"


@given(st.text())
def test_streaming_gives_the_whole_text(text: str) -> None:
    data = text.encode("utf-8", "replace")
    assert "".join(stream(list(data))) == data.decode()


def shown(stops: list[str], pieces: list[str]) -> tuple[str, str | None]:
    matcher = StopStrings(stops)
    out = [matcher.push(piece) for piece in pieces]
    return "".join([*out, matcher.flush()]), matcher.matched


def test_a_stop_string_across_pieces_is_never_shown() -> None:
    matcher = StopStrings(["\nUser:"])
    assert [matcher.push(piece) for piece in ("Hi", "\n", "Us", "er", ": x")] == ["Hi", "", "", "", ""]
    assert (matcher.stopped, matcher.matched, matcher.flush()) == (True, "\nUser:", "")


def test_text_that_only_began_a_stop_string_is_shown() -> None:
    assert shown(["STOP"], ["S", "T", "O", "NE"]) == ("STONE", None)
    assert shown(["STOP"], ["ST"]) == ("ST", None)
    assert shown(["aab"], ["aa", "ab", "c"]) == ("a", "aab")


def test_the_earliest_match_wins_and_of_those_the_longest() -> None:
    assert shown(["b", "bcd", "a"], ["xbcd"]) == ("x", "bcd")
    assert shown(["cd", "bc"], ["abcd"]) == ("a", "bc")


def test_empty_stop_strings_mean_nothing() -> None:
    assert shown(["", ""], ["abc"]) == ("abc", None)


@given(st.lists(st.text("ab", max_size=3)), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_how_text_is_cut_does_not_change_what_is_shown(pieces: list[str], stops: list[str]) -> None:
    text, matched = shown(stops, pieces)
    whole = "".join(pieces)
    ends = [at for stop in stops if (at := whole.find(stop)) >= 0]
    if matched is None:
        assert text == whole and not ends
    else:
        # A longer stop string may begin earlier and be met later than the one that ended the text.
        assert whole.startswith(text + matched) and not any(stop in text for stop in stops)


def chat(template: str, **options: object) -> str:
    messages = [{"role": "user", "content": "Hi"}]
    return render_chat(template, messages, bos_token="<s>", eos_token="</s>", **options)  # type: ignore[arg-type]


def test_a_template_sees_messages_and_tokens() -> None:
    template = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m['content'] }}{{ eos_token }}{% endfor %}"
    assert chat(template) == "<s>user: Hi</s>"


def test_the_generation_block_is_its_content() -> None:
    assert chat("a{% generation %}b{{ messages[0].content }}{% endgeneration %}c") == "abHic"


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ raise_exception('Only one system message') }}", "does not take these messages: Only one system message"),
        ("{% if %}", "does not take these messages: Expected an expression"),
        ("{{ messages[7].content }}", "does not take these messages: list object has no element 7"),
        ("{{ ''.__class__.__mro__ }}", "does not take these messages: access to attribute '__class__'"),
        ("{{ messages.append(1) }}", "does not take these messages: access to attribute 'append'"),
        ("{{ 1 // 0 }}", "does not take these messages: integer division or modulo by zero"),
        ("{{ 'a' * 100000000 }}", "writes more than 16777216 characters"),
        ("{{ 9 ** (9 ** 9) }}", "writes more than 16777216 characters"),
        ("{% for i in range(99999) %}{{ 'a' * 9999 }}{% endfor %}", "writes more than 16777216 characters"),
        ("{% for i in range(999999) %}{% endfor %}", "does not take these messages: Range too big"),
    ],
)
def test_a_bad_template_ends_in_one_sentence(template: str, says: str) -> None:
    with pytest.raises(TapeoutError, match=r"^the chat template of the model") as raised:
        chat(template)
    assert says in str(raised.value)


def test_a_template_that_runs_for_long_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tapeout.runtime.chat.LONGEST_SECONDS", 0.1)
    loops = "{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}"
    with pytest.raises(TapeoutError, match=r"ran longer than 0\.1 s"):
        chat(loops)


def test_a_model_without_a_template_says_so(tmp_path: Path) -> None:
    with pytest.raises(TapeoutError, match=r"has no chat template \(chat_template\.jinja\), so it cannot chat"):
        chat_ids(tmp_path, ByteTokenizer(), [{"role": "user", "content": "Hi"}])


def test_control_tokens_of_the_template_count_and_those_of_a_message_do_not(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}<stop>{% endfor %}")
    (tmp_path / "generation.json").write_text("{}")
    ids = chat_ids(tmp_path, ByteTokenizer(), [{"role": "user", "content": "a<stop>\ufdd0b"}])
    assert ids == [*b"a<stop>b", 256]
