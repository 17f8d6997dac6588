"""GET / (the page), /page/... (its files) /v1/live and /v1/plan (what its live view shows)"""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.staticfiles import StaticFiles

from api.http.handling import check_admin, service_of
from api.http.wire import json_response

STATIC = Path(__file__).parent.parent / "page" / "static"
# Nothing but the page's own files and the api of its own origin; no text ever becomes markup or script.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",  # kept, but asked for again with its ETag
}


def router() -> APIRouter:
    routes = APIRouter()
    files = StaticFiles(directory=STATIC)
    names = frozenset(path.name for path in STATIC.iterdir())

    async def send(name: str, request: Request) -> Response:
        if name not in names:
            raise HTTPException(404)
        response = await files.get_response(name, request.scope)
        response.headers.update(HEADERS)
        return response

    @routes.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
    async def page(request: Request) -> Response:
        return await send("index.html", request)

    @routes.api_route("/page/{name:path}", methods=["GET", "HEAD"], include_in_schema=False)
    async def file(request: Request, name: str) -> Response:
        return await send(name, request)

    @routes.get("/v1/live")
    async def live(request: Request) -> Response:
        service = service_of(request)
        if service.keys.required:  # it names tenants
            check_admin(request, "/v1/live of a server with API keys")
        seen = await service.client.live()
        return json_response({"model": service.ready.model_name, "live": seen}, headers={"Cache-Control": "no-store"})

    @routes.get("/v1/plan")
    async def plan(request: Request) -> Response:
        """What memory was planned for, by device, and what the engine said of itself when it started."""
        service = service_of(request)
        if service.keys.required:  # the lines name files and this machine
            check_admin(request, "/v1/plan of a server with API keys")
        ready = service.ready
        body = {"model": ready.model_name, "memory": ready.memory, "lines": ready.lines}
        return json_response(body, headers={"Cache-Control": "no-store"})

    return routes
