"""Lines from a terminal or a pipe, for a program that must also answer Ctrl-C while it waits for them."""

from __future__ import annotations

import asyncio
import queue
import sys
import termios
import threading
from typing import Any


class Keyboard:
    """Reads on a daemon thread, which a program can leave behind in the middle of a line. As a context manager it
    leaves the terminal as it was."""

    def __init__(self) -> None:
        self.interactive = sys.stdin.isatty()
        self._terminal: list[Any] | None = None
        self._prompts: queue.SimpleQueue[tuple[str, asyncio.Future[str | None]]] = queue.SimpleQueue()
        self._loop = asyncio.get_running_loop()
        threading.Thread(target=self._read, daemon=True, name="keyboard").start()

    def __enter__(self) -> Keyboard:
        if self.interactive:
            self._terminal = termios.tcgetattr(sys.stdin)
        return self

    def __exit__(self, *exc: object) -> None:
        if self._terminal is not None:
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, self._terminal)

    async def line(self, prompt: str) -> str | None:
        """The next line, None at the end. The prompt is shown to people, not to pipes."""
        future: asyncio.Future[str | None] = self._loop.create_future()
        self._prompts.put((prompt, future))
        return await future

    def _read(self) -> None:
        if self.interactive:
            import_readline()
        while True:
            prompt, future = self._prompts.get()
            line = self._one(prompt)
            try:
                self._loop.call_soon_threadsafe(_set, future, line)
            except RuntimeError:  # the loop has ended meanwhile
                return

    def _one(self, prompt: str) -> str | None:
        if not self.interactive:
            text = sys.stdin.readline()
            return text.rstrip("\n") if text else None
        try:
            return input(prompt)
        except EOFError:
            return None


def _set(future: asyncio.Future[str | None], line: str | None) -> None:
    if not future.done():
        future.set_result(line)


def import_readline() -> None:
    """Gives input() editing and a history, where Python has it."""
    try:
        import readline  # noqa: F401
    except ImportError:
        return
