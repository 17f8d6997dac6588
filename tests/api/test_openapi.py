"""The OpenAPI document against the server: what it allows is answered, what it forbids is refused, all as it says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from api.bodies.body import Body, fields_of
from api.bodies.generation import ChatRequest, CompletionRequest
from api.bodies.parsing import Notes, parse
from api.bodies.schema import body_schema, described
from api.bodies.shapes import EXCLUSIVE
from api.dialects.anthropic.requests import MessagesRequest
from api.dialects.responses.requests import ResponsesRequest
from api.errors import ApiError
from testing.fuzz.known import Known
from testing.waiting import PATIENCE_S
from tests.api.changes import CHANGES, KINDS, body
from tests.api.conftest import Running, serving

CHECKS = [not_a_server_error, content_type_conformance, status_code_conformance, response_schema_conformance]
ADMIN = {"Authorization": "Bearer admin"}


# The same examples in each run; a failure says which, and is not made smaller.
FIXED = settings(
    deadline=None, database=None, derandomize=True, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
)
MADE, AT_LEAST = 16, 0.8  # bodies of an endpoint, and the share of them that is answered
FEW = 4
ANSWERED = (
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/responses/input_tokens",
    "/v1/responses/compact", "/v1/messages",
    "/v1/messages/count_tokens", "/api/chat", "/api/generate", "/api/show", "/api/pull", "/tokenize", "/detokenize",
    "/apply-template", "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/load_lora_adapter",
    "/unload_lora_adapter", "/lora-adapters", "/v1/files", "/v1/batches",
    "/v1/fine_tuning/jobs",
)  # fmt: skip


@pytest.fixture(scope="module")
def whole(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server with all endpoints, asked with the admin key."""
    folder = tmp_path_factory.mktemp("whole")
    flags = ("--adapters", "reverse=/fake/reverse", "--admin-key", "admin", "--allow-any-adapter-path", "--fine-tuning")
    with serving(model_dir, folder, *flags, "--data-dir", str(folder / "data"), key="admin") as running:
        yield running


@pytest.fixture(scope="module")
def schema(whole: Running) -> Any:
    return schemathesis.openapi.from_url(f"{whole.url}/openapi.json", headers=ADMIN)


@pytest.fixture(scope="module")
def known(whole: Running) -> Known:
    return Known(whole.http, "/fake/made")


def test_every_endpoint_keeps_to_the_document(whole: Running, schema: Any) -> None:
    """Of requests that the document allows and, where there is a body, forbids."""
    operations = [found.ok() for found in schema.get_all_operations()]
    assert set(ANSWERED) == {operation.path for operation in operations if operation.body}
    for operation in operations:
        mode = GenerationMode.NEGATIVE if operation.body else GenerationMode.POSITIVE

        @settings(FIXED, max_examples=FEW)
        @given(operation.as_strategy(generation_mode=mode))
        def check(case: Any) -> None:
            response = case.call(base_url=whole.url, headers=ADMIN, timeout=PATIENCE_S)
            case.validate_response(response, checks=CHECKS)

        check()


@pytest.mark.parametrize("path", ANSWERED)
def test_what_the_document_describes_is_answered(whole: Running, schema: Any, known: Known, path: str) -> None:
    """Most bodies that are made from it: some fields exclude each other, which a schema does not say."""
    statuses: list[int] = []
    refused: list[str] = []

    @settings(FIXED, max_examples=MADE)
    @given(schema[path]["POST"].as_strategy(generation_mode=GenerationMode.POSITIVE))
    def check(case: Any) -> None:
        case.body = known.filled(path, case.body)
        response = case.call(base_url=whole.url, headers=ADMIN, timeout=PATIENCE_S)
        case.validate_response(response, checks=CHECKS)
        statuses.append(response.status_code)
        refused.extend([] if response.status_code == 200 else [response.text[:300]])

    check()
    assert statuses.count(200) >= AT_LEAST * len(statuses), refused


STREAMED = {
    "/v1/completions": {"prompt": "ab"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "ab"}]},
    "/v1/responses": {"input": "ab"},
    "/v1/messages": {"model": "tiny", "max_tokens": 9, "messages": [{"role": "user", "content": "ab"}]},
    "/api/chat": {"model": "tiny", "messages": [{"role": "user", "content": "ab"}]},
    "/api/generate": {"model": "tiny", "prompt": "ab"},
}


@pytest.mark.parametrize("path", STREAMED)
def test_streams_keep_to_the_document(whole: Running, schema: Any, path: str) -> None:
    case = schema[path]["POST"].Case(body={**STREAMED[path], "stream": True}, media_type="application/json")
    response = case.call(base_url=whole.url, timeout=PATIENCE_S)
    assert response.status_code == 200
    case.validate_response(response, checks=CHECKS)


def test_the_document_says_how_to_send_keys(whole: Running) -> None:
    document = whole.http.get("/openapi.json").json()
    assert {"bearer": []} in document["security"] and {"header": []} in document["security"]
    assert {} in document["security"]  # this server asks for none
    for path, operations in document["paths"].items():
        for operation in operations.values():
            assert "422" not in operation["responses"] and operation["responses"], path


@pytest.mark.parametrize("kind", list(KINDS))
def test_every_field_of_the_table_is_documented(kind: type[Body]) -> None:
    schema = described(kind)["requestBody"]["content"]["application/json"]["schema"]
    forms = schema.get("anyOf", [schema])
    assert {name for form in forms for name in form["properties"]} == set(fields_of(kind))
    for form, pair in product(forms, EXCLUSIVE):
        if form["properties"].keys() >= set(pair):
            assert Draft202012Validator(form["not"]).is_valid(dict.fromkeys(pair))


@pytest.mark.parametrize("kind", list(CHANGES))
def test_changes_are_allowed(kind: Any) -> None:
    validator = Draft202012Validator(body_schema(kind))
    for name, fields in CHANGES[kind].items():
        if set(fields) <= set(kind.model_fields):
            assert validator.is_valid(json.loads(body(kind, **fields))), name


@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest])
def test_what_works_is_allowed(kind: Any) -> None:
    validator = Draft202012Validator(body_schema(kind))
    for value in (None, ["a", "b"], "a"):
        assert validator.is_valid(json.loads(body(kind, stop=value)))
    assert validator.is_valid(json.loads(body(kind, temperature="0.7", top_k=8.0, user="me", n_predict=3, seed=None)))
    assert not validator.is_valid(json.loads(body(kind, stop=5)))
    assert not validator.is_valid(json.loads(body(kind, use_beam_search=True)))


WRONG = st.sampled_from([{"a": 1}, [[]], "x y", -7.5, True])


@given(st.sampled_from([ChatRequest, CompletionRequest, MessagesRequest, ResponsesRequest]), st.data())
def test_what_is_forbidden_is_refused(kind: Any, data: Any) -> None:
    """Each field with a value that the document forbids: parsing refuses it too."""
    schema = body_schema(kind)
    name = data.draw(st.sampled_from(sorted(schema["properties"])))
    value = data.draw(WRONG)
    if Draft202012Validator(schema["properties"][name]).is_valid(value):
        return
    least = {"messages": [{"role": "user", "content": "x"}], "prompt": "x", "input": "x"}
    content = {key: least[key] for key in schema["required"]} | {name: value}
    with pytest.raises(ApiError) as caught:
        parse(kind, json.dumps(content).encode(), Notes("warn"))
    assert caught.value.status == 400
