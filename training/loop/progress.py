"""What a person and a program see of a run: lines on the terminal, log.jsonl, loss.svg."""

from __future__ import annotations

import json
import math
import signal
import time
from pathlib import Path
from types import FrameType
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ktserve.plot import Line, plot
from training.loop.meter import Meter

LOG, CURVE = "log.jsonl", "loss.svg"
_SHOWN = ("loss", "eval_loss", "rewards/margins", "rewards/accuracies", "grad_norm", "learning_rate")


class Progress(TrainerCallback):  # type: ignore[misc]  # transformers has no types
    """A line for each of transformers' log records, into log.jsonl and, shorter, to the terminal."""

    def __init__(
        self, output: Path, meter: Meter | None = None, label: str = "", vocabulary: int | None = None
    ) -> None:
        """`label`: stands before a line on the terminal. `vocabulary`: tokens that the model chooses among, where the
        loss is cross entropy over them."""
        self._path, self._meter, self._vocabulary = output / LOG, meter, vocabulary
        self._done = 0.0 if meter is None else meter.done
        self._label = f"{label}  " if label else ""
        self._begun = self._last = (0.0, 0, 0)  # seconds, tokens, steps

    def on_train_begin(self, args: TrainingArguments | None, state: TrainerState, control: Any, **_: Any) -> None:
        self._begun = self._last = (time.monotonic(), state.num_input_tokens_seen, state.global_step)
        kept = [record for record in read_log(self._path) if record["step"] <= state.global_step]
        partial = self._path.with_name(f".{LOG}.partial")  # a kill in between leaves the old log
        partial.write_text("".join(json.dumps(record) + "\n" for record in kept if state.global_step))
        partial.replace(self._path)

    def on_log(
        self, args: TrainingArguments | None, state: TrainerState, control: Any, logs: dict[str, Any], **_: Any
    ) -> None:
        if "train_runtime" in logs:  # transformers' summary of the whole run
            return
        now = (time.monotonic(), state.num_input_tokens_seen, state.global_step)
        record: dict[str, Any] = {"step": state.global_step, "epoch": round(state.epoch or 0.0, 4)}
        record |= {key: value for key, value in logs.items() if isinstance(value, int | float) and key != "epoch"}
        record["tokens"] = state.num_input_tokens_seen
        if "loss" in logs:
            record["tokens_per_s"] = round((now[1] - self._last[1]) / max(now[0] - self._last[0], 1e-9), 1)
            if self._meter is not None:
                rate = (self._meter.done - self._done) / max(now[0] - self._last[0], 1e-9)
                record["of_peak"], self._done = round(rate / self._meter.peak, 4), self._meter.done
            record["remaining_s"] = round(self._remaining(now, state), 1)
            self._last = now
        with self._path.open("a") as file:
            file.write(json.dumps(record) + "\n")
        print(self._label + line(record, state.max_steps), flush=True)
        if self._vocabulary is not None and diverged(record, self._vocabulary):
            print(
                f"{self._label}warning: step {record['step']}: the loss is that of guessing among {self._vocabulary} "
                "tokens, and no gradient is left: the run has diverged. Stop it, and lower learning_rate or raise "
                "warmup_steps",
                flush=True,
            )

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> TrainerControl:
        """A record of the last steps too: at the end, and wherever an evaluation may end the run."""
        last = state.global_step >= state.max_steps
        control.should_log |= last or (control.should_evaluate and args.load_best_model_at_end)
        return control

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> TrainerControl:
        control.should_log |= control.should_evaluate and args.load_best_model_at_end
        return control

    def _remaining(self, now: tuple[float, int, int], state: TrainerState) -> float:
        done = now[2] - self._begun[2]
        return (now[0] - self._begun[0]) / max(done, 1) * (int(state.max_steps) - now[2])


class StopOnSignal(TrainerCallback):  # type: ignore[misc]
    """The first Ctrl-C or SIGTERM saves and ends after the step in progress; the second ends at once. `stopped`:
    whether a run was ended so before its last step."""

    def __init__(self) -> None:
        self.asked = self.stopped = False

    def install(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._ask)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        print("stopping: this step is finished and saved first (once more: at once)", flush=True)

    def on_step_end(self, args: Any, state: Any, control: TrainerControl, **_: Any) -> None:
        if self.asked:
            control.should_save = control.should_training_stop = True
            self.stopped = state.global_step < state.max_steps


def diverged(record: dict[str, Any], vocabulary: int) -> bool:
    """Whether a record is of a model whose numbers have overflowed to where every token is as likely as any other."""
    loss, norm = float(record.get("loss", 0.0)), float(record.get("grad_norm", 1.0))
    return loss > 0.98 * math.log(vocabulary) and norm < 1e-9


def last_loss(output: Path) -> float | None:
    """Of the last record that has one."""
    return next((record["loss"] for record in reversed(read_log(output / LOG)) if "loss" in record), None)


def line(record: dict[str, Any], steps: int) -> str:
    """A record for the terminal."""
    parts = [f"step {record['step']}/{steps}"]
    parts += [f"{key.rpartition('/')[2]} {record[key]:.4g}" for key in _SHOWN if key in record]
    if "tokens_per_s" in record:
        parts.append(f"{record['tokens_per_s']:,.0f} tok/s")
        if "of_peak" in record:
            parts.append(f"{record['of_peak']:.0%} of peak")
        parts.append(f"{_clock(record['remaining_s'])} left")
    return "  ".join(parts)


def read_log(path: Path) -> list[dict[str, Any]]:
    """The records of a log.jsonl; a last line that was cut off is left out."""
    records = []
    for text in path.read_text().splitlines() if path.is_file() else ():
        try:
            records.append(json.loads(text))
        except ValueError:
            break
    return records


def draw_curve(output: Path) -> bool:
    """loss.svg from log.jsonl. False, and nothing, without a loss in the log."""
    records = read_log(output / LOG)
    curves = {key: [(r["step"], r[key]) for r in records if math.isfinite(r.get(key, math.nan))] for key in _SHOWN[:2]}
    if not curves["loss"]:
        return False
    lines = [Line(key, points) for key, points in curves.items() if points]
    partial = output / f".{CURVE}.partial"
    try:
        partial.write_text(plot(lines, title="", x="step", y="loss"))
        partial.replace(output / CURVE)
    finally:
        partial.unlink(missing_ok=True)
    return True


def _clock(seconds: float) -> str:
    whole = int(seconds)
    hours, minutes = whole // 3600, whole // 60 % 60
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"
