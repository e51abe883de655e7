"""Rendered chat templates against transformers, on templates in the manner of those that models ship."""

from __future__ import annotations

from typing import Any

import pytest

from tapeout.runtime.chat import render_chat

utils = pytest.importorskip("transformers.utils.chat_template_utils")

CHATML = """{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system
You are helpful.<|im_end|>
' }}{% endif %}{{'<|im_start|>' + message['role'] + '
' + message['content'] + '<|im_end|>' + '
'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant
' }}{% endif %}"""
HEADERS = """{{- bos_token }}
{%- set ns = namespace(system='') %}
{%- if messages[0].role == 'system' %}
    {%- set ns.system = messages[0].content | trim %}
    {%- set messages = messages[1:] %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' + ns.system + '<|eot_id|>' }}
{%- for message in messages %}
    {%- if message.content is string %}
        {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}"""
TURNS = """{{ bos_token }}{%- if messages[0]['role'] == 'system' -%}
    {%- set first = messages[0]['content'] + '\n\n' -%}{%- set loop_messages = messages[1:] -%}
{%- else -%}{%- set first = '' -%}{%- set loop_messages = messages -%}{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) and not tools -%}
        {{ raise_exception('Roles must alternate user/assistant/user/assistant/...') }}
    {%- endif -%}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '\n' + (first if loop.first else '') }}
    {{- (message['content'] | trim) + '<end_of_turn>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}"""
TOOLS = """{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n<tools>' }}
    {%- for tool in tools %}
        {{- '\\n' }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.tool_calls %}
        {%- for call in message.tool_calls %}
            {{- '<tool_call>{"name": "' ~ call.function.name ~ '", "arguments": ' }}
            {{- call.function.arguments | tojson(indent=1) }}
            {{- '}</tool_call>' }}
            {%- if loop.index > 3 %}{% break %}{% endif %}
        {%- endfor %}
    {%- elif message.role == 'tool' %}
        {{- '<tool_response>' + message.content + '</tool_response>' }}
    {%- else %}
        {% generation %}{{- message.role ~ ': ' ~ message.content }}{% endgeneration %}
    {%- endif %}

    text after blocks
{%- endfor %}{{ dict(a=1).a if false else 'x' * 3 }}"""
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one question": [{"role": "user", "content": "Hi <there> & 'you'"}],
    "with a system message": [
        {"role": "system", "content": " Be brief. "},
        {"role": "user", "content": "Hi\n"},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "é 😀"},
    ],
    "with a tool": [
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"function": {"name": "get", "arguments": {"city": "Zürich <1>", "days": 2}}}],
        },
        {"role": "tool", "content": "sunny"},
    ],
}
WEATHER = {
    "type": "function",
    "function": {"name": "get", "description": "Wetter für <Ort>", "parameters": {"a": [1.5]}},
}


@pytest.mark.parametrize("tools", [None, [WEATHER]], ids=["no tools", "tools"])
@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("template", [CHATML, HEADERS, TURNS, TOOLS], ids=["chatml", "headers", "turns", "tools"])
@pytest.mark.parametrize("prompt", [True, False], ids=["prompt", "no prompt"])
def test_rendered_as_transformers_does(
    template: str, conversation: str, tools: list[dict[str, Any]] | None, prompt: bool
) -> None:
    messages, tokens = CONVERSATIONS[conversation], {"bos_token": "<bos>", "eos_token": "<eos>"}
    try:
        (expected,), _ = utils.render_jinja_template(
            [messages], tools=tools, chat_template=template, add_generation_prompt=prompt, **tokens
        )
    except Exception as error:
        with pytest.raises(ValueError, match=r"the chat template of the model does not take these messages") as raised:
            render_chat(template, messages, tools=tools, add_generation_prompt=prompt, **tokens)
        assert str(error) in str(raised.value)
    else:
        assert render_chat(template, messages, tools=tools, add_generation_prompt=prompt, **tokens) == expected
