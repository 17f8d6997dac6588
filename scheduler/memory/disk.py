"""KV blocks on disk: which are to be written, which are there, and which are on their way back.

computed --Save--> stored --Fetch--> findable in memory again, in this process or a later one
                      `--Drop, least recently used first--> gone

A block is written as soon as it is complete, so that it is there already when memory evicts it; what is evicted
sooner is lost. Equal keys are equal content, so nothing is ever overwritten.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from scheduler.memory.blocks import BlockManager, Match
from scheduler.memory.prefix import Content
from scheduler.plan import DiskOrder, Drop, Fetch, Save, StepPlan
from scheduler.request import Request

_MOST_SAVES, _MOST_FETCHES = 64, 4  # at a time; orders are taken once a step, whose prompts complete so many blocks
_SAVES_SHARE = 8  # and at most one block in so many
_PATIENCE_S = 30.0  # of a request that waits for blocks, at most
_LEARNT = 0.2  # weight of the newest step


@dataclass(eq=False)
class _Coming:
    """Blocks that are being read. `held` are found ones around them, kept until all can be found together."""

    contents: list[Content]
    blocks: list[int]
    held: list[int]
    waiting: list[Request]
    until: float  # nobody waits any longer


class DiskBlocks:
    """`budget_bytes` for files of `block_bytes` each; `stored` are key and size of those that are there, least recently
    used first. Writes Request.held and Request.fetched.

    A request that is about to run waits for what continues its match on disk, but at most as long as computing that
    would take at the speed of the last prefill steps: then it runs, and whoever comes next may find the blocks.
    """

    def __init__(
        self, blocks: BlockManager, budget_bytes: int, block_bytes: int, stored: Iterable[tuple[bytes, int]]
    ) -> None:
        self._blocks = blocks
        self._budget = budget_bytes
        self._block_bytes = block_bytes
        self._stored = OrderedDict(stored)
        self._bytes = sum(self._stored.values())  # of what is stored and what is being written
        self._most_saves = min(_MOST_SAVES, -(-blocks.num_blocks // _SAVES_SHARE))
        self._saving: dict[bytes, int] = {}  # the blocks, each with a holder of ours
        self._coming: dict[Fetch, _Coming] = {}
        self._orders: list[DiskOrder] = []
        self._writes = True
        self._prefill_s: float | None = None  # of a token
        self.num_saved = 0
        self.num_dropped = 0  # for want of space
        self.num_lost = 0  # that could not be read
        self.num_fetched = 0
        self._make_room(0)

    @property
    def busy(self) -> bool:
        """Whether something is being written or read, or is to be written."""
        return bool(self._saving or self._coming or self._orders or self._blocks.cache.unsaved)

    def orders(self) -> list[DiskOrder]:
        """What was decided since the last call, in order."""
        cache = self._blocks.cache
        while cache.unsaved and len(self._saving) < self._most_saves:
            block, _ = cache.unsaved.popitem(last=False)
            content = cache.content_of(block)
            if content is None or content.hash in self._stored or content.hash in self._saving:
                continue
            self._make_room(self._block_bytes)
            if self._bytes + self._block_bytes > self._budget:  # others are being written
                cache.unsaved[block] = None
                cache.unsaved.move_to_end(block, last=False)
                break
            self._bytes += self._block_bytes
            self._saving[content.hash] = block
            self._blocks.hold([block])
            self._orders.append(Save(content.hash, block))
        orders, self._orders = self._orders, []
        return orders

    # ---- to the disk

    def offer(self, blocks: Iterable[int]) -> None:
        """Blocks whose content is computed by now."""
        cache = self._blocks.cache
        for block in blocks if self._writes else ():
            content = cache.content_of(block)
            if content is not None and isinstance(content.source, bytes) and content.hash not in self._stored:
                cache.unsaved[block] = None

    def saved(self, key: bytes, ok: bool) -> None:
        """A save has ended. After one that failed there are no more."""
        block = self._saving.pop(key)
        content = self._blocks.cache.content_of(block)
        self._blocks.release([block])
        if ok:
            self._stored[key] = self._block_bytes
            self.num_saved += 1
            if content is None:  # it was taken back meanwhile
                self._drop(key)
            return
        self._bytes -= self._block_bytes
        self._writes = False
        self._blocks.cache.unsaved.clear()

    def touch(self, keys: Iterable[bytes]) -> None:
        """They were used, wherever they were found."""
        for key in keys:
            if key in self._stored:
                self._stored.move_to_end(key)

    def forget(self, keys: Iterable[bytes]) -> None:
        """They are not to be trusted."""
        for key in keys:
            if key in self._stored:
                self._drop(key)

    def keys(self) -> list[bytes]:
        """Of what is stored, least recently used first."""
        return list(self._stored)

    def _make_room(self, num_bytes: int) -> None:
        while self._stored and self._bytes + num_bytes > self._budget:
            self._drop(next(iter(self._stored)))
            self.num_dropped += 1

    def _drop(self, key: bytes) -> None:
        self._bytes -= self._stored.pop(key)
        self._orders.append(Drop(key))

    # ---- and back

    def fetch(self, request: Request, match: Match, now: float) -> bool:
        """Begin to read what follows the match, for which there are free blocks, or wait for somebody else's read of
        it. False: nothing is to come that is worth waiting for."""
        if request.fetched or not request.kv_digest or (key := self._wanted(request, match)) is None:
            return False
        for coming in self._coming.values():
            if now < coming.until and any(content.hash == key for content in coming.contents):
                coming.waiting.append(request)
                request.held = True
                return True
        if key not in self._stored or len(self._coming) >= _MOST_FETCHES:
            return False
        contents, found = self._run(request, match)
        held = [*match.blocks, *found]
        self._blocks.hold(held)
        blocks = self._blocks.take_free(len(contents))
        wait_s = _PATIENCE_S
        if self._prefill_s is not None:
            wait_s = min(wait_s, self._prefill_s * len(contents) * self._blocks.block_size)
        fetch = Fetch(tuple((content.hash, block) for content, block in zip(contents, blocks, strict=True)))
        self._coming[fetch] = _Coming(contents, blocks, held, [request], now + wait_s)
        self._orders.append(fetch)
        request.held = request.fetched = True
        return True

    def _wanted(self, request: Request, match: Match) -> bytes | None:
        """The key of the block behind the match, unless that is in memory or not complete."""
        index, total = len(match.blocks), len(request.prompt) + len(request.output)
        if not self._blocks.looks_up(request) or (index + 1) * self._blocks.block_size > total:
            return None
        content = self._blocks.cache.content(request, index)
        return None if self._blocks.cache.find(content) is not None else content.hash

    def _run(self, request: Request, match: Match) -> tuple[list[Content], list[int]]:
        """What follows the match without a gap: content on disk, blocks in memory."""
        cache, size = self._blocks.cache, self._blocks.block_size
        contents: list[Content] = []
        found: list[int] = []
        total = len(request.prompt) + len(request.output)
        for index in range(len(match.blocks), total // size):
            content = cache.content(request, index)
            block = cache.find(content)
            if block is not None:
                found.append(block)
            elif content.hash in self._stored:
                contents.append(content)
            else:
                break
        return contents, found

    def fetched(self, fetch: Fetch, bad: Collection[bytes]) -> None:
        """A read has ended; what is on disk as the keys in `bad` is not what it should be."""
        coming = self._coming.pop(fetch)
        cache = self._blocks.cache
        for content, block in zip(coming.contents, coming.blocks, strict=True):
            if content.hash not in bad:
                cache.insert(block, content)
                self.num_fetched += 1
            else:
                self.num_lost += 1
                self.forget([content.hash])
        self.touch(content.hash for content in coming.contents)
        self._blocks.release([*coming.held, *coming.blocks])
        self._end_wait(coming)

    def expire(self, now: float) -> None:
        """Nobody waits longer than it takes to do without."""
        for coming in self._coming.values():
            if now >= coming.until:
                for request in coming.waiting:
                    request.fetched = True
                self._end_wait(coming)

    def _end_wait(self, coming: _Coming) -> None:
        for request in coming.waiting:
            request.held = False
        coming.waiting.clear()

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """How long a step took: those without decode rows tell what computing a token costs."""
        if seconds > 0 and not plan.rows[0].is_decode:
            each = seconds / plan.num_tokens
            old = each if self._prefill_s is None else self._prefill_s
            self._prefill_s = old + _LEARNT * (each - old)

    # ---- state

    def stats(self) -> dict[str, float | int]:
        size = self._blocks.block_size
        return {
            "disk_bytes": self._bytes,
            "disk_budget_bytes": self._budget,
            "disk_blocks": len(self._stored),
            "disk_saved_blocks": self.num_saved,
            "disk_unsaved_blocks": len(self._blocks.cache.unsaved),
            "disk_evictions": self.num_dropped,
            "disk_damaged_blocks": self.num_lost,
            "disk_hit_tokens": self.num_fetched * size,
            "disk_waiting": sum(len(coming.waiting) for coming in self._coming.values()),
        }

    def holders(self) -> list[list[int]]:
        """Blocks that reads and writes hold."""
        return [list(self._saving.values()), *([*c.held, *c.blocks] for c in self._coming.values())]

    def problems(self) -> list[str]:
        found = []
        counted = sum(self._stored.values()) + len(self._saving) * self._block_bytes
        if counted != self._bytes:
            found.append(f"{self._bytes} bytes on disk are known, blocks have {counted}")
        if self._bytes > self._budget:
            found.append(f"{self._bytes} bytes on disk, {self._budget} are allowed")
        if both := self._stored.keys() & self._saving.keys():
            found.append(f"{len(both)} blocks are written to disk again")
        cache = self._blocks.cache
        changed = [key for key, block in self._saving.items() if (c := cache.content_of(block)) and c.hash != key]
        if changed:
            found.append(f"{len(changed)} blocks became others while they were written")
        return found
