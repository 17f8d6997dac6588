"""What a server of our own holds while a scenario runs: flat or not."""

from __future__ import annotations

import time

import gevent
import psutil

from ktserve.openai_client import AnswerError, Server
from loadtests.chaos.watch import Held, engine_of, held_of

_SPARE_MIB = 48.0
_MEMORY_FACTOR = 1.25
_SPARE = 16  # descriptors, threads
_REST_S = 60.0


class Watch:
    """`seen`: (time of day, what was held), every `every_s` until `end`."""

    def __init__(self, pid: int, api: Server, every_s: float) -> None:
        self._server, self._api = psutil.Process(pid), api
        self.seen: list[tuple[float, Held]] = []
        self.engine_pids: set[int] = set()
        self._greenlet = gevent.spawn(self._watch, every_s)

    def _watch(self, every_s: float) -> None:
        while True:
            self.look()
            gevent.sleep(every_s)

    def look(self) -> Held | None:
        """None while there is no engine."""
        try:
            engine = engine_of(self._server)
            if engine is None:
                return None
            self.engine_pids.add(engine.pid)
            held = held_of(self._server, engine, self._api.get("/metrics"))
        except (OSError, AnswerError, psutil.Error):
            return None
        self.seen.append((time.time(), held))
        return held

    def end(self) -> list[str]:
        """What has grown: the end, at rest, against the first third (which warms up). Empty if nothing has."""
        self._greenlet.kill()
        deadline = time.monotonic() + _REST_S
        while time.monotonic() < deadline:
            last = self.look()
            if last is not None and not (last.running or last.waiting or last.blocks_used or last.slots_used):
                break
            gevent.sleep(0.2)
        return [*self._engines(), *grown([held for _, held in self.seen])]

    def _engines(self) -> list[str]:
        return [] if len(self.engine_pids) == 1 else [f"{len(self.engine_pids)} engines instead of one"]


def grown(seen: list[Held]) -> list[str]:
    """What the last of `seen` holds beyond the most of its first third. Fewer than four looks are reported."""
    if len(seen) < 4:
        return [f"{len(seen)} looks at the server, at least 4 are needed"]
    first, last = [held.rows() for held in seen[: max(2, len(seen) // 3)]], seen[-1].rows()
    rest = ("running", "waiting", "blocks_used", "slots_used")
    found = [f"{name} is {last[name]:g} at the end" for name in rest if last[name]]
    for name in ("api_mib", "engine_mib"):
        bound = max(row[name] for row in first) * _MEMORY_FACTOR + _SPARE_MIB
        if last[name] > bound:
            found.append(f"{name} grew to {last[name]:.0f}, at most {bound:.0f}")
    for name in ("files", "threads"):
        bound = max(row[name] for row in first) + _SPARE
        if last[name] > bound:
            found.append(f"{name} grew to {last[name]:g}, at most {bound:g}")
    return found


def held_table(seen: list[tuple[float, Held]], shown: int = 7) -> list[str]:
    """Lines of a Markdown table: what was held at so many moments, the first and the last among them."""
    if not seen:
        return []
    names = list(seen[0][1].rows())
    step = (len(seen) - 1) / max(1, shown - 1)
    chosen = [seen[i] for i in sorted({round(i * step) for i in range(shown)})]
    lines = [f"| minute | {' | '.join(names)} |", "|---" * (1 + len(names)) + "|"]
    for when, held in chosen:
        lines.append(
            f"| {(when - seen[0][0]) / 60:.1f} | {' | '.join(f'{value:.0f}' for value in held.rows().values())} |"
        )
    return lines
