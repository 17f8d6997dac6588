"""Requests that no client would write: what the server's own OpenAPI document allows and what it forbids, and bodies
with any value in any field, or with any bytes."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import httpx
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.core.errors import InvalidSchema
from schemathesis.core.failures import Failure, FailureGroup
from schemathesis.core.result import Err, Result
from schemathesis.generation import GenerationMode
from schemathesis.schemas import APIOperation
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from loadtests.http import Server
from testing.fuzz.bodies import PATHS, bodies, content_type
from testing.fuzz.known import Known
from testing.fuzz.tuning import opened

Operation = APIOperation[Any, Any, Any, Any]

_ROUND = 5  # examples of an endpoint before the next one
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


def fuzz_document(target: Server, adapter: Path, seconds: float, rng: Random) -> Tally:
    """Requests that schemathesis generates, and the answers checked against the document. Statuses and bodies of
    endpoints that describe no refusals are not compared. `adapter`: a folder that the server may load."""
    headers = {"Authorization": f"Bearer {target.key}"}
    with httpx.Client(base_url=target.url, headers=headers, timeout=_PATIENCE_S) as client:
        return _fuzz_document(target.url, headers, Known(client, str(adapter)), seconds, rng)


def _fuzz_document(base: str, headers: dict[str, str], known: Known, seconds: float, rng: Random) -> Tally:
    tally = Tally()
    schema = schemathesis.openapi.from_url(f"{base}/openapi.json", headers=headers)
    operations = [_operation(found) for found in schema.get_all_operations()]
    until = time.monotonic() + seconds
    while time.monotonic() < until or not tally.ends:
        for operation in operations:
            statuses = {str(status) for status in operation.definition.raw.get("responses", {})}
            described = bool(statuses & {"400", "404", "4XX", "default"})
            checks = [not_a_server_error, content_type_conformance]
            checks += [status_code_conformance, response_schema_conformance] if described else []

            def check(case: Any, operation: Any = operation, checks: Any = checks) -> None:
                if operation.body and case.meta.generation.mode.is_positive:
                    try:
                        case.body = known.filled(operation.path, case.body)
                    except httpx.HTTPStatusError as error:
                        refusal, at = error.response, error.request.url.path
                        why = f"what it names could not be put there: {at} answered {refusal.status_code}"
                        tally.add(operation.label, "not asked", why, refusal.text)
                        return
                try:
                    response = case.call(base_url=base, headers=headers, timeout=_PATIENCE_S)
                except requests.RequestException as error:
                    tally.add(operation.label, "no answer", f"no answer: {error}", case.as_curl_command())
                    return
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

            for mode in map(GenerationMode, ("positive", "negative")):
                if mode.is_positive or operation.body:
                    _round(check, operation.as_strategy(generation_mode=mode), until, rng)
    return tally


def _operation(found: Result[Operation, InvalidSchema]) -> Operation:
    if isinstance(found, Err):
        raise found.err()
    return found.ok()


def fuzz_bodies(target: Server, seconds: float, rng: Random) -> Tally:
    """Bodies that are good but for some fields or bytes. Beside them, the same question has the same answer."""
    tally, until = Tally(), time.monotonic() + seconds
    headers = {"Authorization": f"Bearer {target.key}"}
    with httpx.Client(base_url=target.url, headers=headers, timeout=_PATIENCE_S) as client:
        before = _answer(client)
        if before[:1].isdecimal() and "error" in before:
            tally.faults[f"a good question is refused: {before}"] = ""

        def check(request: tuple[str, bytes]) -> None:
            path, body = request
            try:
                response = client.post(path, content=body, headers={"Content-Type": content_type(path)})
            except httpx.TransportError as error:
                tally.add(f"POST {path}", "no answer", f"no answer: {error}", repr(body))
                return
            tally.add(f"POST {path}", str(response.status_code), _fault(path, response), repr(body))

        while time.monotonic() < until or not tally.ends:  # a run that a body has made diverge has ended
            ids = opened(client)
            for path in PATHS:
                _round(check, st.tuples(st.just(path), bodies(path, ids)), until, rng)
            client.post(f"/api/v1/sessions/{ids['session_id']}/finish").raise_for_status()
            if (now := _answer(client)) != before:
                tally.faults[f"the answer to a question has changed from {before!r} to {now!r}"] = ""
    return tally


def _round(check: Callable[[Any], None], strategy: st.SearchStrategy[Any], until: float, rng: Random) -> None:
    """Examples until it is too late for more; one in any case, however slow the machine is."""
    tried = 0

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
        nonlocal tried
        if time.monotonic() < until or not tried:
            tried += 1
            check(example)

    run()


def _answer(client: httpx.Client) -> str:
    response = client.post("/v1/chat/completions", json=_QUESTION)
    if response.status_code != 200:
        return f"{response.status_code} {response.text[:500]}"
    return str(response.json()["choices"][0]["message"]["content"])


def _fault(path: str, response: httpx.Response) -> str | None:
    """What is wrong with an answer, whatever was asked."""
    if response.status_code >= 500:
        return f"{response.status_code} {response.text[:300]}"
    if response.status_code < 400:
        return None
    try:
        error = response.json()["error"]
        if path.startswith("/api/") and not path.startswith("/api/v1/"):  # Ollama's form
            message, sound = error, True
        else:
            named = {"type"} if path.startswith("/v1/messages") else {"type", "param", "code"}
            message, sound = error["message"], named <= set(error) and isinstance(error["type"], str)
        sound = sound and isinstance(message, str) and 0 < len(message) <= _MOST_TEXT
    except (ValueError, KeyError, TypeError):
        sound = False
    return None if sound else f"{response.status_code} with no error that a client can read: {response.text[:300]}"
