"""Prompt tokens that are computed again where layers keep states, beside a model of keys and values alone.

python -m benchmarks.serving.states MODEL TWIN [--trace chat] [--seconds 60] [--rate 0.5] [--kv-cache-tokens 16384]
Both engines play the same conversations, `--at-once` of them at a time, each turn behind the model's answer to the one
before; counts, no times. MODEL keeps states, TWIN does not; the caches have as many positions.
"""

from __future__ import annotations

import argparse
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.record import write
from benchmarks.serving.snapshots import Talk
from engine.messages import Finished
from loadtests.simulate.traces import TRACES, Trace
from testing.harness import Harness


@dataclass(frozen=True)
class Counts:
    """`snapshots`: the largest share of the cache's memory that they had when a turn ended."""

    turns: int = 0
    prompt_tokens: int = 0
    computed_tokens: int = 0
    snapshots: float = 0.0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serving.states", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("twin", type=Path)
    parser.add_argument("--trace", choices=TRACES, default="chat")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=60.0, help="of arrivals (default: 60)")
    parser.add_argument("--rate", type=float, default=0.5, help="conversations a second (default: 0.5)")
    parser.add_argument("--at-once", type=int, default=4, help="conversations at a time (default: 4)")
    parser.add_argument("--kv-cache-tokens", type=int, default=16384)
    parser.add_argument("--snapshot-share", type=float, help="of the cache, that they may take (default: the engine's)")
    parser.add_argument("--rules", help="'reference' computes in torch")
    parser.add_argument("--out", type=Path, help="write the counts there, as JSON")
    args = parser.parse_args(argv)
    trace = TRACES[args.trace](args.seed, args.seconds, args.rate)
    found = {}
    for name, path in (("states", args.model), ("attention", args.twin)):
        engine = Harness(
            path,
            snapshot_share=args.snapshot_share if name == "states" else None,
            kv_cache_tokens=args.kv_cache_tokens,
            max_num_seqs=args.at_once,
            rules=args.rules,
            pack_cache="off",
        )
        if (engine.plan.source.config.state_bytes > 0) != (name == "states"):
            parser.error(f"{path}: MODEL has layers that keep states, TWIN has none")
        found[name] = play(engine, trace, args.at_once)
        engine.close()
    ours, twin = found["states"], found["attention"]
    print("| layers | turns | prompt tokens | computed | of the prompts | snapshots of the cache, at most |")
    print("|---|---|---|---|---|---|")
    for name, each in found.items():
        share = each.computed_tokens / each.prompt_tokens
        print(
            f"| {name} | {each.turns} | {each.prompt_tokens} | {each.computed_tokens} | {share:.1%} "
            f"| {each.snapshots:.1%} |"
        )
    print(f"computed with states: {ours.computed_tokens / twin.computed_tokens - 1:+.1%}")
    if args.out is not None:
        write(args.out, {name: vars(each) for name, each in found.items()})
    return 0


def play(engine: Harness, trace: Trace, at_once: int) -> Counts:
    """All conversations in the order of their arrival. One ends before the turn that the engine could not hold."""
    memory, counts = engine.plan.memory, Counts()
    vocabulary = engine.plan.source.config.vocab_size
    longest = min(engine.plan.max_model_len, memory.kv_tokens)
    waiting = deque(Talk(each, []) for each in sorted(trace, key=lambda each: each.start_s))
    talking: dict[str, Talk] = {}

    def ask(talk: Talk) -> None:
        turns = talk.conversation.turns
        if talk.turn == len(turns):
            return
        turn = turns[talk.turn]
        prompt = [*talk.context, *(2 + token % (vocabulary - 2) for token in turn.prompt)]
        if len(prompt) + turn.output > longest:
            return
        talk.context, talk.turn = prompt, talk.turn + 1
        asked = talk.conversation
        request = engine.submit(
            prompt,
            max_tokens=turn.output,
            tenant=asked.tenant,
            system_tokens=asked.system_tokens,
            part_ends=turn.ends_behind(len(prompt) - len(turn.prompt)),
        )
        talking[request] = talk

    while waiting or talking:
        while waiting and len(talking) < at_once:
            ask(waiting.popleft())
        engine.until(lambda: any(engine.results[request].end for request in talking) or not talking)
        for request in [request for request in talking if engine.results[request].end]:
            talk, result = talking.pop(request), engine.results.pop(request)
            if not isinstance(result.end, Finished):
                raise RuntimeError(f"a turn did not finish: {result.end}")
            cached = result.end.cached_tokens
            held = engine.core.stats().get("snapshots_findable", 0) * memory.snapshot_blocks
            counts = replace(
                counts,
                turns=counts.turns + 1,
                prompt_tokens=counts.prompt_tokens + len(talk.context),
                computed_tokens=counts.computed_tokens + len(talk.context) - cached,
                snapshots=max(counts.snapshots, held * 16 / memory.kv_tokens),
            )
            talk.context += result.tokens
            ask(talk)
    return counts


if __name__ == "__main__":
    sys.exit(main())
