"""Tools for a chat template that lists none: definitions in the form that the template writes calls in, or else these,
calls and their results as text in Hermes' form."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from api.text.calls.formats import HERMES, ToolFormat

_HEAD = """\
You may call functions to answer. Their signatures, one JSON object a line:
<tools>
{tools}
</tools>

To call one, write a JSON object with its name and arguments within <tool_call> tags:
<tool_call>
{"name": <name of the function>, "arguments": <object of arguments>}
</tool_call>"""
_MARKED_HEAD = """\
## Tools
You may call these functions, one JSON object a line:
{tools}

To call one or several, end your answer with exactly this form, NAME being a function's name and ARGUMENTS a JSON object
of its parameters:
{form}"""


def _head(form: ToolFormat) -> str:
    """`{tools}` stands for the definitions."""
    if form.marks is None:
        return _HEAD
    before, after = form.marks.around("NAME")
    return _MARKED_HEAD.replace("{form}", f"{form.opens}{before}ARGUMENTS{after}{form.closes}")


def with_tools(
    messages: Sequence[dict[str, Any]], definitions: Iterable[dict[str, Any]], form: ToolFormat = HERMES
) -> list[dict[str, Any]]:
    """The messages with the tools in the first system message, which is made if there is none."""
    lines = "\n".join(json.dumps(definition, ensure_ascii=False) for definition in definitions)
    head = _head(form).replace("{tools}", lines, 1)
    if messages and messages[0]["role"] == "system":
        first = {**messages[0], "content": f"{messages[0]['content']}\n\n{head}".lstrip()}
        return [first, *messages[1:]]
    return [{"role": "system", "content": head}, *messages]


def without_calls(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with calls and results as text: roles are system, user and assistant. Results that follow each
    other are one message."""
    plain: list[dict[str, Any]] = []
    last = ""
    for message in messages:
        kept = {key: value for key, value in message.items() if key not in ("tool_calls", "tool_call_id")}
        if message["role"] == "tool":
            text = f"<tool_response>\n{message['content']}\n</tool_response>"
            if last == "tool":
                plain[-1] = {**plain[-1], "content": f"{plain[-1]['content']}\n{text}"}
            else:
                plain.append({"role": "user", "content": text})
        else:
            calls = [_written(call["function"]) for call in message.get("tool_calls", ())]
            plain.append({**kept, "content": "\n".join(filter(None, [message["content"], *calls]))})
        last = message["role"]
    return plain


def _written(function: dict[str, Any]) -> str:
    call = {"name": function["name"], "arguments": function["arguments"]}
    return f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"
