"""When a long prompt's layers are copied to a GPU and computed there, by CUDA events, as numbers and as a text chart.

    python -m benchmarks.gpu.timeline [--layers 8] [--prompt 30000] [--out FILE.json] [--serve="--quantise int8"]

The engine of `ktserve serve` with its experts on the CPU. The prompt comes twice; the second one is shown. Of each
layer, in ms from the step's first launch on:

copy        its experts' way to the GPU, on a stream of its own
attention   all of the compute stream between the experts before and these
wait        the compute stream's, for the copy
experts     their products
"""

from __future__ import annotations

import argparse
import shlex
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import record
from benchmarks.gpu.served import Served
from benchmarks.models.folder import write_folder
from benchmarks.settings import served_config
from engine.experts.base import ExpertTask
from engine.experts.streamed.backend import StreamedExperts
from testing.harness import model_runner

Row = dict[str, Any]  # "layer", and (begin, end) of each kind
KINDS = {"copy": "=", "attention": "a", "wait": ".", "experts": "E"}


class Recorder:
    """Events around what a streamed step does, and when they were."""

    def __init__(self, streamed: StreamedExperts) -> None:
        self._spans: list[tuple[str, int, Any, Any]] = []
        self._began: Any = None
        self._last: Any = None  # end of the compute stream's span before
        self._layer = self._copied = -1
        inner: Any = streamed
        self._begin_step, self._post = inner.begin_step, inner.post
        self._copy, self._bring = inner._streaming.layers._copy, inner._streaming.layers._bring
        self._run: Callable[..., None] = inner._streaming._parts.compute.run
        inner.begin_step, inner.post = self.begin_step, self.post
        inner._streaming.layers._copy, inner._streaming.layers._bring = self.copy, self.bring
        inner._streaming._parts.compute.run = self.run

    def begin_step(self, rows: int, **how: Any) -> None:
        if rows > 1:  # not the decode step behind the prompt
            self._spans.clear()
            self._began = self._last = _event()
        self._begin_step(rows, **how)

    def copy(self, buffer: Any) -> None:
        self._copied = buffer.layer
        self._copy(buffer)

    def bring(self, part: Any, bring: Callable[[], None]) -> None:
        def timed() -> None:
            begin = _event()
            bring()
            self._spans.append(("copy", self._copied, begin, _event()))

        self._bring(part, timed)

    def post(self, task: ExpertTask, stream: Any = None) -> None:
        self._layer = task.layer
        self._mark("attention")
        self._post(task, stream)

    def run(self, *args: Any, **how: Any) -> None:
        self._mark("wait")
        self._run(*args, **how)
        self._mark("experts")

    def _mark(self, kind: str) -> None:
        now = _event()
        self._spans.append((kind, self._layer, self._last, now))
        self._last = now

    def rows(self) -> list[Row]:
        """Of the last step, ms from its begin on. Waits for the GPU."""
        torch.cuda.synchronize()
        found: dict[int, Row] = {}
        for kind, layer, begin, end in self._spans:
            row = found.setdefault(layer, {"layer": layer})
            times = self._began.elapsed_time(begin), self._began.elapsed_time(end)
            row[kind] = min(times[0], row.get(kind, times)[0]), times[1]
        return [found[layer] for layer in sorted(found)]


def _event() -> Any:
    cuda: Any = torch.cuda
    event = cuda.Event(enable_timing=True)
    event.record()
    return event


def hidden(rows: Sequence[Row]) -> float:
    """The share of all copying during which the compute stream computed."""
    busy = [row[kind] for row in rows for kind in ("attention", "experts") if kind in row]
    copies = [row["copy"] for row in rows]
    both: float = sum(max(0.0, min(end, e) - max(begin, b)) for begin, end in copies for b, e in busy)
    every: float = sum(end - begin for begin, end in copies)
    return both / every


def chart(rows: Sequence[Row], width: int = 100) -> str:
    """A line for a layer's copy and one for its part of the compute stream."""
    last = max(end for row in rows for kind, span in row.items() if kind in KINDS for end in span[1:])
    lines = [f"{'':17}0{f'{last:.0f} ms':>{width - 1}}"]
    for row in rows:
        for name, kinds in (("copy", ("copy",)), ("compute", ("attention", "wait", "experts"))):
            line = [" "] * width
            for kind in kinds:
                begin, end = (round(at / last * width) for at in row.get(kind, (0.0, 0.0)))
                line[begin:end] = KINDS[kind] * (end - begin)
            head = f"layer {row['layer']:<2}" if name == "copy" else ""
            lines.append(f"{head:8} {name:8}{''.join(line)}".rstrip())
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder of the random model; it is written if it is not there")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=30000)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--serve", type=shlex.split, default=[], help="flags of `ktserve serve`, in one argument")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ktserve-bench-") as temporary:
        folder = write_folder(args.model or Path(temporary) / "model", {"num_hidden_layers": args.layers})
        flags = ["--gpu-experts", "none", "--max-num-seqs", "1", "--pack-cache", "off", *args.serve]
        served = Served(served_config(folder, [*flags, "--prompt-lane", "off"]))
    streamed = model_runner(served.core).model.expert_backends[0]
    if not isinstance(streamed, StreamedExperts):
        raise SystemExit(f"experts by {type(streamed).__name__}: nothing is streamed here")
    recorder = Recorder(streamed)
    results: dict[str, Any] = {}
    for _ in range(2):  # the first one compiles kernels for such chunks
        name = served.submit(args.prompt, 1)
        served.until([name], 1)
        rows = recorder.rows()
        results = {"rows": rows, "hidden": hidden(rows)}
    print(chart(results["rows"]))
    waits = [row["wait"][1] - row["wait"][0] for row in results["rows"]]
    print(
        f"{results['hidden']:.0%} of the copying beside computing; waits for a copy, ms: {[round(w, 1) for w in waits]}"
    )
    served.core.close()
    if args.out:
        about = {"device": torch.cuda.get_device_name(), "layers": args.layers, "prompt": args.prompt, "flags": flags}
        record.write(args.out, {"about": about, **results})


if __name__ == "__main__":
    main()
