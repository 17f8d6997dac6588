"""What the tests over Ray share."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable

import httpx

from cluster.front.ingress import PROXY_CALLBACK, PROXY_SETTING
from testing.waiting import PATIENCE_S, eventually
from tests.api.conftest import ROOT

_STARTS_S = 600.0  # processes of Ray and the server of a replica, on a machine that others keep busy


def comes(check: Callable[[], object], what: str = "") -> None:
    """As `eventually`, for what needs another replica."""
    eventually(check, what, _STARTS_S)


def ready(url: str) -> int:
    """Replicas that say so, of which a busy machine may hold some up. 0 while the application has no route yet."""
    try:
        answer = httpx.get(f"{url}/health", timeout=PATIENCE_S)
    except httpx.TransportError:
        return 0
    return int(answer.json()["replicas"].get("ready", 0)) if answer.status_code == 200 else 0


def prepare() -> int:
    """Before Ray starts: its settings, in the environment. A free port."""
    for name in ("READY_CHECK", "HEALTH_CHECK"):  # Serve kills a proxy that a busy machine starts in more than 5 s
        os.environ[f"RAY_SERVE_PROXY_{name}_TIMEOUT_S"] = "300"
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", "PYTHONPATH": str(ROOT)}
    os.environ[PROXY_SETTING] = PROXY_CALLBACK
    os.environ["RAY_SERVE_QUEUE_LENGTH_CACHE_TIMEOUT_S"] = "0.1"  # of 10: that answers take longer is the usual case
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
