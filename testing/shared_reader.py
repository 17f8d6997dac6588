"""Adapters are parsed as in service, but by processes that all engines of this one share: those of an engine's own
import torch once more."""

from __future__ import annotations

import atexit

from engine.lora.reader_process import ParsedAdapter, ParseRequest, ReaderProcesses

_PROCESSES = ReaderProcesses()
atexit.register(_PROCESSES.close)


class SharedReader:
    """An `engine.lora.loader.AdapterReader`. What is in progress goes on when it is closed."""

    def parse(self, request: ParseRequest) -> ParsedAdapter:
        return _PROCESSES.parse(request)

    def close(self) -> None:
        """Others go on."""
