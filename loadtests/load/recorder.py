"""Answers of all users, from all locust workers."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import gevent
from locust.env import Environment
from locust.runners import MasterRunner, WorkerRunner

from loadtests.load.records import Answer

_LAST_REPORTS_S = 60.0


class Recorder:
    """Listens to an environment's request events. On a locust worker what it has goes to the master with each report;
    `answers` of a master are those of all workers."""

    def __init__(self, environment: Environment) -> None:
        self.answers: list[Answer] = []
        self._environment = environment
        self._idle: set[str] = set()
        environment.events.request.add_listener(self._seen)
        environment.events.report_to_master.add_listener(self._report)
        environment.events.worker_report.add_listener(self._reported)

    def _seen(self, context: dict[str, Any] | None = None, **_: Any) -> None:
        answer = (context or {}).get("answer")
        if isinstance(answer, Answer):
            self.answers.append(answer)

    def _report(self, client_id: str, data: dict[str, Any]) -> None:
        if isinstance(self._environment.runner, WorkerRunner):
            data["answers"] = [asdict(answer) for answer in self.answers]
            self.answers.clear()

    def _reported(self, client_id: str, data: dict[str, Any]) -> None:
        self.answers += [Answer(**row) for row in data.get("answers", ())]
        if not data.get("user_count"):
            self._idle.add(client_id)

    def settle(self) -> None:
        """After the runner was stopped: wait until each worker has reported with no user left. Raises TimeoutError."""
        runner = self._environment.runner
        if not isinstance(runner, MasterRunner):
            return
        self._idle.clear()
        wait_until(lambda: self._idle >= set(runner.clients), _LAST_REPORTS_S, "the workers' last reports")


def wait_until(check: Callable[[], object], within_s: float, what: str) -> None:
    """Let greenlets run until `check` is true. Raises TimeoutError."""
    deadline = time.monotonic() + within_s
    while not check():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} did not come within {within_s:g} s")
        gevent.sleep(0.05)
