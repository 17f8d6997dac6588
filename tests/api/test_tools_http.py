"""Tools and reasoning over real HTTP with the openai client; the fake engine says what it is told to."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.api.conftest import TEMPLATE, Running, serving

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
QWEN = (
    "{% if tools %}<|im_start|>system\n<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>"
    "Answer with <tool_call><|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function.name }}"
    "{% for key, value in call.function.arguments.items() %}[{{ key }}={{ value }}]{% endfor %}"
    "</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>"
    "{% elif enable_thinking is defined %}<think>\n{% endif %}{% endif %}"
)


@pytest.fixture(scope="module")
def qwen(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A model whose template knows tools and reasoning."""
    folder = tmp_path_factory.mktemp("qwen")
    template = folder / "template.jinja"
    template.write_text(QWEN)
    with serving(model_dir, folder, "--adapters", "say=/fake/say", "--chat-template", str(template)) as running:
        yield running


def say(server: Running, text: str, **fields: Any) -> Any:
    """The answer of a model that says `text`."""
    messages = [*fields.pop("before", []), {"role": "user", "content": text}]
    return server.openai.chat.completions.create(**{"model": "say", "messages": messages, **fields})


def streamed(server: Running, text: str, **fields: Any) -> tuple[dict[str, Any], list[Any]]:
    """The message that the chunks of a stream amount to, and its finish reasons."""
    message: dict[str, Any] = {"content": "", "reasoning": "", "calls": []}
    reasons = []
    for chunk in say(server, text, stream=True, **fields):
        (choice,) = chunk.choices
        message["content"] += choice.delta.content or ""
        message["reasoning"] += getattr(choice.delta, "reasoning_content", None) or ""
        for call in choice.delta.tool_calls or []:
            if call.id is not None:
                assert call.index == len(message["calls"]) and call.type == "function"
                message["calls"].append([call.id, call.function.name, ""])
            message["calls"][call.index][2] += call.function.arguments
        reasons += [choice.finish_reason] if choice.finish_reason else []
    return message, reasons


def prompt_of(server: Running, before: int) -> str:
    tokens = server.received("Submit")[before]["prompt"]
    return str(server.http.post("/detokenize", json={"tokens": tokens}).json()["prompt"])


@pytest.mark.parametrize("name", ["server", "qwen"])
def test_calls(name: str, request: pytest.FixtureRequest) -> None:
    """Whether the template knows tools or not."""
    server = request.getfixturevalue(name)
    answer = say(server, f"Let me see.\n{CALL}\n{CALL}", tools=[WEATHER, NOW])
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls" and choice.message.content == "Let me see."
    one, two = choice.message.tool_calls
    assert one.id != two.id and one.id.startswith("call_") and one.type == "function"
    assert one.function.name == "weather" and json.loads(one.function.arguments) == {"city": "Köln"}
    message, reasons = streamed(server, f"Let me see.\n{CALL}\n{CALL}", tools=[WEATHER, NOW])
    assert message["content"] == "Let me see." and reasons == ["tool_calls"]
    assert [call[1:] for call in message["calls"]] == [["weather", '{"city": "Köln"}']] * 2


@pytest.mark.parametrize("name", ["server", "qwen"])
def test_tools_reach_the_prompt(name: str, request: pytest.FixtureRequest) -> None:
    server = request.getfixturevalue(name)
    before = len(server.received("Submit"))
    say(server, "x", tools=[WEATHER])
    prompt = prompt_of(server, before)
    assert json.dumps(WEATHER, ensure_ascii=False) in prompt and prompt.count("system\n") == 1
    before = len(server.received("Submit"))
    assert say(server, CALL, tools=[WEATHER], tool_choice="none").choices[0].message.content == CALL
    assert "<tools>" not in prompt_of(server, before)


def test_without_tools_calls_are_text(qwen: Running) -> None:
    answer = say(qwen, CALL)
    assert answer.choices[0].message.content == CALL and answer.choices[0].finish_reason == "stop"


def test_results_go_back(qwen: Running, server: Running) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Köln"}'}}
    history = [
        {"role": "user", "content": "How is it?"},
        {"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny <|im_end|>"},
    ]
    before = len(qwen.received("Submit"))
    say(qwen, "x", before=history, tools=[WEATHER])
    prompt = prompt_of(qwen, before)
    assert "<think>Hm.</think><tool_call>weather[city=Köln]</tool_call><|im_end|>" in prompt
    assert "<|im_start|>tool\nsunny <|im_end|><|im_end|>" in prompt
    before = len(server.received("Submit"))
    say(server, "x", before=history)
    assert f"assistant\n{CALL}<|im_end|>" in prompt_of(server, before)
    assert "user\n<tool_response>\nsunny <|im_end|>\n</tool_response><|im_end|>" in prompt_of(server, before)


def test_one_call_at_most(qwen: Running) -> None:
    before = len(qwen.received("StopFound"))
    answer = say(qwen, f"{CALL}{CALL} and much more {'x' * 300}", tools=[WEATHER], parallel_tool_calls=False)
    assert len(answer.choices[0].message.tool_calls) == 1 and answer.choices[0].finish_reason == "tool_calls"
    assert qwen.wait_for("StopFound", before + 1)


def test_functions_are_the_older_form(qwen: Running) -> None:
    fields = {"functions": [WEATHER["function"]], "function_call": "auto"}
    message = say(qwen, CALL, **fields).choices[0]
    assert message.finish_reason == "function_call" and message.message.function_call.name == "weather"
    assert json.loads(message.message.function_call.arguments) == {"city": "Köln"}
    deltas = [chunk.choices[0].delta.function_call for chunk in say(qwen, CALL, stream=True, **fields)]
    assert "".join(delta.arguments for delta in deltas if delta) == '{"city": "Köln"}'


