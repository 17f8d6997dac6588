"""JSON files of a model folder. Torch-free."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from engine.errors import ModelFileError
from engine.files.regular import read_bytes


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises ModelFileError if it cannot be read or is no object."""
    try:
        value = json.loads(read_bytes(path))
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"{path}: not sound JSON: {error}", "model") from error
    if not isinstance(value, dict):
        raise ModelFileError(f"{path}: not a JSON object", "model")
    return value
