"""Decode with draft tokens looked up in texts, as many as pay (`--speculate ngram:8`), all there are, and none.

    python -m benchmarks.cpu.speculate [--model FILE] [--streams 1,8] [--turns 3] [--serve="--device cpu"]

Two kinds of prompts: "repetitive", lines that differ in little, which the model goes on with, and "other", a task in
words. Engines are built as `ktserve serve` builds them and serve all turns, in one order and the other; greedy, prompts
uncached. The same prompts come again in each turn, so `suffix:K` finds the answers of the turns before. Printed are
medians: tokens a second while decoding, the share of drafts that was accepted, tokens a step and row.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from api.text.tokenizer import load_tokenizer
from benchmarks.settings import served_config
from demo.paths import demo_model
from engine.core import EngineCore
from engine.launch.assemble import assemble
from engine.messages import Failed, FromEngine, Refused, Submit, Tokens
from engine.planning.plan import plan_engine
from scheduler.request import SamplingParams

_TEXTS = {
    "repetitive": "".join(f"The fox has {n} red apples and the kite has {n + 1} red apples.\n" for n in range(2, 10)),
    "other": "Tell me a story about a fox who lost a kite in the woods and found something else. ",
}


class Engine:
    def __init__(self, model: Path, speculate: str | None, streams: int, flags: Sequence[str]) -> None:
        config = served_config(model, flags)
        config = replace(config, speculate=speculate, max_num_seqs=streams, prefix_caching=False)
        self.core: EngineCore = assemble(plan_engine(config), self._take, lambda *_: None)
        self._seen: dict[str, int] = {}  # tokens by request
        self._next = 0

    def decode(self, prompt: list[int], streams: int, tokens: int) -> tuple[float, float, float]:
        """(tokens a second from the moment that every stream has one, accepted / drafted, tokens a step and row)"""
        first = self._next
        self._seen = {}
        for _ in range(streams):
            # a number in front, so that streams differ
            ids = [*prompt[: self._next % 7], *prompt]
            sampling = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
            self.core.handle(Submit(request_id=str(self._next), prompt=ids, sampling=sampling))
            self._next += 1
        while len(self._seen) < streams:
            self.core.step()
        before, stats, began = sum(self._seen.values()), self.core.stats(), time.perf_counter()
        while self.core.busy:
            self.core.step()
        seconds = time.perf_counter() - began
        after = self.core.stats()
        made = sum(self._seen.values()) - before
        if sum(self._seen.values()) != tokens * (self._next - first):
            raise RuntimeError(f"{sum(self._seen.values())} tokens came of {streams} streams of {tokens}")
        drafted, accepted, steps = (after[k] - stats[k] for k in ("drafted_tokens", "accepted_tokens", "steps"))
        return made / seconds, accepted / drafted if drafted else 0.0, made / (steps * streams)

    def _take(self, message: FromEngine) -> None:
        if isinstance(message, Tokens):
            self._seen[message.request_id] = self._seen.get(message.request_id, 0) + len(message.tokens)
        elif isinstance(message, Refused | Failed):
            raise RuntimeError(message.message)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder or .gguf with a tokenizer; default: the demo model")
    parser.add_argument("--streams", default="1,8")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--settings", default="none,ngram:8,suffix:8,ngram:4:always", help="values of --speculate")
    parser.add_argument("--serve", type=shlex.split, default=[], help="flags of `ktserve serve`, in one argument")
    args = parser.parse_args()
    model = args.model or demo_model()
    tokenizer = load_tokenizer(model)
    print(f"{'text':<12}{'streams':>8} {'speculate':<16}{'tok/s':>10}{'accepted':>10}{'tokens/step':>13}")
    for streams in map(int, args.streams.split(",")):
        runs: dict[tuple[str, str], list[tuple[float, float, float]]] = {}
        names = args.settings.split(",")
        engines = {name: Engine(model, None if name == "none" else name, streams, args.serve) for name in names}
        for turn in range(args.turns):
            for speculate in names if turn % 2 else reversed(names):
                engine = engines[speculate]
                for name, text in _TEXTS.items():
                    prompt = tokenizer.encode(text, add_special_tokens=False)
                    engine.decode(prompt, streams, min(16, args.tokens))  # caches and threads are warm
                    runs.setdefault((name, speculate), []).append(engine.decode(prompt, streams, args.tokens))
        for engine in engines.values():
            engine.core.close()
        for (name, speculate), seen in sorted(runs.items(), reverse=True, key=lambda item: item[0]):
            speed, accepted, made = (statistics.median(values) for values in zip(*seen, strict=True))
            print(f"{name:<12}{streams:>8} {speculate:<16}{speed:>10.1f}{accepted:>10.2f}{made:>13.2f}")


if __name__ == "__main__":
    main()
