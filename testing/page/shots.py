"""The screenshots of docs/page.md: `python -m testing.page.shots URL`, of a server with the demo model, --fine-tuning,
--adapter-root, --measure-bandwidth and the admin key "chief"."""

from __future__ import annotations

import base64
import json
import sys
import threading
import time
from pathlib import Path

import httpx

from testing.page.browser import Browser, Keys, browser
from testing.waiting import PATIENCE_S

DOCS = Path(__file__).parents[2] / "docs" / "page"
STORY = "Tell me a story about a fox."
BELL = "The harbour bell rings eleven times."


def shoot(page: Browser, name: str) -> None:
    picture = page.driver.execute_cdp_cmd("Page.captureScreenshot", {"format": "png"})["data"]
    (DOCS / f"{name}.png").write_bytes(base64.b64decode(picture))


def ask(page: Browser, text: str) -> None:
    page.fill("#prompt", text)
    page.press(Keys.ENTER)
    ended = "return !document.querySelector('.answer.working') && !!document.querySelector('.answer')"
    page.until(lambda: page.script(ended), "the answer did not end")


def compare(page: Browser) -> None:
    page.click("#add-column")
    page.click("#add-column")
    ask(page, "What is the capital of France?")
    ask(page, STORY)


def probabilities(page: Browser) -> None:
    page.click("#open-settings")
    page.click("[data-field=logprobs]")
    ask(page, STORY)
    page.script("document.querySelectorAll('.tokens span')[9].focus()")


def live(page: Browser, url: str) -> None:
    """With a dozen long answers on their way."""
    models = [entry["id"] for entry in httpx.get(f"{url}/v1/models").json()["data"]]
    stop = threading.Event()

    def chat(number: int) -> None:
        body = {"model": models[number % len(models)], "messages": [{"role": "user", "content": STORY}]}
        while not stop.is_set():
            httpx.post(
                f"{url}/v1/chat/completions", json={**body, "max_tokens": 400, "ignore_eos": True}, timeout=PATIENCE_S
            )

    threads = [threading.Thread(target=chat, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    page.find("#tab-live").click()
    shown = "return document.querySelectorAll('#rows tr').length >= 3"
    page.until(lambda: page.script(shown), "no batch is shown")
    time.sleep(25)  # for the lines over time
    page.until(lambda: page.script(shown), "no batch is shown")
    shoot(page, "live")
    stop.set()
    for thread in threads:
        thread.join()


def tuning(page: Browser, url: str) -> None:
    """A job that has just ended."""
    with httpx.Client(base_url=url, timeout=PATIENCE_S) as client:

        def upload(count: int, question: str) -> str:
            rows = [
                {"messages": [{"role": "user", "content": f"{question} {n}?"}, {"role": "assistant", "content": BELL}]}
                for n in range(count)
            ]
            data = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
            files = {"file": ("talks.jsonl", data)}
            return str(client.post("/v1/files", data={"purpose": "fine-tune"}, files=files).json()["id"])

        body = {
            "model": "demo",
            "training_file": upload(24, "What does the bell say, number"),
            "validation_file": upload(6, "Tell me what the bell says, number"),
            "suffix": "bell",
            "hyperparameters": {"n_epochs": 10, "batch_size": 4},
        }
        client.post("/v1/fine_tuning/jobs", json=body).raise_for_status()
    page.click("#tab-tuning")
    page.until(lambda: page.text("#job-name") == "bell: succeeded", "the job did not end")
    page.until(lambda: page.all("#checkpoints button"), "no checkpoints")


def adapters(page: Browser) -> None:
    page.script("sessionStorage.setItem('ktserve.admin', 'chief')")
    page.driver.refresh()
    page.click("#tab-adapters")
    page.until(lambda: page.all("#adapter-rows button"), "no adapters")


def main(url: str) -> None:
    DOCS.mkdir(exist_ok=True)
    with browser() as page:
        page.open(url)
        compare(page)
        shoot(page, "compare")
        page.open(url, dark=True)
        probabilities(page)
        shoot(page, "probabilities")
        page.open(url, dark=True, height=1250)
        live(page, url)
        page.open(url, height=640)
        adapters(page)
        shoot(page, "adapters")
        page.open(url, height=1000)
        tuning(page, url)
        shoot(page, "tuning")
        page.open(url, 390, 844)
        compare(page)
        shoot(page, "phone")


if __name__ == "__main__":
    main(sys.argv[1])
