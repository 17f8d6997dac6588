"""An HTTP request on its way to a replica, and what of it decides where to."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

_HOP = frozenset(
    {"connection", "content-length", "host", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade"}
)


@dataclass(frozen=True)
class Call:
    """`path` with its query. `model`, `prompt`: of the body; "" where there is none. `key`: the caller's. `tried`:
    replicas that refused it for now. `catalogue`: the change of adapters that it is to see."""

    method: str
    path: str
    headers: tuple[tuple[str, str], ...]
    body: bytes
    model: str = ""
    prompt: str = ""
    key: str = ""
    tried: tuple[str, ...] = ()
    catalogue: int = 0

    @staticmethod
    def of(method: str, path: str, headers: Iterable[tuple[str, str]], body: bytes) -> Call:
        """Whatever the body is: what it says that decides nothing here is the server's to refuse."""
        kept = tuple((name, value) for name, value in headers if name.lower() not in _HOP)
        named = {name.lower(): value for name, value in kept}
        key = named.get("authorization", named.get("x-api-key", ""))
        said: Any = None
        if method == "POST" and body[:1] == b"{":
            try:
                said = json.loads(body)
            except ValueError:
                said = None
        if not isinstance(said, dict):
            return Call(method, path, kept, body, key=key)
        model = said.get("model")
        return Call(method, path, kept, body, model if isinstance(model, str) else "", _prompt(said), key)


def kept_headers(headers: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Without those that belong to a connection."""
    return [(name, value) for name, value in headers if name.lower() not in _HOP]


def _prompt(body: Mapping[str, Any]) -> str:
    """All text before the answer, in order; enough to find an equal beginning again."""
    said = [body.get(name) for name in ("system", "tools", "prompt", "messages", "input")]
    return "".join(each if isinstance(each, str) else json.dumps(each) for each in said if each is not None)
