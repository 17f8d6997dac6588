"""Chunks of a streamed answer, straight to its connection.

The layers around a route look at how an answer begins; its hundreds of chunks need not pass through all of them. A
connection offers them as an extension of the ASGI scope, where they are chunks: to HTTP/1.1, not to HEAD.
"""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.types import Scope
from uvicorn.protocols.http.flow_control import FlowControl

_NAME = "ktserve.chunks"


class Chunks:
    """The way of one answer's body, once its header has been sent."""

    def __init__(self, transport: asyncio.WriteTransport, flow: FlowControl) -> None:
        self._transport = transport
        self._flow = flow

    @property
    def blocked(self) -> bool:
        """Whether the client is behind: what is to be written has to wait, as the scope's `send` does."""
        return self._flow.write_paused

    def write(self, data: bytes) -> None:
        """`data` is not empty. Nothing, if the client has gone."""
        if not self._transport.is_closing():
            self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))


def offer_chunks(scope: Any, transport: asyncio.WriteTransport, flow: FlowControl) -> None:
    """`scope` is of a request that has just come."""
    if scope["http_version"] == "1.1" and scope["method"] != "HEAD":
        scope.setdefault("extensions", {}).setdefault(_NAME, Chunks(transport, flow))


def chunks_of(scope: Scope) -> Chunks | None:
    """None where the answer is sent another way."""
    chunks: Chunks | None = scope.get("extensions", {}).get(_NAME)
    return chunks
