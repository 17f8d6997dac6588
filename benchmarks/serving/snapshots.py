"""Prompt tokens that are computed again where layers keep states, by the scheduler alone: shares of the cache for
snapshots beside attention alone.

    python -m benchmarks.serving.snapshots rag [--kv-cache-tokens 131072] [--shares 1 0.75 0.5 0.25] [--seeds 3]

As `benchmarks.serving.states` plays conversations, without models: answers are numbers. A snapshot takes the memory of
`--snapshot-blocks` blocks. Counts, no times; the engine's differ by a few documents of `rag`, whose requests end in
other steps.
"""

from __future__ import annotations

import argparse
import sys
import zlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from loadtests.simulate.traces import TRACES, Conversation, Trace
from scheduler.config import SchedulerConfig
from scheduler.plan import EventKind, StepRow
from scheduler.request import Request, SamplingParams
from scheduler.scheduler import Scheduler

BLOCK = 16
STEP_S = 0.01


@dataclass
class Talk:
    """A conversation that is played: what has been said, and how many turns of it were asked."""

    conversation: Conversation
    context: list[int]
    turn: int = 0


def play(trace: Trace, at_once: int, tokens: int, snapshot_blocks: int, share: float) -> int:
    """Prompt tokens computed, with `at_once` conversations at a time. `snapshot_blocks` 0: of attention alone."""
    snapshots = int(tokens // BLOCK * share) // snapshot_blocks if snapshot_blocks else 0
    config = SchedulerConfig(
        num_blocks=tokens // BLOCK, max_num_seqs=at_once, max_num_batched_tokens=512, max_model_len=tokens,
        max_queue=4096, num_adapter_slots=0, eos_token_ids=(), num_states=at_once if snapshot_blocks else 0,
        num_snapshots=snapshots, snapshot_blocks=snapshot_blocks,
    )  # fmt: skip
    scheduler, now, computed, asked = Scheduler(config), 0.0, 0, 0
    waiting = deque(Talk(each, []) for each in sorted(trace, key=lambda each: each.start_s))
    talking: dict[str, Talk] = {}

    def ask(talk: Talk) -> None:
        nonlocal asked
        if talk.turn == len(talk.conversation.turns):
            return
        turn = talk.conversation.turns[talk.turn]
        before = len(talk.context)
        talk.context, talk.turn, asked = [*talk.context, *turn.prompt], talk.turn + 1, asked + 1
        request = Request(
            f"r{asked}",
            talk.context,
            SamplingParams(max_tokens=turn.output, ignore_eos=True, temperature=0.0),
            tenant=talk.conversation.tenant,
            system_tokens=talk.conversation.system_tokens,
            part_ends=turn.ends_behind(before),
        )
        scheduler.add(request, now, 1.0)
        talking[request.request_id] = talk

    while waiting or talking:
        while waiting and len(talking) < at_once:
            ask(waiting.popleft())
        plan = scheduler.schedule(now)
        now += STEP_S
        if plan is None:
            raise RuntimeError("nothing can run: the cache holds no request")
        for event in scheduler.commit(plan, [_answer(row) if row.samples else [] for row in plan.rows], now):
            if event.kind is EventKind.FINISHED:
                talk = talking.pop(event.request.request_id)
                computed += len(talk.context) - event.request.num_cached
                talk.context = [*talk.context, *event.request.output]
                ask(talk)
    return computed


def _answer(row: StepRow) -> list[int]:
    return [zlib.crc32(f"{row.request.request_id} {row.start}".encode()) % 30000]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", choices=TRACES)
    parser.add_argument("--kv-cache-tokens", type=int, nargs="+", default=[131072])
    parser.add_argument("--shares", type=float, nargs="+", default=[1.0, 0.15])
    parser.add_argument("--snapshot-blocks", type=int, default=201)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=40.0, help="of arrivals (default: 40)")
    parser.add_argument("--rate", type=float, default=1.0, help="conversations a second (default: 1)")
    parser.add_argument("--at-once", type=int, default=8, help="conversations at a time (default: 8)")
    args = parser.parse_args(argv)
    traces = [TRACES[args.trace](seed, args.seconds, args.rate) for seed in range(args.seeds)]
    print("| positions | share | computed | attention alone | more |\n|---|---|---|---|---|")
    for tokens in args.kv_cache_tokens:
        alone = sum(play(trace, args.at_once, tokens, 0, 0.0) for trace in traces)
        for share in args.shares:
            found = sum(play(trace, args.at_once, tokens, args.snapshot_blocks, share) for trace in traces)
            print(f"| {tokens:,} | {share:g} | {found:,} | {alone:,} | {found / alone - 1:+.1%} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
