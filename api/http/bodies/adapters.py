"""Bodies of the endpoints that load and unload adapters."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from api.http.bodies.values import Body


class LoadAdapterRequest(Body):
    lora_name: Annotated[str, Field(min_length=1, max_length=200)]
    lora_path: Annotated[str, Field(min_length=1, max_length=4096)]
    replace: bool = False
    load_inplace: bool = False  # vLLM's name for the same
    expert_scaling: Literal["alpha/r", "alpha/sqrt(r)", "peft"] | None = None
    pinned: bool = False  # SGLang's name: it stays in host memory


class UnloadAdapterRequest(Body):
    lora_name: Annotated[str, Field(min_length=1, max_length=200)]
