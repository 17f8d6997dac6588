"""Grammars for calls: an answer that has to be one, and arguments that have to follow their schemas."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from api.errors import bad_request
from api.text.calls.definitions import ToolUse
from api.text.calls.formats import ToolFormat
from engine.messages import GrammarSpec

_JSON = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}  # as templates write it
ANY_ARGUMENTS = {"type": "object"}


def grammar_of(use: ToolUse, form: ToolFormat, answer: GrammarSpec | None = None) -> GrammarSpec | None:
    """None if nothing has to be enforced: nobody must call, no tool is `strict`, and there is no `answer`, what an
    answer without calls is to be. Raises ApiError 400 if both cannot be."""
    enclosed = form.closes is not None
    opens = "" if form.bare else _quoted(form.opens)
    calls = "call (SPACE? call)*" if enclosed and not use.one else "call"
    rules = ["SPACE: /[ \\n]{1,4}/", "TEXT: /(.|\\n)*/"]
    if answer is not None and use.must and answer.field.startswith("response_format"):
        answer = None  # OpenAI's says what a text is to be, and there is none
    if answer is not None:
        if use.must:
            message = "the answer has to be a call: send tool_choice 'auto' with a JSON schema, or 'none'"
            raise bad_request(f"{answer.field}: {message}", answer.field)
        if answer.kind != "json_schema":
            message = "only a JSON schema goes with tools that may be called: send one, or tool_choice 'none'"
            raise bad_request(f"{answer.field}: {message}", answer.field)
        schema = _json(json.loads(answer.text))
        rules += [f"start: SPACE? {calls} | answer", f"call: {opens} body", f"answer: {schema}"]
    elif use.must:
        rules += [f"start: SPACE? {calls}", f"call: {opens} body"]
    elif enclosed and any(tool.strict for tool in use.tools):
        rules += ["start: call* TEXT", "call: begin body", f"begin[lazy]: TEXT {_quoted(form.opens)}"]
    else:
        return None
    schemas = {tool.name: tool.enforced if use.must or tool.strict else ANY_ARGUMENTS for tool in use.callable}
    bodies = _xml(schemas, form) if form.xml else _objects(schemas, form)
    rules += ["body: " + " | ".join(f"body_{i}" for i in range(len(schemas))), *bodies]
    return GrammarSpec("lark", "\n".join(rules) + "\n", field="tools" if answer is None else answer.field)


def _objects(schemas: Mapping[str, Mapping[str, Any]], form: ToolFormat) -> Iterator[str]:
    inner = "" if form.closes is None else "\n"
    before, after = ("[", "]") if form.listed else ("", "")
    for i, (name, schema) in enumerate(schemas.items()):
        head = f'{inner}{before}{{"name": {json.dumps(name)}, "{form.arguments}": '
        yield f"body_{i}: {_quoted(head)} {_json(schema)} {_quoted(f'}}{after}{inner}{form.closes or str()}')}"


def _xml(schemas: Mapping[str, Mapping[str, Any]], form: ToolFormat) -> Iterator[str]:
    yield "value[lazy]: /(.|\\n)*<\\/parameter>/"
    yield "parameters[lazy]: /(.|\\n)*<\\/function>/"
    for i, (name, schema) in enumerate(schemas.items()):
        if schema is ANY_ARGUMENTS:
            head, tail = _quoted(f"\n<function={name}>\n"), _quoted(f"\n{form.closes}")
            yield f"body_{i}: {head} parameters {tail}"
            continue
        parts = []
        required = schema.get("required", ())
        for j, (key, value) in enumerate(schema.get("properties", {}).items()):
            head, tail = _quoted(f"<parameter={key}>\n"), _quoted("\n</parameter>")
            if _is_text(value) and (pattern := _whole_pattern(value)) is not None:
                yield f"text_{i}_{j}[lazy]: /{_in_slashes(pattern)}\\n<\\/parameter>/"
                content = f"{head} text_{i}_{j}"
            else:
                content = f"{head} value" if _is_text(value) else f"{head} {_content(value)} {tail}"
            parts.append(f'({content} "\\n")' + ("" if key in required else "?"))
        end = _quoted(f"</function>\n{form.closes}")
        yield f"body_{i}: {_quoted(f'{chr(10)}<function={name}>{chr(10)}')} {' '.join(parts)} {end}"


def _whole_pattern(schema: Mapping[str, Any]) -> str | None:
    """The pattern of a whole text, without its anchors."""
    found = re.fullmatch(r"\^(\(\?:.*\))\$", str(schema.get("pattern", "")), re.DOTALL)
    return None if found is None else found[1]


def _in_slashes(pattern: str) -> str:
    """A regular expression as Lark has it between slashes."""
    return re.sub(
        r"\\.|/|\n", lambda found: {"/": "\\/", "\n": "\\n"}.get(found[0], found[0]), pattern, flags=re.DOTALL
    )


def _is_text(schema: Any) -> bool:
    return isinstance(schema, dict) and schema.get("type") == "string" and not {"enum", "const"} & set(schema)


def _content(schema: Any) -> str:
    """A value that is written as JSON, or one of some texts, which are written as they are."""
    allowed = schema.get("enum", [schema["const"]] if "const" in schema else []) if isinstance(schema, dict) else []
    if allowed and all(isinstance(one, str) and one for one in allowed):
        return _either(map(_quoted, allowed))
    return _json(schema)


def _either(options: Iterable[str]) -> str:
    return f"({' | '.join(options)})"


def _json(schema: Any) -> str:
    return f"%json {json.dumps({**schema, 'x-guidance': _JSON} if isinstance(schema, dict) else schema)}"


def _quoted(text: str) -> str:
    return json.dumps(text)
