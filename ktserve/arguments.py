"""Arguments of commands that the command line hands over to: a mistake is one line."""

from __future__ import annotations

import argparse
from typing import NoReturn


class OneLineParser(argparse.ArgumentParser):
    """Exit status 2 behind `error: ...` and how to find out what is taken, without the usage of all flags."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message} (try: {self.prog} --help)\n")
