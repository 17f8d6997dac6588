"""The HTTP application: all endpoints over one service."""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Awaitable, Callable

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Match, Route
from starlette.types import Receive, Scope, Send

from api.dialects.anthropic import routes as anthropic
from api.dialects.ollama import routes as ollama
from api.dialects.openai import chat, completions
from api.dialects.responses import routes as responses
from api.dialects.tinker import routes as tinker
from api.endpoints import batches, files, fine_tuning, models, page, probes, system
from api.endpoints.openapi import document
from api.errors import ApiError
from api.http.middleware import Callers
from api.http.service import Service
from api.http.wire import ClientGoneError, as_api_error, json_response
from api.version import project_version
from engine.errors import KtserveError

log = logging.getLogger("ktserve")


class Application(FastAPI):
    """The endpoints that generate are called directly: they take a request and return the response, so they need
    nothing of the framework, whose layers and search for a route took longer than everything else about a short
    answer. It has the other endpoints, what there is no endpoint for, and the document of all."""

    def __init__(self, service: Service) -> None:
        super().__init__(title="ktserve", version=project_version(), redirect_slashes=False, openapi_url=None)
        self.state.service = service
        self.add_middleware(Callers, service=service)
        self._direct: dict[tuple[str, str], Callable[[Request], Awaitable[Response]]] = {}
        self._callers = Callers(self._answer, service)
        for family in (chat, completions, responses, anthropic, ollama):
            routes = family.router().routes
            self.routes.extend(routes)
            for route in filter(_takes_the_request_alone, routes):
                assert isinstance(route, Route)
                self._direct |= {(method, route.path): route.endpoint for method in route.methods or ()}
        for family in (models, files, batches, fine_tuning, tinker, system, probes, page):
            self.routes.extend(family.router().routes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (scope["method"], scope["path"]) not in self._direct:
            scope = {**scope, "path": _known_path(scope["path"])}
        if scope["type"] == "http" and (scope["method"], scope["path"]) in self._direct:
            scope["app"] = self
            await self._callers(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive, send)
        try:
            response = await self._direct[scope["method"], scope["path"]](request)
        except Exception as error:  # noqa: BLE001 - the handlers of the framework answer it
            handlers = self.exception_handlers
            handler = next(handlers[kind] for kind in type(error).__mro__ if kind in handlers)
            answer = handler(request, error)
            response = answer if isinstance(answer, Response) else await answer
        await response(scope, receive, send)


# As other servers have them, and clients look for them.
_WITHOUT_V1 = re.compile(r"/(chat/completions|completions|responses|messages|models)(/.*)?")
_ELSEWHERE = {
    "/v1/tokenize": "/tokenize",
    "/v1/detokenize": "/detokenize",
    "/v1/health": "/health",
    "/healthz": "/health",
    "/health_generate": "/health",
}


def _known_path(path: str) -> str:
    """A path as it is here."""
    return f"/v1{path}" if _WITHOUT_V1.fullmatch(path) else _ELSEWHERE.get(path, path)


def _takes_the_request_alone(route: BaseRoute) -> bool:
    if not isinstance(route, Route) or route.param_convertors:
        return False
    return list(inspect.signature(route.endpoint).parameters) == ["request"]


def create_app(service: Service) -> Application:
    """All endpoints over one service."""
    app = Application(service)
    app.state.openapi = document(
        app,
        keys=service.keys.required,
        reject_unknown=service.config.unknown_fields == "reject",
        root_path=service.config.root_path,
    )

    async def on_purpose(request: Request, error: Exception) -> Response:
        response = error_response(error, request.url.path)
        if response.status_code >= 500:
            log.warning("%s %s: %s", request.method, request.url.path, error)
        return response

    async def unexpected(request: Request, error: Exception) -> Response:
        log.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return error_response(error, request.url.path)

    async def gone(request: Request, error: Exception) -> Response:
        return Response(status_code=499)  # nobody reads it

    async def http(request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        if status == 405 and request.headers.get("upgrade", "").lower() == "websocket":
            status = 426  # by which clients know that they may go on without
        message = _MESSAGES.get(status, str(error))
        response = error_response(ApiError(status, f"{request.method} {request.url.path}: {message}"), request.url.path)
        if status == 405:
            response.headers["allow"] = ", ".join(sorted(_methods(app, request)))
        elif status == 426:
            response.headers["upgrade"] = "HTTP/1.1"
        return response

    app.add_exception_handler(KtserveError, on_purpose)
    app.add_exception_handler(ClientGoneError, gone)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(Exception, unexpected)
    return app


_MESSAGES = {404: "no such endpoint", 405: "method not allowed", 426: "there are no WebSockets here, only HTTP"}


def error_response(error: Exception, path: str) -> Response:
    """In the form of the api that the path belongs to: Anthropic's, Ollama's or OpenAI's."""
    api_error = as_api_error(error)
    if path.startswith("/v1/messages"):
        body = anthropic.error_body(api_error)
    elif path.startswith("/api/") and not path.startswith("/api/v1/"):
        body = ollama.error_body(api_error)
    else:
        body = api_error.body()
    return json_response(body, api_error.status, api_error.headers())


def _methods(app: FastAPI, request: Request) -> set[str]:
    """What the request's path takes."""
    matching = (route for route in app.routes if route.matches(request.scope)[0] is not Match.NONE)
    methods = {method for route in matching for method in getattr(route, "methods", None) or ()}
    return methods | ({"HEAD"} if "GET" in methods else set())
