"""The chats of other vendors over HTTP: their templates, reasoning and calls, by the openai client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.api.conftest import Running, serving
from tests.api.test_tools_http import NOW, WEATHER, prompt_of, say, streamed

# What GLM-4.6's template writes of tools, reasoning and calls, around turns in the fake engine's vocabulary
GLM = r"""[gMASK]<sop>
{%- if tools %}<|system|>
# Tools
<tools>
{% for tool in tools %}{{ tool | tojson(ensure_ascii=False) }}
{% endfor %}</tools>
For each function call, output the function name and arguments within the following XML format:
<tool_call>{function-name}
<arg_key>{arg-key-1}</arg_key>
<arg_value>{arg-value-1}</arg_value>
</tool_call>{%- endif -%}
{%- for m in messages %}{%- if m.role == 'user' %}<|im_start|>user
{{ m.content }}<|im_end|>{%- elif m.role == 'assistant' %}<|assistant|>
{{ '\n<think>' + (m.reasoning_content or '') + '</think>' }}{{ m.content }}
{%- for call in m.tool_calls or [] %}
{{ '\n<tool_call>' + call.function.name }}
{% for k, v in call.function.arguments.items() %}<arg_key>{{ k }}</arg_key>
<arg_value>{{ v | tojson(ensure_ascii=False) if v is not string else v }}</arg_value>
{% endfor %}</tool_call>{% endfor %}
{%- elif m.role == 'tool' %}<|observation|>
<tool_response>
{{ m.content }}
</tool_response>{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{{- '\n<think></think>' if (enable_thinking is defined and not enable_thinking) else '' }}{%- endif -%}
"""
# Likewise MiniMax-M2's
MINIMAX = r"""{%- set call_begin, call_end = '<minimax:tool_call>', '</minimax:tool_call>' -%}
{{- ']~!b[' ~ ']~b]system' ~ '\n' }}
{%- if tools %}# Tools
<tools>
{% for tool in tools %}<tool>{{ tool.function | tojson(ensure_ascii=False) }}</tool>
{% endfor %}</tools>
{{ call_begin }}
<invoke name="tool-name-1">
<parameter name="param-key-1">param-value-1</parameter>
</invoke>
{{ call_end }}{% endif %}
{{- '[e~[\n' }}
{%- for m in messages %}{%- if m.role == 'assistant' %}{{- ']~b]ai' ~ '\n' }}
{{- '<think>\n' ~ m.reasoning_content ~ '\n</think>\n\n' if m.reasoning_content else '' }}{{ m.content }}
{%- if m.tool_calls %}{{ '\n' ~ call_begin ~ '\n' }}
{%- for call in m.tool_calls %}{{- '<invoke name="' ~ call.function.name ~ '">' }}
{%- for k, v in call.function.arguments.items() %}{{- '<parameter name="' ~ k ~ '">' }}{{ v }}{{- '</parameter>' }}
{%- endfor %}{{- '</invoke>' ~ '\n' }}{% endfor %}{{- call_end }}{% endif %}{{- '[e~[' ~ '\n' }}
{%- elif m.role == 'tool' %}{{- ']~b]tool\n<response>' ~ m.content ~ '</response>[e~[\n' }}
{%- else %}{{- '<|im_start|>user' ~ '\n' ~ m.content ~ '<|im_end|>\n' }}{% endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant' ~ '\n' ~ '<think>' ~ '\n' }}{%- endif -%}
"""
COUNT = {
    "type": "function",
    "function": {
        "name": "count",
        "parameters": {"type": "object", "properties": {"to": {"type": "integer"}, "note": {"type": "string"}}},
    },
}
ANSWERS = {
    "glm": (
        "\n<think>Two things.</think>\nLet me see.\n<tool_call>weather\n<arg_key>city</arg_key>\n"
        "<arg_value>Köln</arg_value>\n</tool_call>\n<tool_call>count<arg_key>to</arg_key><arg_value>3</arg_value>"
        "<arg_key>note</arg_key><arg_value>1 < 2\n</arg_value></tool_call>"
    ),
    "minimax": (
        "Two things.\n</think>\n\nLet me see.\n<minimax:tool_call>\n<invoke name=\"weather\">\n"
        "<parameter name=\"city\">Köln</parameter>\n</invoke>\n<invoke name=\"count\">\n<parameter name=\"to\">3"
        "</parameter>\n<parameter name=\"note\">1 < 2\n\n</parameter>\n</invoke>\n</minimax:tool_call>"
    ),
}  # fmt: skip
CALLS = [("weather", {"city": "Köln"}), ("count", {"to": 3, "note": "1 < 2\n"})]


@pytest.fixture(scope="module", params=[("glm", GLM), ("minimax", MINIMAX)], ids=["glm", "minimax"])
def vendor(
    request: pytest.FixtureRequest, model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Running]]:
    name, template = request.param
    folder = tmp_path_factory.mktemp(name)
    path = folder / "template.jinja"
    path.write_text(template)
    with serving(model_dir, folder, "--adapters", "say=/fake/say", "--chat-template", str(path)) as running:
        yield name, running


def test_reasoning_text_and_calls(vendor: tuple[str, Running]) -> None:
    """Whole and streamed."""
    name, server = vendor
    (choice,) = say(server, ANSWERS[name], tools=[WEATHER, COUNT]).choices
    message = choice.message
    assert (message.reasoning_content, message.content) == ("Two things.", "Let me see.")
    assert [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls] == CALLS
    assert choice.finish_reason == "tool_calls"
    found, reasons = streamed(server, ANSWERS[name], tools=[WEATHER, COUNT])
    assert (found["reasoning"], found["content"], reasons) == ("Two things.", "Let me see.", ["tool_calls"])
    assert [(call[1], json.loads(call[2])) for call in found["calls"]] == CALLS


def test_tools_and_results_reach_the_prompt(vendor: tuple[str, Running]) -> None:
    name, server = vendor
    call = {"id": "call_1", "type": "function", "function": {"name": "count", "arguments": '{"to": 3}'}}
    history: list[dict[str, Any]] = [
        {"role": "user", "content": "How far?"},
        {"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "done"},
    ]
    before = len(server.received("Submit"))
    say(server, "x", before=history, tools=[WEATHER, COUNT])
    prompt = prompt_of(server, before)
    written = {
        "glm": [
            "<tool_call>count\n<arg_key>to</arg_key>\n<arg_value>3</arg_value>\n</tool_call>",
            "<tool_response>\ndone",
        ],
        "minimax": ['<invoke name="count"><parameter name="to">3</parameter></invoke>', "<response>done</response>"],
    }
    for text in (*written[name], "Hm.", "The weather of a city."):
        assert text in prompt


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "now"}}])
def test_forced_calls_have_a_grammar_in_the_vendors_form(vendor: tuple[str, Running], choice: Any) -> None:
    name, server = vendor
    before = len(server.received("Submit"))
    if name == "minimax":  # its template opens reasoning, whose end is no token of this vocabulary
        with pytest.raises(openai.BadRequestError, match="end of reasoning is not one token"):
            say(server, ANSWERS[name], tools=[WEATHER, NOW], tool_choice=choice)
        return
    off = {"enable_thinking": False}
    say(server, ANSWERS[name], tools=[WEATHER, NOW], tool_choice=choice, extra_body=off)
    text = server.received("Submit")[before]["grammar"]["text"]
    assert "<tool_call>" in text and "now" in text and ("<arg_key>city</arg_key>" in text) == (choice == "required")


def test_a_template_of_channels_is_refused(model_dir: Path, tmp_path: Path) -> None:
    """Its answers would be taken for text."""
    path = tmp_path / "template.jinja"
    path.write_text("{{ messages }}<|start|>assistant<|channel|>final<|message|>")
    flags = ("--adapters", "say=/fake/say", "--chat-template", str(path))
    with serving(model_dir, tmp_path, *flags) as running, pytest.raises(openai.BadRequestError, match="in channels"):
        say(running, "x")
