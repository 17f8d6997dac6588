"""An engine in this process, timed step by step: decode of so many rows, prefill, where a step's time goes."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf

from benchmarks.models.shapes import Shape, tensor_types
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.launch.assemble import assemble
from engine.messages import Abort, Failed, FromEngine, Refused, Submit, Tokens
from engine.model.native_executor import NativeExecutor
from engine.planning.plan import plan_engine
from engine.steps.base import Launched
from engine.steps.runner import ModelRunner
from engine.weights.pack_cache import SUFFIX
from native import _native
from scheduler.plan import Event
from scheduler.request import SamplingParams
from testing.harness import load_adapter, model_runner

KV_TOKENS = 33_280  # a prompt of 32768, and some
ENDLESS = 1024  # tokens of a request that is aborted once steps have been timed
BETWEEN_READS_S = 0.25
READ_BYTES = 1 << 29  # more than caches hold


class RunError(Exception):
    """A request of the benchmark was refused or failed."""


def prompt(shape: Shape, length: int, seed: int) -> list[int]:
    """Token ids that differ from one seed to the next, all below the special one."""
    return [(7919 * (seed + 1) + 104729 * i + 31 * i * i) % (shape.vocabulary - 1) for i in range(length)]


class Needs:
    """Bytes that a step must read, as the file stores them."""

    def __init__(self, shape: Shape, mix: str) -> None:
        sizes: Counter[int] = Counter()
        self.dense = 0  # all else but the embedding, of which a token reads one row
        for name, dims, type in tensor_types(shape, mix):
            block, size = gguf.GGML_QUANT_SIZES[type]
            total = math.prod(dims) // block * size
            if "_exps." in name:
                sizes[int(name.split(".")[1])] += total // shape.experts
            elif name != "token_embd.weight":
                self.dense += total
        self.expert = [sizes[layer] for layer in sorted(sizes)]  # of one of each sparse layer, all three projections

    def step(self, touched: list[int], kv_bytes: int) -> int:
        """`touched`: distinct experts by sparse layer."""
        return self.dense + kv_bytes + sum(n * size for n, size in zip(touched, self.expert, strict=True))


@dataclass
class _Seen:
    """In the profiler's place: bytes of every decode step."""

    needs: Needs
    kv_bytes_per_token: int
    step_bytes: list[int] = field(default_factory=list)

    def step(self, step: Launched, total_s: float, schedule_s: float) -> None:
        rows = step.plan.rows
        if step.trace is not None and all(row.is_decode for row in rows):
            kv = sum(row.start + row.num_tokens for row in rows) * self.kv_bytes_per_token
            self.step_bytes.append(self.needs.step(step.trace.experts_touched, kv))

    def tokens(self, event: Event, step: int) -> None: ...

    def close(self) -> None: ...


