"""Tinker's endpoints, below /api/v1."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from api.dialects.tinker import listings
from api.dialects.tinker import requests as r
from api.dialects.tinker.futures import Result
from api.dialects.tinker.handling import body_of, runs_of
from api.dialects.tinker.run import Run
from api.dialects.tinker.runs import Runs, load_order, publish_order
from api.dialects.tinker.sampling import sample
from api.dialects.tinker.saved import SAMPLER, WEIGHTS, Note
from api.dialects.tinker.wire import forward_backward_output, model_of, read_forward_backward, sample_response
from api.errors import ApiError, bad_request, shortened
from api.http.handling import service_of, tenant_of
from api.http.service import Service
from api.http.wire import json_response
from api.tenants.record import Tenant
from engine.tuning import Batch, OptimStep, Order, SaveRun, Tuned

_PROTO = "application/x-protobuf"
_UNEMBED = "the head is not trained here: train_unembed changes nothing"
_METRICS = {"loss": "loss:sum", "targets": "targets:sum", "hits": "hits:sum"}


def router() -> APIRouter:
    routes = APIRouter(prefix="/api/v1", include_in_schema=False)

    # ---- the server and its clients

    @routes.get("/healthz")
    async def healthz(request: Request) -> Response:
        return json_response({"status": "ok"})

    @routes.post("/client/config")
    async def client_config(request: Request) -> Response:
        await body_of(r.ClientConfig, request)
        most = service_of(request).config.max_body_bytes // 2
        return json_response({"pjwt_auth_enabled": False, "fwdbwd_max_chunk_bytes_count": min(5_000_000, most)})

    @routes.post("/client/dynamic_config")
    async def dynamic_config(request: Request) -> Response:
        return json_response({"refresh_interval_sec": 300})

    @routes.get("/get_server_capabilities")
    async def capabilities(request: Request) -> Response:
        service, tenant = service_of(request), tenant_of(request)
        base = service.ready.model_name
        found = {"model_name": base, "max_context_length": tenant.context(service.ready.max_model_len)}
        seen = [{**found, "trainable": service.tuning is not None, "sampleable": True}]
        return json_response({"supported_models": seen if service.sees(tenant, base) else []})

    @routes.post("/create_session")
    async def create_session(request: Request) -> Response:
        runs, tenant = runs_of(request), tenant_of(request)
        await body_of(r.CreateSession, request)
        return json_response(
            {"type": "create_session", "session_id": runs.open_session(tenant), "info_message": _UNEMBED}
        )

    @routes.post("/session_heartbeat")
    async def heartbeat(request: Request) -> Response:
        runs_of(request).check_session(tenant_of(request), (await body_of(r.Heartbeat, request)).session_id)
        return json_response({"type": "session_heartbeat"})

    @routes.post("/sessions/{session}/finish")
    async def finish(request: Request, session: str) -> Response:
        runs, tenant = runs_of(request), tenant_of(request)
        runs.check_session(tenant, session)
        await runs.finish(tenant, session)
        return Response(status_code=204)

    @routes.post("/telemetry")
    async def telemetry(request: Request) -> Response:
        """Taken, and thrown away."""
        async with service_of(request).bodies.read(request):
            return json_response({"status": "accepted"})

    # ---- runs

    @routes.post("/create_model")
    async def create_model(request: Request) -> Response:
        runs, tenant, service = runs_of(request), tenant_of(request), service_of(request)
        runs.tuning.check_allowed(tenant)
        body = await body_of(r.CreateModel, request)
        runs.check_session(tenant, body.session_id)
        _check_base(service, tenant, body.base_model)
        if body.optimizer_config is not None:
            body.optimizer_config.check()
        lora = body.lora_config or r.LoraConfig(rank=32)
        targets = (*(("attention",) if lora.train_attn else ()), *(("mlp",) if lora.train_mlp else ()))
        if not targets:
            raise bad_request("lora_config: train_attn or train_mlp is needed", "lora_config")
        record = runs.new(tenant, body.session_id, body.model_seq_id, service.ready.model_name, lora.rank, targets)

        async def work() -> Result:
            await runs.open(tenant, record, lora.seed or 0, None)
            return {"type": "create_model", "model_id": record.id}

        return _future(runs.creation(tenant, record, work()), record.id)

    @routes.post("/unload_model")
    async def unload_model(request: Request) -> Response:
        runs, tenant = runs_of(request), tenant_of(request)
        run = runs.run(tenant, (await body_of(r.Model, request)).model_id)

        async def work() -> Result:
            await runs.close_run(run)
            return {"type": "unload_model", "model_id": run.record.id}

        return _future(runs.futures.add(tenant, work()), run.record.id)

    @routes.post("/get_info")
    async def get_info(request: Request) -> Response:
        runs, tenant, service = runs_of(request), tenant_of(request), service_of(request)
        record = runs.run(tenant, (await body_of(r.Model, request)).model_id).record
        return json_response(
            {
                "type": "get_info",
                "model_id": record.id,
                "model_data": {"model_name": record.base_model, "tokenizer_id": _tokenizer_id(service)},
                "is_lora": True,
                "lora_rank": record.rank,
                "model_name": record.base_model,
            }
        )

    @routes.post("/forward_backward")
    async def forward_backward(request: Request) -> Response:
        runs, tenant, service = runs_of(request), tenant_of(request), service_of(request)
        if request.headers.get("content-type", "").split(";")[0] != _PROTO:
            raise ApiError(415, f"Content-Type: {_PROTO} is expected", code="unsupported_media_type")
        in_thread = runs.tuning.batches.in_thread  # Python parses slowly: the loop has others to serve
        async with service.protobuf_bodies.read(request) as raw:
            run = runs.run(tenant, await in_thread(model_of, raw))
            asked = await in_thread(read_forward_backward, raw)
        order = Batch(asked.samples, asked.loss, asked.settings, learn=not asked.forward_only, outputs=True)

        async def done(tuned: Tuned) -> Result:
            metrics = {_METRICS[name]: value for name, value in tuned.metrics.items()}
            return forward_backward_output(tuned.logprobs, metrics)

        return _ordered(runs, tenant, run, asked.seq_id, order, done)

    @routes.post("/optim_step")
    async def optim_step(request: Request) -> Response:
        runs, tenant = runs_of(request), tenant_of(request)
        body = await body_of(r.OptimStepRequest, request)
        run, p = runs.run(tenant, body.model_id), body.adam_params
        order = OptimStep(p.learning_rate, p.beta1, p.beta2, p.eps, p.weight_decay, p.grad_clip_norm)

        async def done(tuned: Tuned) -> Result:
            return {"metrics": {"grad_norm:mean": tuned.metrics["grad_norm"]}}

        return _ordered(runs, tenant, run, body.seq_id, order, done)

    # ---- weights

    @routes.post("/save_weights")
    async def save_weights(request: Request) -> Response:
        runs, tenant = runs_of(request), tenant_of(request)
        body = await body_of(r.SaveWeights, request)
        run, name = runs.run(tenant, body.model_id), body.path or f"{body.seq_id:06}"
        path = await _checked_save(runs, tenant, run, body, WEIGHTS, name)

        async def done(tuned: Tuned) -> Result:
            await _noted(runs, run, body, WEIGHTS, name)
            return {"type": "save_weights", "path": path}

        return _saving(runs, tenant, run, body.seq_id, runs.save_order(run, WEIGHTS, name), done, path)

    @routes.post("/save_weights_for_sampler")
    async def save_weights_for_sampler(request: Request) -> Response:
        runs, tenant = runs_of(request), tenant_of(request)
        body = await body_of(r.SaveForSampler, request)
        run = runs.run(tenant, body.model_id)
        if body.kind != "snapshot":
            raise bad_request(f"kind: 'snapshot' is expected, got {shortened(body.kind)}", "kind", "unsupported_field")
        if body.path is None:
            publish = publish_order(run)

            async def published(tuned: Tuned) -> Result:
                await runs.snapshot(run, publish.name)
                sampler = runs.open_sampler(tenant, publish.name)
                return {"type": "save_weights_for_sampler", "sampling_session_id": sampler}

            return _ordered(runs, tenant, run, body.seq_id, publish, published)
        name = body.path
        path = await _checked_save(runs, tenant, run, body, SAMPLER, name)

        async def saved(tuned: Tuned) -> Result:
            await _noted(runs, run, body, SAMPLER, name)
            await runs.serve(path, runs.saved.place(run.record.id, SAMPLER, name), tenant.name)
            return {"type": "save_weights_for_sampler", "path": path}

        return _saving(runs, tenant, run, body.seq_id, runs.save_order(run, SAMPLER, name), saved, path)

    @routes.post("/load_weights")
    async def load_weights(request: Request) -> Response:
        """Into a run, or, with a session, as the beginning of a new one."""
        runs, tenant, service = runs_of(request), tenant_of(request), service_of(request)
        runs.tuning.check_allowed(tenant)
        body = await body_of(r.LoadWeights, request)
        if body.base_model is not None:
            _check_base(service, tenant, body.base_model)
        record, folder = await runs.saved.find(tenant, body.path, WEIGHTS)
        runs.saved.check_base(record, service.ready.model_name)
        if body.optimizer_config is not None:
            body.optimizer_config.check()
        if body.model_id is not None and body.seq_id is not None:
            run = runs.run(tenant, body.model_id)

            async def done(tuned: Tuned) -> Result:
                return {"type": "load_weights", "path": body.path, "model_id": run.record.id}

            return _ordered(runs, tenant, run, body.seq_id, load_order(folder, optimizer=body.optimizer), done)
        if body.session_id is None or body.model_seq_id is None:
            raise bad_request("model_id and seq_id, or session_id and model_seq_id, are expected", "model_id")
        runs.check_session(tenant, body.session_id)
        new = runs.new(tenant, body.session_id, body.model_seq_id, record.base_model, record.rank, record.targets)

        async def work() -> Result:
            await runs.open(tenant, new, 0, folder)
            if not body.optimizer:
                await runs.client.tune(new.id, load_order(folder, optimizer=False))
            return {"type": "load_weights", "path": body.path, "model_id": new.id}

        return _future(runs.creation(tenant, new, work()), new.id)

    # ---- samples

    @routes.post("/create_sampling_session")
    async def create_sampling_session(request: Request) -> Response:
        runs, tenant, service = runs_of(request), tenant_of(request), service_of(request)
        body = await body_of(r.CreateSampler, request)
        runs.check_session(tenant, body.session_id)
        adapter = await _adapter(runs, service, tenant, body.base_model, body.model_path)
        sampler = runs.open_sampler(tenant, adapter)
        return json_response({"type": "create_sampling_session", "sampling_session_id": sampler})

    @routes.get("/samplers/{sampler}")
    async def sampler_info(request: Request, sampler: str) -> Response:
        adapter = runs_of(request).sampler(tenant_of(request), sampler)
        base = service_of(request).ready.model_name
        return json_response({"sampler_id": sampler, "base_model": base, "model_path": adapter})

    @routes.post("/asample")
    async def asample(request: Request) -> Response:
        runs, tenant, service = runs_of(request), tenant_of(request), service_of(request)
        async with service.bodies.read(request) as raw:
            body = r.read(r.SampleRequest, raw)
        if body.sampling_session_id is not None:
            adapter = runs.sampler(tenant, body.sampling_session_id)
        else:
            adapter = await _adapter(runs, service, tenant, body.base_model, body.model_path)
        if adapter is not None and adapter not in service.client.adapters:
            raise ApiError(404, f"{adapter} is not served any more: save the weights again", param="model_path")
        prompt, params, stops = body.prompt.tokens, body.params(), body.stops
        if prompt and max(prompt) >= service.ready.vocab_size:
            raise bad_request(f"prompt: token ids are 0 to {service.ready.vocab_size - 1}", "prompt")

        async def work() -> Result:
            found = await sample(service, tenant, adapter, prompt, params, body.num_samples, stops)
            return sample_response(found, body.topk_prompt_logprobs)

        key = runs.futures.add(tenant, work())
        ids = [f"{key}-{number}" for number in range(body.num_samples)]
        return json_response({"request_id": key, "sample_sequence_ids": ids})

    @routes.post("/retrieve_future")
    async def retrieve_future(request: Request) -> Response:
        runs, tenant = runs_of(request), tenant_of(request)
        key = (await body_of(r.Retrieve, request)).request_id
        found = await runs.futures.fetch(tenant, key)
        if found is None:
            return json_response({"type": "try_again", "request_id": key, "queue_state": "active"})
        return Response(found, media_type=_PROTO) if isinstance(found, bytes) else json_response(found)

    routes.include_router(listings.router())
    return routes


def _future(key: str, model_id: str) -> Response:
    return json_response({"request_id": key, "model_id": model_id})


def _ordered(
    runs: Runs, tenant: Tenant, run: Run, seq_id: int, order: Order, then: Callable[[Tuned], Awaitable[Result]]
) -> Response:
    return _future(runs.order(tenant, run, seq_id, order, then), run.record.id)


def _check_base(service: Service, tenant: Tenant, name: str) -> None:
    """Raises ApiError 404 for another model than the base."""
    if service.adapter(tenant, name) is not None:
        raise bad_request(f"base_model: {service.ready.model_name!r} is expected, got {shortened(name)}", "base_model")


async def _checked_save(runs: Runs, tenant: Tenant, run: Run, body: r.SaveWeights, kind: str, name: str) -> str:
    """The tinker:// path of what is to be saved; there is room for it until `_saving` ends. Raises ApiError."""
    place, path = runs.saved.place(run.record.id, kind, name), f"tinker://{run.record.id}/{kind}/{name}"
    if run.numbered(body.seq_id) is None:
        if place.exists() and not body.overwrite:
            raise ApiError(409, f"path: {name} is there already: set overwrite", param="path", code="exists")
        await runs.saved.reserve(tenant, path)
    return path


