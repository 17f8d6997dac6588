"""KV blocks on disk: which are to be written, which are there, and which are on their way back.

computed --Save--> stored --Fetch--> findable in memory again, in this process or a later one
                      `--Drop, least recently used first--> gone

A block is written as soon as it is complete, so that it is there already when memory evicts it; what is evicted
sooner is lost. Equal keys are equal content, so nothing is ever overwritten. Where layers keep states, snapshots behind
prompts and ended answers are written likewise, and what follows a match is read as far as the last of them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from scheduler.memory.blocks import BlockManager, Match
from scheduler.memory.prefix import Content, blake2
from scheduler.memory.states import StatePool
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

    state: Content | None = None  # of the block behind which a snapshot is that is being read, too

    @property
    def targets(self) -> set[bytes]:
        """Blocks whose coming others may wait for; with a snapshot, the one before it."""
        return {content.hash for content in self.contents} if self.state is None else {self.state.hash}


class _Run(NamedTuple):
    """What is to be read, and what is found around it."""

    contents: list[Content]
    found: list[int]
    state: Content | None  # of the block behind which a snapshot is to be read
    num_blocks: int  # that need not be computed then
    target: bytes


def state_key(block: bytes) -> bytes:
    """Of the snapshot behind a block with this hash."""
    return blake2(b"state" + block)


class DiskBlocks:
    """`budget_bytes` for files of `block_bytes` each, and `state_bytes` of snapshots; `stored` are key and size of
    those that are there, least recently used first. Writes Request.held and Request.fetched.

    A request that is about to run waits for what continues its match on disk, but at most as long as computing that
    would take at the speed of the last prefill steps: then it runs, and whoever comes next may find the blocks.
    """

    def __init__(
        self,
        blocks: BlockManager,
        budget_bytes: int,
        block_bytes: int,
        stored: Iterable[tuple[bytes, int]],
        state_bytes: int = 0,
    ) -> None:
        self._blocks = blocks
        self._states = blocks.states
        self._state_bytes = state_bytes
        self._saving_states: dict[bytes, int] = {}  # slots, none of which changes meanwhile
        self._spoiled: set[bytes] = set()  # of those the keys that are not to stay
        if self._states is not None:
            self._states.on_disk = True
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
        self.num_saved = self.num_saved_states = 0
        self.num_dropped = 0  # for want of space
        self.num_lost = 0  # that could not be read
        self.num_fetched = self.num_fetched_states = 0
        self._make_room(0)

    @property
    def busy(self) -> bool:
        """Whether something is being written or read, or is to be written."""
        unsaved = self._blocks.cache.unsaved or (self._states is not None and self._states.unsaved)
        return bool(self._saving or self._saving_states or self._coming or self._orders or unsaved)

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
        if self._states is not None:
            self._save_state(self._states)
        orders, self._orders = self._orders, []
        return orders

    # ---- to the disk

    def _save_state(self, states: StatePool) -> None:
        """One at a time: it is as large as many blocks."""
        while not self._saving_states and (block := states.next_unsaved()) is not None:
            key = state_key(block)
            if key in self._stored:
                del states.unsaved[block]
                continue
            self._make_room(self._state_bytes)
            if self._bytes + self._state_bytes > self._budget:  # blocks are being written
                return
            self._bytes += self._state_bytes
            self._saving_states[key] = slot = states.begin_save(block)
            self._orders.append(Save(key, slot, state=True))

    def offer(self, blocks: Iterable[int]) -> None:
        """Blocks whose content is computed by now."""
        cache = self._blocks.cache
        for block in blocks if self._writes else ():
            content = cache.content_of(block)
            if content is not None and isinstance(content.source, bytes) and content.hash not in self._stored:
                cache.unsaved[block] = None

    def saved(self, key: bytes, ok: bool) -> None:
        """A save has ended. After one that failed there are no more."""
        if key in self._saving_states:
            return self._saved_state(key, ok)
        block = self._saving.pop(key)
        content = self._blocks.cache.content_of(block)
        self._blocks.release([block])
        if ok:
            self._stored[key] = self._block_bytes
            self.num_saved += 1
            if content is None:  # it was taken back meanwhile
                self._drop(key)
            return None
        self._bytes -= self._block_bytes
        self._stop_writing()
        return None

    def _saved_state(self, key: bytes, ok: bool) -> None:
        if self._states is not None:
            self._states.saved(self._saving_states.pop(key))
        spoiled = key in self._spoiled
        self._spoiled.discard(key)
        if ok:
            self._stored[key] = self._state_bytes
            self.num_saved_states += 1
            if spoiled:
                self._drop(key)
            return
        self._bytes -= self._state_bytes
        self._stop_writing()

    def _stop_writing(self) -> None:
        self._writes = False
        self._blocks.cache.unsaved.clear()
        if self._states is not None:
            self._states.on_disk = False
            self._states.unsaved.clear()

    def touch(self, keys: Sequence[bytes], snapshot: bytes | None) -> None:
        """Blocks, and the snapshot behind one, were used, wherever they were found."""
        for key in (*keys, *(() if snapshot is None else (state_key(snapshot),))):
            if key in self._stored:
                self._stored.move_to_end(key)

    def forget(self, keys: Iterable[bytes]) -> None:
        """Blocks, and snapshots behind them, are not to be trusted."""
        for block in keys:
            for key in (block, state_key(block)) if self._states is not None else (block,):
                if key in self._stored:
                    self._drop(key)
                elif key in self._saving_states:
                    self._spoiled.add(key)

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

    def fetch(self, request: Request, match: Match, now: float, spare: Callable[[], int]) -> bool:
        """Begin to read what follows the match, for which there are free blocks, or wait for somebody else's read of
        it. False: nothing is to come that is worth waiting for. `spare`: how many blocks running requests do not need.
        """
        if request.fetched or not request.kv_digest or (run := self._run(request, match)) is None:
            return False
        for coming in self._coming.values():
            if now < coming.until and run.target in coming.targets:
                coming.waiting.append(request)
                request.held = True
                return True
        if len(self._coming) >= _MOST_FETCHES:
            return False
        blocks, contents = self._blocks, run.contents
        held = [*match.blocks, *run.found]
        blocks.hold(held)
        slot = None
        if run.state is not None and self._states is not None:
            later = blocks.blocks_for(request.num_tokens) - len(match.blocks) - len(run.found)
            slot = self._states.begin_read(lambda: spare() - later)
            if slot is None or not blocks.make_room(len(contents)):
                if slot is not None:
                    self._states.was_read(slot, None)
                blocks.release(held)
                return False
        elif not blocks.make_room(len(contents)):
            blocks.release(held)
            return False
        taken = blocks.take_free(len(contents))
        if self._states is not None:
            self._states.keep_memory(set(taken))
        wait_s = _PATIENCE_S
        if self._prefill_s is not None:
            wait_s = min(wait_s, self._prefill_s * run.num_blocks * blocks.block_size)
        fetch = Fetch(
            tuple((content.hash, block) for content, block in zip(contents, taken, strict=True)),
            None if run.state is None or slot is None else (state_key(run.state.hash), slot),
        )
        self._coming[fetch] = _Coming(contents, taken, held, [request], now + wait_s, run.state)
        self._orders.append(fetch)
        request.held = request.fetched = True
        return True

    def _run(self, request: Request, match: Match) -> _Run | None:
        """What follows the match without a gap, in memory or on disk; where layers keep states, as far as the last
        state. None: nothing that is on disk."""
        cache, size, states = self._blocks.cache, self._blocks.block_size, self._states
        if not self._blocks.looks_up(request):
            return None
        total = len(request.prompt) + len(request.output)
        parts: list[tuple[Content, int | None]] = []
        num_blocks = 0  # that are worth it
        for index in range(len(match.blocks), (total if states is None else total - 1) // size):
            content = cache.content(request, index)
            block = cache.find(content)
            if block is None and content.hash not in self._stored:
                break
            parts.append((content, block))
            if states is None or states.find(content) or state_key(content.hash) in self._stored:
                num_blocks = len(parts)
        if not num_blocks or (states is None and parts[0][1] is not None):
            return None
        last = parts[num_blocks - 1][0]
        state = None if states is None or states.find(last) else last
        contents = [content for content, block in parts[:num_blocks] if block is None]
        found = [block for _, block in parts[:num_blocks] if block is not None]
        return _Run(
            contents,
            found,
            state,
            num_blocks,
            parts[0][0].hash if states is None else last.hash,
        )

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
        if fetch.state is not None and coming.state is not None and self._states is not None:
            key, slot = fetch.state
            if good := key not in bad:
                self.num_fetched_states += 1
            else:
                self.num_lost += 1
                if key in self._stored:
                    self._drop(key)
            self._states.was_read(slot, coming.state if good else None)
        self.touch([content.hash for content in coming.contents], None if coming.state is None else coming.state.hash)
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
            "disk_saved_snapshots": self.num_saved_states,
            "disk_read_snapshots": self.num_fetched_states,
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
        counted += len(self._saving_states) * self._state_bytes
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
