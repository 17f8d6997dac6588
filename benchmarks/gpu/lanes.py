"""Long prompts beside running streams on a GPU, with a lane of their own (`--prompt-lane auto`) and without (`off`).

    python -m benchmarks.gpu.lanes --layers 12 [--model FOLDER | FILE.gguf] [--out FILE] [--serve="--cpu-threads 14"]

The engine as `ktserve serve` builds it, without sockets, experts on the CPU and streamed for long chunks. For each
setting, in turn:

alone     the first token of a prompt of --prompt tokens; the tokens a second of STREAMS streams
beside    both at once: how much later the first token comes, the streams' rate until then, their gaps
arriving  four prompts of 8,192 tokens while 32 streams are running: prompt tokens a second until the last first token
"""

from __future__ import annotations

import argparse
import gc
import shlex
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from benchmarks import record
from benchmarks.gpu.served import Served
from benchmarks.models.configs import QWEN3_30B_A3B
from benchmarks.models.folder import write_folder
from benchmarks.settings import served_config
from engine.messages import Abort

STREAMS = 8
ARRIVING, ARRIVING_TOKENS, BUSY_STREAMS = 4, 8192, 32
LANES = ("off", "auto")


def beside(served: Served, streams: int, prompts: int, tokens: int) -> dict[str, float]:
    """So many prompts that arrive together while so many streams run; seconds, milliseconds, tokens a second."""
    with served.running(streams) as names:
        rate = _rate(served, names) if streams else 0.0
        before = {name: len(served.times[name]) for name in names}
        began = time.perf_counter()
        asked = [served.submit(tokens, 2) for _ in range(prompts)]
        served.until(asked, 1)
        first = sorted(served.times[name][0] - began for name in asked)
        found = {"first_token_s": first[-1], "prompt_tok_s": prompts * tokens / first[-1]}
        if streams:
            until = began + first[-1]
            seen = {name: [at for at in served.times[name][before[name] - 1 :] if at <= until] for name in names}
            gaps = sorted((b - a) * 1e3 for times in seen.values() for a, b in pairwise(times))
            found |= {
                "rate_alone": rate,
                "rate_beside": sum(len(times) - 1 for times in seen.values()) / first[-1],
                "step_alone_ms": streams / rate * 1e3,
            }
            if gaps:
                found |= {"gap_p50_ms": statistics.median(gaps), "gap_p99_ms": gaps[int(0.99 * (len(gaps) - 1))]}
                found["longest_gap_ms"] = gaps[-1]
        for name in asked:
            served.core.handle(Abort(request_id=name))
        return found


def _rate(served: Served, names: list[str], steps: int = 24) -> float:
    before = sum(len(served.times[name]) for name in names)
    began = time.perf_counter()
    served.until(names, min(len(served.times[name]) for name in names) + steps)
    return (sum(len(served.times[name]) for name in names) - before) / (time.perf_counter() - began)


def measure(model: Path, flags: list[str], tokens: int, repeats: int) -> dict[str, Any]:
    gc.collect()  # the engine before holds as much memory
    served = Served(served_config(model, flags))
    beside(served, 0, 1, tokens)  # once to warm up
    alone = [beside(served, 0, 1, tokens) for _ in range(repeats)]
    both = [beside(served, STREAMS, 1, tokens) for _ in range(repeats)]
    arriving = [beside(served, BUSY_STREAMS, ARRIVING, ARRIVING_TOKENS) for _ in range(repeats)]
    notes = served.lines
    served.core.close()
    return {"alone": _median(alone), "beside": _median(both), "arriving": _median(arriving), "lines": notes}


def _median(runs: list[dict[str, float]]) -> dict[str, float]:
    return {key: statistics.median(run[key] for run in runs if key in run) for key in runs[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder of the random model, written if it is not there; or a file")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--prompt", type=int, default=30000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--lanes", nargs="*", default=LANES, choices=LANES)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--serve", type=shlex.split, default=[], help="flags of `ktserve serve`, in one argument")
    args = parser.parse_args()
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="ktserve-bench-") as temporary:
        model = args.model
        if model is None or model.suffix != ".gguf":
            changes = {"num_hidden_layers": args.layers}
            if args.prompt + 64 > QWEN3_30B_A3B["max_position_embeddings"]:
                changes["max_position_embeddings"] = args.prompt + 64
            model = write_folder(model or Path(temporary) / "model", changes)
        flags = ["--max-num-seqs", str(BUSY_STREAMS + ARRIVING), "--pack-cache", "off", *args.serve]
        for lane in args.lanes:
            results[lane] = measure(model, [*flags, "--prompt-lane", lane], args.prompt, args.repeats)
            for what in ("alone", "beside", "arriving"):
                print(lane, what, {key: round(value, 2) for key, value in results[lane][what].items()}, flush=True)
    if len(results) == len(LANES):
        for lane, found in results.items():
            alone, both = found["alone"], found["beside"]
            found["beside_over_alone"] = both["first_token_s"] / alone["first_token_s"]
            found["rate_share"] = both["rate_beside"] / both["rate_alone"]
            found["gap_p99_steps"] = both.get("gap_p99_ms", float("nan")) / both["step_alone_ms"]
            print(lane, {key: round(found[key], 2) for key in ("beside_over_alone", "rate_share", "gap_p99_steps")})
        gained = results["auto"]["arriving"]["prompt_tok_s"] / results["off"]["arriving"]["prompt_tok_s"]
        print(f"arriving: {gained:.2f}x the prompt tokens a second")
    if args.out:
        about = {
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "layers": args.layers,
            "flags": flags,
        }
        record.write(args.out, {"about": about, "results": results})


if __name__ == "__main__":
    main()
