"""JSON files of a model folder. Torch-free."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from engine.errors import ModelFileError


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises ModelFileError if it cannot be read or is no object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelFileError(f"{path}: cannot be read: {error.strerror}", "model") from error
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"{path}: not sound JSON: {error}", "model") from error
    if not isinstance(value, dict):
        raise ModelFileError(f"{path}: not a JSON object", "model")
    return value
