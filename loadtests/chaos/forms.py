"""Attackers that ask in the other forms: Anthropic's, Responses', Ollama's, with grammars and tools; and batches."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from loadtests.chaos.actors import PATIENCE_S, WORDS, Attack
from loadtests.http import Answer, HttpError

_SCHEMAS: tuple[dict[str, Any], ...] = (
    {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}}, "required": ["a", "b"]},
    {"type": "array", "items": {"type": "boolean"}, "maxItems": 5},
    {"type": "string", "pattern": "(a|a)*b"},
    {"type": "string", "maxLength": 10**9},
    {"$ref": "#/nowhere"},
)
_FORM = "multipart/form-data; boundary=b"
_PART = '--b\r\nContent-Disposition: form-data; name="'


async def forms(a: Attack) -> None:
    """Good requests and odd grammars in every form but that of the flood, some at once."""

    while not a.over:
        requests = [_request(a) for _ in range(a.rng.randint(1, 4))]
        await asyncio.gather(*(a.tally.count(path, _outcome(a.target.post(path, body))) for path, body in requests))


def _request(a: Attack) -> tuple[str, dict[str, Any]]:
    r = a.rng
    model, text, count = (
        r.choice(a.models),
        " ".join(r.choice(WORDS) for _ in range(r.randint(1, 40))),
        r.randint(1, 48),
    )
    messages, schema = [{"role": "user", "content": text}], r.choice(_SCHEMAS)
    function = {"name": "f", "parameters": _SCHEMAS[0]}
    common: dict[str, Any] = {"model": model, "stream": r.random() < 0.5}
    message = {**common, "messages": messages}
    kinds: list[tuple[str, dict[str, Any]]] = [
        ("/v1/messages", {**message, "max_tokens": count}),
        (
            "/v1/messages",
            {
                **message,
                "max_tokens": count,
                "tools": [{"name": "f", "input_schema": _SCHEMAS[0]}],
                "tool_choice": {"type": "any"},
            },
        ),
        ("/v1/messages/count_tokens", {"model": model, "messages": messages}),
        ("/v1/responses", {**common, "input": text, "max_output_tokens": count, "store": r.random() < 0.5}),
        ("/v1/responses", {**common, "input": text, "text": {"format": _named(schema)}, "max_output_tokens": count}),
        ("/api/chat", {**message, "options": {"num_predict": count}}),
        ("/api/generate", {**common, "prompt": text, "format": schema, "options": {"num_predict": count}}),
        ("/v1/chat/completions", a.body(tools=[{"type": "function", "function": function}], tool_choice="required")),
        ("/v1/chat/completions", a.body(response_format={"type": "json_schema", "json_schema": _plain(schema)})),
        ("/v1/chat/completions", a.body(structured_outputs={"regex": r.choice(["[0-9]{3}", "(a?){900}a{900}", "("])})),
    ]
    return r.choice(kinds)


def _plain(schema: dict[str, Any]) -> dict[str, Any]:
    return {"name": "x", "schema": schema}


def _named(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", **_plain(schema)}


async def _outcome(answer: Any) -> str:
    return str((await answer).outcome)


async def batches(a: Attack) -> None:
    """Uploads files, good and broken ones, and starts batches; most of them are cancelled, some files deleted."""

    async def send(method: str, path: str, body: bytes | None = None, kind: str = "application/json") -> Answer:
        try:
            answer = await asyncio.wait_for(a.target.exchange(method, path, body, kind), PATIENCE_S)
        except asyncio.TimeoutError:
            a.tally.add("batches", "never")
            return Answer(0.0)
        a.tally.add("batches", answer.outcome)
        return answer

    async def one() -> None:
        made = await send("POST", "/v1/files", _upload(a), _FORM)
        if made.outcome != "200":
            return
        file = made.json()["id"]
        wanted = {"input_file_id": file, "endpoint": "/v1/chat/completions", "completion_window": "1h"}
        begun = await send("POST", "/v1/batches", json.dumps(wanted).encode())
        await asyncio.sleep(a.rng.uniform(0, 3))
        if begun.outcome == "200" and (a.over or a.rng.random() < 0.7):
            await send("POST", f"/v1/batches/{begun.json()['id']}/cancel", b"")
        await send("DELETE", f"/v1/files/{file}")

    while not a.over:
        try:
            await one()
        except (OSError, HttpError) as error:
            a.tally.add("batches", f"refused ({type(error).__name__})")
        await asyncio.sleep(a.rng.uniform(0, 1))


def _upload(a: Attack) -> bytes:
    lines = [
        {"custom_id": str(i), "method": "POST", "url": "/v1/chat/completions", "body": a.body(max_tokens=8)}
        for i in range(a.rng.randint(1, 8))
    ]
    content = "\n".join(map(json.dumps, lines))
    if a.rng.random() < 0.3:
        content = content[: a.rng.randint(0, len(content))]
    head = f'{_PART}purpose"\r\n\r\nbatch\r\n{_PART}file"; filename="a.jsonl"\r\n\r\n'
    return f"{head}{content}\r\n--b--\r\n".encode()
