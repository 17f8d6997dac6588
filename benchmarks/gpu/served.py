"""What a server does on a GPU: the engine as `ktserve serve` builds it, and the same behind HTTP.

    python -m benchmarks.gpu.served --layers 12 [--rows 1 8 32 128] [--prompt 30000] [--out FILE]
                                    [--serve="--expert-backend gpu"]

A random model is written to --model (or a temporary folder). Then, with the same flags:

http      a server as a child: so many streams at once, tokens a second while all of them are running
engine    its engine in this process, no sockets: tokens a second of its own loop, scheduling and messages included
host      of a step, what is not waiting for the GPU: the time that must hide behind it
ttft      a prompt of --prompt tokens alone (and a step of decode behind it), and into eight running streams: their
          longest gap, and the median one; the model has as many positions as it takes
"""

from __future__ import annotations

import argparse
import gc
import json
import shlex
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch

from benchmarks import record
from benchmarks.client import Burst, burst, our_request, our_server
from benchmarks.models.configs import QWEN3_30B_A3B
from benchmarks.models.folder import write_folder
from benchmarks.settings import served_config
from engine.config import EngineConfig
from engine.device import Arrival
from engine.launch.assemble import build
from engine.launch.process import THREADS_S
from engine.messages import Abort, Failed, FromEngine, MessageBatch, Refused, Submit, Tokens, encode
from scheduler.request import SamplingParams

CONTEXT = 512  # tokens of a stream's prompt
STREAMS = 8  # that run when the long prompt comes
OUTPUT = 128  # tokens of a stream through HTTP
BEHIND = 32  # tokens behind a long prompt


class Served:
    """The engine of a server, and what it sends. `context`: tokens of a stream's prompt."""

    def __init__(self, config: EngineConfig, context: int = CONTEXT) -> None:
        self.context = context
        self.times: dict[str, list[float]] = {}  # by request: when each of its messages of tokens came
        self.tokens = 0
        self._said: list[FromEngine] = []  # since the last step
        self._steps: list[tuple[float, list[FromEngine]]] = []  # since `read`: when each ended, what it said
        began = time.perf_counter()
        self.core, ready = build(config, lambda message: self._said.append(message), lambda *_: None)
        self.loaded_s = time.perf_counter() - began
        self.lines = ready.lines
        self.vocabulary = ready.vocab_size
        self._count = 0

    def step(self) -> None:
        """As the engine's process does it: what a step says is one frame, and threads get the interpreter."""
        if not self.core.step():
            time.sleep(THREADS_S)
        said, self._said = self._said, []
        encode(MessageBatch(messages=said))
        self._steps.append((time.perf_counter(), said))

    def read(self) -> None:
        """What the steps have said."""
        for at, said in self._steps:
            for message in said:
                if isinstance(message, Tokens):
                    self.times[message.request_id].append(at)
                    self.tokens += len(message.tokens)
                elif isinstance(message, Refused | Failed):
                    raise RuntimeError(f"{message.request_id}: {message.message}")
        self._steps.clear()

    def prompt(self, tokens: int) -> list[int]:
        """Different from any before, so that no prefix of it is cached."""
        self._count += 1
        return [(7919 * (i + 104729 * self._count) + 13) % self.vocabulary for i in range(tokens)]

    def submit(self, tokens: int, output: int) -> str:
        prompt = self.prompt(tokens)
        name = f"r{self._count}"
        self.times[name] = []
        sampling = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True)
        self.core.handle(Submit(request_id=name, prompt=prompt, sampling=sampling))
        return name

    def until(self, names: Sequence[str], tokens: int) -> None:
        """Step until each of them has brought so many."""
        while any(len(self.times[name]) < tokens for name in names):
            self.step()
            self.read()

    @contextmanager
    def running(self, streams: int) -> Iterator[list[str]]:
        """So many streams in decode."""
        names = [self.submit(self.context, 4096) for _ in range(streams)]
        self.until(names, 4)
        yield names
        for name in names:
            self.core.handle(Abort(request_id=name))
        while self.core.busy:
            self.step()
        self.read()

    def decode(self, rows: int, seconds: float = 0.0, steps: int = 16) -> dict[str, float]:
        """So many steps of so many streams, and more until so many seconds have passed."""
        with self.running(rows), _waits() as waited:
            done, tokens, began = 0, self.tokens, time.perf_counter()
            waited.clear()
            while (took := time.perf_counter() - began) < seconds or done < steps:
                self.step()
                done += 1
            self.read()
            return {
                "engine_ms": took / done * 1e3,
                "engine_tok_s": (self.tokens - tokens) / took,
                "host_ms": (took - sum(waited)) / done * 1e3,
            }

    def expert_choices(self) -> tuple[int, int]:
        """Of all rows so far where some experts are on a GPU: choices, and those of them that were there."""
        counts = [places.choices() for places in self.core.runner.model.expert_places if places.choices is not None]
        return sum(choices for choices, _ in counts), sum(hits for _, hits in counts)

    def burst(self, streams: int, prompt: int, output: int) -> float:
        """Tokens a second of so many requests that come at once, while all of them are running."""
        began = time.perf_counter()
        names = [self.submit(prompt, output) for _ in range(streams)]
        self.until(names, output)
        while self.core.busy:
            self.step()
        self.read()
        times = [self.times.pop(name) for name in names]
        gaps = [[b - a for a, b in pairwise(each)] for each in times]
        return steady_tok_s(Burst(streams * output, 0.0, [each[0] - began for each in times], gaps))

    def first_token(self, tokens: int, streams: int) -> dict[str, float]:
        """Behind the prompt alone, a step of decode too."""
        with self.running(streams) as names:
            before = {name: len(self.times[name]) for name in names}
            began = time.perf_counter()
            name = self.submit(tokens, 2 if names else BEHIND)
            self.until([name], 1)
            found = {"ttft_s": self.times[name][0] - began}
            if not names:
                self.until([name], BEHIND)
                gaps = [b - a for a, b in pairwise(self.times[name])]
                found["decode_ms"] = statistics.median(gaps) * 1e3
            else:
                seen = [self.times[n][before[n] - 1 :] for n in names]
                gaps = [b - a for times in seen for a, b in pairwise(times)]
                found |= {"gap_ms": statistics.median(gaps) * 1e3, "longest_gap_ms": max(gaps) * 1e3}
        return found


