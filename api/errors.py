"""Errors as the OpenAI API shapes them: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import math
import reprlib
from typing import Any

from engine.errors import KtserveError

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
_MOST_TEXT, _MOST_PARAM = 4000, 500  # characters, whatever a client has put into the names of fields


class ApiError(KtserveError):
    """Ends a request with `status`. `param` names the field that is wrong, `retry_after_s` becomes Retry-After. Both
    texts are cut where they are long."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        self.message = cut(message)
        super().__init__(self.message)
        self.status = status
        self.param = None if param is None else param[:_MOST_PARAM]
        self.code = code
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        headers = {}
        if self.retry_after_s is not None:
            headers["Retry-After"] = str(max(1, math.ceil(self.retry_after_s)))
        if self.status in (408, 413):  # the rest of the body is not wanted
            headers["Connection"] = "close"
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return headers


class TooLongError(ApiError):
    """A prompt, with the output that was asked for (None: without), takes more than `limit` tokens. The message is
    OpenAI's; a dialect whose clients look for other words makes its own of the numbers."""

    def __init__(self, message: str, param: str, prompt_tokens: int, output_tokens: int | None, limit: int) -> None:
        super().__init__(400, message, param=param, code="context_length_exceeded")
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.limit = limit


class UnreadableError(ApiError):
    """A part of the messages, at `param`, has not the form of its kind: ends a request that newly asks for it, and is
    left out of a history."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(400, message, param=param)


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def cut(message: str) -> str:
    """A message that quotes a client as a client can read it: its beginning, if it is long."""
    return message if len(message) <= _MOST_TEXT else f"{message[:_MOST_TEXT]}..."


def shortened(value: Any) -> str:
    """A value for an error message: its repr, at most 80 characters of it, whatever its size."""
    if isinstance(value, str):
        value = value[:100]
    elif isinstance(value, int) and abs(value) >= 10**40:
        return f"an integer of about {value.bit_length() * 301 // 1000} digits"
    text = reprlib.repr(value) if isinstance(value, list | dict) else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
