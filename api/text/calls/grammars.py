"""Grammars for calls: an answer that has to be one, and arguments that have to follow their schemas."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from api.errors import bad_request
from api.text.calls.definitions import ToolUse
from api.text.calls.formats import ToolFormat
from api.text.calls.xml_call import Tags
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
    bodies = _objects(schemas, form) if form.tags is None else _xml(schemas, form, form.tags)
    rules += ["body: " + " | ".join(f"body_{i}" for i in range(len(schemas))), *bodies]
    return GrammarSpec("lark", "\n".join(rules) + "\n", field="tools" if answer is None else answer.field)


def _objects(schemas: Mapping[str, Mapping[str, Any]], form: ToolFormat) -> Iterator[str]:
    inner = "" if form.closes is None else "\n"
    before, after = ("[", "]") if form.listed else ("", "")
    for i, (name, schema) in enumerate(schemas.items()):
        head = f'{inner}{before}{{"name": {json.dumps(name)}, "{form.arguments}": '
        yield f"body_{i}: {_quoted(head)} {_json(schema)} {_quoted(f'}}{after}{inner}{form.closes or str()}')}"


def _xml(schemas: Mapping[str, Mapping[str, Any]], form: ToolFormat, tags: Tags) -> Iterator[str]:
    end = f"{tags.end_of_function}\n" if tags.end_of_function else ""
    yield f"value[lazy]: /(.|\\n)*{_in_slashes(tags.end_of_value)}/"
    yield f"parameters[lazy]: /(.|\\n)*{_in_slashes(end + (form.closes or ''))}/"
    line = "\n" if tags.lines else ""
    for i, (name, schema) in enumerate(schemas.items()):
        start = f"\n{tags.function[0]}" if tags.function[0] else ""
        head = _quoted(f"{start}{name}{tags.function[1]}\n")
        if schema is ANY_ARGUMENTS:
            yield f"body_{i}: {head} parameters"
            continue
        parts = []
        required = schema.get("required", ())
        for j, (key, value) in enumerate(schema.get("properties", {}).items()):
            begin = f"{tags.parameter[0]}{key}{tags.parameter[1]}" + (f"\n{tags.value}" if tags.value else "")
            before, after = _quoted(f"{begin}{line}"), _quoted(f"{line}{tags.end_of_value}")
            if _is_text(value) and (pattern := _whole_pattern(value)) is not None:
                yield f"text_{i}_{j}[lazy]: /{_in_slashes(pattern)}{_in_slashes(line + tags.end_of_value)}/"
                content = f"{before} text_{i}_{j}"
            else:
                content = f"{before} value" if _is_text(value) else f"{before} {_content(value)} {after}"
            parts.append(f'({content} "\\n")' + ("" if key in required else "?"))
        yield f"body_{i}: {' '.join([head, *parts, _quoted(f'{end}{form.closes}')])}"


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
