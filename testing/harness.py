"""A whole engine in this process, without sockets: submit, run, look."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.launch.assemble import assemble
from engine.launch.process import THREADS_S
from engine.lora.version import AdapterStatus
from engine.messages import Cancelled, Failed, Finished, FromEngine, Refused, Reply, Submit, TokenLogprobs, Tokens
from engine.planning.plan import plan_engine
from engine.steps.runner import ModelRunner
from scheduler.request import SamplingParams
from testing.shared_reader import SharedReader

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LOAD_CALL = -1


def load_adapter(core: EngineCore, name: str, path: str | Path, expert_scaling: str | None = None) -> None:
    """Returns when it can be used. Raises UserError."""
    core.adapters.load(LOAD_CALL, name, str(path), expert_scaling=expert_scaling)
    while core.adapters.status(name) is AdapterStatus.LOADING:
        core.adapters.wait()
        core.step()
    core.adapters.resolve(name)


def model_runner(core: EngineCore) -> ModelRunner:
    """Of an engine with a model; TypeError without one."""
    if not isinstance(core.runner, ModelRunner):
        raise TypeError(f"an engine with a model is needed, this one runs its steps by {type(core.runner).__name__}")
    return core.runner


@dataclass
class Result:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    end: FromEngine | None = None


class Harness:
    """`config` are EngineConfig's fields. Every step checks the integrity of blocks and slots. `mapped`: as of
    `assemble`."""

    def __init__(self, model: Path, mapped: Any = None, **config: Any) -> None:
        defaults: dict[str, Any] = {
            "dtype": "float32",
            "kv_cache_tokens": 2048,
            "rules": "reference",
            "cpu_threads": 1,
            "device": "cpu",
        }
        settings = EngineConfig(model=str(model), check_integrity=True, **(defaults | config))
        self.plan = plan_engine(settings)
        self.progress: list[tuple[str, int, int]] = []
        self.core: EngineCore = assemble(
            self.plan, self._take, lambda *seen: self.progress.append(seen), SharedReader(), mapped
        )
        self.results: dict[str, Result] = {}
        self.prompts: dict[str, list[int]] = {}
        self._ids = 0
        self.messages: list[FromEngine] = []

    @property
    def runner(self) -> ModelRunner:
        return model_runner(self.core)

    def adapter(self, name: str, path: Path, expert_scaling: str | None = None) -> None:
        load_adapter(self.core, name, path, expert_scaling)

    def submit(self, prompt: list[int], adapter: str | None = None, **sampling: Any) -> str:
        options = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True, **sampling}
        fields = ("tenant", "priority", "timeout_s", "system_tokens", "part_ends")
        extra = {k: options.pop(k) for k in fields if k in options}
        rid = f"r{self._ids}"
        self._ids += 1
        self.results[rid] = Result()
        self.prompts[rid] = prompt
        self.core.handle(
            Submit(request_id=rid, prompt=prompt, sampling=SamplingParams(**options), adapter=adapter, **extra)
        )
        return rid

    def until(self, done: Callable[[], object]) -> None:
        """Step until `done`, as the engine process does: while only threads have work, they get the interpreter."""
        while not done():
            if not self.core.step() and not done():
                assert self.core.waiting_for_threads, "nothing is left to do, and what is waited for has not happened"
                time.sleep(THREADS_S)

    def run(self) -> dict[str, Result]:
        """Step until every request has ended."""
        self.until(lambda: all(r.end for r in self.results.values()) and not self.core.busy)
        return self.results

    def generate(
        self, prompts: list[list[int]], adapters: list[str | None] | None = None, **sampling: Any
    ) -> list[list[int]]:
        """All at once; greedy tokens of each."""
        rids = [self.submit(p, a, **sampling) for p, a in zip(prompts, adapters or [None] * len(prompts), strict=True)]
        self.run()
        for rid in rids:
            assert isinstance(self.results[rid].end, Finished), self.results[rid].end
        return [self.results[rid].tokens for rid in rids]

    def close(self) -> None:
        self.core.close()

    def _take(self, message: FromEngine) -> None:
        if not isinstance(message, Reply) or message.call_id != LOAD_CALL:
            self.messages.append(message)
        if isinstance(message, Tokens):
            result = self.results[message.request_id]
            assert result.end is None, "a token after the end"
            result.tokens += message.tokens
            result.logprobs += message.logprobs or []
            result.prompt_logprobs = message.prompt_logprobs or result.prompt_logprobs
        elif isinstance(message, Finished | Refused | Cancelled | Failed):
            result = self.results[message.request_id]
            assert result.end is None, "two ends"
            result.end = message


@torch.inference_mode()
def greedy(model: PreTrainedModel, prompt: list[int], n: int, likely: Sequence[int] = ()) -> tuple[list[int], float]:
    """transformers' greedy continuation, and the smallest gap between the best two logits on the way.

    `likely`: what it may be, as the tokens of an engine: as far as it is, one call of the model gives all of it.
    """
    ids, gap = list(prompt), float("inf")
    end = len(prompt) + n
    while len(ids) < end:
        ahead = list(likely[len(ids) - len(prompt) : n - 1])
        logits = model(torch.tensor([ids + ahead])).logits[0, len(ids) - 1 :].float()
        best = logits.topk(2)
        for (first, second), (token, _), guess in zip(
            best.values.tolist(), best.indices.tolist(), [*ahead, None], strict=True
        ):
            gap = min(gap, first - second)
            ids.append(token)
            if token != guess:
                likely = ()
                break
    return ids[len(prompt) :], gap


@torch.inference_mode()
def full_logits(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    """float32 [len, V]."""
    logits: torch.Tensor = model(torch.tensor([tokens])).logits[0]
    return logits.float()
