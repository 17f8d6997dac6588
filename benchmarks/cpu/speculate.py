"""Decode with draft tokens looked up in texts, as many as pay (`--speculate ngram:8`), and none.

    python -m benchmarks.cpu.speculate [--model FILE] [--streams 1,4,16,32] [--turns 3] [--serve="--device cpu"]

Four kinds of texts (`benchmarks.cpu.texts`): edits of code, calls of tools, quotes and prose. The answers are given: in
place of the tokens that a random model samples, the host is told those of the answer, as soon as they are computed, so
that drafts are as often right as with a model that answers so. Engines are built as `ktserve serve` builds them and
serve all turns, each of them first in turn; greedy, prompts uncached, another text for each request. Printed are
medians: tokens a second while decoding, and over those without drafts in the same turn; the share of drafts that was
accepted, tokens a step and row. `none` among the settings is a second engine without drafts, listed as `again`: what
equal engines differ by.
"""

from __future__ import annotations

import argparse
import gc
import shlex
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import record
from benchmarks.cpu.texts import KINDS, Exchange, exchanges
from benchmarks.settings import served_config
from demo.paths import demo_model
from engine.core import EngineCore
from engine.launch.assemble import assemble
from engine.messages import Failed, FromEngine, Refused, Submit, Tokens
from engine.planning.plan import plan_engine
from engine.steps.lane import PromptLane
from engine.steps.runner import InFlight
from scheduler.request import SamplingParams


class Measured(NamedTuple):
    """While every stream was decoding."""

    speed: float  # tokens a second
    accepted: float  # of the drafts
    made: float  # tokens a step and row


class Engine:
    def __init__(self, model: Path, speculate: str | None, streams: int, flags: Sequence[str]) -> None:
        config = served_config(model, flags)
        config = replace(config, speculate=speculate, max_num_seqs=streams, prefix_caching=False)
        self.core: EngineCore = assemble(plan_engine(config), self._take, lambda *_: None)
        self._due: dict[str, list[int]] = {}  # the answer, by request
        self._seen: dict[str, list[int]] = {}  # tokens by request
        self._next = 0
        lane = self.core.prompts
        for runner in (self.core.runner, *([lane.runner] if isinstance(lane, PromptLane) else [])):
            runner.tokens = partial(self._given, runner.tokens)  # type: ignore[method-assign]

    @property
    def vocabulary(self) -> int:
        return self.core.runner.model.config.vocab_size

    def decode(self, asked: Sequence[Exchange]) -> Measured:
        self._seen, self._due = {}, {}
        for exchange in asked:
            sampling = SamplingParams(max_tokens=len(exchange.answer), temperature=0.0, ignore_eos=True)
            name = str(self._next)
            self._due[name] = exchange.answer
            self.core.handle(Submit(request_id=name, prompt=exchange.prompt, sampling=sampling))
            self._next += 1
        while len(self._seen) < len(asked):
            self.core.step()
        before, stats, began = sum(map(len, self._seen.values())), self.core.stats(), time.perf_counter()
        while self.core.busy:
            self.core.step()
        seconds = time.perf_counter() - began
        after = self.core.stats()
        if self._seen != self._due:
            raise RuntimeError("other tokens came than those of the answers")
        drafted, accepted, steps = (after[k] - stats[k] for k in ("drafted_tokens", "accepted_tokens", "steps"))
        made = sum(map(len, self._seen.values())) - before
        return Measured(made / seconds, accepted / drafted if drafted else 0.0, made / (steps * len(asked)))

    def _given(self, tokens: Callable[[InFlight], list[list[int]]], step: InFlight) -> list[list[int]]:
        """Those of the answers, once the step has been computed."""
        if step.arrival is not None:
            step.arrival.wait()
        sampled = None if step.tokens is None else step.tokens.numpy()
        for i, (row, drafts) in enumerate(step.samples):
            answer = self._due[row.request.request_id]
            place = row.start + row.num_tokens - len(row.drafts) + drafts - len(row.request.prompt)
            if sampled is not None and place < len(answer):
                sampled[i] = answer[place]
        return tokens(step)

    def _take(self, message: FromEngine) -> None:
        if isinstance(message, Tokens):
            self._seen.setdefault(message.request_id, []).extend(message.tokens)
        elif isinstance(message, Refused | Failed):
            raise RuntimeError(message.message)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder or .gguf; default: the demo model")
    parser.add_argument("--streams", default="1,4,16,32")
    parser.add_argument("--tokens", type=int, default=128, help="of an answer")
    parser.add_argument("--prompt", type=int, default=384, help="tokens at most")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--texts", nargs="*", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--settings", default="ngram:8,suffix:8", help="of --speculate, beside none; none: again")
    parser.add_argument("--serve", type=shlex.split, default=[], help="flags of `ktserve serve`, in one argument")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    model = args.model or demo_model()
    names = ["none", *("again" if name == "none" else name for name in args.settings.split(","))]
    results: list[dict[str, Any]] = []
    print(f"{'text':<8}{'streams':>8} {'speculate':<16}{'tok/s':>10}{'ratio':>8}{'accepted':>10}{'tokens/step':>13}")
    for streams in map(int, args.streams.split(",")):
        drafts = {name: None if name in ("none", "again") else name for name in names}
        engines = {name: Engine(model, drafts[name], streams, args.serve) for name in names}
        vocabulary = next(iter(engines.values())).vocabulary
        texts = {kind: exchanges(kind, vocabulary, args.prompt, args.tokens) for kind in args.texts}
        some = list(islice(texts[args.texts[0]], streams))
        for engine in engines.values():  # caches and threads are warm
            engine.decode([Exchange(one.prompt, one.answer[:16]) for one in some])
        runs: dict[tuple[str, str], list[Measured]] = {}
        for turn in range(args.turns):
            for kind, source in texts.items():
                asked = list(islice(source, streams))
                for speculate in names[turn % len(names) :] + names[: turn % len(names)]:
                    runs.setdefault((kind, speculate), []).append(engines[speculate].decode(asked))
        for engine in engines.values():
            engine.core.close()
        engines.clear()
        gc.collect()  # the next ones hold as much memory
        for (kind, speculate), seen in runs.items():
            pairs = zip(seen, runs[kind, "none"], strict=True)
            ratio = statistics.median(one.speed / plain.speed for one, plain in pairs)
            speed, accepted, made = (statistics.median(values) for values in zip(*seen, strict=True))
            print(f"{kind:<8}{streams:>8} {speculate:<16}{speed:>10.1f}{ratio:>8.2f}{accepted:>10.2f}{made:>13.2f}")
            found = {"tok_s": speed, "ratio": ratio, "accepted": accepted, "tokens_a_step": made}
            results.append({"text": kind, "streams": streams, "speculate": speculate, **found})
    if args.out:
        about = {"model": model.name, "flags": args.serve, "turns": args.turns, "tokens": args.tokens}
        record.write(args.out, {"about": about, "results": results})


if __name__ == "__main__":
    main()
