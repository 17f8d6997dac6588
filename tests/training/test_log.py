"""What a run says: every step is in the log and on the terminal, a run that has diverged says so, and nothing else."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml

from tests.training.models import losses
from training.data import build_datasets, load_tokenizer
from training.loop.progress import diverged, last_loss, read_log
from training.run import train


@pytest.mark.parametrize(("steps", "every", "logged"), [(2, 10, [2]), (5, 2, [2, 4, 5]), (4, 2, [2, 4])])
@pytest.mark.parametrize("several", [False, True])
def test_the_last_steps_are_logged(config, several, steps, every, logged, capfd):
    config = replace(config, max_steps=steps, logging_steps=every, save_strategy="no")
    output = config.output
    if several:
        config = replace(config, adapters=(replace(config, adapter_name="a"),))
        output = output / "a"
    train(config)
    assert [record["step"] for record in read_log(output / "log.jsonl") if "loss" in record] == logged
    assert f"last loss {last_loss(output):.4g}" in capfd.readouterr().out


def test_the_first_step_is_logged_if_it_is_wanted(config):
    train(replace(config, max_steps=3, logging_steps=2, logging_first_step=True, save_strategy="no"))
    assert [record["step"] for record in read_log(config.output / "log.jsonl")] == [1, 2, 3]


def test_steps_before_an_early_end_are_logged(config):
    config = replace(
        config, val_size=4, eval_strategy="steps", eval_steps=3, save_steps=3, early_stopping_steps=1,
        learning_rate=0.0, max_steps=20, logging_steps=7,
    )  # fmt: skip
    train(config)
    steps = [record["step"] for record in read_log(config.output / "log.jsonl") if "loss" in record]
    assert steps[-1] < 20 and steps[-1] % 3 == 0


def test_a_run_that_has_diverged_says_so(config, capfd):
    """Weights so large that every token is as likely as any other."""
    config = replace(config, learning_rate=0.0, max_steps=1, save_strategy="no")
    train(config)
    assert "the run has diverged" not in capfd.readouterr().out
    broken = replace(config, output_dir=f"{config.output_dir}-broken")

    def zero_norm(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return (args[0] * 0.0,)

    from training import run

    load = run.load_base

    def load_broken(config):  # type: ignore[no-untyped-def]
        model = load(config)
        model.lm_head.register_forward_pre_hook(zero_norm)
        return model

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "load_base", load_broken)
        train(broken)
    assert losses(broken.output) == [pytest.approx(math.log(2048), abs=1e-4)]
    assert "step 1: the loss is that of guessing among 2048 tokens" in capfd.readouterr().out
    assert not diverged({"loss": 2.0, "grad_norm": 0.0}, 2048) and not diverged({"eval_loss": 9.0}, 2048)


def test_the_tokens_that_count_are_among_those_of_the_samples(config, pairs):
    for each in (config, replace(config, train_on_prompt=True), replace(config, packing=True)):
        rows, _ = build_datasets(each, load_tokenizer(each))
        items = [rows[i] for i in range(len(rows))]
        assert rows.report.tokens == sum(len(item["input_ids"]) for item in items) > rows.report.learnt
        assert each.train_on_prompt is False or rows.report.learnt == rows.report.tokens - rows.report.samples
    config = replace(config, stage="dpo", dataset=(str(pairs),))
    report = build_datasets(config, load_tokenizer(config))[0].report
    assert report.learnt < report.tokens


@pytest.mark.parametrize(("stage", "commands"), [("sft", ([], ["--resume", "max_steps=3"])), ("dpo", ([],))])
def test_nothing_but_our_lines_is_printed(config, pairs, stage, commands, tmp_path):
    """By a whole command: no library's warnings, on either stream."""
    if stage == "dpo":
        pytest.importorskip("trl", reason="stage: dpo needs trl")
    settings = {
        "model_name_or_path": config.model_name_or_path, "dataset": str(pairs) if stage == "dpo" else config.dataset[0],
        "output_dir": config.output_dir, "device": "cpu", "max_steps": 2, "gradient_checkpointing": True, "bf16": True,
        "val_size": 3, "eval_strategy": "steps", "save_steps": 1, "plot_loss": False, "stage": stage,
        "kt_num_threads": 1,
    }  # fmt: skip
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings))
    program = Path(__file__).parents[2] / "ktserve" / "__main__.py"
    for arguments in commands:
        done = subprocess.run(
            [sys.executable, str(program), "train", str(tmp_path / "run.yaml"), *arguments], capture_output=True,
            text=True,
        )  # fmt: skip
        assert done.returncode == 0 and not done.stderr, done.stderr
        ours = ("experts: ", "data: ", "step ", "adapter written: ")
        assert all(line.startswith(ours) or "parameters are trained" in line for line in done.stdout.splitlines())
