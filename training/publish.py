"""Loads a finished adapter into a running server, which goes on serving an older version's requests to their end."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from http.client import HTTPException
from pathlib import Path
from typing import Any

from engine.errors import UserError

_TIMEOUT_S = 600.0  # a load is answered when the adapter has been read


def check_server(url: str, key: str | None) -> None:
    """Before hours of training: the server answers, and the key may load adapters. UserError if not."""
    if not url.startswith(("http://", "https://")):
        raise UserError(f"--publish {url}: begins with neither http:// nor https://", "publish")
    _call(url, "/lora-adapters", key, None)


def publish(url: str, key: str | None, name: str, folder: Path) -> str:
    """Loads `folder` as the adapter `name`, in place of one of that name; a line about it. UserError with the server's
    reason if it refuses."""
    body = {"lora_name": name, "lora_path": str(folder.resolve()), "replace": True}
    answer = _call(url, "/v1/load_lora_adapter", key, body)
    warnings = answer.get("warnings") or []
    return "\n".join([f"published: {name} at {url}", *(f"warning: {text}" for text in warnings)])


def _call(url: str, path: str, key: str | None, body: dict[str, Any] | None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    request = urllib.request.Request(url.rstrip("/") + path, data=data, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
            return json.load(response)
    except urllib.error.HTTPError as error:
        raise UserError(f"{url}{path}: {error.code}: {_reason(error.read())}", "publish") from None
    except (OSError, HTTPException, ValueError) as error:
        raise UserError(f"{url}{path}: {getattr(error, 'reason', error)}", "publish") from None


def _reason(content: bytes) -> str:
    try:
        return str(json.loads(content)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return content[:200].decode(errors="replace")
