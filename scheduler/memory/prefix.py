"""Which blocks hold the KV of which beginnings of prompts."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Callable, Container, Sequence
from typing import NamedTuple

from scheduler.request import AdapterKey, Request

Hash = Callable[[bytes], bytes]


def blake2(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=32).digest()


class Content(NamedTuple):
    """What a full block holds. Two blocks of equal content have equal KV: all of it is compared on a hit. On disk the
    hash alone stands for it: 256 bits, of which nobody finds two inputs."""

    hash: bytes
    parent: bytes  # hash of the block before, or of the owner
    ids: bytes  # token ids, int64
    owner: str  # Request.cache_owner
    salt: str
    source: AdapterKey | bytes  # Request.cache_source


class PrefixCache:
    """Findable blocks by chained hash over (parent hash, token ids), rooted in (source, owner, salt).

    None of these ever sees another's blocks. A hash collision costs a hit, never a wrong one.
    `unsaved` are those of them that are computed and could be written to disk, in the order in which they became so.
    """

    def __init__(self, block_size: int, hash: Hash = blake2) -> None:
        self._block_size = block_size
        self._hash = hash
        self._block_of: dict[bytes, int] = {}
        self._content: dict[int, Content] = {}
        self.unsaved: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._content)

    def __contains__(self, block: int) -> bool:
        return block in self._content

    @property
    def hashes(self) -> Container[bytes]:
        """Of what is findable."""
        return self._block_of

    def content(self, request: Request, index: int) -> Content:
        """Of the request's block `index`, whose tokens are all known."""
        hashes = request.block_hashes
        ids = array("q", _tokens(request, index * self._block_size, (index + 1) * self._block_size)).tobytes()
        if index < len(hashes):
            parent = hashes[index - 1] if index else self._root(request)
        else:
            if index > len(hashes):
                self.content(request, index - 1)
            parent = hashes[index - 1] if index else self._root(request)
            hashes.append(self._hash(parent + ids))
        return Content(hashes[index], parent, ids, request.cache_owner, request.cache_salt, request.cache_source)

    def find(self, content: Content) -> int | None:
        block = self._block_of.get(content.hash)
        return block if block is not None and self._content[block] == content else None

    def content_of(self, block: int) -> Content | None:
        """What a findable block holds."""
        return self._content.get(block)

    def insert(self, block: int, content: Content) -> bool:
        """False if an equal (or colliding) block is findable already: the first one stays."""
        if content.hash in self._block_of or block in self._content:
            return False
        self._block_of[content.hash] = block
        self._content[block] = content
        return True

    def discard(self, block: int) -> None:
        content = self._content.pop(block, None)
        if content is not None:
            del self._block_of[content.hash]
            self.unsaved.pop(block, None)

    def problems(self) -> list[str]:
        if len(self._block_of) != len(self._content):
            return [f"{len(self._block_of)} hashes for {len(self._content)} findable blocks"]
        return [
            f"block {block} is findable as another"
            for block, content in self._content.items()
            if self._block_of.get(content.hash) != block
        ] + [f"block {block} is to be saved but not findable" for block in self.unsaved if block not in self._content]

    def _root(self, request: Request) -> bytes:
        return self._hash(repr((request.cache_source, request.cache_owner, request.cache_salt)).encode())


def _tokens(request: Request, start: int, end: int) -> Sequence[int]:
    split = len(request.prompt)
    if end <= split:
        return request.prompt[start:end]
    return request.prompt[start:split] + request.output[max(0, start - split) : end - split]
