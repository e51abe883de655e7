"""Chat templates: Jinja in a sandbox, with what transformers gives to the templates that models ship."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from tapeout.runtime.errors import TapeoutError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from jinja2.sandbox import ImmutableSandboxedEnvironment

    from tapeout.runtime.tokenizer import Tokenizer

TEMPLATE = "chat_template.jinja"
LONGEST_TEXT = 1 << 24
LONGEST_SECONDS = 5.0
# Noncharacters, which no text means: around what a user wrote that reads like a control token.
BEGIN, END = "\ufdd0", "\ufdd1"


def chat_ids(
    folder: Path,
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    **variables: Any,
) -> list[int]:
    """Token ids of a conversation, up to where the model's answer begins.

    The template's own control tokens are read as such; the same texts inside a message stay plain text. Raises
    TapeoutError when the artifact has no chat template or the template refuses the messages.
    """
    try:
        template = (folder / TEMPLATE).read_text("utf-8")
    except FileNotFoundError:
        raise TapeoutError(
            f"{folder}: this model has no chat template ({TEMPLATE}), so it cannot chat; give a plain prompt instead"
        ) from None
    generation = json.loads((folder / "generation.json").read_bytes())
    text = render_chat(
        template,
        [_marked(message, tokenizer) for message in messages],
        bos_token=generation.get("bos_token", ""),
        eos_token=generation.get("eos_token", ""),
        tools=None if tools is None else [_marked(tool, tokenizer) for tool in tools],
        **variables,
    )
    ids: list[int] = []
    for at, piece in enumerate(re.split(f"{BEGIN}([^{BEGIN}{END}]*){END}", text)):
        ids += tokenizer.encode(re.sub(f"[{BEGIN}{END}]", "", piece), add_bos=False, special=at % 2 == 0)
    return ids


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    bos_token: str,
    eos_token: str,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    **variables: Any,
) -> str:
    """The text of a conversation in the form the model was trained on.

    Encode it with ``special=True`` and without a begin token: templates write their own. Raises TapeoutError for a
    template that is no Jinja, refuses the messages, reaches out of the sandbox, or runs or grows without end.
    """
    from jinja2 import TemplateError

    deadline = time.monotonic() + LONGEST_SECONDS
    try:
        compiled = _environment(deadline).from_string(template)
        size, parts = 0, list[str]()
        for part in compiled.generate(
            messages=_plain(messages),
            tools=_plain(tools),
            documents=None,
            bos_token=bos_token,
            eos_token=eos_token,
            add_generation_prompt=add_generation_prompt,
            **variables,
        ):
            size += len(part)
            _bound(size, deadline)
            parts.append(part)
    except (
        TemplateError,
        ArithmeticError,
        LookupError,
        TypeError,
        ValueError,
        AttributeError,
        RecursionError,
    ) as error:
        if isinstance(error, TapeoutError):
            raise
        message = " ".join(str(error).split()) or type(error).__name__
        raise TapeoutError(f"the chat template of the model does not take these messages: {message}") from error
    return "".join(parts)


def _bound(size: int, deadline: float) -> None:
    if size > LONGEST_TEXT:
        raise TapeoutError(f"the chat template of the model writes more than {LONGEST_TEXT} characters; it is broken")
    if time.monotonic() > deadline:
        raise TapeoutError(f"the chat template of the model ran longer than {LONGEST_SECONDS:g} s; it is broken")


def _plain(value: Any) -> Any:
    """A copy in plain JSON types: the sandbox need not know what methods anything else has."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if hasattr(value, "items"):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]  # pyright: ignore[reportUnknownVariableType]
    raise TapeoutError(f"a message holds a {type(value).__name__}; messages and tools must be plain JSON values")


def _marked(value: Any, tokenizer: Tokenizer) -> Any:
    """A copy where texts of control tokens in strings stand between BEGIN and END."""
    if isinstance(value, str):
        text = re.sub(f"[{BEGIN}{END}]", "", value)
        found = sorted(set(tokenizer.control_texts(text)), key=lambda each: (-len(each), each))
        if not found:
            return text
        return re.sub("|".join(map(re.escape, found)), lambda match: f"{BEGIN}{match.group()}{END}", text)
    if hasattr(value, "items"):
        return {key: _marked(item, tokenizer) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_marked(item, tokenizer) for item in value]  # pyright: ignore[reportUnknownVariableType]
    return value


def _environment(deadline: float) -> ImmutableSandboxedEnvironment:
    """The sandbox. Its ranges are bounded by Jinja; calls and products are bounded here."""
    from jinja2 import nodes
    from jinja2.exceptions import TemplateRuntimeError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Bounded(ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset(["*", "**"])

        def call(self, /, context: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
            _bound(0, deadline)
            return super().call(context, obj, *args, **kwargs)

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            size = _product(operator, left, right)
            _bound(size, deadline)
            return super().call_binop(context, operator, left, right)

    class GenerationBlock(Extension):
        """``{% generation %}`` marks what the model wrote, for training; here it is only its content."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def refuse(message: str) -> NoReturn:
        raise TemplateRuntimeError(message)

    environment = Bounded(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, loopcontrols])
    environment.filters["tojson"] = _to_json
    names: dict[str, Any] = environment.globals  # pyright: ignore[reportAssignmentType]
    names.update(raise_exception=refuse, strftime_now=time.strftime)
    return environment


def _product(operator: str, left: Any, right: Any) -> int:
    """About how many characters or bits a product or power takes."""
    size: Callable[[Any], int] = lambda value: len(value) if hasattr(value, "__len__") else 1  # noqa: E731
    if operator == "*":
        times = next((value for value in (left, right) if isinstance(value, int)), 1)
        return size(left) * size(right) * times if hasattr(left, "__len__") or hasattr(right, "__len__") else 0
    return left.bit_length() * right if isinstance(left, int) and isinstance(right, int) else 0


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the HTML escapes of Jinja's own filter, as transformers has it."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
