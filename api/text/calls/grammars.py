"""Grammars for calls: an answer that has to be one, and arguments that have to follow their schemas."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from api.errors import bad_request
from api.text.calls.definitions import ToolUse
from api.text.calls.formats import ToolFormat
from api.text.calls.literals import ANY, Literals, TokenOf, in_slashes, no_tokens
from api.text.calls.marked_call import Marks
from api.text.calls.xml_call import Tags
from engine.messages import GrammarSpec

_JSON = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}  # as templates write it
ANY_ARGUMENTS = {"type": "object"}


def grammar_of(
    use: ToolUse, form: ToolFormat, answer: GrammarSpec | None = None, token_of: TokenOf = no_tokens
) -> GrammarSpec | None:
    """None if nothing has to be enforced: nobody must call, no tool is `strict`, and there is no `answer`, what an
    answer without calls is to be. `token_of`: of the form's markers. Raises ApiError 400 if both cannot be."""
    texts = Literals(form.markers, token_of)
    enclosed = form.closes is not None
    opens = "" if form.bare else texts.written(form.opens)
    rules = ["SPACE: /[ \\n]{1,4}/", f"TEXT: {ANY}"]
    if form.marks is None:
        calls, inside = "call (SPACE? call)*" if enclosed and not use.one else "call", "body"
    else:  # one stretch has them all
        between = f"{texts.written(form.marks.between)} " if form.marks.between else ""
        calls, inside = "call", f"body {'' if use.one else f'({between}body)* '}{texts.written(form.closes or '')}"
    if (answer := wanted(use, answer)) is not None:
        if answer.kind != "json_schema":
            message = "only a JSON schema goes with tools that may be called: send one, or tool_choice 'none'"
            raise bad_request(f"{answer.field}: {message}", answer.field)
        schema = json_rule(json.loads(answer.text))
        rules += [f"start: SPACE? {calls} | answer", f"call: {opens} {inside}", f"answer: {schema}"]
    elif use.must:
        rules += [f"start: SPACE? {calls}", f"call: {opens} {inside}"]
    elif enclosed and any(tool.strict for tool in use.tools):
        rule, begin = texts.until("begin", form.opens)
        rules += ["start: call* TEXT", f"call: {begin} {inside}", rule]
    else:
        return None
    schemas = enforced(use)
    if form.marks is not None:
        bodies = _marked(schemas, form.marks, texts)
    else:
        bodies = _objects(schemas, form, texts) if form.tags is None else _xml(schemas, form, form.tags, texts)
    rules += ["body: " + " | ".join(f"body_{i}" for i in range(len(schemas))), *bodies]
    return GrammarSpec("lark", "\n".join(rules) + "\n", field="tools" if answer is None else answer.field)


def wanted(use: ToolUse, answer: GrammarSpec | None) -> GrammarSpec | None:
    """What an answer without calls is to be, where there may be one. Raises ApiError 400 if there may not."""
    if answer is None or (use.must and answer.field.startswith("response_format")):
        return None  # OpenAI's says what a text is to be, and there is none
    if use.must:
        message = "the answer has to be a call: send tool_choice 'auto' with a JSON schema, or 'none'"
        raise bad_request(f"{answer.field}: {message}", answer.field)
    return answer


def enforced(use: ToolUse) -> dict[str, Mapping[str, Any]]:
    """The schemas that arguments are held to."""
    return {tool.name: tool.enforced if use.must or tool.strict else ANY_ARGUMENTS for tool in use.callable}


def _objects(schemas: Mapping[str, Mapping[str, Any]], form: ToolFormat, texts: Literals) -> Iterator[str]:
    inner = "" if form.closes is None else "\n"
    before, after = ("[", "]") if form.listed else ("", "")
    for i, (name, schema) in enumerate(schemas.items()):
        head = f'{inner}{before}{{"name": {json.dumps(name)}, "{form.arguments}": '
        end = texts.written(f"}}{after}{inner}{form.closes or ''}")
        yield f"body_{i}: {texts.written(head)} {json_rule(schema)} {end}"


def _marked(schemas: Mapping[str, Mapping[str, Any]], marks: Marks, texts: Literals) -> Iterator[str]:
    for i, (name, schema) in enumerate(schemas.items()):
        before, after = marks.around(name)
        if marks.numbered:
            head = f"{texts.written(f'{marks.begin}functions.{name}:')} /[0-9]{{1,4}}/ {texts.written(marks.separator)}"
        else:
            head = texts.written(before)
        yield f"body_{i}: {head} {json_rule(schema)} {texts.written(after)}"


def _xml(schemas: Mapping[str, Mapping[str, Any]], form: ToolFormat, tags: Tags, texts: Literals) -> Iterator[str]:
    end = f"{tags.end_of_function}\n" if tags.end_of_function else ""
    rule, value = texts.until("value", tags.end_of_value)
    yield rule
    rule, parameters = texts.until("parameters", end + (form.closes or ""))
    yield rule
    line = "\n" if tags.lines else ""
    for i, (name, schema) in enumerate(schemas.items()):
        start = f"\n{tags.function[0]}" if tags.function[0] else ""
        head = texts.written(f"{start}{name}{tags.function[1]}\n")
        if schema is ANY_ARGUMENTS:
            yield f"body_{i}: {head} {parameters}"
            continue
        parts = []
        required = schema.get("required", ())
        for j, (key, inner) in enumerate(schema.get("properties", {}).items()):
            begin = f"{tags.parameter[0]}{key}{tags.parameter[1]}" + (f"\n{tags.value}" if tags.value else "")
            before, after = texts.written(f"{begin}{line}"), texts.written(f"{line}{tags.end_of_value}")
            if _is_text(inner) and (pattern := _whole_pattern(inner)) is not None:
                rule, text = texts.until(f"text_{i}_{j}", f"{line}{tags.end_of_value}", f"/{in_slashes(pattern)}/")
                yield rule
                content = f"{before} {text}"
            else:
                content = f"{before} {value}" if _is_text(inner) else f"{before} {_content(inner)} {after}"
            parts.append(f'({content} "\\n")' + ("" if key in required else "?"))
        yield f"body_{i}: {' '.join([head, *parts, texts.written(f'{end}{form.closes}')])}"


def _whole_pattern(schema: Mapping[str, Any]) -> str | None:
    """The pattern of a whole text, without its anchors."""
    found = re.fullmatch(r"\^(\(\?:.*\))\$", str(schema.get("pattern", "")), re.DOTALL)
    return None if found is None else found[1]


def _is_text(schema: Any) -> bool:
    return isinstance(schema, dict) and schema.get("type") == "string" and not {"enum", "const"} & set(schema)


def _content(schema: Any) -> str:
    """A value that is written as JSON, or one of some texts, which are written as they are."""
    allowed = schema.get("enum", [schema["const"]] if "const" in schema else []) if isinstance(schema, dict) else []
    if allowed and all(isinstance(one, str) and one for one in allowed):
        return _either(map(json.dumps, allowed))
    return json_rule(schema)


def _either(options: Iterable[str]) -> str:
    return f"({' | '.join(options)})"


def json_rule(schema: Any) -> str:
    """An expression, in Lark, of the JSON of a schema."""
    return f"%json {json.dumps({**schema, 'x-guidance': _JSON} if isinstance(schema, dict) else schema)}"
