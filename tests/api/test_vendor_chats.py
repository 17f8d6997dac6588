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
# DeepSeek-V3.1's: it lists no tools, and joins arguments as texts
DEEPSEEK = r"""{{ bos_token }}{%- for m in messages if m.role == 'system' %}{{ m.content + '\n' }}{%- endfor %}
{%- for m in messages %}{%- if m.role == 'user' %}{{ '<|im_start|>user\n' + m.content + '<|im_end|>\n' }}
{%- elif m.role == 'assistant' and m.tool_calls %}{{ '<｜Assistant｜></think>' + (m.content or '') }}
{{- '<｜tool▁calls▁begin｜>' }}{%- for call in m['tool_calls'] %}
{{- '<｜tool▁call▁begin｜>' + call.function.name + '<｜tool▁sep｜>' + call.function.arguments + '<｜tool▁call▁end｜>' }}
{%- endfor %}{{ '<｜tool▁calls▁end｜>' }}{%- elif m.role == 'assistant' %}{{ m.content }}
{%- elif m.role == 'tool' %}{{ '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}
{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' + ('<think>' if thinking else '</think>') }}{%- endif %}"""
# Kimi K2's: of a call it writes the id
KIMI = r"""{%- if tools %}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson(separators=(',', ':')) }}{%- endif %}
{%- for m in messages %}{%- if m.role == 'assistant' %}<|im_assistant|>{{ m.content }}
{%- if m.tool_calls %}<|tool_calls_section_begin|>{%- for call in m.tool_calls %}<|tool_call_begin|>{{ call.id }}
{{- '<|tool_call_argument_begin|>' + (call.function.arguments | tojson) + '<|tool_call_end|>' }}{%- endfor %}
{{- '<|tool_calls_section_end|>' }}{%- endif %}
{%- elif m.role == 'tool' %}## Return of {{ m.tool_call_id + '\n' + m.content }}
{%- else %}<|im_start|>{{ m.role + '\n' + m.content }}<|im_end|>{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
<think>{%- endif %}"""
# gpt-oss': one call a message, reasoning as `thinking` and only of a turn that has no answer yet
HARMONY = r"""<|start|>system<|message|>Reasoning: {{ reasoning_effort or 'medium' }}<|end|>
{%- if messages[0].role == 'system' or tools %}<|start|>developer<|message|>
{%- if messages[0].role == 'system' %}{{ messages[0].content }}{%- endif %}
{%- for tool in tools or [] %}{{ '// ' + tool.function.description + '\ntype ' + tool.function.name }}{%- endfor %}
{{- '<|end|>' }}{%- endif %}
{%- for m in messages %}{%- if m.role == 'user' %}<|im_start|>user
{{ m.content }}<|im_end|>
{%- elif m.role == 'assistant' and m.tool_calls %}
{%- if m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{%- endif %}
{{- '<|start|>assistant to=functions.' + m.tool_calls[0].function.name + '<|channel|>commentary json<|message|>' }}
{{- m.tool_calls[0].function.arguments | tojson }}<|call|>
{%- elif m.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}
{{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}
{%- elif m.role == 'tool' %}<|start|>functions to=assistant<|channel|>commentary<|message|>{{ m.content | tojson }}
{{- '<|end|>' }}{%- endif %}{%- endfor %}{%- if add_generation_prompt %}<|im_start|>assistant
{%- endif %}"""
TEMPLATES = {"glm": GLM, "minimax": MINIMAX, "deepseek": DEEPSEEK, "kimi": KIMI, "harmony": HARMONY}
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
    "deepseek": (
        "Two things.</think>Let me see.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>"
        "{\"city\": \"Köln\"}<｜tool▁call▁end｜><｜tool▁call▁begin｜>count<｜tool▁sep｜>"
        "{\"to\": 3, \"note\": \"1 < 2\\n\"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
    "kimi": (
        "Two things.</think>Let me see.<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0"
        "<|tool_call_argument_begin|>{\"city\": \"Köln\"}<|tool_call_end|><|tool_call_begin|>functions.count:1"
        "<|tool_call_argument_begin|>{\"to\": 3, \"note\": \"1 < 2\\n\"}<|tool_call_end|><|tool_calls_section_end|>"
    ),
    "harmony": (
        "<|channel|>analysis<|message|>Two things.<|end|><|start|>assistant<|channel|>commentary<|message|>Let me see."
        "<|end|><|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
        "{\"city\": \"Köln\"}<|call|><|start|>assistant to=functions.count<|channel|>commentary json<|message|>"
        "{\"to\": 3, \"note\": \"1 < 2\\n\"}<|call|>"
    ),
}  # fmt: skip
MORE: dict[str, Any] = {"deepseek": {"extra_body": {"enable_thinking": True}}}
CALLS = [("weather", {"city": "Köln"}), ("count", {"to": 3, "note": "1 < 2\n"})]


