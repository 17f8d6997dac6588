"""A conversation that gets shorter: what its user said, and a summary of the rest by the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final

import msgspec
from pydantic import Field

from api.bodies import shapes
from api.bodies.body import Body, no_op, supported
from api.bodies.parsing import Notes, parse
from api.bodies.values import Messages
from api.dialects.responses.requests import WORDS, ReasoningConfig, ResponsesRequest, chat_of
from api.dialects.responses.summaries import BEGINNING
from api.errors import bad_request
from api.prepare.job import Job, Prepared
from api.prepare.prompts import TOKEN_BYTES, Preparer

REQUEST: Final = (
    "Write a summary of the conversation so far. It takes the place of everything but the user's own messages: whoever "
    "goes on reads those and your summary alone. Say what was asked for, what was decided and why, what has been done, "
    "which files, commands and results matter, and what is to be done next. Write the summary alone."
)
_PART = 4  # of the context: a summary is no longer


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
    """`messages` of the result: those of the conversation, without the request for a summary."""
    body = parse(CompactRequest, raw, notes)
    if body.previous_response_id is not None and job.history is None:
        return Prepared(b"", previous=body.previous_response_id)
    history = [] if job.history is None else msgspec.json.decode(job.history)
    if body.input is None and not history:
        raise bad_request("input or previous_response_id is expected", "input")
    # What the conversation ends with is no news to be answered: an image in it becomes a line.
    asked = {"role": "user", "content": REQUEST}
    given = [{"role": "user", "content": body.input}] if isinstance(body.input, str) else body.input or []
    whole = ResponsesRequest.model_construct(
        model=body.model, input=[*given, asked], instructions=body.instructions, reasoning=body.reasoning
    )
    chat, messages, _ = chat_of(whole, history, notes)
    prepared = prompts.chat_of(chat, job, notes, WORDS)
    left = job.max_model_len - len(prepared.prompts[0]) // TOKEN_BYTES
    options = {**msgspec.json.decode(prepared.options), "max_tokens": min(left, max(1, job.max_model_len // _PART))}
    return msgspec.structs.replace(
        prepared, options=msgspec.json.encode(options), messages=msgspec.json.encode(messages[:-1])
    )


def kept(messages: Sequence[dict[str, Any]]) -> list[str]:
    """What the user said. A summary before this one is in this one."""
    said = [message["content"] for message in messages if message["role"] == "user"]
    return [text for text in said if text and not text.startswith(BEGINNING)]
