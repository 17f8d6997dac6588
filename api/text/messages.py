"""The messages of a chat request, checked and brought into the form that chat templates expect."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from api.errors import ApiError, UnreadableError, bad_request, shortened
from api.text.kinds import CHAT_PARTS, FREE_TEXT, Content, Fate, unread

_FIELDS = {"role", "content", "name", "reasoning_content", "tool_calls", "function_call", "tool_call_id", "refusal"}
_ECHOED = ("annotations", "audio")  # what an answer carries and clients send back
_ROLES = ("system", "user", "assistant", "tool")
_OTHER_ROLES = {"developer": "system", "function": "tool"}
_MAX_CALLS = 1024  # of one message


class Findings(Protocol):
    """Is told what of the messages is not taken as it is, and where that stands. May raise ApiError."""

    def found_unknown(self, key: str, where: str) -> None: ...
    def left_out(self, where: str, kind: str) -> None: ...
    def made_a_line(self, where: str, kind: str) -> None: ...
    def unreadable(self, error: UnreadableError) -> None: ...


class Refusing:
    """`Findings` that takes nothing but what it understands. Raises ApiError."""

    def found_unknown(self, key: str, where: str) -> None:
        name = f"{where}.{key[:100]}"
        raise bad_request(f"unknown field '{name}'", name, "unknown_field")

    def left_out(self, where: str, kind: str) -> None:
        raise unsupported(where, kind)

    def unreadable(self, error: UnreadableError) -> None:
        raise error

    made_a_line = left_out


def unsupported(where: str, kind: str, expected: Sequence[str] = ("text",)) -> ApiError:
    """A kind of part, block or item that a user newly asks for."""
    named = " or ".join(map(repr, expected))
    return bad_request(f"{where}: {shortened(kind)} is not supported, only {named}", where, "unsupported_field")


def newest_request(roles: Sequence[Any]) -> int | None:
    """Which of the messages is what a user newly asks: the last one, system messages behind it aside. None if it is no
    user's, or stands behind a result: clients send what a tool has shown as a user's message there."""
    last = next((i for i in reversed(range(len(roles))) if roles[i] not in ("system", "developer")), None)
    if last is None or roles[last] != "user" or (last and roles[last - 1] in ("tool", "function")):
        return None
    return last


def objects_of(messages: Sequence[Any], where: str, findings: Findings) -> list[tuple[int, dict[str, Any]]]:
    """The messages or items that are objects, with their places. Others are left out of the history."""
    kept = []
    for i, message in enumerate(messages):
        if isinstance(message, dict):
            kept.append((i, message))
        else:
            place = f"{where}[{i}]"
            findings.unreadable(UnreadableError(f"{place}: not an object but {shortened(message)}", place))
    return kept


def normalise(messages: Sequence[Any], findings: Findings | None = None) -> list[dict[str, Any]]:
    """Content parts joined to text, `developer` as `system`, `function` as `tool`, arguments of calls as objects where
    they are such, null and unknown fields left out; parts that are no text as api/text/kinds.py has it. Raises ApiError
    400 naming messages[i].field. `findings` None: all that is not text is refused."""
    found = findings or Refusing()
    given = objects_of(messages, "messages", found)
    newest = newest_request([message.get("role") for _, message in given])
    made = []
    for at, (i, message) in enumerate(given):
        role = role_of(message, f"messages[{i}]", _ROLES, _OTHER_ROLES, found, last=i == len(messages) - 1)
        made.append(_message(message, role, f"messages[{i}]", found, newly=at == newest))
    return made


def role_of(
    message: Mapping[str, Any], where: str, roles: Sequence[str], others: Mapping[str, str], findings: Findings, *,
    last: bool,
) -> str:  # fmt: skip
    """One of `roles`, or of `others`, which maps names to theirs. A message of any other role in a history is read as a
    user's. Raises ApiError for one that ends the conversation."""
    given = message.get("role")
    role = others.get(given, given) if isinstance(given, str) else given
    if isinstance(role, str) and role in roles:
        return role
    if last:
        expected = f"{', '.join(map(repr, roles[:-1]))} or {roles[-1]!r}"
        raise bad_request(f"{where}.role: {expected} is expected, got {shortened(given)}", f"{where}.role")
    findings.made_a_line(f"{where}.role", given if isinstance(given, str) else type(given).__name__)
    return "user"


def _message(message: dict[str, Any], role: str, where: str, findings: Findings, *, newly: bool) -> dict[str, Any]:
    fields = {key: value for key, value in message.items() if value is not None}
    if "reasoning" in fields:  # another name of it
        fields.setdefault("reasoning_content", fields.pop("reasoning"))
    for key in fields:
        if key in _ECHOED:
            if fields[key] not in ([], ""):
                findings.left_out(where, key)
        elif key not in _FIELDS:
            findings.found_unknown(key, where)
    content = _content(fields.get("content"), role, f"{where}.content", findings, newly=newly)
    if role == "assistant" and isinstance(fields.get("refusal"), str):
        content = content or fields["refusal"]
    result: dict[str, Any] = {"role": role, "content": content}
    for key in ("name", "reasoning_content", "tool_call_id"):
        if isinstance(fields.get(key), str):
            result[key] = fields[key]
        elif key in fields:
            with passed_over(findings, newly=newly):
                raise UnreadableError(f"{where}.{key}: a text is expected", f"{where}.{key}")
    if calls := _calls(fields, role, where, findings, newly=newly):
        result["tool_calls"] = calls
    return result


