"""Prompt tokens that are computed again where layers keep states, beside a model of keys and values alone.

python -m benchmarks.serving.states [MODEL TWIN] [--trace chat] [--seconds 60] [--rate 0.5] [--kv-cache-tokens 16384]
                                    [--llama BINARIES]
Both engines play the same conversations, `--at-once` of them at a time, each turn behind the model's answer to the one
before; counts, no times. MODEL keeps states, TWIN does not; by default they are tiny ones, made here as GGUF, of which
a snapshot takes 200 blocks (201 of Qwen3.5-35B-A3B). The caches have as many positions. With --llama llama-server
plays them on both, too: `--at-once` slots over one cache of as many positions, and beside it what it has by default,
8 GiB for prompts and 32 checkpoints of states a slot.
"""

from __future__ import annotations

import argparse
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.peers.llamacpp import Peer, completed
from benchmarks.record import write
from benchmarks.serving.snapshots import Talk
from engine.messages import Finished
from loadtests.simulate.traces import TRACES, Trace, Turn
from testing.harness import Harness
from testing.models.gguf_writer import save_gguf, tokenizer_metadata
from testing.models.tiny import tiny_model

LONGEST = 16384  # positions of the models made here


@dataclass(frozen=True)
class Counts:
    """`snapshots`: the largest share of the cache's memory that they had when a turn ended, None of llama.cpp."""

    turns: int = 0
    prompt_tokens: int = 0
    computed_tokens: int = 0
    snapshots: float | None = 0.0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serving.states", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("twin", type=Path, nargs="?")
    parser.add_argument("--trace", choices=TRACES, default="chat")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=60.0, help="of arrivals (default: 60)")
    parser.add_argument("--rate", type=float, default=0.5, help="conversations a second (default: 0.5)")
    parser.add_argument("--at-once", type=int, default=4, help="conversations at a time (default: 4)")
    parser.add_argument("--kv-cache-tokens", type=int, default=16384)
    parser.add_argument("--snapshot-share", type=float, help="of the cache, that they may take (default: the engine's)")
    parser.add_argument("--rules", help="'reference' computes in torch")
    parser.add_argument("--llama", type=Path, help="folder of llama-server")
    parser.add_argument("--out", type=Path, help="write the counts there, as JSON")
    args = parser.parse_args(argv)
    if (args.model is None) != (args.twin is None):
        parser.error("give MODEL and TWIN, or neither")
    with TemporaryDirectory() as folder:
        models = (args.model, args.twin) if args.model else make(Path(folder))
        found = _found(args, parser, *models)
    ours, twin = found["states"], found["attention"]
    print("| layers | turns | prompt tokens | computed | of the prompts | snapshots of the cache, at most |")
    print("|---|---|---|---|---|---|")
    for name, each in found.items():
        share = each.computed_tokens / each.prompt_tokens
        print(
            f"| {name} | {each.turns} | {each.prompt_tokens} | {each.computed_tokens} | {share:.1%} "
            f"| {f'{each.snapshots:.1%}' if each.snapshots is not None else ''} |"
        )
    print(f"computed with states: {ours.computed_tokens / twin.computed_tokens - 1:+.1%}")
    if args.out is not None:
        write(args.out, {name: vars(each) for name, each in found.items()})
    return 0


def _found(args: argparse.Namespace, parser: argparse.ArgumentParser, model: Path, twin: Path) -> dict[str, Counts]:
    trace, found = TRACES[args.trace](args.seed, args.seconds, args.rate), {}
    for name, path in (("states", model), ("attention", twin)):
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
        longest, vocabulary = _limits(engine)
        engine.close()
        if args.llama is not None:
            with Peer(args.llama).cache_server(path, args.at_once, args.kv_cache_tokens) as url:
                found[f"{name}, llama.cpp"] = play_peer(url, trace, args.at_once, longest, vocabulary)
    return found


def make(folder: Path) -> tuple[Path, Path]:
    """Of four layers each: one of attention behind three delta nets, whose states of a sequence take as many bytes as
    keys and values of 200 blocks, and attention alone."""
    common: dict[str, Any] = {
        "num_hidden_layers": 4,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": LONGEST,
    }
    common |= {"vocab_size": 320, "eos_token_id": 319}
    kinds = ["linear_attention"] * 3 + ["full_attention"]
    net: dict[str, Any] = {"linear_num_key_heads": 14, "linear_num_value_heads": 28, "linear_key_head_dim": 32}
    net |= {"linear_value_head_dim": 32, "layer_types": kinds}
    made = []
    for family, own in (("qwen3_next", net), ("qwen3_moe", {})):
        made.append(folder / f"{family}.gguf")
        model = tiny_model(0, family=family, **common, **own)
        save_gguf(model, made[-1], "F32", metadata=tokenizer_metadata(320))
    return made[0], made[1]


def play(engine: Harness, trace: Trace, at_once: int) -> Counts:
    """All conversations in the order of their arrival. One ends before the turn that the engine could not hold."""
    memory, counts = engine.plan.memory, Counts()
    longest, vocabulary = _limits(engine)
    waiting, talking = _arrived(trace), dict[str, Talk]()

    def ask(talk: Talk) -> None:
        if (turn := _next(talk, longest, vocabulary)) is None:
            return
        asked, prompt = talk.conversation, talk.context
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
                snapshots=max(counts.snapshots or 0.0, held * 16 / memory.kv_tokens),
            )
            talk.context += result.tokens
            ask(talk)
    return counts


def play_peer(url: str, trace: Trace, at_once: int, longest: int, vocabulary: int) -> Counts:
    """As `play`, by the llama-server at `url`."""
    waiting = _arrived(trace)

    def talk_on(_: int) -> Iterator[tuple[int, int]]:
        """(tokens of the prompt, computed ones) of each turn."""
        while waiting:
            try:
                talk = waiting.popleft()
            except IndexError:  # another took the last one
                return
            while (turn := _next(talk, longest, vocabulary)) is not None:
                answer = completed(url, talk.context, turn.output)
                yield len(talk.context), answer.computed
                talk.context += answer.tokens

    with ThreadPoolExecutor(at_once) as pool:
        turns = [turn for each in pool.map(lambda place: list(talk_on(place)), range(at_once)) for turn in each]
    return Counts(len(turns), sum(prompt for prompt, _ in turns), sum(computed for _, computed in turns), None)


def _limits(engine: Harness) -> tuple[int, int]:
    """Positions that one conversation can have, and tokens that there are."""
    return min(engine.plan.max_model_len, engine.plan.memory.kv_tokens), engine.plan.source.config.vocab_size


def _arrived(trace: Trace) -> deque[Talk]:
    return deque(Talk(each, []) for each in sorted(trace, key=lambda each: each.start_s))


def _next(talk: Talk, longest: int, vocabulary: int) -> Turn | None:
    """Its next turn, whose prompt is put behind what was said; None: it is over, or does not fit."""
    turns = talk.conversation.turns
    if talk.turn == len(turns):
        return None
    turn = turns[talk.turn]
    prompt = [*talk.context, *(2 + token % (vocabulary - 2) for token in turn.prompt)]
    if len(prompt) + turn.output > longest:
        return None
    talk.context, talk.turn = prompt, talk.turn + 1
    return turn


if __name__ == "__main__":
    sys.exit(main())
