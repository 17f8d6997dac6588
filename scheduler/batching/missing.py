"""Blocks that running requests lack for tokens that they have."""

from __future__ import annotations

from scheduler.core import Core
from scheduler.request import Request, Status


class Missing:
    """Counted for one step, while it is put together. The sum is counted whole when it is asked for first, and from
    then on for requests of which `changed` says that they got rows or blocks, began to run or were preempted."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._counted: dict[Request, int] | None = None
        self._changed: list[Request] = []
        self._sum = 0

    def of(self, request: Request) -> int:
        return max(0, self._core.blocks.blocks_for(request.num_tokens) - len(request.blocks))

    def changed(self, request: Request) -> None:
        if self._counted is not None:
            self._changed.append(request)

    def total(self) -> int:
        """Of all running requests."""
        if self._counted is None:
            self._counted = {request: self.of(request) for _, _, request in self._core.running}
            self._sum = sum(self._counted.values())
        for request in self._changed:
            now = self.of(request) if request.status is Status.RUNNING else 0
            self._sum += now - self._counted.get(request, 0)
            self._counted[request] = now
        self._changed.clear()
        return self._sum
