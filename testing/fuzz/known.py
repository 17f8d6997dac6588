"""Bodies made from the OpenAPI document, with what a document cannot know: files and adapters that this server has."""

from __future__ import annotations

import json
from functools import cached_property
from typing import Any

import httpx

from api.bodies.body import Body, fields_of
from testing.fuzz.bodies import body_kind

_ADAPTER = "made"
_LINE = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a", "max_tokens": 2}}


class Known:
    """`client`: with the admin key. `adapter`: a folder that may be loaded."""

    def __init__(self, client: httpx.Client, adapter: str) -> None:
        self._client = client
        self._adapter = adapter

    def filled(self, path: str, body: Any) -> Any:
        """A body for `path` that names what is there. Raises httpx.HTTPStatusError if it cannot be put there."""
        kind = body_kind(path)
        if kind is not None and issubclass(kind, Body):  # two spellings of a field are to be the same
            of = {name: field.of for name, field in fields_of(kind).items() if field.of is not None}
            body = {name: value for name, value in body.items() if of.get(name) not in body}
        if path in ("/v1/load_lora_adapter", "/load_lora_adapter"):
            return {**body, "lora_name": _ADAPTER, "lora_path": self._adapter, "replace": True}
        if path in ("/v1/unload_lora_adapter", "/unload_lora_adapter"):
            load = {"lora_name": _ADAPTER, "lora_path": self._adapter, "replace": True}
            self._client.post("/v1/load_lora_adapter", json=load).raise_for_status()
            return {**body, "lora_name": _ADAPTER}
        if path == "/lora-adapters":
            return [{**each, "id": 0} for each in body]
        if path == "/v1/batches":
            return {**body, "input_file_id": self._batch_file}
        if path == "/v1/fine_tuning/jobs":
            return {**body, "training_file": self._training_file, "validation_file": None}
        if path == "/v1/responses/compact" and body.get("input") is None:  # a stored response would do instead
            return {**body, "input": "hello"}
        return body

    @cached_property
    def _batch_file(self) -> str:
        return self._uploaded("batch", _LINE)

    @cached_property
    def _training_file(self) -> str:
        """Which no job learns anything from."""
        return self._uploaded("fine-tune", {})

    def _uploaded(self, purpose: str, line: dict[str, Any]) -> str:
        file = ("a.jsonl", json.dumps(line).encode() + b"\n")
        answer = self._client.post("/v1/files", data={"purpose": purpose}, files={"file": file})
        return str(answer.raise_for_status().json()["id"])
