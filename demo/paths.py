"""Where the demo model's files lie in the repository."""

from __future__ import annotations

from pathlib import Path
from typing import Final

HERE: Final = Path(__file__).resolve().parent
MODEL_FILE: Final = "tiny-kite-q8_0.gguf"
ADAPTERS: Final = ("pirate", "json")


def demo_model() -> Path:
    """The GGUF file. Raises FileNotFoundError, which says how to make it."""
    path = HERE / "model" / MODEL_FILE
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: make it with `python -m demo.train` and `python -m demo.export`")
    return path


def demo_adapters() -> dict[str, Path]:
    """The adapters' folders by name. Raises FileNotFoundError for a missing one."""
    found = {name: HERE / "adapters" / name for name in ADAPTERS}
    for path in found.values():
        if not (path / "adapter_config.json").is_file():
            raise FileNotFoundError(
                f"{path} is missing: make it with `python -m demo.train` and `python -m demo.export`"
            )
    return found
