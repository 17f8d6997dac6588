"""`--profile-dir`: one JSON line per step (steps.jsonl) and per generated token (tokens.jsonl).

A thread writes; the queue is bounded. When it is full, lines are dropped and counted, a step never waits.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from pathlib import Path
from typing import Any, Protocol, TextIO

import msgspec

from engine.errors import UserError
from engine.steps.base import Launched
from engine.weights.store import WeightSource
from scheduler.plan import Event

log = logging.getLogger("ktserve")
_QUEUE_LINES = 8192


class StepObserver(Protocol):
    """What the engine's core tells of its steps."""

    def step(self, step: Launched, total_s: float, schedule_s: float) -> None: ...

    def tokens(self, event: Event, step: int) -> None: ...

    def close(self) -> None: ...


class Profiler:
    """`step` and `tokens` cost a dict and a queue put. Lines are documented in docs/profiling.md."""

    def __init__(self, folder: str, source: WeightSource, kv_bytes_per_token: int) -> None:
        path = Path(folder)
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._files: dict[str, TextIO] = {
                name: (path / f"{name}.jsonl").open("a", encoding="utf-8") for name in ("steps", "tokens")
            }
        except OSError as error:
            raise UserError(f"--profile-dir {folder}: {error.strerror}", field="profile_dir") from error
        config = source.config
        each = {layer: source.experts(layer).num_bytes for layer in config.sparse_layers}
        traced = config.without_mtp.sparse_layers  # a step's trace is of these
        self._expert_bytes = [each[layer] // config.num_experts for layer in traced]
        self._dense_bytes = source.num_bytes - sum(each.values())
        self._kv_bytes_per_token = kv_bytes_per_token
        self.dropped = 0
        self._queue: queue.Queue[tuple[str, dict[str, Any]] | None] = queue.Queue(_QUEUE_LINES)
        self._thread = threading.Thread(target=self._write, name="profiler", daemon=True)
        self._thread.start()

    def step(self, step: Launched, total_s: float, schedule_s: float) -> None:
        """A committed step. `bytes` counts weights of touched experts and dense layers as stored, and KV read."""
        rows, touched = step.plan.rows, step.trace.experts_touched if step.trace else []
        kv = sum(row.start + row.num_tokens for row in rows) * self._kv_bytes_per_token
        weights = self._dense_bytes + sum(n * size for n, size in zip(touched, self._expert_bytes, strict=True))
        decode = sum(row.is_decode for row in rows)
        self._put(
            "steps",
            {
                "time": time.time(),
                "step": step.plan.step,
                "tokens": step.plan.num_tokens,
                "decode_rows": decode,
                "prefill_rows": len(rows) - decode,
                "adapters": len({row.adapter_slot for row in rows} - {0}),
                "total_s": total_s,
                "schedule_s": schedule_s,
                **step.phases,
                "experts_s": step.trace.experts_s if step.trace else 0.0,
                "experts_touched": touched,
                "weight_bytes": weights,
                "kv_bytes": kv,
                "dropped_lines": self.dropped,
            },
        )

    def tokens(self, event: Event, step: int) -> None:
        """Those of the event, sampled by `step`."""
        request = event.request
        for i, token in enumerate(event.tokens, len(request.output) - len(event.tokens)):
            line = {"time": time.time(), "request": request.request_id, "step": step, "index": i, "token": token}
            self._put("tokens", {**line, "adapter": request.adapter.uid})

    def close(self) -> None:
        """Write what is queued and end the thread."""
        self._queue.put(None)
        self._thread.join(timeout=5)
        for file in self._files.values():
            with contextlib.suppress(OSError):  # reported when it was written
                file.close()

    def _put(self, name: str, line: dict[str, Any]) -> None:
        try:
            self._queue.put_nowait((name, line))
        except queue.Full:
            self.dropped += 1

    def _write(self) -> None:
        """A disk that is full, or gone, ends the profile, never a step: what comes after is counted as dropped."""
        encoder, broken = msgspec.json.Encoder(), False
        while (item := self._queue.get()) is not None:
            name, line = item
            if broken:
                self.dropped += 1
                continue
            try:
                self._files[name].write(encoder.encode(line).decode() + "\n")
                if self._queue.empty():
                    for file in self._files.values():
                        file.flush()
            except OSError as error:
                broken = True
                log.error("--profile-dir: %s; the profile ends here", error.strerror)
