"""What Tinker's endpoints have in common."""

from __future__ import annotations

import asyncio
from typing import TypeVar

from starlette.requests import Request

from api.dialects.tinker import requests as r
from api.dialects.tinker.runs import Runs
from api.errors import ApiError
from api.http.handling import service_of

_T = TypeVar("_T", bound=r._Request)


def runs_of(request: Request) -> Runs:
    """Raises ApiError 404 on a server without --fine-tuning."""
    service = service_of(request)
    if service.tuning is None:
        raise ApiError(404, "training is off: start the server with --fine-tuning", code="no_fine_tuning")
    runs: Runs | None = getattr(request.app.state, "tinker_runs", None)
    if runs is None:
        runs = request.app.state.tinker_runs = Runs(service.client, service.tuning)
        request.app.state.tinker_expiry = asyncio.create_task(runs.expire())
    return runs


async def body_of(kind: type[_T], request: Request) -> _T:
    async with service_of(request).small_bodies.read(request) as raw:
        return r.read(kind, raw)
