"""Tinker's endpoints of what was saved."""

from __future__ import annotations

import time

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from api.dialects.tinker import requests as r
from api.dialects.tinker.handling import body_of, runs_of
from api.dialects.tinker.saved import SAMPLER, WEIGHTS, RunRecord
from api.errors import ApiError, bad_request, shortened
from api.http.handling import tenant_of
from api.http.wire import json_response


def router() -> APIRouter:
    routes = APIRouter()

    @routes.get("/training_runs")
    async def training_runs(request: Request) -> Response:
        runs, tenant = runs_of(request), tenant_of(request)
        limit, offset = (_count(request, name, default) for name, default in (("limit", 20), ("offset", 0)))
        found = await runs.saved.records(tenant)
        shown = [runs.shown(record) for record in found[offset : offset + limit]]
        cursor = {"offset": offset, "limit": limit, "total_count": len(found)}
        return json_response({"training_runs": shown, "cursor": cursor})

    @routes.get("/training_runs/{run_id}")
    async def training_run(request: Request, run_id: str) -> Response:
        return json_response(runs_of(request).shown(await _record(request, run_id)))

    @routes.get("/training_runs/{run_id}/checkpoints")
    async def checkpoints(request: Request, run_id: str) -> Response:
        found = runs_of(request).saved.checkpoints(await _record(request, run_id))
        cursor = {"offset": 0, "limit": len(found), "total_count": len(found)}
        return json_response({"checkpoints": found, "cursor": cursor})

    @routes.delete("/training_runs/{run_id}/checkpoints/{kind}/{name}")
    async def delete_checkpoint(request: Request, run_id: str, kind: str, name: str) -> Response:
        runs, tenant = runs_of(request), tenant_of(request)
        await runs.delete(tenant, await _record(request, run_id), kind, name)
        return Response(status_code=204)

    @routes.put("/training_runs/{run_id}/checkpoints/{kind}/{name}/ttl")
    async def set_ttl(request: Request, run_id: str, kind: str, name: str) -> Response:
        saved, tenant, body = runs_of(request).saved, tenant_of(request), await body_of(r.SetTtl, request)
        if kind not in (WEIGHTS, SAMPLER):
            raise ApiError(404, f"there are no weights {shortened(kind)}/{shortened(name)}", param="checkpoint_id")
        _, folder = await saved.find(tenant, f"tinker://{run_id}/{kind}/{name}", kind)
        expires_at = None if body.ttl_seconds is None else time.time() + body.ttl_seconds
        await saved.note(folder, msgspec.structs.replace(await saved.noted(folder), expires_at=expires_at))
        return Response(status_code=204)

    @routes.post("/weights_info")
    async def weights_info(request: Request) -> Response:
        runs, tenant = runs_of(request), tenant_of(request)
        record, _ = await runs.saved.find(tenant, (await body_of(r.WeightsInfo, request)).tinker_path, WEIGHTS)
        trained = {"train_attn": "attention" in record.targets, "train_mlp": "mlp" in record.targets}
        info = {"base_model": record.base_model, "is_lora": True, "lora_rank": record.rank, "train_unembed": False}
        return json_response({**info, **trained})

    return routes


async def _record(request: Request, run_id: str) -> RunRecord:
    """Raises ApiError 404."""
    record = await runs_of(request).saved.record(run_id)
    if record is None or record.tenant != tenant_of(request).name:
        raise ApiError(404, f"there is no training run {shortened(run_id)}", param="training_run_id")
    return record


def _count(request: Request, name: str, default: int) -> int:
    """Of a query. Raises ApiError."""
    text = request.query_params.get(name, str(default))
    if not (text.isascii() and text.isdecimal() and len(text) < 7):
        raise bad_request(f"{name}: a whole number is expected, got {shortened(text)}", name)
    return int(text)