class Timed:
    """Calls of an object's methods, added up; everything else passes through."""

    def __init__(self, target: Any, clock: dict[str, float]) -> None:
        self._target, self._clock = target, clock

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._target, name)
        if not callable(found):
            return found

        def call(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return found(*args, **kwargs)
            finally:
                self._clock["native"] += time.perf_counter() - began

        self.__dict__[name] = call
        return call


class BenchEngine:
    """Not for two threads. `close` gives the memory back."""

    def __init__(self, model: Path, shape: Shape, mix: str, threads: int, **config: Any) -> None:
        fields: dict[str, Any] = {
            "kv_cache_tokens": KV_TOKENS,
            "max_num_seqs": 32,
            "prefix_caching": False,
            "device": "cpu",
        }
        settings = EngineConfig(model=str(model), cpu_threads=threads, **(fields | config))
        self.shape, self.needs = shape, Needs(shape, mix)
        self.failure: str | None = None
        self._next = 0
        self._started: set[str] = set()  # requests that have a token
        self._answer: list[int] = []  # tokens of all requests since it was emptied
        began = time.perf_counter()
        self.core: EngineCore = assemble(plan_engine(settings), self._take, lambda *_: None)
        self.load_s = time.perf_counter() - began
        gc.collect()
        gc.freeze()  # as the served process does before its first step

    @property
    def runner(self) -> ModelRunner:
        return model_runner(self.core)

    @property
    def pool(self) -> Any:
        return self.runner.pool

    def decode(self, rows: int, tokens: int, length: int, adapters: list[str | None] | None = None) -> float:
        """Mean seconds of a decode step of `rows` sequences, over `tokens` steps behind prompts of `length`."""
        self._begin(rows, length, adapters)
        began = time.perf_counter()
        for _ in range(tokens):
            self.core.step()
        seconds = time.perf_counter() - began
        self._end()
        return seconds / tokens

    def decode_and_read(self, rows: int, tokens: int, length: int) -> tuple[float, list[float]]:
        """The same, and for each quarter of a second of those steps the bytes that reading alone brings in the time of
        one, as it was before and behind them: neighbours on one memory change its rate by half within seconds."""
        self._begin(rows, length, None)
        total, done, brought, before = 0.0, 0, list[float](), self._read_rate()
        while done < tokens:
            began, first = time.perf_counter(), done
            while done < tokens and time.perf_counter() - began < BETWEEN_READS_S:
                self.core.step()
                done += 1
            seconds = time.perf_counter() - began
            after = self._read_rate()
            brought.append(seconds / (done - first) * (before + after) / 2)
            total, before = total + seconds, after
        self._end()
        return total / tokens, brought

    def _read_rate(self) -> float:
        return float(_native.read_bandwidth(self.pool, READ_BYTES, repeats=2))

    def settle(self) -> None:
        """Waits until packed weights that were mapped have been copied, which takes a part of a thread: in a server,
        some seconds after its start."""
        while SUFFIX in Path("/proc/self/maps").read_text():
            time.sleep(0.2)

    def decode_bytes(self, rows: int, tokens: int, length: int) -> float:
        """Mean bytes that those steps must read. Not timed: what is counted costs time."""
        runner = self.runner
        kv = sum(b.kv_bytes_per_token for b in runner.model.attention_backends)
        seen = _Seen(self.needs, kv)
        self.core.profiler, runner.tracing = seen, True
        try:
            self._begin(rows, length, None)
            for _ in range(tokens):
                self.core.step()
            self._end()
        finally:
            self.core.profiler, runner.tracing = None, False
        return statistics.mean(seen.step_bytes)

    def prefill(self, length: int) -> float:
        """Seconds from an idle engine to the first token of one prompt."""
        self._submit(prompt(self.shape, length, self._next), 1, None)
        began = time.perf_counter()
        self._drain()
        return time.perf_counter() - began

    def second_turn(self, length: int, answer: int, more: int) -> tuple[float, float]:
        """Seconds to the first token of a prompt of `length`, and of what follows behind `answer` tokens of an answer
        and `more` of a question. With the prefix cache."""
        said, times = prompt(self.shape, length, self._next), []
        for tokens, asked in ((answer, 0), (1, more)):
            self._answer, began = [], time.perf_counter()
            said = said + prompt(self.shape, asked, self._next)
            self._submit(said, tokens, None)
            while not self._answer and not self.failure:
                self.core.step()
            times.append(time.perf_counter() - began)
            self._drain()
            said = said + self._answer
        return times[0], times[1]

    def shares(self, rows: int, tokens: int, length: int) -> dict[str, float]:
        """Milliseconds of a decode step, and of it: in native calls, before and after the forward pass."""
        model: Any = self.runner.model
        clock = {"native": 0.0}
        places: list[tuple[Any, str]] = [(model.lm_head, "runner"), (model.ops, "kernel")]
        places.append((model.embedding, "packed"))
        executor = self.runner.executor
        if isinstance(executor, NativeExecutor):
            places.append((executor._decoder, "_kernel"))
        for layer in model.layers:
            if hasattr(layer.mlp, "task"):
                places.append((layer.mlp.task.handle, "task"))
        kept = [(owner, name, getattr(owner, name)) for owner, name in places if hasattr(owner, name)]
        for owner, name, target in kept:
            setattr(owner, name, Timed(target, clock))
        try:
            self._begin(rows, length, None)
            native, total = [], []
            for _ in range(tokens):
                clock["native"], began = 0.0, time.perf_counter()
                self.core.step()
                total.append(time.perf_counter() - began)
                native.append(clock["native"])
            self._end()
        finally:
            for owner, name, target in kept:
                setattr(owner, name, target)
        outside = [t - n for t, n in zip(total, native, strict=True)]
        step, rest = statistics.median(total), statistics.median(outside)
        return {"step_ms": step * 1e3, "outside_native_ms": rest * 1e3, "python_share": rest / step}

    def load(self, adapters: list[str]) -> None:
        """NAME=PATH each; known ones stay as they are."""
        known = {info.name for info in self.core.adapters.infos()}
        for name, _, path in (text.partition("=") for text in adapters):
            if name not in known:
                load_adapter(self.core, name, path)

    def hold(self, adapters: list[str], loaded: bool) -> None:
        """Put adapters into the slots 1 ..., or empty those, beside the scheduler: no request may be using them."""
        known, model = self.core.adapters, self.runner.model
        for slot, name in enumerate(adapters, 1):
            model.set_adapter(slot, known.weights(known.resolve(name)) if loaded else None)

    def close(self) -> None:
        self.core.close()
        del self.core

    def _begin(self, rows: int, length: int, adapters: list[str | None] | None) -> None:
        """Submit, and step until every row has a token (adapters may have to come into their slots)."""
        self._started.clear()
        tokens = min(ENDLESS, self.shape.context // 2)
        for row in range(rows):
            ids = prompt(self.shape, length, self._next)
            self._submit(ids, tokens, adapters[row % len(adapters)] if adapters else None)
        while len(self._started) < rows and not self.failure:
            if not self.core.step():
                time.sleep(0.001)
        self._check()
        self.core.step()  # the first step of all rows together warms up

    def _end(self) -> None:
        for request_id in list(self._started):
            self.core.handle(Abort(request_id=request_id))
        self._drain()

    def _submit(self, ids: list[int], tokens: int, adapter: str | None) -> None:
        self._next += 1
        sampling = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        self.core.handle(Submit(request_id=f"b{self._next}", prompt=ids, sampling=sampling, adapter=adapter))

    def _drain(self) -> None:
        while self.core.busy:
            self.core.step()
        self._check()

    def _check(self) -> None:
        if self.failure:
            raise RunError(self.failure)

    def _take(self, message: FromEngine) -> None:
        if isinstance(message, Tokens):
            self._started.add(message.request_id)
            self._answer += message.tokens
        elif isinstance(message, Failed | Refused):
            self.failure = str(message)