async def _noted(runs: Runs, run: Run, body: r.SaveWeights, kind: str, name: str) -> None:
    expires_at = None if body.ttl_seconds is None else time.time() + body.ttl_seconds
    await runs.saved.note(runs.saved.place(run.record.id, kind, name), Note(expires_at, body.user_metadata))


def _saving(
    runs: Runs,
    tenant: Tenant,
    run: Run,
    seq_id: int,
    order: SaveRun,
    then: Callable[[Tuned], Awaitable[Result]],
    path: str,
) -> Response:
    ended = partial(runs.saved.release, path)
    try:
        return _future(runs.order(tenant, run, seq_id, order, then, ended), run.record.id)
    except ApiError:
        ended()
        raise


async def _adapter(runs: Runs, service: Service, tenant: Tenant, base: str | None, path: str | None) -> str | None:
    """The adapter of a tinker:// path, loaded; None: the base. Raises ApiError."""
    if path is not None:
        if path not in service.client.adapters:
            record, folder = await runs.saved.find(tenant, path, SAMPLER)
            runs.saved.check_base(record, service.ready.model_name)
            await runs.serve(path, folder, tenant.name)
        return service.adapter(tenant, path)
    if base is None:
        raise bad_request("base_model or model_path is expected", "base_model")
    _check_base(service, tenant, base)
    return None


def _tokenizer_id(service: Service) -> str:
    """What a client on this machine may load the tokenizer from; on others it is a name alone."""
    keyed: Any = service.keys.required
    return service.ready.model_name if keyed else service.client.config.model
