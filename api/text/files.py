"""JSON files of a model folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from engine.errors import ModelFileError


def read_json(path: Path) -> dict[str, Any]:
    """An object from a JSON file. Raises ModelFileError naming the file."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, UnicodeDecodeError, msgspec.DecodeError) as error:
        raise ModelFileError(f"{path}: {error}", "model") from error
