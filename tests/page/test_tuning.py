"""The view of fine-tuning, over a fake engine whose runs stop at their fourth step until a gate opens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("selenium", reason="selenium is not installed")

from testing.page.browser import Browser, Keys
from tests.api.conftest import Running
from tests.page.test_playground import ask

ROWS = [[{"role": "user", "content": f"Number {n}?"}, {"role": "assistant", "content": "Yes."}] for n in range(8)]
LOSS = "document.querySelector('#losses')"


def create(echo: Running, suffix: str, rows: list = ROWS) -> str:
    """A job of six steps."""
    data = b"".join(json.dumps({"messages": row}).encode() + b"\n" for row in rows)
    file = echo.openai.files.create(file=("talks.jsonl", data), purpose="fine-tune").id
    values = {"n_epochs": 3, "batch_size": 4}
    return echo.openai.fine_tuning.jobs.create(
        model="tiny",
        training_file=file,
        validation_file=file,
        suffix=suffix,
        metadata={"<b>": "<img src=x onerror=1>"},
        method={"type": "supervised", "supervised": {"hyperparameters": values}},
    ).id


def press(page: Browser, name: str) -> None:
    next(button for button in page.all("#job-actions button") if button.text == name).click()


def named(page: Browser, status: str) -> None:
    page.until(lambda: page.text("#job-name").endswith(f": {status}"), f"the job is not {status}")


def test_a_job_from_its_steps_to_a_chat_with_its_checkpoint(page: Browser, echo: Running) -> None:
    gate = Path(echo.log.with_name("tuning_gate"))
    create(echo, "bell")
    page.click("#tab-tuning")
    page.until(lambda: "Step 3/6: training loss=1.0000" in page.text("#events"), "no events")
    named(page, "running")
    assert "n_epochs 3, batch_size 4" in page.text("#job-facts") and "<b>=<img" in page.text("#job-facts")
    assert page.text("#loss-text") == "Step 3: training 1.0000, validation 0.7500, 50.0 % of training tokens right"
    page.script(f"{LOSS}.focus()")
    page.press(Keys.HOME)
    assert page.text("#loss-text").startswith("Step 1: training 3.0000, validation 1.5000")
    page.press(Keys.ARROW_RIGHT)
    assert "whole validation file 1.0000" in page.text("#loss-text")
    drawn = f"return new Set({LOSS}.getContext('2d').getImageData(0, 0, {LOSS}.width, {LOSS}.height).data).size"
    assert page.script(drawn) > 10, "the chart is empty"
    assert len(page.all("#checkpoints button")) == 1
    press(page, "Pause")
    named(page, "paused")
    press(page, "Resume")
    page.until(lambda: "Fine-tuning job resumed" in page.text("#events"), "it was not resumed")
    gate.touch()
    named(page, "succeeded")
    gate.unlink()
    assert not page.all("#job-actions button")
    page.until(lambda: len(page.all("#checkpoints button")) == 3, "the checkpoints are not listed")
    assert page.text("#loss-text").startswith("Step 6") and page.text("#job-rows").count("bell") >= 1
    model = echo.openai.fine_tuning.jobs.list().data[0].fine_tuned_model
    page.click(f"[aria-label='Chat with {model} beside the base']")
    page.until(lambda: page.find("#chat").is_displayed(), "the playground did not open")
    chosen = "return [...document.querySelectorAll('.column select')].map((select) => select.value)"
    assert page.script(chosen) == ["tiny", model]
    ask(page, "hello")
    assert page.text(".answer .text").count("hello") == 2, "two answers"
    page.click("#tab-tuning")
    page.click("#checkpoints button")
    page.confirm(False)
    page.click("#tab-chat")
    assert len(page.all(".answer")) == 2, "the conversation is kept"


def test_jobs_are_chosen_and_cancelled(page: Browser, echo: Running) -> None:
    create(echo, "first")
    bad = create(echo, "broken", [[{"role": "user", "content": "<script>"}]])
    page.click("#tab-tuning")
    page.until(lambda: {"first", "broken"} <= set(page.text("#job-rows button").split()), "the jobs are not listed")
    page.click(f"[data-job='{bad}']")
    named(page, "failed")
    assert "line 1" in page.text("#job-facts") and not page.all("#checkpoints button")
    assert page.all("#events .bad"), "what is wrong is not marked"
    next(button for button in page.all("#job-rows button") if button.text == "first").click()
    page.until(lambda: page.text("#job-name").startswith("first: running"), "the other job is not shown")
    press(page, "Cancel")
    page.confirm(True)
    named(page, "cancelled")
    assert not page.all("#job-actions button")
