"""/v1/fine_tuning/jobs, and DELETE /v1/models/ft:..."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from api.bodies.body import Body
from api.bodies.parsing import parse
from api.bodies.schema import described
from api.bodies.values import Count, Integer, Number
from api.endpoints.files import listing, page
from api.endpoints.models import unload
from api.errors import ApiError, bad_request
from api.http.handling import service_of, tenant_of
from api.http.wire import json_response
from api.tuning.records import OPEN, Asked, JobRecord, JobStatus
from api.tuning.service import Tuning
from api.tuning.store import JobStore

_Key = Annotated[str, Field(max_length=64)]
_Value = Annotated[str, Field(max_length=512)]
_LOOK_S = 0.25  # for events that are streamed
_MOST = 100


class Hyperparameters(Body):
    n_epochs: Annotated[int, Field(ge=1, le=100), Integer] | Literal["auto"] = "auto"
    batch_size: Annotated[int, Field(ge=1, le=1024), Integer] | Literal["auto"] = "auto"
    learning_rate_multiplier: Annotated[float, Field(gt=0, le=1000), Number] | Literal["auto"] = "auto"
    beta: Annotated[float, Field(gt=0, le=10), Number] | Literal["auto"] = "auto"


class MethodPart(Body):
    hyperparameters: Hyperparameters | None = None


class Method(Body):
    type: Literal["supervised", "dpo", "reinforcement"]
    supervised: MethodPart | None = None
    dpo: MethodPart | None = None
    reinforcement: dict[str, Any] | None = None


def _method(kind: str, *names: str) -> dict[str, Any]:
    """The shape of one method, with its hyperparameters."""
    schema = Hyperparameters.model_json_schema()["properties"]
    values = {"type": "object", "properties": {name: schema[name] for name in names}, "additionalProperties": False}
    part = {"type": "object", "properties": {"hyperparameters": values}, "additionalProperties": False}
    return {
        "type": "object",
        "required": ["type"],
        "properties": {"type": {"const": kind}, kind: part},
        "additionalProperties": False,
    }


_NAMES = ("n_epochs", "batch_size", "learning_rate_multiplier")


class JobRequest(Body):
    SHAPES = {  # noqa: RUF012
        "method": {"anyOf": [_method("supervised", *_NAMES), _method("dpo", *_NAMES, "beta")]},
        "hyperparameters": {"type": "null", "description": "those of a supervised method, as older clients have them"},
        "integrations": {"type": "array", "maxItems": 0},
    }

    model: str | None = None  # the base, or a model that a job has trained
    training_file: str
    validation_file: str | None = None
    suffix: Annotated[str, Field(pattern="^[A-Za-z0-9-]{1,64}$")] | None = None
    seed: Count | None = None
    metadata: dict[_Key, _Value] | None = Field(default=None, max_length=16)
    method: Method | None = None
    hyperparameters: Hyperparameters | None = None
    integrations: list[Any] | None = None


def tuning_of(request: Request) -> Tuning:
    """Raises ApiError 404 on a server without --fine-tuning."""
    tuning = service_of(request).tuning
    if tuning is None:
        message = "fine-tuning is off: start the server with --fine-tuning and --data-dir DIR"
        raise ApiError(404, message, code="no_fine_tuning")
    return tuning


def router() -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/fine_tuning/jobs", openapi_extra=described(JobRequest, strict=True))
    async def create(request: Request) -> Response:
        tuning, tenant, service = tuning_of(request), tenant_of(request), service_of(request)
        async with service.small_bodies.read(request) as raw:
            body = parse(JobRequest, raw)
        base = service.ready.model_name
        if body.integrations:
            raise bad_request("integrations: there are none; leave it out", "integrations", "unsupported_field")
        job = await tuning.create(
            tenant,
            model=base,
            begins=service.adapter(tenant, body.model or base),
            training_file=body.training_file,
            validation_file=body.validation_file,
            suffix=body.suffix,
            seed=body.seed,
            metadata=body.metadata,
            asked=_asked(body),
        )
        return json_response(job.shown())

    @routes.get("/v1/fine_tuning/jobs")
    async def list_(request: Request) -> Response:
        tuning, tenant = tuning_of(request), tenant_of(request)
        names = tuple(name for name in request.query_params if name == "metadata" or name.startswith("metadata["))
        after, limit, _, _ = listing(request, ("after", "limit", *names), _MOST, 20)
        if after is not None:
            await tuning.job(tenant, after)
        wanted = {name[len("metadata[") : -1]: request.query_params[name] for name in names if name != "metadata"}
        none = "metadata" in names
        if none and request.query_params["metadata"] != "null":
            raise bad_request("metadata: 'null' is expected, or metadata[KEY]=VALUE", "metadata")

        def matches(job: JobRecord) -> bool:
            has = job.metadata or {}
            return not (none and has) and all(has.get(key) == value for key, value in wanted.items())

        found = await tuning.ask(JobStore.jobs, tenant.name, after, limit + 1, matches)
        return json_response(page([job.shown() for job in found], limit))

    @routes.get("/v1/fine_tuning/jobs/{job_id}")
    async def retrieve(request: Request, job_id: str) -> Response:
        return json_response((await tuning_of(request).job(tenant_of(request), job_id)).shown())

    @routes.post("/v1/fine_tuning/jobs/{job_id}/cancel")
    async def cancel(request: Request, job_id: str) -> Response:
        return await _move(request, job_id, JobStatus.CANCELLED, "Fine-tuning job cancelled")

    @routes.post("/v1/fine_tuning/jobs/{job_id}/pause")
    async def pause(request: Request, job_id: str) -> Response:
        return await _move(request, job_id, JobStatus.PAUSED, "Fine-tuning job paused")

    @routes.post("/v1/fine_tuning/jobs/{job_id}/resume")
    async def resume(request: Request, job_id: str) -> Response:
        return await _move(request, job_id, JobStatus.QUEUED, "Fine-tuning job resumed")

    @routes.get("/v1/fine_tuning/jobs/{job_id}/events")
    async def events(request: Request, job_id: str) -> Response:
        tuning, tenant = tuning_of(request), tenant_of(request)
        stream = request.query_params.get("stream", "false")
        if stream not in ("true", "false"):
            raise bad_request("stream: 'true' or 'false' is expected", "stream")
        after, limit, _, _ = listing(request, ("after", "limit", "stream"), 1000, 20)
        job = await tuning.job(tenant, job_id)
        if stream == "true":
            return StreamingResponse(_stream(tuning, job.id), media_type="text/event-stream")
        found = await tuning.ask(JobStore.events, job.id, after, limit + 1)
        return json_response(page([each.shown() for each in found], limit))

    @routes.get("/v1/fine_tuning/jobs/{job_id}/checkpoints")
    async def checkpoints(request: Request, job_id: str) -> Response:
        tuning, tenant = tuning_of(request), tenant_of(request)
        after, limit, _, _ = listing(request, ("after", "limit"), _MOST, 10)
        job = await tuning.job(tenant, job_id)
        found = await tuning.ask(JobStore.checkpoints, job.id)
        ids = [each.id for each in found]
        if after is not None and after not in ids:
            raise ApiError(404, "after: there is no such checkpoint", param="after", code="checkpoint_not_found")
        rest = found[0 if after is None else ids.index(after) + 1 :]
        return json_response(page([each.shown() for each in rest[: limit + 1]], limit))

    @routes.delete("/v1/models/{model:path}")
    async def delete(request: Request, model: str) -> Response:
        service, tenant = service_of(request), tenant_of(request)
        name = service.adapter(tenant, model)
        if name is None or service.tuning is None or service.owner(name) != tenant.name:
            message = f"{model!r} was not trained with this key: only such models can be deleted"
            raise ApiError(403, message, param="model", code="not_deletable")
        await unload(service, name)
        await service.tuning.remove_model(name)
        return json_response({"id": name, "object": "model", "deleted": True})

    return routes


async def _move(request: Request, job_id: str, to: JobStatus, message: str) -> Response:
    return json_response((await tuning_of(request).move(tenant_of(request), job_id, to, message)).shown())


def _asked(body: JobRequest) -> Asked:
    """Raises ApiError for a method that is not there, and parts of others."""
    kind = body.method.type if body.method is not None else "supervised"
    if kind == "reinforcement":
        message = "method.type: graders are not run here; allowed are 'supervised' and 'dpo'"
        raise bad_request(message, "method.type", "unsupported_field")
    part = None if body.method is None else getattr(body.method, kind)
    others = [name for name in ("supervised", "dpo", "reinforcement") if name != kind]
    if body.method is not None and (other := next((name for name in others if getattr(body.method, name)), None)):
        raise bad_request(f"method.{other}: the method's type is {kind!r}", f"method.{other}")
    if body.hyperparameters is not None and part is not None and part.hyperparameters is not None:
        raise bad_request("hyperparameters: give those of the method alone", "hyperparameters")
    given = body.hyperparameters or (None if part is None else part.hyperparameters) or Hyperparameters()
    if kind == "supervised" and given.beta != "auto":
        raise bad_request("beta: it is of the method dpo", "hyperparameters.beta")
    return Asked(method=kind, **given.model_dump())


async def _stream(tuning: Tuning, job_id: str) -> AsyncIterator[bytes]:
    """Events as they come, until the job has ended."""
    number = 0
    while True:
        job = await tuning.ask(JobStore.job, job_id)
        found = await tuning.ask(JobStore.events_since, job_id, number, 100)
        for last, each in found:
            number = last
            yield b"data: " + msgspec.json.encode(each.shown()) + b"\n\n"
        if not found and (job is None or job.status not in OPEN):
            yield b"data: [DONE]\n\n"
            return
        if not found:
            await asyncio.sleep(_LOOK_S)
