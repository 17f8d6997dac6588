"""`python -m ktserve training-plan CONFIG.yaml [key=value ...]`: a run's memory plan. People use `ktserve plan`."""

from __future__ import annotations

from engine.exit_status import exit_status
from training.config import load_config


def main(arguments: list[str]) -> int:
    """Prints the plan. Exit status: 0; 1 for a mistake of the user's or a run that does not fit, said in one line."""
    return exit_status(lambda: _run(arguments))


def _run(arguments: list[str]) -> int:
    config = load_config(arguments[0], arguments[1:])
    from training.loop.load import started  # imports torch: settings are checked first
    from training.memory.plan import plan_training

    plan = plan_training(started(config)[0])
    print(plan.render())
    plan.check(config.force_memory_plan)
    return 0