@contextmanager
def _waits() -> Iterator[list[float]]:
    """Seconds of each wait for the GPU."""
    seconds: list[float] = []
    original = Arrival.wait

    def wait(self: Arrival) -> None:
        began = time.perf_counter()
        original(self)
        seconds.append(time.perf_counter() - began)

    Arrival.wait = wait  # type: ignore[method-assign]
    try:
        yield seconds
    finally:
        Arrival.wait = original  # type: ignore[method-assign]


def steady_tok_s(seen: Burst) -> float:
    """Tokens a second from the last stream's first token to the first stream's last one."""
    times = [list(accumulate(gaps, initial=first)) for first, gaps in zip(seen.ttft_s, seen.gaps_s, strict=True)]
    begin, end = max(t[0] for t in times), min(t[-1] for t in times)
    if end <= begin:
        return float("nan")
    return sum(begin < at <= end for t in times for at in t) / (end - begin)


def through_http(model: Path, flags: Sequence[str], rows: Sequence[int]) -> dict[int, dict[str, float]]:
    found: dict[int, dict[str, float]] = {}
    with our_server(model, [*flags, "--skip-tokenizer"]) as url:
        for count in rows:
            for tokens in (4, OUTPUT):  # once to warm up

                def prompt(stream: int, seed: int = tokens * 1000 + count) -> list[int]:
                    return [(7919 * (i + 104729 * (stream + 1000 * seed)) + 29) % 30000 for i in range(CONTEXT)]

                seen = burst(url, [our_request(prompt(s), tokens, None) for s in range(count)], tokens)
            found[count] = {"http_tok_s": steady_tok_s(seen), "http_ttft_s": statistics.median(seen.ttft_s)}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", type=Path, help="folder of the random model, written if it is not there; or a GGUF file"
    )
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 8, 32, 128])
    parser.add_argument("--prompt", type=int, default=0, help="tokens of the long prompt; 0: none")
    parser.add_argument("--prompt-streams", type=int, nargs="*", default=[0, 0, STREAMS], help="beside the long prompt")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each row of the engine")
    parser.add_argument("--no-http", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--serve", type=shlex.split, default=[], help="flags of `ktserve serve`, in one argument")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ktserve-bench-") as temporary:
        changes: dict[str, Any] = {"num_hidden_layers": args.layers}
        if args.prompt + BEHIND > QWEN3_30B_A3B["max_position_embeddings"]:
            changes["max_position_embeddings"] = args.prompt + BEHIND
        model = args.model
        if model is None or model.suffix != ".gguf":
            model = write_folder(model or Path(temporary) / "model", changes)
        seqs = max([*args.rows, STREAMS + 1])
        flags = ["--max-num-seqs", str(seqs), "--pack-cache", "off", *args.serve]
        behind = {} if args.no_http or not args.rows else through_http(model, flags, args.rows)
        served = Served(served_config(model, flags))
    gc.collect()
    gc.freeze()  # as the engine's process
    print(f"{args.layers} layers loaded in {served.loaded_s:.0f} s: ktserve serve MODEL {' '.join(flags)}")
    print("\n".join(served.lines), flush=True)
    results: list[dict[str, Any]] = []
    for rows in args.rows:
        row: dict[str, Any] = {"rows": rows, **served.decode(rows, args.seconds), **behind.get(rows, {})}
        if "http_tok_s" in row:
            row["http_share"] = row["http_tok_s"] / row["engine_tok_s"]
        results.append(row)
        print(json.dumps(row), flush=True)
    prompts: list[dict[str, Any]] = []
    for streams in args.prompt_streams if args.prompt else ():  # the first one compiles kernels for such chunks
        prompts.append({"prompt": args.prompt, "streams": streams, **served.first_token(args.prompt, streams)})
        print(json.dumps(prompts[-1]), flush=True)
    served.core.close()
    if args.out:
        about = {
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU", "torch": torch.__version__,
            "layers": args.layers, "flags": flags, "context": CONTEXT, "loaded_s": served.loaded_s,
            "lines": served.lines,
        }  # fmt: skip
        record.write(args.out, {"about": about, "results": results, "prompts": prompts})


if __name__ == "__main__":
    main()
