"""A server of the run's own."""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from demo.paths import demo_adapters
from ktserve.launcher import program
from loadtests.child import ended_after, wait_ready
from loadtests.load.scenarios import TENANTS

_START_S = 600.0
_ADMIN = "load-admin"


@dataclass(frozen=True)
class Started:
    """Where it is and what it can be asked with."""

    url: str
    pid: int
    keys: dict[str, str] = field(default_factory=dict)
    admin_key: str = ""
    adapter_path: str = ""


@contextlib.contextmanager
def serving(scenario: str, flags: Sequence[str], adapters: int) -> Iterator[Started]:
    """`ktserve serve` on a free port with what the scenario needs: keys of tenants, the right to load adapters,
    `adapters` names for the demo's adapters. Raises ServerError."""
    with socket.socket() as probe, tempfile.TemporaryDirectory(prefix="ktload-") as folder:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        keys = {tenant: f"load-{tenant}" for tenant in TENANTS} if scenario == "tenants" else {}
        more: list[str] = []
        if keys:
            path = Path(folder) / "keys"
            path.write_text("".join(f"{keys[tenant]}={tenant}:{weight:g}\n" for tenant, weight in TENANTS.items()))
            more += ["--api-keys-file", str(path)]
        adapter = str(next(iter(demo_adapters().values())))
        churns = scenario in ("churn", "soak")
        if churns:
            more += ["--allow-any-adapter-path"]
        for number in range(adapters):
            more += ["--adapters", f"a{number:02}={adapter}"]
        probe.close()
        env = os.environ | ({"KTSERVE_ADMIN_KEY": _ADMIN} if churns else {})
        with ended_after(program("serve", *more, *flags, "--port", str(port)), env=env) as process:
            url = f"http://127.0.0.1:{port}"
            wait_ready(process, f"{url}/health", _START_S)
            yield Started(url, process.pid, keys, _ADMIN if churns else "", adapter if churns else "")
