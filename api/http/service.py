"""What the routes share: who asks, which model they mean, and the way of a prompt into the engine."""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.requests import Request

from api.batches.call import TENANT
from api.batches.service import Batches
from api.bodies.generation import ChatOptions, CompletionOptions
from api.bodies.sampling import check_vocabulary, sampling_params
from api.client.client import EngineClient
from api.config import ServeConfig
from api.errors import ApiError, TooLongError, bad_request, shortened
from api.http.answers.generation import Answers, Choice
from api.http.answers.meter import Meter
from api.http.fast.delivery import new_inbox
from api.http.metrics import Metrics
from api.http.middleware import UnknownFields, caller_of, note
from api.http.wire import Bodies, until_gone
from api.prepare.job import Job, Kind, Prepared
from api.prepare.pool import PromptPool
from api.prepare.prompts import too_long
from api.tenants.keys import Keys
from api.tenants.limits import Limits, Ticket
from api.tenants.record import Tenant
from api.tenants.usage import UsageLog
from api.text.channels import reader_of
from api.text.output import Output
from api.text.segments import Layout
from api.text.stops import StopStrings
from api.text.tokenizer import Tokenizer
from api.tracing import Tracing
from api.tuning.service import Tuning
from engine import messages as m
from scheduler.request import SamplingParams

_COMPLETION_TOKENS = 16  # OpenAI's default of /v1/completions