@contextmanager
def passed_over(findings: Findings, *, newly: bool) -> Iterator[None]:
    """What cannot be read within is left out of a history; where it is newly asked for, UnreadableError is raised."""
    try:
        yield
    except UnreadableError as error:
        if newly:
            raise
        findings.unreadable(error)


def json_of(content: Any, where: str, findings: Findings, *, newly: bool) -> str:
    """The text of a content that is neither text nor a list: as JSON in a history, where results of tools are sent as
    they came. Raises UnreadableError where it is newly asked for."""
    if content is not None and not newly:
        findings.made_a_line(where, type(content).__name__)
        return json.dumps(content, ensure_ascii=False)
    with passed_over(findings, newly=newly):
        raise UnreadableError(f"{where}: a text or a list of parts is expected, got {shortened(content)}", where)
    return ""


def _calls(
    fields: dict[str, Any], role: str, where: str, findings: Findings, *, newly: bool
) -> list[dict[str, Any]]:  # fmt: skip
    """The calls that an assistant's message made; those of another form are left out."""
    calls = fields.get("tool_calls") or []
    if function := fields.get("function_call"):
        calls = [{"type": "function", "function": function}]
        where = f"{where}.function_call"
    else:
        where = f"{where}.tool_calls"
    if calls and role != "assistant":
        with passed_over(findings, newly=newly):
            raise UnreadableError(f"{where}: only an assistant's message has calls", where)
        return []
    form = f"{where}: a list of at most {_MAX_CALLS} calls is expected"
    if not isinstance(calls, list):
        findings.unreadable(UnreadableError(form, where))
        return []
    if len(calls) > _MAX_CALLS:
        raise bad_request(form, where)
    made = []
    for i, call in enumerate(calls):
        with passed_over(findings, newly=False):
            made.append(_call(call, f"{where}[{i}]"))
    return made


def _call(call: Any, where: str) -> dict[str, Any]:
    match call:
        case {"type": "custom", "custom": {"name": str(name), "input": str(text)}}:
            call = {**call, "type": "function", "function": {"name": name, "arguments": {FREE_TEXT: text}}}
    match call:
        case {"function": {"name": str(name), **more}} if call.get("type") in (None, "function"):
            arguments = more.get("arguments")
        case _:
            form = '{"id": ..., "type": "function", "function": {"name": ..., "arguments": ...}}'
            raise UnreadableError(f"{where}: {form} is expected", where)
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, str | dict):
        raise UnreadableError(f"{where}.function.arguments: JSON as a text is expected", where)
    made: dict[str, Any] = {"type": "function", "function": {"name": name, "arguments": _object(arguments)}}
    if call.get("id") is not None:
        if not isinstance(call["id"], str):
            raise UnreadableError(f"{where}.id: a text is expected", where)
        made["id"] = call["id"]
    return made


def _object(arguments: str | dict[str, Any]) -> str | dict[str, Any]:
    """The arguments as an object; as the text that they are, where a model once wrote something else."""
    if isinstance(arguments, dict):
        return arguments
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def _content(content: Any, role: str, where: str, findings: Findings, *, newly: bool) -> str:
    if isinstance(content, str):
        return content
    if content is None and role in ("assistant", "tool"):
        return ""
    if not isinstance(content, list):
        return json_of(content, where, findings, newly=newly)
    text = Content()
    for i, part in enumerate(content):
        with passed_over(findings, newly=newly):
            _add_part(text, part, f"{where}[{i}]", findings, newly=newly)
    return str(text)


def _add_part(text: Content, part: Any, where: str, findings: Findings, *, newly: bool) -> None:
    if isinstance(part, str):
        text.text(part)
        return
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise UnreadableError(f'{where}: {{"type": "text", "text": ...}} is expected', where)
    kind = part["type"]
    match CHAT_PARTS.fate(kind, newly=newly):
        case Fate.READ:
            key = "refusal" if kind == "refusal" else "text"
            if not isinstance(part.get(key), str):
                raise UnreadableError(f"{where}.{key}: a text is expected", f"{where}.{key}")
            for name, value in part.items():
                if name not in ("type", key) and value is not None:
                    findings.found_unknown(name, where)
            text.text(part[key])
        case Fate.LINE:
            findings.made_a_line(where, kind)
            text.line(unread(kind))
        case Fate.LEFT_OUT:
            findings.left_out(where, kind)
        case Fate.REFUSED:
            raise unsupported(where, kind)
