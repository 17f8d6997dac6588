"""What clients of llama-server look at: /props, /slots, /apply-template; and /docs"""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.openapi.docs import get_swagger_ui_html
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from api.bodies.generation import ChatRequest
from api.bodies.schema import described
from api.errors import ApiError
from api.http.handling import service_of, tenant_of
from api.http.service import Service
from api.http.wire import ChunkedResponse, json_response
from api.prepare.job import Kind
from api.version import project_version


def router() -> APIRouter:
    routes = APIRouter()

    @routes.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return get_swagger_ui_html(openapi_url="openapi.json", title="ktserve")

    @routes.get("/props")
    async def props(request: Request) -> Response:
        """The model, its template and what a request gets unless it says otherwise."""
        service, tenant = service_of(request), tenant_of(request)
        template = None if service.tokenizer is None else service.tokenizer.template
        special = {} if template is None else template.special_tokens
        context = tenant.context(service.ready.max_model_len)
        return json_response(
            {
                "default_generation_settings": {"n_ctx": context, "params": service.defaults},
                "total_slots": _slots(service),
                "model_alias": service.ready.model_name,
                "model_path": service.models(tenant)[0]["root"] if service.models(tenant) else "",
                "modalities": {"vision": False, "audio": False},
                "chat_template": "" if template is None else template.source,
                "bos_token": special.get("bos_token", ""),
                "eos_token": special.get("eos_token", ""),
                "build_info": f"ktserve {project_version()}",
            }
        )

    @routes.post("/props", include_in_schema=False)
    async def change_props(request: Request) -> Response:
        tenant_of(request)
        raise ApiError(501, "/props can only be read: settings are given at the start", code="read_only")

    @routes.get("/slots")
    async def slots(request: Request) -> Response:
        """The requests that may run at the same time, and how many of them do."""
        service, tenant = service_of(request), tenant_of(request)
        context, busy = tenant.context(service.ready.max_model_len), service.client.num_open
        return json_response([{"id": i, "n_ctx": context, "is_processing": i < busy} for i in range(_slots(service))])

    @routes.post("/slots/{slot}", include_in_schema=False)
    async def change_slot(request: Request, slot: str) -> Response:
        tenant_of(request)
        raise ApiError(501, "/slots can only be read: the prefix cache keeps prompts by itself", code="read_only")

    @routes.post("/apply-template", openapi_extra=described(ChatRequest))
    async def apply_template(request: Request) -> Response:
        """The prompt that a chat becomes, as a text."""
        service, _ = service_of(request), tenant_of(request)
        prepared = await service.prepare(Kind.TEMPLATE, request)
        return ChunkedResponse([b'{"prompt":', *prepared.answer, b"}"], service.bodies)

    return routes


def _slots(service: Service) -> int:
    return service.client.config.max_num_seqs
