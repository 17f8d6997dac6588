"""What the tests over Ray share."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable

import httpx
import psutil

from cluster.front.ingress import PROXY_CALLBACK, PROXY_SETTING
from testing.waiting import PATIENCE_S, eventually
from tests.api.conftest import ROOT

SERVER = "--config", "ktserve-replica-"  # words of the command line of a replica's own server
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


def processes(*words: str) -> list[psutil.Process]:
    """Those below this process with all the words in their command lines, the oldest first: others on this machine may
    run Ray, too."""
    ours = sorted(psutil.Process().children(recursive=True), key=psutil.Process.create_time)
    return [process for process in ours if all(word in _line(process) for word in words)]


def _line(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""  # it has ended meanwhile


def ended(process: psutil.Process) -> bool:
    """Whether or not its parent has asked how."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


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
