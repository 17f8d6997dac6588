"""Tokens a second of a whole training step beside a GPU, of Qwen3-30B-A3B's shape with fewer layers.

    python -m benchmarks.training.step [--layers 4 8] [--cases cpu:4096 streamed:8192] [--steps 5] [--json FILE]

Each case is a run of `ktserve train` in a process of its own, on a random bf16 model: LoRA of rank 16 on everything,
packed rows of 4096 tokens, each one document, a micro-batch a step. cpu:N computes the experts of N tokens on the CPU
(stream_min_tokens: 0), streamed:N copies every layer's to the GPU, auto:N does what was found to be faster. A step is
everything between two lines of its log: data, forward, loss, backward, clipping, AdamW. The median step behind the
first two counts.

Two depths give what a layer more takes, and by a straight line a step of 48 layers; a streamed layer is copied twice a
step but for the four in which the direction changes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

import ktserve
from benchmarks.models.folder import write_folder
from benchmarks.training.soak import write_tokenizer
from training.loop.progress import read_log

LAYERS, ROW = 48, 4096
_WARM_UP = 2  # steps


def models(folder: Path, depths: list[int]) -> dict[int, Path]:
    """By depth: a model of so many layers, those of the deepest one's files."""
    deepest = write_folder(folder / str(max(depths)), {"num_hidden_layers": max(depths)})
    write_tokenizer(deepest)
    return {depth: _shallower(deepest, folder / str(depth), depth) for depth in depths}


def _shallower(whole: Path, folder: Path, depth: int) -> Path:
    if folder == whole:
        return whole
    folder.mkdir(exist_ok=True)
    config = json.loads((whole / "config.json").read_text()) | {"num_hidden_layers": depth}
    index = json.loads((whole / "model.safetensors.index.json").read_text())
    places = {
        name: file
        for name, file in index["weight_map"].items()
        if not name.startswith("model.layers.") or int(name.split(".")[2]) < depth
    }
    for file in {*places.values(), "tokenizer.json", "tokenizer_config.json"}:
        (folder / file).unlink(missing_ok=True)
        (folder / file).symlink_to(whole / file)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors.index.json").write_text(json.dumps(index | {"weight_map": places}))
    return folder


def write_data(folder: Path, rows: int) -> Path:
    """Documents that are cut to a row's length."""
    path = folder / "data.jsonl"
    with path.open("w") as file:
        for number in range(rows):
            text = " ".join(f"{number * word % 1000} and" for word in range(ROW))
            messages = [{"role": "user", "content": f"Count {number}"}, {"role": "assistant", "content": text}]
            file.write(json.dumps({"messages": messages}) + "\n")
    return path


def seconds_a_step(model: Path, folder: Path, case: str, steps: int, limit_s: float) -> dict[str, Any]:
    """One run. RuntimeError with the end of its output if it fails, or takes longer than `limit_s`."""
    way, tokens = case.split(":")
    rows = int(tokens) // ROW
    out = folder / f"out-{way}-{tokens}-{model.name}"
    settings = {
        "model_name_or_path": str(model),
        "dataset": str(write_data(folder, rows * steps)),
        "output_dir": str(out),
        "overwrite_output_dir": True,
        "bf16": True,
        "packing": True,
        "cutoff_len": ROW,
        "overlong": "truncate",
        "lora_rank": 16,
        "per_device_train_batch_size": rows,
        "stream_min_tokens": {"cpu": 0, "streamed": int(tokens), "auto": None}[way],
        "max_steps": steps,
        "logging_steps": 1,
        "save_strategy": "no",
        "plot_loss": False,
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(settings))
    program = [sys.executable, str(Path(ktserve.__file__).with_name("__main__.py")), "training", str(path)]
    began = time.monotonic()
    try:
        done = subprocess.run(program, capture_output=True, text=True, check=False, timeout=limit_s)
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"{case}: not done in {limit_s:.0f} s: {str(error.stdout)[-1500:]}") from error
    if done.returncode:
        raise RuntimeError(f"{case}: {done.stdout[-1500:]}{done.stderr[-3000:]}")
    records = [record for record in read_log(out / "log.jsonl") if "tokens_per_s" in record]
    each = [rows * ROW / record["tokens_per_s"] for record in records]
    step_s = statistics.median(each[min(_WARM_UP, len(each) - 1) :])
    lines = [line for line in done.stdout.splitlines() if line.startswith("experts: micro") or "every micro" in line]
    return {
        "case": case, "layers": int(model.name), "step_s": step_s, "tokens_per_s": rows * ROW / step_s,
        "steps_s": each, "losses": [record["loss"] for record in records], "run_s": time.monotonic() - began,
        "said": lines,
    }  # fmt: skip


def whole(found: dict[int, dict[str, Any]], tokens: int) -> dict[str, float]:
    """A layer more, what is beside the layers, and 48 of them, from two depths."""
    (few, less), (many, more) = sorted(found.items())
    layer_s = (more["step_s"] - less["step_s"]) / (many - few)
    step_s = more["step_s"] + (LAYERS - many) * layer_s
    beside_s = more["step_s"] - many * layer_s
    return {"layer_s": layer_s, "beside_s": beside_s, "step_s": step_s, "tokens_per_s": tokens / step_s}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs=2, default=[4, 8], help="two depths")
    parser.add_argument("--cases", nargs="+", default=["streamed:8192", "cpu:4096"], help="WAY:TOKENS")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="for models and outputs; default: a temporary one")
    parser.add_argument("--seconds", type=float, default=3600.0, help="end after so many")
    parser.add_argument("--json", type=Path, help="write the results there")
    args = parser.parse_args()
    if args.folder:
        args.folder.mkdir(parents=True, exist_ok=True)
        measure(args, args.folder)
    else:
        with tempfile.TemporaryDirectory(prefix="ktserve-train-step-") as folder:
            measure(args, Path(folder))


def measure(args: argparse.Namespace, folder: Path) -> None:
    began = time.monotonic()
    folders = models(folder, args.layers)
    print(f"models written, {time.monotonic() - began:.0f} s", flush=True)
    results: dict[str, Any] = {"cpus": os.cpu_count(), "runs": [], "whole": {}}
    for case in args.cases:
        found = {}
        for depth in sorted(args.layers, reverse=True):
            left = args.seconds - (time.monotonic() - began)
            if left < 1:
                print(f"no time for {case}, {depth} layers", flush=True)
                continue
            try:
                run = seconds_a_step(folders[depth], folder, case, args.steps, left)
            except RuntimeError as error:
                print(error, flush=True)
                continue
            found[depth] = run
            results["runs"].append(run)
            text = " ".join(f"{s:.2f}" for s in run["steps_s"])
            print(
                f"{case:>14}, {depth} layers: {run['step_s']:.3f} s a step, {run['tokens_per_s']:,.0f} tok/s; steps "
                f"{text} s; {run['run_s']:.0f} s in all; {' '.join(run['said'])}",
                flush=True,
            )
        if len(found) == 2:
            all_of_it = results["whole"][case] = whole(found, int(case.split(":")[1]))
            print(
                f"{case:>14}: {all_of_it['layer_s'] * 1e3:.1f} ms a layer, {all_of_it['beside_s'] * 1e3:.0f} beside; "
                f"{LAYERS} layers: {all_of_it['step_s']:.2f} s, {all_of_it['tokens_per_s']:,.0f} tok/s",
                flush=True,
            )
        if args.json:
            args.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