@pytest.fixture(scope="module", params=list(TEMPLATES))
def vendor(
    request: pytest.FixtureRequest, model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Running]]:
    name = request.param
    folder = tmp_path_factory.mktemp(name)
    path = folder / "template.jinja"
    path.write_text(TEMPLATES[name])
    with serving(model_dir, folder, "--adapters", "say=/fake/say", "--chat-template", str(path)) as running:
        yield name, running


def test_reasoning_text_and_calls(vendor: tuple[str, Running]) -> None:
    """Whole and streamed."""
    name, server = vendor
    (choice,) = say(server, ANSWERS[name], tools=[WEATHER, COUNT], **MORE.get(name, {})).choices
    message = choice.message
    assert (message.reasoning_content, message.content) == ("Two things.", "Let me see.")
    assert [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls] == CALLS
    assert choice.finish_reason == "tool_calls"
    found, reasons = streamed(server, ANSWERS[name], tools=[WEATHER, COUNT], **MORE.get(name, {}))
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
        "deepseek": [
            '<｜tool▁call▁begin｜>count<｜tool▁sep｜>{"to": 3}<｜tool▁call▁end｜>',
            "<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>ARGUMENTS<｜tool▁call▁end｜>",
        ],
        "kimi": ['functions.count:0<|tool_call_argument_begin|>{"to": 3}', "## Return of functions.count:0\ndone"],
        "harmony": [
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant to=functions.count",
            'json<|message|>{"to": 3}<|call|><|start|>functions to=assistant',
        ],
    }
    reasoning = [] if name in ("deepseek", "kimi") else ["Hm."]  # those templates leave that of earlier messages out
    for text in (*written[name], *reasoning, "The weather of a city."):
        assert text in prompt


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "now"}}])
def test_forced_calls_have_a_grammar_in_the_vendors_form(vendor: tuple[str, Running], choice: Any) -> None:
    name, server = vendor
    before = len(server.received("Submit"))
    if name in ("minimax", "kimi"):  # its template opens reasoning, whose end is no token of this vocabulary
        with pytest.raises(openai.BadRequestError, match="end of reasoning is not one token"):
            say(server, ANSWERS[name], tools=[WEATHER, NOW], tool_choice=choice)
        return
    off = {"enable_thinking": False}
    say(server, ANSWERS[name], tools=[WEATHER, NOW], tool_choice=choice, extra_body=off)
    text = server.received("Submit")[before]["grammar"]["text"]
    assert "now" in text and ("weather" in text) == (choice == "required")
    signs = {"glm": "<tool_call>", "deepseek": "<｜tool▁sep｜>", "harmony": "<|channel|>commentary to=functions.now"}
    assert json.dumps(signs[name])[1:-1] in text


def test_the_other_apis_read_channels(model_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "template.jinja"
    path.write_text(HARMONY)
    with serving(model_dir, tmp_path, "--adapters", "say=/fake/say", "--chat-template", str(path)) as server:
        message = {"role": "user", "content": ANSWERS["harmony"]}
        tools = [{"type": "function", **tool["function"]} for tool in (WEATHER, COUNT)]
        response = server.openai.responses.create(model="say", input=ANSWERS["harmony"], tools=tools)
        kinds = ["reasoning", "message", "function_call", "function_call"]
        assert [item.type for item in response.output] == kinds and response.output_text == "Let me see."
        assert [(i.name, json.loads(i.arguments)) for i in response.output if i.type == "function_call"] == CALLS
        offered = [
            {"name": tool["function"]["name"], "input_schema": tool["function"]["parameters"]}
            for tool in (WEATHER, COUNT)
        ]
        body = {"model": "say", "max_tokens": 500, "messages": [message], "tools": offered}
        answer = server.http.post("/v1/messages", json=body).json()
        blocks = answer["content"]
        assert [block["type"] for block in blocks][-3:] == ["text", "tool_use", "tool_use"]
        assert [(block["name"], block["input"]) for block in blocks if block["type"] == "tool_use"] == CALLS
        assert answer["stop_reason"] == "tool_use"
        whole = say(server, "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.")
        assert (whole.choices[0].message.reasoning_content, whole.choices[0].message.content) == ("Hm.", "Yes.")
        noted = server.http.post(
            "/v1/chat/completions",
            json={"model": "say", "messages": [message], "reasoning_effort": "none", "max_tokens": 5},
        )
        assert noted.status_code == 200 and "none is low" in noted.headers["warnings"]
        with pytest.raises(openai.BadRequestError, match="answers in channels"):
            say(server, "x", extra_body={"thinking_token_budget": 5})
        before = len(server.received("Submit"))
        begun = [{"role": "user", "content": "go"}, {"role": "assistant", "content": "It is"}]
        how = {"add_generation_prompt": False, "continue_final_message": True, "max_tokens": 3}
        going_on = server.http.post("/v1/chat/completions", json={"model": "tiny", "messages": begun, **how})
        assert going_on.status_code == 200 and prompt_of(server, before).endswith("final<|message|>It is")
