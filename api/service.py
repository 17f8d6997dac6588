"""What the routes share: who asks, which model they mean, and the way of a prompt into the engine."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from api.chat_messages import normalise
from api.client import EngineClient
from api.config import ServeConfig
from api.errors import ApiError, bad_request
from api.generation import Answer
from api.metrics import Metrics
from api.protocol import ChatRequest, CompletionRequest, sampling_params
from api.tenants import Keys, Tenant
from api.tokenizer import Tokenizer
from engine import messages as m
from engine.errors import EngineError

_COMPLETION_TOKENS = 16  # OpenAI's default of /v1/completions
_LONG_TEXT = 4096  # characters; longer texts are encoded beside the event loop


@dataclass
class Service:
    """`defaults`: the model's sampling defaults. `tokenizer` None: prompts and answers are token ids."""

    client: EngineClient
    config: ServeConfig
    keys: Keys
    tokenizer: Tokenizer | None
    defaults: dict[str, Any]
    metrics: Metrics = field(default_factory=Metrics)
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def ready(self) -> m.Ready:
        if self.client.ready is None:
            raise self.client.unavailable()
        return self.client.ready

    # ---- models

    def adapter(self, tenant: Tenant, model: str) -> str | None:
        """The adapter that a model name means, None for the base. Raises ApiError 404 that lists what there is."""
        if tenant.sees(model):
            if model == self.ready.model_name:
                return None
            if model in self.client.adapters:
                return model
        names = ", ".join(repr(entry["id"]) for entry in self.models(tenant)) or "none"
        raise ApiError(
            404, f"the model {model!r} does not exist; models: {names}", param="model", code="model_not_found"
        )

    def models(self, tenant: Tenant) -> list[dict[str, Any]]:
        """The base model and the adapters that a tenant may see, as /v1/models shows them."""
        base = self.ready.model_name
        return [
            {
                "id": name,
                "object": "model",
                "created": self.created,
                "owned_by": "ktserve",
                "root": base,
                "parent": None if name == base else base,
                "max_model_len": self.ready.max_model_len,
            }
            for name in [base, *self.client.adapters]
            if tenant.sees(name)
        ]

    # ---- prompts

    def need_tokenizer(self, param: str) -> Tokenizer:
        if self.tokenizer is None:
            raise bad_request("the server runs without a tokenizer (--skip-tokenizer): send token ids", param)
        return self.tokenizer

    async def encode(self, text: str, *, add_special_tokens: bool, param: str) -> list[int]:
        tokenizer = self.need_tokenizer(param)
        if len(text) < _LONG_TEXT:
            return tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return await asyncio.to_thread(tokenizer.encode, text, add_special_tokens=add_special_tokens)

    async def encode_chat(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool = False,
        variables: dict[str, Any],
    ) -> list[int]:
        """Raises ApiError 400 or TemplateError."""
        template = self.need_tokenizer("messages").template
        if template is None:
            raise bad_request("the model has no chat template: give one with --chat-template", "messages")
        if taken := sorted({"messages", "add_generation_prompt"} & set(variables)):
            raise bad_request(f"chat_template_kwargs may not set {taken[0]!r}", "chat_template_kwargs")
        text = template.render(
            normalise(messages),
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables=variables,
        )
        return await self.encode(text, add_special_tokens=False, param="messages")

    def check_tokens(self, tokens: Sequence[int], param: str) -> None:
        if not tokens:
            raise bad_request(f"{param}: the prompt is empty", param)
        vocab = self.ready.vocab_size
        for token in tokens:
            if not 0 <= token < vocab:
                raise bad_request(f"{param}: token id {token} is outside the vocabulary (0 to {vocab - 1})", param)

    # ---- requests

    def submit(
        self, body: ChatRequest | CompletionRequest, tenant: Tenant, adapter: str | None, prompts: list[list[int]]
    ) -> list[Answer]:
        """n answers for each prompt, prompt after prompt. All of them are aborted if one cannot be sent."""
        for token in map(int, body.logit_bias):
            if token >= self.ready.vocab_size:
                raise bad_request(
                    f"logit_bias: token id {token} is outside the vocabulary (0 to {self.ready.vocab_size - 1})",
                    "logit_bias",
                )
        if body.stop and self.tokenizer is None:
            raise _without_text("stop")
        limits = [self._output_tokens(body, len(prompt)) for prompt in prompts]
        answers: list[Answer] = []
        try:
            for prompt, limit in zip(prompts, limits, strict=True):
                for choice in range(body.n):
                    answers.append(self._submit_one(body, tenant, adapter, prompt, limit, choice))
        except EngineError:
            for answer in answers:
                answer.abort()
            raise
        return answers

    def _submit_one(
        self,
        body: ChatRequest | CompletionRequest,
        tenant: Tenant,
        adapter: str | None,
        prompt: list[int],
        limit: int,
        choice: int,
    ) -> Answer:
        message = m.Submit(
            request_id=uuid.uuid4().hex,
            prompt=prompt,
            sampling=sampling_params(body, self.defaults, max(1, limit), choice),
            adapter=adapter,
            tenant=tenant.name,
            tenant_weight=tenant.weight,
            priority=body.priority,
            timeout_s=self.config.request_timeout_s,
        )
        detokenizer = None
        if self.tokenizer is not None:
            detokenizer = self.tokenizer.detokenizer(skip_special_tokens=body.skip_special_tokens)
        return Answer(
            self.client.submit(message),
            detokenizer,
            body.stop,
            self.metrics,
            prompt_tokens=len(prompt),
            drop_output=limit == 0,
        )

    def _output_tokens(self, body: ChatRequest | CompletionRequest, prompt_tokens: int) -> int:
        """max_tokens, or its default. Raises ApiError 400 if prompt and output do not fit."""
        length = self.ready.max_model_len
        room = length - prompt_tokens
        param = "messages" if isinstance(body, ChatRequest) else "prompt"
        if room < 1:
            raise bad_request(
                f"the prompt has {prompt_tokens} tokens; with at least one of output it must fit into {length}",
                param,
                "context_length_exceeded",
            )
        wanted = body.output_tokens
        if wanted is None:
            default = self.config.default_max_tokens
            if default is None:
                default = room if isinstance(body, ChatRequest) else _COMPLETION_TOKENS
            return min(default, room)
        if wanted > room:
            field = "max_tokens" if body.max_tokens is not None else "max_completion_tokens"
            raise bad_request(
                f"{field} {wanted} and the prompt's {prompt_tokens} tokens exceed {length}; at most {room} are left",
                field,
                "context_length_exceeded",
            )
        return wanted


def _without_text(param: str) -> ApiError:
    return bad_request(f"{param}: the server runs without a tokenizer (--skip-tokenizer)", param)


def usage(answers: Sequence[Answer], n: int) -> dict[str, Any]:
    """Prompts count once, however many answers they have; outputs as delivered."""
    firsts = answers[::n]
    prompt = sum(answer.prompt_tokens for answer in firsts)
    output = sum(answer.num_tokens for answer in answers)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": sum(answer.cached_tokens for answer in firsts)},
    }