@dataclass
class Service:
    """`defaults`: the model's sampling defaults. `tokenizer` None: prompts and answers are token ids."""

    client: EngineClient
    config: ServeConfig
    keys: Keys
    tokenizer: Tokenizer | None
    prompts: PromptPool
    defaults: dict[str, Any]
    metrics: Metrics = field(default_factory=Metrics)
    limits: Limits = field(default_factory=Limits)
    batch_limits: Limits = field(default_factory=Limits)  # as large, of their own
    usage: UsageLog | None = None
    tracing: Tracing | None = None
    bodies: Bodies = field(init=False)
    protobuf_bodies: Bodies = field(init=False)  # Tinker's clients send 5 MB at a time
    small_bodies: Bodies = field(init=False)  # of requests that are parsed here
    unknown_fields: UnknownFields = field(default_factory=UnknownFields)
    created: int = field(default_factory=lambda: int(time.time()))
    batches: Batches | None = None  # with --data-dir
    answering: asyncio.Task[None] | None = None  # the batches' lines
    tuning: Tuning | None = None  # with --fine-tuning
    training: asyncio.Task[None] | None = None  # its jobs

    def __post_init__(self) -> None:
        self.bodies = Bodies(self.config.max_body_bytes, self.config.body_timeout_s)
        self.protobuf_bodies = Bodies(min(6 << 20, self.config.max_body_bytes), self.config.body_timeout_s)
        self.small_bodies = Bodies(min(2**16, self.config.max_body_bytes), self.config.body_timeout_s)
        self.metrics.serves, self.client.on_unloaded = self.client.serves, self.metrics.unloaded

    async def stop_answering(self) -> None:
        """End the work on batches and fine-tuning jobs; the next start goes on with it."""
        tasks = {task for task in (self.answering, self.training) if task is not None}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    @property
    def ready(self) -> m.Ready:
        if self.client.ready is None:
            raise self.client.unavailable()
        return self.client.ready

    def keys_named(self, tenant: str) -> Tenant | None:
        """The tenant of that name, by the keys of now."""
        return self.keys.named(tenant)

    # ---- models

    def adapter(self, tenant: Tenant, model: str | None) -> str | None:
        """The adapter that a model name means (its own, or BASE:ADAPTER), None for the base. `model` None or "": the
        tenant's default. Raises ApiError 404 that lists what the tenant may see (what it may not is as unknown); 400 if
        none is named and the base is hidden; EngineUnavailable while adapters may still be loading."""
        base = self.ready.model_name
        if not model and tenant.default_model is None and not self.sees(tenant, base):
            raise bad_request("model: name one of those that /v1/models lists", "model")
        name = model or tenant.default_model or base
        for known in (name, name.removeprefix(f"{base}:")):
            if self.sees(tenant, known) and known == base:
                return None
            if self.sees(tenant, known) and known in self.client.adapters:
                return known
        if self.client.health != "ready" or (self.sees(tenant, name) and self.owner(name) is not None):
            raise self.client.unavailable()
        names = ", ".join(repr(entry["id"]) for entry in self.models(tenant)) or "none"
        raise ApiError(
            404, f"the model {shortened(name)} does not exist; models: {names}", param="model", code="model_not_found"
        )

    def models(self, tenant: Tenant) -> list[dict[str, Any]]:
        """The base model and the adapters that a tenant may see, as /v1/models shows them. `root` is the folder or
        file, its name alone if there are keys: where things lie on this machine is not for tenants."""
        base = self.ready.model_name
        roots = {base: self.client.config.model or base}
        roots |= {name: info.path for name, info in self.client.adapters.items()}

        def held(name: str) -> dict[str, Any]:
            """Where the nearest copy of an adapter is."""
            info = self.client.adapters.get(name)
            return {} if info is None else {"residency": self.client.residency.get(name), "pinned": info.pinned}

        created_at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self.created))
        return [
            {
                "id": name,
                "object": "model",
                "created": self.created,
                "type": "model",  # this and the next two: Anthropic's form
                "display_name": name,
                "created_at": created_at,
                "owned_by": "ktserve",
                "root": os.path.basename(os.path.normpath(root)) if self.keys.required else root,
                "parent": None if name == base else base,
                "max_model_len": tenant.context(self.ready.max_model_len),
                **held(name),
            }
            for name, root in roots.items()
            if self.sees(tenant, name)
        ]

    def owner(self, model: str) -> str | None:
        """The tenant that has trained it here; None: nobody."""
        return None if self.tuning is None else self.tuning.owners.get(model)

    def sees(self, tenant: Tenant, model: str) -> bool:
        """A model that was trained here is its tenant's alone."""
        owner = self.owner(model)
        return tenant.sees(model) if owner is None else owner == tenant.name

    # ---- prompts

    async def prepare(self, kind: Kind, request: Request, history: Callable[[str], bytes] | None = None) -> Prepared:
        """The request's body, checked, its prompts as token ids. `history` gives JSON of the messages of the response
        that a body goes on with. Raises ApiError; ClientGoneError, and stops the work, if the client goes away."""
        length = caller_of(request.scope).context(self.ready.max_model_len)
        job = Job(kind, self.ready.vocab_size, length, keeps_states=self.ready.keeps_states)
        async with self.bodies.read(request) as raw:
            prepared = await self._prepared(job, raw, request)
            if prepared.previous is not None and history is not None:
                job = msgspec.structs.replace(job, history=history(prepared.previous))
                prepared = await self._prepared(job, raw, request)
        self.unknown_fields.log(prepared.unknown)
        note(request, prepared)
        return prepared

    async def _prepared(self, job: Job, raw: bytes, request: Request) -> Prepared:
        work = self.prompts.prepare(job, raw, background=TENANT in request.scope)
        return await until_gone(request.scope, request.receive, work)

    # ---- requests

    async def submit(
        self,
        body: ChatOptions | CompletionOptions,
        tenant: Tenant,
        adapter: str | None,
        prompts: list[list[int]],
        prepared: Prepared,
    ) -> Answers:
        """n answers for each prompt of `prepared`, prompt after prompt. All are aborted if one cannot be sent."""
        for param, tokens in (
            ("logit_bias", map(int, body.logit_bias)),
            ("stop_token_ids", body.stop_token_ids),
            ("allowed_token_ids", body.allowed_token_ids),
        ):
            check_vocabulary(tokens, self.ready.vocab_size, param)
        if body.stop and self.tokenizer is None:
            raise bad_request("stop: the server runs without a tokenizer (--skip-tokenizer)", "stop")
        limits = [self._output_tokens(body, tenant, len(prompt)) for prompt in prompts]
        stops = StopStrings(body.stop) if body.stop else None
        if body.min_tokens > min(limits):
            most = f"the {min(limits)} tokens that the output may have"
            raise bad_request(f"min_tokens: {body.min_tokens} is more than {most}", "min_tokens")
        priority = _priority(body, tenant)
        tickets = self._admitted(body, tenant, prompts, limits)
        waiting = iter(tickets)
        answers = Answers(new_inbox(), body.candidates)
        reading = prepared.reading
        layout = None if reading is None else reading.layout
        try:
            ends = prepared.part_ends or [[]] * len(prompts)
            for prompt, limit, part_ends in zip(prompts, limits, ends, strict=True):
                for choice in range(body.candidates):
                    if answers.choices:
                        await asyncio.sleep(0)  # many long prompts must not hold up the event loop
                    sampling = sampling_params(body, self.defaults, max(1, limit), choice, prepared.bad_words)
                    if reading is not None:
                        sampling = msgspec.structs.replace(sampling, thinking=reading.thinking)
                    message = self._message(body, tenant, adapter, prompt, sampling, priority, prepared, part_ends)
                    meter = Meter(
                        self.metrics,
                        tenant=tenant.name,
                        model=adapter or self.ready.model_name,
                        billed_prompt=0 if choice else len(prompt),
                        ticket=next(waiting),
                        usage=self.usage,
                        tracing=self.tracing,
                    )
                    open_request = self.client.submit(message, answers.inbox)
                    output, dropped = self._output(body, stops, layout), limit == 0
                    answers.add(Choice(open_request, output, meter, prompt_tokens=len(prompt), drop_output=dropped))
        except BaseException:  # whatever stopped one, its siblings must not run on unread
            answers.abort()
            for ticket in tickets:  # those of the answers have ended
                ticket.end(ran=False)
            raise
        return answers

    def _admitted(
        self, body: ChatOptions | CompletionOptions, tenant: Tenant, prompts: list[list[int]], limits: list[int]
    ) -> list[Ticket]:
        """Of each answer. A prompt counts once; max_tokens, if it is named, is set aside. Raises ApiError."""
        named = (body.output_tokens or -1) >= 0
        account = self.batch_limits if tenant.background else self.limits
        asked = [
            (0 if choice else len(prompt), limit if named else 0)
            for prompt, limit in zip(prompts, limits, strict=True)
            for choice in range(body.candidates)
        ]
        try:
            return account.admit(tenant, asked)
        except ApiError as error:
            if error.status == 429:
                self.metrics.limited(tenant.name).inc()
            raise

    def _message(
        self,
        body: ChatOptions | CompletionOptions,
        tenant: Tenant,
        adapter: str | None,
        prompt: list[int],
        sampling: SamplingParams,
        priority: int,
        prepared: Prepared,
        part_ends: list[int],
    ) -> m.Submit:
        return m.Submit(
            request_id=uuid.uuid4().hex,
            prompt=prompt,
            sampling=sampling,
            grammar=prepared.grammar,
            adapter=adapter,
            tenant=tenant.name,
            tenant_weight=tenant.weight,
            max_waiting=tenant.max_waiting(self.client.config.max_queue),
            cache_group=tenant.cache_salt,
            cache_salt=body.cache_salt or "",
            opening_tokens=prepared.opening_tokens,
            system_tokens=prepared.system_tokens,
            part_ends=tuple(part_ends),
            priority=priority,
            timeout_s=None if tenant.background else self.config.request_timeout_s,
            background=tenant.background,
        )

    def _output(
        self, body: ChatOptions | CompletionOptions, stops: StopStrings | None, layout: Layout | None
    ) -> Output:
        detokenizer, segments = None, reader_of(layout) if layout else None
        if self.tokenizer is not None:
            shown = layout.markers if layout else ()
            detokenizer = self.tokenizer.detokenizer(skip_special_tokens=body.skip_special_tokens, shown=shown)
        return Output(detokenizer, stops, body.min_tokens, segments, include_stop=body.include_stop_str_in_output)

    def _output_tokens(self, body: ChatOptions | CompletionOptions, tenant: Tenant, prompt_tokens: int) -> int:
        """max_tokens, or its default. Raises ApiError 400 if prompt and output do not fit."""
        length = tenant.context(self.ready.max_model_len)
        room = length - prompt_tokens
        param = "messages" if isinstance(body, ChatOptions) else "prompt"
        if room < 1:
            raise too_long(prompt_tokens, length, param)
        wanted = body.output_tokens
        if wanted is None or wanted < 0:
            default = self.config.default_max_tokens
            if default is None:
                default = room if isinstance(body, ChatOptions) or wanted is not None else _COMPLETION_TOKENS
            return min(default, room)
        if wanted > room:
            field = "max_tokens" if body.max_tokens is not None else "max_completion_tokens"
            raise TooLongError(
                f"This model's maximum context length is {length} tokens. However, you requested "
                f"{prompt_tokens + wanted} tokens ({prompt_tokens} in the {param}, {wanted} in the completion). "
                f"Please reduce the length of the {param} or the completion: {field} can be at most {room}.",
                field,
                prompt_tokens,
                wanted,
                length,
            )
        return wanted


def _priority(body: ChatOptions | CompletionOptions, tenant: Tenant) -> int:
    """Smaller runs first. Raises ApiError 400 for one that the tenant may not ask for."""
    ceiling = tenant.priority_ceiling
    if ceiling is None or body.priority >= ceiling:
        return body.priority
    if "priority" in body.model_fields_set:
        raise bad_request(
            f"priority {body.priority}: this key may ask for {ceiling} (first) to 1000 (last)", "priority"
        )
    return ceiling
