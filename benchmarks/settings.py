"""The engine's settings as `ktserve serve` has them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from api.cli.options import Parser, add_flags, resolve
from api.config import ServeConfig
from engine.config import EngineConfig
from ktserve.settings import settings_of


def served_config(model: Path, flags: Sequence[str]) -> EngineConfig:
    """What `ktserve serve MODEL FLAGS` gives its engine."""
    parser = Parser()
    add_flags(parser, settings_of(EngineConfig) + settings_of(ServeConfig))
    return resolve(parser.parse_args(["--model", str(model), *flags]), {})[0]
