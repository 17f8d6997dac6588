"""Which experts were hot, as a file: so that a server begins with those, and not with whichever come first.

{"version": 1, "experts": E, "layers": {"0": [uses a step, one per expert], ...}}
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from engine.errors import UserError

log = logging.getLogger("ktserve")
INTERVAL_S = 300.0  # between two writings
_VERSION = 1


class Profile:
    """Of the experts of `layers`. Read once; written by a thread while steps run, and at the end."""

    def __init__(self, path: Path, layers: Sequence[int], experts: int) -> None:
        """UserError if the file's folder is not there."""
        self._path = path
        self._layers = [str(layer) for layer in layers]
        self._experts = experts
        self._written_s = time.monotonic()
        self._thread: threading.Thread | None = None
        self.known = False  # whether there was one to read
        if not path.absolute().parent.is_dir():
            raise self._refusal("its folder does not exist")

    def read(self) -> torch.Tensor | None:
        """Uses a step, float32 [layers * experts]; None if there is no such file. UserError if it is no profile, or of
        another model."""
        try:
            content: Any = json.loads(self._path.read_text())
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise self._refusal(f"cannot be read: {error}") from error
        if not isinstance(content, dict) or content.get("version") != _VERSION:
            raise self._refusal(f"is no profile of version {_VERSION}")
        held = content.get("layers")
        if content.get("experts") != self._experts or not isinstance(held, dict) or set(held) != set(self._layers):
            raise self._refusal(
                f"is of another model; this one has {self._experts} experts in each of {len(self._layers)} layers"
            )
        try:
            uses = torch.tensor([held[name] for name in self._layers], dtype=torch.float32)
        except (TypeError, ValueError) as error:
            raise self._refusal("holds something else than numbers") from error
        if uses.shape != (len(self._layers), self._experts) or not bool((uses.isfinite() & (uses >= 0)).all()):
            raise self._refusal("does not hold a number, at least 0, for each expert")
        self.known = True
        return uses.flatten()

    @property
    def due(self) -> bool:
        return time.monotonic() - self._written_s > INTERVAL_S

    def write(self, uses: torch.Tensor) -> None:
        """On a thread of its own, unless the one before is still at it."""
        self._written_s = time.monotonic()
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._write, args=(uses.tolist(),), name="expert-profile")
            self._thread.start()

    def close(self, uses: torch.Tensor) -> None:
        if self._thread is not None:
            self._thread.join()
        self._write(uses.tolist())

    def _write(self, uses: list[float]) -> None:
        """All of it or nothing; a disk that is full ends no engine."""
        parts = {name: uses[i * self._experts : (i + 1) * self._experts] for i, name in enumerate(self._layers)}
        rounded = {name: [round(use, 4) for use in part] for name, part in parts.items()}
        partial = self._path.with_name(f"{self._path.name}.{os.getpid()}.partial")
        try:
            partial.write_text(json.dumps({"version": _VERSION, "experts": self._experts, "layers": rounded}))
            partial.replace(self._path)
        except OSError as error:
            log.error("--expert-profile %s: not written: %s", self._path, error)

    def _refusal(self, why: str) -> UserError:
        return UserError(f"--expert-profile {self._path}: {why}; name another file, or delete it", "expert_profile")
