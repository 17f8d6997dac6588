"""Tokens a second of a whole training step beside a GPU, of Qwen3-30B-A3B's shape with fewer layers.

    python -m benchmarks.training.step [--layers 4 8] [--cases cpu:4096 streamed:8192] [--steps 5] [--json FILE]

Each case is a run of `ktserve train` for each depth, one behind the other in a process of the case's own, on a random
bf16 model: LoRA of rank 16 on everything, packed rows of 4096 tokens, each one document, a micro-batch a step. cpu:N
computes the experts of N tokens on the CPU (stream_min_tokens: 0), streamed:N copies every layer's to the GPU, auto:N
does what was found to be faster. A step is everything between two lines of its log: data, forward, loss, backward,
clipping, AdamW. The median step behind the first two counts. What a run said is printed with the seconds since its
process, or the run before, began.

Two depths give what a layer more takes, and by a straight line a step of 48 layers; a streamed layer is copied twice a
step but for the four in which the direction changes.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import yaml

from benchmarks import record
from benchmarks.models.folder import write_folder
from benchmarks.training.soak import write_tokenizer
from training.loop.progress import LOG, read_log

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


def write_settings(model: Path, folder: Path, case: str, steps: int) -> Path:
    """Those of one run, into a file."""
    way, tokens = case.split(":")
    rows = int(tokens) // ROW
    settings = {
        "model_name_or_path": str(model),
        "dataset": str(write_data(folder, rows * steps)),
        "output_dir": str(output(model, folder, case)),
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
    path = folder / f"{case.replace(':', '-')}-{model.name}.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


def output(model: Path, folder: Path, case: str) -> Path:
    return folder / f"out-{case.replace(':', '-')}-{model.name}"


def run_all(paths: list[Path]) -> int:
    """One run behind the other in this process. The exit status of the first that fails."""
    from training.main import main as train

    for path in paths:
        if status := train([str(path)]):
            return status
        gc.collect()  # the model's memory, before the next one is loaded
    return 0


def run(paths: list[Path], limit_s: float) -> list[list[str]]:
    """What each run printed, every line behind the seconds since the one before it ended. One that fails, or is not
    done in `limit_s`, prints the end of its output here."""
    program = [sys.executable, "-m", "benchmarks.training.step", "--runs", *map(str, paths)]
    process = subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    timer = threading.Timer(limit_s, process.kill)
    errors: list[str] = []
    reader = threading.Thread(target=lambda: errors.extend(process.stderr or ()))
    said: list[list[str]] = [[]]
    timer.start()
    reader.start()
    began = time.monotonic()
    for line in process.stdout or ():
        now = time.monotonic()
        said[-1].append(f"{now - began:.1f} s {line.rstrip()}")
        if line.startswith("adapter written"):
            said.append([])
            began = now
    status = process.wait()
    timer.cancel()
    reader.join()
    if status:
        why = f"not done in {limit_s:.0f} s" if status < 0 else f"status {status}"
        print(f"{why}: {' | '.join(said[-1][-5:])}{''.join(errors)[-3000:]}", flush=True)
    return said


def seconds_a_step(model: Path, folder: Path, case: str, said: list[str]) -> dict[str, Any] | None:
    """What the log of a run says; None if it has too few steps."""
    tokens = int(case.split(":")[1])
    records = [record for record in read_log(output(model, folder, case) / LOG) if "tokens_per_s" in record]
    each = [tokens / record["tokens_per_s"] for record in records]
    if len(each) <= _WARM_UP:
        return None
    step_s = statistics.median(each[_WARM_UP:])
    return {
        "case": case, "layers": int(model.name), "step_s": step_s, "tokens_per_s": tokens / step_s, "steps_s": each,
        "losses": [record["loss"] for record in records], "said": said,
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
    parser.add_argument("--runs", type=Path, nargs="+", metavar="CONFIG.yaml", help="only runs with these settings")
    args = parser.parse_args()
    if args.runs:
        sys.exit(run_all(args.runs))
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
        depths = sorted(args.layers, reverse=True)
        left = args.seconds - (time.monotonic() - began)
        if left < 1:
            print(f"no time for {case}", flush=True)
            continue
        said = run([write_settings(folders[depth], folder, case, args.steps) for depth in depths], left)
        found = {}
        for depth, lines in zip(depths, said, strict=False):
            one = seconds_a_step(folders[depth], folder, case, lines)
            if one is None:
                continue
            found[depth] = one
            results["runs"].append(one)
            print(
                f"{case:>14}, {depth} layers: {one['step_s']:.3f} s a step, {one['tokens_per_s']:,.0f} tok/s; steps "
                f"{' '.join(f'{s:.2f}' for s in one['steps_s'])} s"
            )
            print("".join(f"{'':>16}{line[:150]}\n" for line in lines if " s step " not in line), end="", flush=True)
        if len(found) == 2:
            all_of_it = results["whole"][case] = whole(found, int(case.split(":")[1]))
            print(
                f"{case:>14}: {all_of_it['layer_s'] * 1e3:.1f} ms a layer, {all_of_it['beside_s'] * 1e3:.0f} beside; "
                f"{LAYERS} layers: {all_of_it['step_s']:.2f} s, {all_of_it['tokens_per_s']:,.0f} tok/s",
                flush=True,
            )
        if args.json:
            record.write(args.json, results)


if __name__ == "__main__":
    main()
