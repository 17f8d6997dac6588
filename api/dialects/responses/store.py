"""Responses that were asked to be kept, for those that continue them."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from api.errors import ApiError

_MOST = 4096  # responses
_MOST_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Stored:
    """`body`: the response as it was given; `messages`: JSON of the conversation so far, its answer included."""

    tenant: str
    body: bytes
    messages: bytes

    @property
    def size(self) -> int:
        return len(self.body) + len(self.messages)


class ResponseStore:
    """In memory, bounded: the least recently used go first. A tenant finds its own alone."""

    def __init__(self, most: int = _MOST, most_bytes: int = _MOST_BYTES) -> None:
        self._most, self._most_bytes = most, most_bytes
        self._kept: OrderedDict[str, Stored] = OrderedDict()
        self._bytes = 0

    def keep(self, response_id: str, stored: Stored) -> None:
        if stored.size > self._most_bytes:
            return
        self._drop(response_id)
        self._kept[response_id] = stored
        self._bytes += stored.size
        while len(self._kept) > self._most or self._bytes > self._most_bytes:
            self._drop(next(iter(self._kept)))

    def find(self, tenant: str, response_id: str, param: str | None = None) -> Stored:
        """Raises ApiError 404."""
        stored = self._kept.get(response_id)
        if stored is None or stored.tenant != tenant:
            raise ApiError(404, f"Response with id {response_id!r} not found.", param=param, code="response_not_found")
        self._kept.move_to_end(response_id)
        return stored

    def delete(self, tenant: str, response_id: str) -> None:
        """Raises ApiError 404."""
        self.find(tenant, response_id)
        self._drop(response_id)

    def _drop(self, response_id: str) -> None:
        stored = self._kept.pop(response_id, None)
        if stored is not None:
            self._bytes -= stored.size
