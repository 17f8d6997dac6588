"""Compaction, by POST /v1/responses/compact or by an item of a response's input: what the user said and a summary go on
as the beginning of a conversation."""

from __future__ import annotations

import json
from typing import Any, cast

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import CompactedResponse

from api.dialects.responses.routes import CompactionFormatter
from api.dialects.responses.summaries import BEGINNING, REQUEST, opened, sealed
from api.errors import ApiError
from api.http.answers.generation import Answers, Update
from api.text.deltas import Text
from tests.api.conftest import Running

CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
TALK: list[Any] = [
    {"role": "developer", "content": "be kind"},
    {"role": "user", "content": "first"},
    CALL,
    {"type": "function_call_output", "call_id": "c", "output": "found"},
    {"role": "assistant", "content": "done"},
    {"role": "user", "content": [{"type": "input_text", "text": "then"}]},
]


def texts(compacted: CompactedResponse) -> list[str]:
    return [item.content[0].text for item in compacted.output[:-1]]  # type: ignore[union-attr]


def test_a_conversation_gets_shorter_and_goes_on(server: Running) -> None:
    compacted = server.openai.responses.compact(model="tiny", input=TALK, instructions="you are a clerk")
    assert compacted.object == "response.compaction" and compacted.usage.output_tokens > 0
    assert texts(compacted) == ["first", "then"]
    item = compacted.output[-1]
    assert item.type == "compaction"
    summary = opened(item.encrypted_content) or ""
    for part in ("you are a clerk", "found", "done", REQUEST.split(".")[0]):  # the fake answers with the prompt
        assert part in summary
    output = [each.model_dump(exclude_none=True, warnings=False) for each in compacted.output]
    then = server.http.post("/v1/responses", json={"model": "tiny", "input": [*output, *TALK[-1:]]})
    assert then.status_code == 200 and "warnings" not in then.headers, then.text
    assert "first" in then.text and json.dumps(BEGINNING)[1:-1] in then.text
    again = server.openai.responses.compact(model="tiny", input=[*output, {"role": "user", "content": "third"}])
    assert texts(again) == ["first", "then", "third"]


def test_what_it_may_begin_with(server: Running) -> None:
    client = server.openai
    first = client.responses.create(model="tiny", input="kept")
    assert texts(client.responses.compact(model="tiny", previous_response_id=first.id)) == ["kept"]
    assert texts(client.responses.compact(model="tiny", input="said", previous_response_id=first.id)) == [
        "kept",
        "said",
    ]
    with pytest.raises(openai.BadRequestError, match="input or previous_response_id"):
        client.responses.compact(model="tiny")
    with pytest.raises(openai.NotFoundError, match="no-such"):
        client.responses.compact(model="no-such", input="a")
    image: Any = {"role": "user", "content": [{"type": "input_image", "image_url": "data:image/png;base64,aGk="}]}
    assert len(client.responses.compact(model="tiny", input=[image]).output) == 2
    sent = {"tools": [{"type": "function", "name": "f"}], "parallel_tool_calls": False, "reasoning": {"effort": "low"}}
    answer = server.http.post("/v1/responses/compact", json={"model": "tiny", "input": TALK, **sent})
    assert answer.status_code == 200, answer.text


TRIGGER: Any = {"type": "compaction_trigger"}
OFFERS: Any = {
    "tools": [{"type": "function", "name": "g", "parameters": {}}], "tool_choice": "required", "max_output_tokens": 1,
    "text": {"format": {"type": "json_object"}},
}  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
def test_a_trigger_at_the_end_of_an_input_asks_for_a_summary(server: Running, stream: bool) -> None:
    """Whatever else is asked for, as clients send it with every request."""
    asked: Any = {"model": "tiny", "input": [*TALK, TRIGGER], **OFFERS}
    if stream:
        events = list(server.openai.responses.create(**asked, stream=True))
        assert [event.sequence_number for event in events] == list(range(len(events)))
        kinds = ["created", "in_progress", "output_item.added", "output_item.done", "completed"]
        assert [event.type for event in events] == [f"response.{kind}" for kind in kinds]
        response = cast(Any, events[-1]).response
        assert cast(Any, events[-2]).item == response.output[0]
    else:
        response = server.openai.responses.create(**asked)
    assert response.status == "completed" and response.usage.output_tokens > 1
    (item,) = response.output
    summary = opened(item.encrypted_content) or ""
    for part in ("found", "done", REQUEST.split(".")[0]):
        assert part in summary
    goes_on = [*TALK[:2], item.model_dump(exclude_none=True), TALK[-1]]
    then = server.http.post("/v1/responses", json={"model": "tiny", "input": goes_on})
    assert then.status_code == 200 and "warnings" not in then.headers, then.text
    kept = server.openai.responses.create(model="tiny", input="now", previous_response_id=response.id).output_text
    assert all(part in kept for part in ("first", "then", BEGINNING, "now")) and '"c"' not in kept


def test_where_a_trigger_asks_for_nothing(server: Running) -> None:
    client = server.openai
    with pytest.raises(openai.BadRequestError, match="nothing to compact"):
        client.responses.create(model="tiny", input=[TRIGGER])
    first = client.responses.create(model="tiny", input="kept")
    (item,) = client.responses.create(model="tiny", input=[TRIGGER], previous_response_id=first.id).output
    assert item.type == "compaction"
    answer = server.http.post("/v1/responses", json={"model": "tiny", "input": [TRIGGER, *TALK]})
    assert answer.status_code == 200 and "compaction_trigger" in answer.headers["warnings"]


def test_no_summary_is_an_error_not_an_empty_one() -> None:
    formatter = CompactionFormatter("resp_1", cast(Answers, None), [{"role": "user", "content": "a"}])
    with pytest.raises(ApiError, match="no summary") as caught:
        formatter.whole([Update([Text(" ")], finish_reason="stop")])
    assert caught.value.status == 500


def test_the_longest_input_has_room_for_the_request(server: Running) -> None:
    items = [*[{"role": "assistant", "content": ""}] * 8191, {"role": "user", "content": "a"}]
    answer = server.http.post("/v1/responses/compact", json={"model": "tiny", "input": items})
    assert answer.status_code == 200, answer.text


@given(st.text())
def test_what_is_sealed_is_opened(text: str) -> None:
    assert opened(sealed(text)) == BEGINNING + text.encode("utf-8", "replace").decode()


@given(st.one_of(st.none(), st.integers(), st.text(), st.text().map(lambda text: sealed("") + text)))
def test_what_others_sealed_is_not(content: Any) -> None:
    found = opened(content)
    assert found is None or found.startswith(BEGINNING)
