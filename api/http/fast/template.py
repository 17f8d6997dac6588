"""Events that differ in a text alone."""

from __future__ import annotations

import uuid
from collections.abc import Callable

import msgspec

from api.http import fast

_PLACE = uuid.uuid4().hex  # stands in a sample for the text; no client can send it
_encode = msgspec.json.Encoder().encode


class EventTemplate:
    """Events of which a text alone differs, and the number of the choice: `sample(index, text)` makes one. What stands
    around the text is kept, so an event is one join."""

    def __init__(self) -> None:
        self._around: dict[int, list[bytes]] = {}

    def event(self, index: int, text: str, sample: Callable[[int, str], bytes]) -> bytes:
        """`sample` is always the same: kept here, a formatter's own would be a cycle that only the collector breaks."""
        if not fast.ENABLED:
            return sample(index, text)
        around = self._around.get(index)
        if around is None:
            around = self._around[index] = sample(index, _PLACE).split(_encode(_PLACE))
        return _encode(text).join(around)
