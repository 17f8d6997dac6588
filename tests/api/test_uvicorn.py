"""The internals of uvicorn that the bounds on connections stand on: another version must still have them."""

from __future__ import annotations

import asyncio
from typing import Any
from unittest.mock import MagicMock

import pytest
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from api.http.connections import GuardedProtocol

OVERRIDDEN = (
    "connection_made",
    "data_received",
    "send_400_response",
    "_unsupported_upgrade_warning",
    "on_response_complete",
    "pause_writing",
    "resume_writing",
    "connection_lost",
)
OF_THE_CONNECTION = ("config", "conn", "cycle", "client", "flow", "loop", "scope", "transport")
OF_A_REQUEST = ("response_complete", "response_started", "disconnected", "message_event")


@pytest.mark.parametrize("name", OVERRIDDEN)
def test_what_is_overridden_is_there(name: str) -> None:
    assert callable(getattr(H11Protocol, name)) and name in vars(GuardedProtocol)


def test_what_is_read_of_a_connection_and_a_request_is_there() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 204})
        await send({"type": "http.response.body"})

    async def connect() -> None:
        config = uvicorn.Config(app, http=H11Protocol, ws="none", lifespan="off", log_config=None)
        config.load()
        protocol = H11Protocol(config, ServerState(), {}, asyncio.get_running_loop())
        transport = MagicMock(spec=asyncio.Transport)
        transport.get_extra_info.return_value = None
        transport.is_closing.return_value = False
        protocol.connection_made(transport)
        protocol.data_received(b"GET / HTTP/1.1\r\nhost: here\r\n\r\n")
        cycle = protocol.cycle
        for name in OF_THE_CONNECTION:
            assert getattr(protocol, name) is not None or name == "client", name
        for name in OF_A_REQUEST:
            assert hasattr(cycle, name), name
        while not cycle.response_complete:
            await asyncio.sleep(0)
        assert b"204" in b"".join(call.args[0] for call in transport.write.call_args_list)
        protocol.connection_lost(None)

    asyncio.run(connect())
