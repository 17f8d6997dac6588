"""An OpenAI-compatible server over blocking sockets, which gevent makes cooperative."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit


class LoadError(Exception):
    """The server answered with an error, or not as the protocol says. `status`: of the answer, or 0."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Api:
    """A server (with or without /v1) and the key to send, if any. All methods raise LoadError or OSError."""

    url: str
    key: str = ""
    timeout_s: float = 300.0

    def models(self) -> dict[str, int | None]:
        """All that the key may see, with their context in tokens if the server tells; a base before its adapters."""
        listed = json.loads(self._answer("GET", "/v1/models"))["data"]
        ordered = sorted(listed, key=lambda model: bool(model.get("parent")))
        return {model["id"]: model.get("max_model_len") for model in ordered}

    def post(self, path: str, body: dict[str, Any]) -> bytes:
        return self._answer("POST", path, body)

    def get(self, path: str) -> bytes:
        return self._answer("GET", path)

    def events(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Of a streamed answer, until [DONE]. Closing the iterator closes the connection."""
        with self._open("POST", path, body) as response:
            for line in response:
                data = line.decode().strip()
                if not data.startswith("data:"):
                    continue
                data = data.removeprefix("data:").strip()
                if data == "[DONE]":
                    return
                try:
                    event: dict[str, Any] = json.loads(data)
                except ValueError:
                    raise LoadError(f"no JSON in an event: {data[:80]}") from None
                if "error" in event:
                    error = event["error"]
                    raise LoadError(str(error.get("message", error) if isinstance(error, dict) else error))
                yield event
        raise LoadError("the stream ended without [DONE]")

    def _answer(self, method: str, path: str, body: Any = None) -> bytes:
        with self._open(method, path, body) as response:
            return response.read()

    def _open(self, method: str, path: str, body: Any = None) -> http.client.HTTPResponse:
        parts = urlsplit(self.url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(parts.hostname or "", parts.port, timeout=self.timeout_s)
        headers = {"Content-Type": "application/json", "Connection": "close"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        prefix = parts.path.rstrip("/").removesuffix("/v1")
        try:
            connection.request(method, prefix + path, json.dumps(body) if body is not None else None, headers)
            response = connection.getresponse()
        except http.client.HTTPException as error:
            raise LoadError(f"no HTTP answer: {error!r}") from None
        if response.status >= 300:
            said = response.read(500).decode(errors="replace")
            response.close()
            raise LoadError(f"{response.status}: {said}", response.status)
        return response
