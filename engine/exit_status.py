"""How a command of the engine's process ends."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from engine.errors import UserError


def exit_status(command: Callable[[], int]) -> int:
    """What `command` returns; 1 for a mistake of the user's, said in one line; 0 if the reader of the output has seen
    enough (`| head`)."""
    try:
        return command()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
