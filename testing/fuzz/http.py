"""Requests that no client would write: what the server's own OpenAPI document allows and what it forbids, and bodies
with any value in any field, or with any bytes."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

import httpx
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.core.failures import Failure, FailureGroup
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from api.http.bodies.generation import ChatRequest, CompletionRequest
from api.http.bodies.tokenize import DetokenizeRequest, TokenizeRequest
from loadtests.chaos.wire import Target
from testing.fuzz.mutate import mutated

_ROUND = 20  # examples of an endpoint before the next one
_PATIENCE_S = 150.0
_MOST_TEXT = 5000  # characters of an error message
_QUESTION = {"model": "demo", "messages": [{"role": "user", "content": "What is 2 + 3?"}], "temperature": 0}


@dataclass
class Tally:
    """`ends`: statuses by endpoint."""

    ends: dict[str, Counter[str]] = field(default_factory=dict)
    faults: dict[str, str] = field(default_factory=dict)  # the first example of each

    def add(self, place: str, outcome: str, fault: str | None, example: str) -> None:
        self.ends.setdefault(place, Counter())[outcome] += 1
        if fault is not None:
            self.faults.setdefault(f"{place}: {fault}", example[:2000])


def fuzz_document(target: Target, seconds: float, rng: Random) -> Tally:
    """Requests that schemathesis generates, and the answers checked against the document. Statuses and bodies of
    endpoints that describe no refusals are not compared."""
    tally, until = Tally(), time.monotonic() + seconds
    base, headers = f"http://{target.host}:{target.port}", {"Authorization": f"Bearer {target.key}"}
    schema = schemathesis.openapi.from_url(f"{base}/openapi.json")
    operations = [found.ok() for found in schema.get_all_operations()]
    while time.monotonic() < until:
        for operation in operations:
            statuses = {str(status) for status in operation.definition.raw.get("responses", {})}
            described = bool(statuses & {"400", "404", "4XX", "default"})
            checks = [not_a_server_error, content_type_conformance]
            checks += [status_code_conformance, response_schema_conformance] if described else []

            def check(case: Any, operation: Any = operation, checks: Any = checks) -> None:
                response = case.call(base_url=base, headers=headers, timeout=_PATIENCE_S)
                fault = None
                try:
                    case.validate_response(response, checks=checks)
                except (Failure, FailureGroup) as error:
                    kinds = error.exceptions if isinstance(error, FailureGroup) else [error]
                    fault = f"{response.status_code} {', '.join(sorted(kind.title for kind in kinds))}"
                tally.add(
                    operation.label,
                    str(response.status_code),
                    fault,
                    f"{case.as_curl_command()}: {response.text[:500]}",
                )

            for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
                if mode is GenerationMode.POSITIVE or operation.body:
                    _round(check, operation.as_strategy(generation_mode=mode), until, rng)
    return tally


def fuzz_bodies(target: Target, seconds: float, rng: Random) -> Tally:
    """Bodies that are good but for some fields or bytes. Beside them, the same question has the same answer."""
    tally, until = Tally(), time.monotonic() + seconds
    headers = {"Authorization": f"Bearer {target.key}", "Content-Type": "application/json"}
    with httpx.Client(base_url=f"http://{target.host}:{target.port}", headers=headers, timeout=_PATIENCE_S) as client:
        before = _answer(client)
        if before[:1].isdecimal() and "error" in before:
            tally.faults[f"a good question is refused: {before}"] = ""

        def check(request: tuple[str, bytes]) -> None:
            path, body = request
            response = client.post(path, content=body)
            tally.add(f"POST {path}", str(response.status_code), _fault(response), repr(body))

        while time.monotonic() < until:
            for path in _ENDPOINTS:
                _round(check, st.tuples(st.just(path), _bodies(path)), until, rng)
            if (now := _answer(client)) != before:
                tally.faults[f"the answer to a question has changed from {before!r} to {now!r}"] = ""
    return tally


def _round(check: Callable[[Any], None], strategy: st.SearchStrategy[Any], until: float, rng: Random) -> None:
    @seed(rng.randrange(1 << 30))
    @settings(
        max_examples=_ROUND,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def run(example: Any) -> None:
        if time.monotonic() < until:
            check(example)

    run()


def _answer(client: httpx.Client) -> str:
    response = client.post("/v1/chat/completions", json=_QUESTION)
    if response.status_code != 200:
        return f"{response.status_code} {response.text[:500]}"
    return str(response.json()["choices"][0]["message"]["content"])


def _fault(response: httpx.Response) -> str | None:
    """What is wrong with an answer, whatever was asked."""
    if response.status_code >= 500:
        return f"{response.status_code} {response.text[:300]}"
    if response.status_code < 400:
        return None
    try:
        error = response.json()["error"]
        sound = (
            isinstance(error["type"], str)
            and 0 < len(error["message"]) <= _MOST_TEXT
            and {"param", "code"} <= set(error)
        )
    except (ValueError, KeyError, TypeError):
        sound = False
    return None if sound else f"{response.status_code} with no error that a client can read: {response.text[:300]}"


_MESSAGES = [{"role": "user", "content": "hello"}]
_ENDPOINTS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "/v1/chat/completions": (
        {"model": "demo", "messages": _MESSAGES, "max_tokens": 3},
        sorted(ChatRequest.model_fields),
    ),
    "/v1/completions": ({"model": "demo", "prompt": "a", "max_tokens": 3}, sorted(CompletionRequest.model_fields)),
    "/tokenize": ({"model": "demo", "prompt": "a"}, sorted(TokenizeRequest.model_fields)),
    "/detokenize": ({"model": "demo", "tokens": [1, 2]}, sorted(DetokenizeRequest.model_fields)),
    "/v1/load_lora_adapter": ({"lora_name": "x", "lora_path": "/nowhere"}, ["lora_name", "lora_path", "replace"]),
    "/v1/unload_lora_adapter": ({"lora_name": "x"}, ["lora_name"]),
}
_SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(10**30), 10**30)
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(
        [2**63, 2**64, -1, 0, 1e-320, 1e308, "", "<|im_end|>", "demo", "user", "assistant", "\x00", "\ud800"]
    )
)
_VALUES = st.recursive(
    _SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["role", "content", "type", "text", "name", "1", ""]) | st.text(max_size=5),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


def _bodies(path: str) -> st.SearchStrategy[bytes]:
    good, names = _ENDPOINTS[path]
    fields = st.dictionaries(st.sampled_from(names) | st.text(max_size=6), _VALUES, min_size=1, max_size=4)
    edited = fields.map(lambda changes: json.dumps({**good, **changes}).encode())
    damaged = st.builds(
        lambda number: mutated({"body": json.dumps(good).encode()}, [{"body": b'{"a": [1e5, -2]}'}], Random(number)),
        st.integers(0, 1 << 40),
    ).map(lambda files: files.get("body", b""))
    return edited | edited | damaged | _VALUES.map(lambda value: json.dumps(value).encode())