@pytest.mark.parametrize(
    ("choice", "only", "many"),
    [("required", None, True), ({"type": "function", "function": {"name": "now"}}, "now", False)],
)
def test_forced_calls_have_a_grammar(qwen: Running, choice: Any, only: str | None, many: bool) -> None:
    before = len(qwen.received("Submit"))
    say(qwen, CALL, tools=[WEATHER, NOW], tool_choice=choice)
    grammar = qwen.received("Submit")[before]["grammar"]
    assert grammar["kind"] == "lark" and ('"now' in grammar["text"]) != (only == "weather")
    assert ("weather" in grammar["text"]) == (only is None) and ("call)*" in grammar["text"]) == many


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "string"}}}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": {"required": "x"}}}]}, "tools"),
        ({"tools": [{"type": 3}]}, "tools"),
        ({"tools": [NOW] * 1025}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [NOW], "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [NOW], "tool_choice": {"type": "function", "function": {"name": "then"}}}, "tool_choice"),
        ({"tools": [NOW], "functions": [NOW["function"]]}, "functions"),
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
        ({"extra_body": {"thinking_token_budget": -1}}, "thinking_token_budget"),
        ({"extra_body": {"thinking_token_budget": 3}}, "thinking_token_budget"),  # <think> is no token here
    ],
)
def test_mistakes_are_400(qwen: Running, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        say(qwen, "x", **fields)
    assert caught.value.param == param


@pytest.mark.parametrize("choice", ["required", "auto", {"type": "function", "function": {"name": "odd"}}])
def test_the_wrong_schema_among_those_of_tools_is_named(qwen: Running, choice: Any) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"not": {}}}}
    odd = {"type": "function", "function": {"name": "odd", "parameters": schema, "strict": True}}
    with pytest.raises(openai.BadRequestError) as caught:
        say(qwen, "x", tools=[WEATHER, odd], tool_choice=choice)
    assert caught.value.param == "tools" and caught.value.code == "invalid_grammar"
    message = caught.value.body["message"]  # type: ignore[index,call-overload]
    assert message == 'tools[1].function.parameters: #/properties/b: Unimplemented keys: ["not"]'


def test_reasoning_is_apart(qwen: Running) -> None:
    text = "<think>\nHm.\n</think>\n\nYes."
    message = say(qwen, text).choices[0].message
    assert message.content == "Yes." and message.reasoning_content == message.reasoning == "Hm."
    assert streamed(qwen, text)[0] == {"content": "Yes.", "reasoning": "Hm.", "calls": []}
    hidden = say(qwen, text, extra_body={"include_reasoning": False}).choices[0].message
    assert hidden.content == "Yes." and not hasattr(hidden, "reasoning_content") and not hasattr(hidden, "reasoning")
    message, reasons = streamed(qwen, f"<think>Which?</think>{CALL}", tools=[WEATHER])
    assert message["reasoning"] == "Which?" and message["calls"][0][1] == "weather" and reasons == ["tool_calls"]


def test_log_probabilities_of_a_response_are_those_of_its_text(qwen: Running) -> None:
    """Neither of reasoning nor of calls, in a stream as in a whole answer. A marker is several tokens here."""
    text = f"<think>Hm, hm.</think>\n\nYes.{CALL}No."
    tool = {"type": "function", **WEATHER["function"]}
    fields: Any = {"model": "say", "input": text, "tools": [tool], "include": ["message.output_text.logprobs"]}
    whole = qwen.openai.responses.create(**fields)
    end = list(qwen.openai.responses.create(**fields, stream=True))[-1].response
    for response in (whole, end):
        contents = [item.content[0] for item in response.output if item.type == "message"]
        assert [content.text for content in contents] == ["Yes.", "No."]
        scored = ["".join(score.token for score in content.logprobs) for content in contents]
        assert scored == ["Yes.<tool_call", "No."]


def test_reasoning_that_the_template_opens(qwen: Running) -> None:
    on = {"extra_body": {"enable_thinking": True}}
    message = say(qwen, "Hm.\n</think>\n\nYes.", **on).choices[0].message
    assert message.content == "Yes." and message.reasoning_content == "Hm."
    assert streamed(qwen, "Hm. Hm.", **on)[0] == {"content": "", "reasoning": "Hm. Hm.", "calls": []}


def test_effort_switches_reasoning(qwen: Running, server: Running) -> None:
    for effort, ending in (("none", "<think></think>"), ("low", "<think>\n")):
        before = len(qwen.received("Submit"))
        say(qwen, "x", reasoning_effort=effort)
        assert prompt_of(qwen, before).endswith(f"assistant\n{ending}")
    body = {
        "model": "say",
        "messages": [{"role": "user", "content": "x"}],
        "reasoning_effort": "low",
        "thinking_token_budget": 5,
        "chat_template_kwargs": {"colour": "red"},
    }
    noted = server.http.post("/v1/chat/completions", json=body)
    assert noted.status_code == 200
    for name in ("reasoning_effort", "thinking_token_budget", "chat_template_kwargs.colour"):
        assert f"'{name}' has no effect" in noted.headers["warnings"]


def test_text_of_a_model_without_reasoning_is_left_alone(server: Running) -> None:
    assert "think" not in TEMPLATE
    text = "<think>\nHm.\n</think>\n\nYes."
    assert say(server, text).choices[0].message.content == text
