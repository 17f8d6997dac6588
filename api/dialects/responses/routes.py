"""POST /v1/responses, and its /input_tokens and /compact; GET and DELETE of those kept; answers as items and events."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from api.bodies.generation import ChatOptions
from api.bodies.schema import described
from api.dialects.common.blocks import Block, BlockKind, Blocks, Change
from api.dialects.common.logprobs import chat_logprobs
from api.dialects.responses.compaction import CompactRequest
from api.dialects.responses.requests import ResponsesRequest
from api.dialects.responses.store import ResponseStore, Stored
from api.dialects.responses.summaries import BEGINNING, sealed
from api.errors import ApiError, bad_request
from api.http.answers.generation import Answers, Update
from api.http.answers.streaming import ResponseFormatter
from api.http.handling import model_of, open_chat, respond, service_of, tenant_of
from api.http.middleware import answer_id
from api.http.wire import json_response
from api.prepare.job import Kind, Prepared
from api.prepare.prompts import TOKEN_BYTES
from api.text.calls.free_text import TextReader, text_in_arguments
from api.text.tokenizer import Tokenizer

Keep = Callable[[dict[str, Any], dict[str, Any]], None]
_PREFIX = {BlockKind.TEXT: "msg", BlockKind.REASONING: "rs", BlockKind.CALL: "fc"}


def router() -> APIRouter:
    routes, kept = APIRouter(), ResponseStore()

    async def prepared_of(request: Request, kind: Kind = Kind.RESPONSES) -> Prepared:
        tenant = tenant_of(request).name

        def history(response_id: str) -> bytes:
            return kept.find(tenant, response_id, "previous_response_id").messages

        return await service_of(request).prepare(kind, request, history)

    @routes.post("/v1/responses", openapi_extra=described(ResponsesRequest))
    async def create_response(request: Request) -> Response:
        service, tenant = service_of(request), tenant_of(request)
        prepared = await prepared_of(request)
        body, answers = await open_chat(request, prepared)
        head = _head(msgspec.json.decode(prepared.head), answer_id(request, "resp_", None), model_of(request, body))

        def keep(written: dict[str, Any], message: dict[str, Any]) -> None:
            messages = [*msgspec.json.decode(prepared.messages), message]
            stored = Stored(tenant.name, msgspec.json.encode(written), msgspec.json.encode(messages))
            kept.keep(head["id"], stored)

        calls = Calls(prepared.names, frozenset(prepared.reading.free if prepared.reading is not None else ()))
        form = SummaryFormatter if prepared.is_summary else ResponsesFormatter
        formatter = form(head, answers, service.tokenizer, keep if head["store"] else None, calls)
        return await respond(request, answers, formatter, stream=body.stream)

    @routes.post("/v1/responses/input_tokens", openapi_extra=described(ResponsesRequest))
    async def count_tokens(request: Request) -> Response:
        service, tenant = service_of(request), tenant_of(request)
        prepared = await prepared_of(request)
        service.adapter(tenant, ChatOptions.model_validate_json(prepared.options).model)
        counted = len(prepared.prompts[0]) // TOKEN_BYTES
        return json_response({"object": "response.input_tokens", "input_tokens": counted})

    @routes.post("/v1/responses/compact", openapi_extra=described(CompactRequest))
    async def compact(request: Request) -> Response:
        prepared = await prepared_of(request, Kind.COMPACT)
        _, answers = await open_chat(request, prepared)
        response_id = answer_id(request, "resp_", None)
        formatter = CompactionFormatter(response_id, answers, msgspec.json.decode(prepared.messages))
        return await respond(request, answers, formatter, stream=False)

    @routes.post("/v1/responses/{response_id}/cancel")
    async def cancel_response(request: Request, response_id: str) -> Response:
        kept.find(tenant_of(request).name, response_id)
        raise bad_request("Cannot cancel a synchronous response.", "response_id")

    @routes.get("/v1/responses/{response_id}")
    async def get_response(request: Request, response_id: str) -> Response:
        stored = kept.find(tenant_of(request).name, response_id)
        return Response(stored.body, media_type="application/json")

    @routes.delete("/v1/responses/{response_id}")
    async def delete_response(request: Request, response_id: str) -> Response:
        kept.delete(tenant_of(request).name, response_id)
        return json_response({"id": response_id, "object": "response", "deleted": True})

    return routes


def _head(asked: dict[str, Any], response_id: str, model: str) -> dict[str, Any]:
    """What a response says beside its output: what was asked, and what everybody gets."""
    return {
        **asked,
        "id": response_id,
        "object": "response",
        "created_at": int(time.time()),
        "model": model,
        "error": None,
        "background": False,
        "truncation": "disabled",
    }


class Calls(NamedTuple):
    """What calls are called. `names`: a tool's name in the chat -> its own, and its namespace; `free`: the tools that
    take a text."""

    names: Mapping[str, tuple[str, str]] = {}
    free: frozenset[str] = frozenset()

    def named(self, block: Block) -> dict[str, Any]:
        name, namespace = self.names.get(block.name, (block.name, None))
        return {"call_id": block.call_id, "name": name, **({} if namespace is None else {"namespace": namespace})}

    def is_free(self, block: Block) -> bool:
        return block.kind is BlockKind.CALL and block.name in self.free


class ResponsesFormatter(ResponseFormatter):
    """`head`: the response without what comes of the answer. `tokenizer` names the tokens of log-probabilities. `keep`
    is given the whole response and the assistant's message at the end. `calls`: what calls are called."""

    close: ClassVar[bytes] = b""

    def __init__(
        self,
        head: dict[str, Any],
        answers: Answers,
        tokenizer: Tokenizer | None,
        keep: Keep | None = None,
        calls: Calls | None = None,
    ) -> None:
        self._head = head
        self._calls = calls or Calls()
        self._free_text = TextReader()  # of the call that is being written
        self._tokenizer = tokenizer
        self._unscored: list[tuple[int, dict[str, Any]]] = []  # those of tokens whose text is yet to come
        self._keep = keep
        self._answers = answers
        self._blocks = Blocks()
        self._reason: str | None = None
        self._sequence = 0

    def whole(self, choices: Sequence[Update]) -> dict[str, Any]:
        for _ in self._changes(choices[0]):
            pass
        return self._ended()

    def _changes(self, update: Update | None) -> Iterator[tuple[Change, Block, str, list[dict[str, Any]]]]:
        """What an update (None: the end) does to the blocks, with the log-probabilities that belong to it."""
        if update is None:
            changes = self._blocks.finish()
        else:
            self._reason = update.finish_reason or self._reason
            changes = self._blocks.push(update.deltas)
            if update.logprobs is not None:
                scores = chat_logprobs(self._tokenizer, update.logprobs)["content"]
                self._unscored += zip(update.said, scores, strict=True)
        for what, block, text in changes:
            yield what, block, text, self._scores(block) if what is not Change.START else []

    def _scores(self, block: Block) -> list[dict[str, Any]]:
        """Of a text's tokens that have come since it was last asked about."""
        if block.kind is not BlockKind.TEXT:
            return []
        calls = len(self._blocks.calls)
        mine = [score for before, score in self._unscored if before == calls]
        self._unscored = [(before, score) for before, score in self._unscored if before > calls]
        block.scores += mine
        return mine

    def _ended(self) -> dict[str, Any]:
        response = self._response()
        if self._keep is not None:
            self._keep(response, self._said())
        return response

    def _said(self) -> dict[str, Any]:
        """The message that a following response goes on behind."""
        return _message(self._blocks)

    def _usage(self) -> dict[str, Any]:
        usage = self._answers.usage()
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": usage["completion_tokens_details"],
            "total_tokens": usage["total_tokens"],
        }

    def _response(self) -> dict[str, Any]:
        cut = self._reason == "length"
        return {
            **self._head,
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": [self._item(block, "completed") for block in self._blocks.all],
            "usage": self._usage(),
        }

    def _item_id(self, block: Block) -> str:
        prefix = "ctc" if self._calls.is_free(block) else _PREFIX[block.kind]
        return f"{prefix}_{self._head['id'].removeprefix('resp_')}_{block.index}"

    def _item(self, block: Block, status: str) -> dict[str, Any]:
        item: dict[str, Any] = {"id": self._item_id(block), "status": status}
        done = status == "completed"
        match block.kind:
            case BlockKind.TEXT:
                return {**item, "type": "message", "role": "assistant", "content": [_part(block)] if done else []}
            case BlockKind.REASONING:
                return {**item, "type": "reasoning", "summary": [], "content": [_part(block)] if done else []}
            case BlockKind.CALL if self._calls.is_free(block):
                text = text_in_arguments(block.text) if done else ""
                return {**item, "type": "custom_tool_call", **self._calls.named(block), "input": text}
            case BlockKind.CALL:
                arguments = block.text if done else ""
                return {**item, "type": "function_call", **self._calls.named(block), "arguments": arguments}

    def _event(self, kind: str, **data: Any) -> bytes:
        body = msgspec.json.encode({"type": kind, "sequence_number": self._sequence, **data})
        self._sequence += 1
        return b"event: " + kind.encode() + b"\ndata: " + body + b"\n\n"

    def begin(self) -> bytes:
        response = {**self._head, "status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def update(self, index: int, update: Update) -> bytes:
        return b"".join(self._change(*change) for change in self._changes(update))

    def end(self) -> bytes:
        last = b"".join(self._change(*change) for change in self._changes(None))
        response = self._ended()
        return last + self._event(f"response.{response['status']}", response=response)

    def error(self, error: ApiError) -> bytes:
        details = {"code": error.code or "server_error", "message": error.message}
        response = {**self._head, "status": "failed", "error": details, "incomplete_details": None, "output": []}
        return self._event("response.failed", response=response)

    def _change(self, what: Change, block: Block, text: str, scores: list[dict[str, Any]]) -> bytes:
        at = {"item_id": self._item_id(block), "output_index": block.index}
        in_part = {**at, "content_index": 0}
        kind = _FREE if self._calls.is_free(block) else _STREAMS[block.kind]
        if what is Change.MORE:
            if kind == _FREE:
                text = self._free_text.push(text)
                return self._event(f"{kind}.delta", delta=text, **at) if text else b""
            more: dict[str, Any] = {"logprobs": scores} if block.kind is BlockKind.TEXT else {}
            return self._event(f"{kind}.delta", delta=text, **(at if block.kind is BlockKind.CALL else in_part), **more)
        if what is Change.START:
            self._free_text = TextReader()
            item = self._item(block, "in_progress")
            started = self._event("response.output_item.added", output_index=block.index, item=item)
            if block.kind is BlockKind.CALL:
                return started
            empty = _part(Block(block.index, block.kind))
            return started + self._event("response.content_part.added", part=empty, **in_part)
        item = self._item(block, "completed")
        if kind == _FREE:
            done = self._event(f"{kind}.done", input=item["input"], **at)
        elif block.kind is BlockKind.CALL:
            done = self._event(f"{kind}.done", name=item["name"], arguments=block.text, **at)
        else:
            scored: dict[str, Any] = {"logprobs": block.scores} if block.kind is BlockKind.TEXT else {}
            done = self._event(f"{kind}.done", text=block.text, **in_part, **scored)
            done += self._event("response.content_part.done", part=_part(block), **in_part)
        return done + self._event("response.output_item.done", output_index=block.index, item=item)


class SummaryFormatter(ResponsesFormatter):
    """The answer as one item: a summary that its client sends back unread."""

    def _summary(self) -> str:
        message = _message(self._blocks)
        summary: str = message["content"].strip() or message.get("reasoning_content", "").strip()
        if not summary:
            raise ApiError(500, "the model wrote no summary; ask again, or compact by a request of your own")
        return summary

    def _said(self) -> dict[str, Any]:
        return {"role": "user", "content": BEGINNING + self._summary()}

    def _response(self) -> dict[str, Any]:
        number = self._head["id"].removeprefix("resp_")
        item = {"id": f"cmp_{number}", "type": "compaction", "encrypted_content": sealed(self._summary())}
        return {
            **self._head,
            "status": "completed",
            "incomplete_details": None,
            "output": [item],
            "usage": self._usage(),
        }

    def update(self, index: int, update: Update) -> bytes:
        for _ in self._changes(update):
            pass
        return b""

    def end(self) -> bytes:
        for _ in self._changes(None):
            pass
        response = self._ended()
        (item,) = response["output"]
        at = {"output_index": 0, "item": item}
        added, done = (self._event(f"response.output_item.{what}", **at) for what in ("added", "done"))
        return added + done + self._event("response.completed", response=response)


class CompactionFormatter(SummaryFormatter):
    """What the user said, `messages`, then the summary."""

    def __init__(self, response_id: str, answers: Answers, messages: Sequence[dict[str, Any]]) -> None:
        super().__init__({"id": response_id}, answers, None)
        self._messages = messages

    def _response(self) -> dict[str, Any]:
        number = self._head["id"].removeprefix("resp_")
        said = [
            {"id": f"msg_{number}_{i}", "type": "message", "role": "user", "status": "completed",
             "content": [{"type": "input_text", "text": message["content"]}]}
            for i, message in enumerate(self._messages)
        ]  # fmt: skip
        whole = super()._response()
        return {
            "id": self._head["id"],
            "object": "response.compaction",
            "created_at": int(time.time()),
            "output": [*said, *whole["output"]],
            "usage": whole["usage"],
        }


_FREE = "response.custom_tool_call_input"
_STREAMS = {
    BlockKind.TEXT: "response.output_text",
    BlockKind.REASONING: "response.reasoning_text",
    BlockKind.CALL: "response.function_call_arguments",
}


def _part(block: Block) -> dict[str, Any]:
    if block.kind is BlockKind.REASONING:
        return {"type": "reasoning_text", "text": block.text}
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": block.scores}


def _message(blocks: Blocks) -> dict[str, Any]:
    """The assistant's message, as a following request repeats it."""
    text = "".join(block.text for block in blocks.all if block.kind is BlockKind.TEXT)
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if reasoning := "".join(block.text for block in blocks.all if block.kind is BlockKind.REASONING):
        message["reasoning_content"] = reasoning
    if blocks.calls:
        message["tool_calls"] = [
            {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.text}}
            for call in blocks.calls
        ]
    return message
