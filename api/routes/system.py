"""/health, /metrics, /version, /tokenize, /detokenize"""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from api.errors import bad_request
from api.http import described, json_response, read_body
from api.protocol import DetokenizeRequest, TokenizeRequest, parse
from api.routes.common import service_of, tenant_of
from api.stream import EngineUnavailable
from api.version import project_version


def router() -> APIRouter:
    routes = APIRouter()

    @routes.get("/health")
    async def health(request: Request) -> Response:
        """200 while requests are served; 503 while the engine loads, restarts, drains, is silent or has ended."""
        client = service_of(request).client
        status = 200 if client.health == "ready" else 503
        return json_response({"status": client.health, "restarts": client.restarts}, status)

    @routes.get("/metrics")
    async def metrics(request: Request) -> Response:
        service = service_of(request)
        try:
            service.metrics.stats = await service.client.stats()
        except EngineUnavailable:  # no gauges rather than old ones
            service.metrics.stats = {}
        service.metrics.engine_up = service.client.state == "ready"
        service.metrics.show_names = not service.keys.required or service.keys.is_admin(
            request.headers.get("authorization")
        )
        service.metrics.restarts = service.client.restarts
        return Response(service.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @routes.get("/version")
    async def version_() -> Response:
        return json_response({"version": project_version()})

    @routes.post("/tokenize", openapi_extra=described(TokenizeRequest))
    async def tokenize(request: Request) -> Response:
        service, tenant = service_of(request), tenant_of(request)
        body = parse(TokenizeRequest, await read_body(request, service.config.max_body_bytes))
        service.adapter(tenant, body.model)
        if body.prompt is not None:
            tokens = await service.encode(body.prompt, add_special_tokens=body.add_special_tokens, param="prompt")
        else:
            tokens = await service.encode_chat(
                body.messages or [],
                add_generation_prompt=body.add_generation_prompt,
                variables=body.chat_template_kwargs,
            )
        return json_response({"tokens": tokens, "count": len(tokens), "max_model_len": service.ready.max_model_len})

    @routes.post("/detokenize", openapi_extra=described(DetokenizeRequest))
    async def detokenize(request: Request) -> Response:
        service, tenant = service_of(request), tenant_of(request)
        body = parse(DetokenizeRequest, await read_body(request, service.config.max_body_bytes))
        service.adapter(tenant, body.model)
        tokenizer = service.need_tokenizer("tokens")
        if any(token >= service.ready.vocab_size for token in body.tokens):
            raise bad_request(f"tokens: ids must be under {service.ready.vocab_size}", "tokens")
        return json_response({"prompt": tokenizer.decode(body.tokens, skip_special_tokens=False)})

    return routes
