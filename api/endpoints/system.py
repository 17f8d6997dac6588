"""/health, /metrics, /version, /tokenize, /detokenize"""

from __future__ import annotations

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from api.bodies.generation import DetokenizeRequest, TokenizeRequest
from api.bodies.schema import described
from api.client.stream import EngineUnavailable
from api.endpoints.openapi import of_server
from api.errors import ApiError
from api.http.handling import check_admin, service_of, tenant_of
from api.http.wire import ChunkedResponse, json_response
from api.prepare.job import Kind
from api.tenants.record import Tenant
from api.version import project_version


def router() -> APIRouter:
    routes = APIRouter()

    @routes.get("/health")
    async def health(request: Request) -> Response:
        """200 while requests are served; 503 while the engine loads (with its progress), restarts, drains or is
        silent."""
        client = service_of(request).client
        body: dict[str, object] = {"status": client.health, "restarts": client.restarts}
        if (loading := client.loading) is not None:
            body["loading"] = {"stage": loading.stage, "done": loading.done, "total": loading.total}
        return json_response(body, 200 if client.health == "ready" else 503)

    @routes.get("/metrics", response_class=PlainTextResponse)
    async def metrics(request: Request) -> Response:
        service = service_of(request)
        if service.keys.required:  # tenants are named in it
            check_admin(request, "/metrics of a server with API keys")
        try:
            service.metrics.stats = await service.client.stats()
        except EngineUnavailable:  # no gauges rather than old ones
            service.metrics.stats = {}
        service.metrics.engine_up = service.client.state == "ready"
        service.metrics.usage_lines_lost = 0 if service.usage is None else service.usage.dropped
        service.metrics.restarts = service.client.restarts
        service.metrics.residency = service.client.residency
        return Response(service.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @routes.get("/ping")
    @routes.post("/ping", include_in_schema=False)
    async def ping(request: Request) -> Response:
        """200 while requests are served, without a body."""
        return Response(status_code=200 if service_of(request).client.health == "ready" else 503)

    @routes.get("/load")
    async def load(request: Request) -> Response:
        """The requests that are open."""
        tenant_of(request)
        return json_response({"server_load": service_of(request).client.num_open})

    @routes.get("/tokenizer_info")
    async def tokenizer_info(request: Request) -> Response:
        service, _ = service_of(request), tenant_of(request)
        if service.tokenizer is None:
            raise ApiError(404, "the server runs without a tokenizer (--skip-tokenizer)", code="no_tokenizer")
        template = service.tokenizer.template
        return json_response(
            {
                "vocab_size": service.tokenizer.vocab_size,
                "model_max_length": service.ready.max_model_len,
                "chat_template": None if template is None else template.source,
                **({} if template is None else template.special_tokens),
            }
        )

    @routes.get("/openapi.json", include_in_schema=False)
    async def openapi(request: Request) -> Response:
        service, caller = service_of(request), request.scope["state"]["caller"]
        if service.client.ready is None:
            return json_response(of_server(request.app.state.openapi, [], 1, 1))
        names = [entry["id"] for entry in service.models(caller)] if isinstance(caller, Tenant) else []
        return json_response(
            of_server(request.app.state.openapi, names, service.ready.max_model_len, service.ready.vocab_size)
        )

    @routes.get("/version")
    async def version_() -> Response:
        return json_response({"version": project_version()})

    @routes.post("/tokenize", openapi_extra=described(TokenizeRequest))
    async def tokenize(request: Request) -> Response:
        service, tenant = service_of(request), tenant_of(request)
        prepared = await service.prepare(Kind.TOKENIZE, request)
        options = msgspec.json.decode(prepared.options)
        service.adapter(tenant, options["model"])
        end = f',"count":{options["count"]},"max_model_len":{service.ready.max_model_len}}}'.encode()
        return ChunkedResponse([b'{"tokens":', *prepared.answer, end], service.bodies)

    @routes.post("/detokenize", openapi_extra=described(DetokenizeRequest))
    async def detokenize(request: Request) -> Response:
        service, tenant = service_of(request), tenant_of(request)
        prepared = await service.prepare(Kind.DETOKENIZE, request)
        service.adapter(tenant, msgspec.json.decode(prepared.options)["model"])
        text = prepared.answer  # under llama-server's name too
        return ChunkedResponse([b'{"prompt":', *text, b',"content":', *text, b"}"], service.bodies)

    return routes
