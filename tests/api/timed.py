"""`ktserve` whose event loop says, in the file $TIMED while there is one, what CPU time its longest callback took, and
which it was. The loop is asyncio's own: uvloop's does not show its callbacks."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from contextlib import suppress
from pathlib import Path

from api.cli import main as command_line

_NOTICED_S = 0.005


def measure(place: Path) -> None:
    run = asyncio.Handle._run

    def timed(self: asyncio.Handle) -> None:
        began = time.thread_time()
        run(self)
        took = time.thread_time() - began
        with suppress(FileNotFoundError):
            if took > _NOTICED_S and took > float(place.read_text().split()[0]):
                place.write_text(f"{took} {self._callback!r}")

    asyncio.Handle._run = timed  # type: ignore[method-assign]
    command_line.uvloop.run = asyncio.run  # type: ignore[assignment]


if __name__ == "__main__":
    measure(Path(os.environ["TIMED"]))
    sys.exit(command_line.main())
