"""What the tests over Ray share."""

from __future__ import annotations

import os
import socket

from tests.api.conftest import ROOT


def prepare() -> int:
    """Before Ray starts: its settings, in the environment. A free port."""
    for name in ("READY_CHECK", "HEALTH_CHECK"):  # Serve kills a proxy that a busy machine starts in more than 5 s
        os.environ[f"RAY_SERVE_PROXY_{name}_TIMEOUT_S"] = "300"
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", "PYTHONPATH": str(ROOT)}
    os.environ["RAY_SERVE_QUEUE_LENGTH_CACHE_TIMEOUT_S"] = "0.1"  # of 10: that answers take longer is the usual case
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
