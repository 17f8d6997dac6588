"""`python -m ktserve training-plan CONFIG.yaml [key=value ...]`: a run's memory plan. People use `ktserve plan`."""

from __future__ import annotations

import os
import sys

from engine.errors import UserError
from training.config import load_config


def main(arguments: list[str]) -> int:
    """Prints the plan. Exit status: 0; 1 for a mistake of the user's or a run that does not fit, said in one line."""
    try:
        config = load_config(arguments[0], arguments[1:])
        from training.memory.plan import plan_training  # imports torch: settings are checked first

        plan = plan_training(config)
        print(plan.render())
        plan.check(config.force_memory_plan)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader has seen enough, `| head` for instance
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0
