"""An engine of several ranks in processes of its own, as the api starts it, with short limits."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import psutil
import zmq

from engine.config import EngineConfig
from engine.heartbeat import Heartbeat
from engine.messages import FatalError, Ready, Submit, Tokens, decode_from_engine, encode
from scheduler.request import SamplingParams
from testing.models.tiny import save_hf, tiny_model
from testing.waiting import PATIENCE_S

ROOT = Path(__file__).parents[2]
ENGINE = """
import sys
from engine.launch import leader
from engine.ranks.watch import Limits
leader.LIMITS = Limits({serving_s}, {start_s})
from engine.main import main
sys.exit(main(sys.argv[1:]))
"""


class Engine:
    """Whose ranks wait for one another for a few seconds, not minutes. `shape` of its tiny model: changes to it."""

    def __init__(
        self,
        folder: Path,
        ranks: int,
        serving_s: float,
        start_s: float,
        shape: dict[str, Any] | None = None,
        **changes: Any,
    ) -> None:
        divided = {"num_attention_heads": ranks, "num_key_value_heads": ranks, "moe_intermediate_size": 16 * ranks}
        save_hf(tiny_model(6, **(divided | (shape or {}))), folder / "model")
        settings = {"device": "cpu", "rules": "reference", "kv_cache_tokens": 8192, **changes}
        config = EngineConfig(model=str(folder / "model"), tensor_parallel=ranks, **settings)
        self._address, beat = f"ipc://{folder}/engine", folder / "beat"
        Heartbeat.create(beat)
        arguments = ["serve", "--config-json", msgspec.json.encode(config).decode(), "--address", self._address]
        code = ENGINE.format(serving_s=serving_s, start_s=start_s)
        command = [sys.executable, "-c", code, *arguments, "--heartbeat", str(beat)]
        self._engine = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT)
        self._context = zmq.Context()
        self._connection = self._context.socket(zmq.DEALER)
        self._connection.connect(self._address)

    def until(self, kind: type[Ready] | type[Tokens], patience_s: float = PATIENCE_S) -> None:
        """It has sent such a message."""
        while True:
            assert self._connection.poll(int(patience_s * 1000)), f"no {kind.__name__} comes"
            messages = decode_from_engine(self._connection.recv())
            assert not any(isinstance(m, FatalError) for m in messages), messages
            if any(isinstance(m, kind) for m in messages):
                return

    def submit(self) -> None:
        """A request of some thousand steps; returns while they run."""
        sampling = SamplingParams(max_tokens=8000, temperature=0.0, ignore_eos=True)
        self._connection.send(encode(Submit(request_id="r", prompt=[3, 4, 5], sampling=sampling)))
        for _ in range(8):
            self.until(Tokens)

    def pids(self) -> list[int]:
        """Of all ranks, as many as there are by now."""
        children = psutil.Process(self._engine.pid).children()
        return [self._engine.pid, *sorted(child.pid for child in children if "rank" in child.cmdline())]

    def ended(self) -> tuple[int, str]:
        """Its status, and what it and its ranks have said."""
        _, said = self._engine.communicate(timeout=PATIENCE_S)
        return self._engine.returncode, said

    def close(self) -> None:
        self._engine.kill()
        self._engine.wait()
        self._connection.close(linger=0)
        self._context.term()
