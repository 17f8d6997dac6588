"""A conversation that gets shorter: what its user said, and a summary of the rest by the model."""

from __future__ import annotations

from typing import Annotated

import msgspec
from pydantic import Field

from api.bodies import shapes
from api.bodies.body import Body, no_op, supported
from api.bodies.parsing import Notes, parse
from api.bodies.values import Messages
from api.dialects.responses.requests import ReasoningConfig, ResponsesRequest, summary_of
from api.errors import bad_request
from api.prepare.job import Job, Prepared
from api.prepare.prompts import Preparer


class CompactRequest(Body):
    """OpenAI's compaction of a response's input."""

    SHAPES = {"input": shapes.INPUT, "previous_response_id": shapes.PREVIOUS}  # noqa: RUF012

    FIELDS = (
        supported("model", "as everywhere"),
        supported("input", "a text, or items of every kind (docs/agents.md)"),
        supported("instructions", "the first message, of the summary alone"),
        supported("previous_response_id", "its messages come before the input; it must have been stored"),
        supported("reasoning", "see `/v1/responses`"),
        no_op("tools", "a summary calls none"),
        no_op("parallel_tool_calls", "a summary calls no tools"),
        no_op("text", "a summary is text"),
        no_op("image", "the model reads text only"),
        no_op("service_tier", "there is one tier"),
        no_op("prompt_cache_key", "the prefix cache finds equal prompts by itself"),
        no_op("prompt_cache_options", "the prefix cache finds equal prompts by itself"),
        no_op("prompt_cache_retention", "the prefix cache keeps what fits, least recently used first out"),
    )

    model: str | None = None
    input: str | Messages | None = None
    instructions: str | None = None
    previous_response_id: Annotated[str, Field(max_length=200)] | None = None
    reasoning: ReasoningConfig | None = None


def prepare(prompts: Preparer, job: Job, raw: bytes, notes: Notes) -> Prepared:
    body = parse(CompactRequest, raw, notes)
    if body.previous_response_id is not None and job.history is None:
        return Prepared(b"", previous=body.previous_response_id)
    history = [] if job.history is None else msgspec.json.decode(job.history)
    if body.input is None and not history:
        raise bad_request("input or previous_response_id is expected", "input")
    given = [{"role": "user", "content": body.input}] if isinstance(body.input, str) else body.input or []
    whole = ResponsesRequest.model_construct(
        model=body.model, input=given, instructions=body.instructions, reasoning=body.reasoning
    )
    return summary_of(prompts, job, whole, history, notes)
