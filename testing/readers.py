"""Adapters are read as in service, but by processes that all engines of this one share: those of an engine's own import
torch once more."""

from __future__ import annotations

import atexit
from collections.abc import Callable

from engine.lora.adapter import AdapterWeights
from engine.lora.budget import AdapterSize
from engine.lora.reading.process import AdapterReader, ReadRequest

_READER = AdapterReader()
atexit.register(_READER.close)


class SharedReader:
    """As engine.lora.reads.Reader. A read that is in progress goes on when it is closed."""

    def read(
        self, request: ReadRequest, make_room: Callable[[AdapterSize], None] = lambda size: None
    ) -> AdapterWeights:
        return _READER.read(request, make_room)

    def close(self) -> None:
        """Others go on."""
