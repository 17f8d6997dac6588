"""What the adapter endpoints of several servers have in common."""

from __future__ import annotations

import asyncio
import os
from typing import Annotated, Literal

from pydantic import Field

from api.bodies.body import Body
from api.config import ServeConfig
from api.errors import ApiError
from api.http.service import Service
from engine import messages as m


class LoadAdapterRequest(Body):
    lora_name: Annotated[str, Field(min_length=1, max_length=200)]
    lora_path: Annotated[str, Field(min_length=1, max_length=4096)]
    replace: bool = False
    load_inplace: bool = False  # vLLM's name for the same
    expert_scaling: Literal["alpha/r", "alpha/sqrt(r)", "peft"] | None = None
    pinned: bool = False  # SGLang's name: it stays in host memory


class UnloadAdapterRequest(Body):
    lora_name: Annotated[str, Field(min_length=1, max_length=200)]


async def load(service: Service, body: LoadAdapterRequest) -> m.AdapterInfo:
    """Raises ApiError, CallRefused or EngineUnavailable."""
    if body.lora_name == service.ready.model_name:
        raise ApiError(400, f"{body.lora_name!r} is the base model's name", param="lora_name")
    return await service.client.load_adapter(
        body.lora_name,
        await asyncio.to_thread(_allowed, body.lora_path, service.config),  # a file system may take its time
        replace=body.replace or body.load_inplace,
        expert_scaling=body.expert_scaling,
        pinned=body.pinned,
    )


async def unload(service: Service, name: str) -> None:
    """Raises ApiError, CallRefused or EngineUnavailable."""
    if name not in service.client.adapters:
        names = ", ".join(map(repr, service.client.adapters)) or "none"
        raise ApiError(
            404, f"no adapter {name!r} is loaded; loaded: {names}", param="lora_name", code="adapter_not_found"
        )
    await service.client.unload_adapter(name)


def _allowed(path: str, config: ServeConfig) -> str:
    """The folder; below a root, the one that its links lead to. Raises ApiError 403 for one outside the roots."""
    if config.allow_any_adapter_path:
        return path
    if not config.adapter_root:
        raise ApiError(
            403,
            "loading adapters while the server runs needs --adapter-root FOLDER (or --allow-any-adapter-path)",
            param="lora_path",
            code="no_adapter_root",
        )
    try:
        real = os.path.realpath(os.path.expanduser(path))
        roots = [os.path.realpath(root) for root in config.adapter_root]
        inside = any(os.path.commonpath([root, real]) == root for root in roots)
    except ValueError:  # a NUL byte
        inside = False
    if not inside or not path.startswith(("/", "~")):
        raise ApiError(
            403, "lora_path: not an absolute path below an --adapter-root", param="lora_path", code="path_not_allowed"
        )
    return real
