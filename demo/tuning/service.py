"""Two tenants' fine-tuning jobs and a loop of reinforcement learning, beside chats, on one copy of the demo model.

    python -m demo.tuning.service           # make train-service-demo

Prints each round's reward and the jobs' ends; DIR/reward.svg has a plot. The exit status is 1 if a job has not
succeeded, a chat was refused, or the reward has not risen.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import openai

from demo.tuning.data import talks
from demo.tuning.policy import ASKED, WORD, rounds
from demo.tuning.server import BASE, serving
from ktserve.plot import Line, plot

OUT = Path("build/train-service-demo")
KEYS = ("harbour", "lighthouse")
_STYLES = dict(zip(KEYS, ("pirate", "json"), strict=True))
_RISE = 0.2  # of the mean reward, from the first three rounds to the last three


class Chats:
    """One chat after another, in a thread, until `close`."""

    def __init__(self, url: str) -> None:
        self.answered = self.refused = 0
        self._client = openai.OpenAI(base_url=f"{url}/v1", api_key=KEYS[0], max_retries=0)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._chat)
        self._thread.start()

    def _chat(self) -> None:
        while not self._over.wait(0.2):
            try:
                self._client.chat.completions.create(
                    model=BASE, messages=[{"role": "user", "content": "What is 7 + 8?"}], max_tokens=16
                )
                self.answered += 1
            except openai.OpenAIError as error:
                self.refused += 1
                print(f"a chat was refused: {error}")

    def close(self) -> None:
        self._over.set()
        self._thread.join()


def started(url: str, key: str, examples: int, epochs: int) -> str:
    """A job of a tenant: its id."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key=key)
    rows = "".join(json.dumps({"messages": row["messages"]}) + "\n" for row in talks(_STYLES[key], examples))
    file = client.files.create(file=("talks.jsonl", io.BytesIO(rows.encode())), purpose="fine-tune")
    method: Any = {
        "type": "supervised",
        "supervised": {"hyperparameters": {"n_epochs": epochs, "batch_size": 8}},
    }
    made = client.fine_tuning.jobs.create(
        model=BASE,
        training_file=file.id,
        suffix=_STYLES[key],
        seed=1,
        method=method,
    )
    return made.id


def ended(url: str, key: str, job_id: str) -> str:
    """The job's status, once it has ended."""
    jobs = openai.OpenAI(base_url=f"{url}/v1", api_key=key).fine_tuning.jobs
    while (job := jobs.retrieve(job_id)).status not in ("succeeded", "failed", "cancelled"):
        time.sleep(0.5)
    why = "" if job.error is None else f", {job.error.message}"
    print(f"{key}: {job.status}, {job.fine_tuned_model}, {job.trained_tokens} tokens{why}")
    return job.status


def drawn(rewards: Sequence[float]) -> str:
    """Mean rewards by round, as SVG."""
    line = Line("", list(enumerate(rewards, 1)))
    return plot([line], title=f"stories with a {WORD}", x="round", y="mean reward")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make train-service-demo")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--answers", type=int, default=32, help="in a round")
    parser.add_argument("--examples", type=int, default=64, help="of each job")
    parser.add_argument("--epochs", type=int, default=1, help="of each job")
    args = parser.parse_args(argv)
    OUT.mkdir(parents=True, exist_ok=True)
    keys = OUT / "keys"
    keys.write_text("".join(f"{key}={key}\n" for key in KEYS))
    flags = ["--fine-tuning", "--training-share", "0.3", "--data-dir", str(OUT / "data"), "--api-keys-file", str(keys)]
    with serving(OUT / "server.log", flags) as server:
        url = server.url
        chats = Chats(url)
        try:
            jobs = {key: started(url, key, args.examples, args.epochs) for key in KEYS}
            question = {"model": BASE, "messages": [{"role": "user", "content": ASKED}]}
            headers = {"Authorization": f"Bearer {KEYS[0]}"}
            asked = httpx.post(f"{url}/tokenize", json=question, headers=headers).raise_for_status()
            rewards = []
            for found in rounds(url, KEYS[0], BASE, asked.json()["tokens"], args.rounds, args.answers):
                rewards.append(found.reward)
                print(f"round {len(rewards)}: {found.reward:.2f} of the stories have a {WORD}")
            statuses = [ended(url, key, job_id) for key, job_id in jobs.items()]
        finally:
            chats.close()
    (OUT / "reward.svg").write_text(drawn(rewards))
    rise = sum(rewards[-3:]) / 3 - sum(rewards[:3]) / 3
    print(f"the mean reward rose by {rise:.2f}; {chats.answered} chats were answered, {chats.refused} refused")
    return int(set(statuses) != {"succeeded"} or chats.refused > 0 or rise < _RISE)


if __name__ == "__main__":
    sys.exit(main())
