"""Errors in the form that an endpoint's clients read."""

from __future__ import annotations

from starlette.responses import Response

from api.http.dialects import anthropic, ollama
from api.http.wire import as_api_error, json_response


def error_response(error: Exception, path: str) -> Response:
    """In the form of the api that the path belongs to: Anthropic's, Ollama's or OpenAI's."""
    api_error = as_api_error(error)
    if path.startswith("/v1/messages"):
        body = anthropic.error_body(api_error)
    elif path.startswith("/api/"):
        body = ollama.error_body(api_error)
    else:
        body = api_error.body()
    return json_response(body, api_error.status, api_error.headers())
