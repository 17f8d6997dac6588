"""Slots of states: those of running sequences, and snapshots that others may begin from.

own        [0, num_states)                              one of each running request
snapshots  [num_states, num_states + num_snapshots)     a copy of the state behind a full block that is findable

A snapshot is named by its block: of which tokens, tenant and adapter it is, is that block's content, compared whole.
Snapshots and blocks share one budget: a snapshot's slot has memory while so many free blocks are withheld, which then
have none, and the least recently used of both is evicted.
Rows read and write slots in the order of steps, so that a slot may have another owner in the next step already; within
a step nobody writes to a slot that a row begins from.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Protocol

from msgspec.structs import replace

from scheduler.memory.order import Kind, Order
from scheduler.memory.prefix import Content, PrefixCache
from scheduler.plan import NO_STATE, Idle, RowState, StepRow
from scheduler.request import Request

NEAR_BLOCKS = 4  # so many behind a snapshot are computed again rather than another kept
_PART_BLOCKS = 16  # between two snapshots of parts at least, for each may be for nobody; so is
_PART_SHARE = 8  # this part of what lies before the second one
_OPENING_TOKENS = 8  # of the answer, where nobody says how many a template has written behind the last message
_NEARLY_ALL = 8  # times as many as the others


@dataclass(slots=True)
class _Snapshot:
    slot: int
    content: Content
    closing: bytes  # of one in an answer: the block behind which the prompt's own is
    read: bool = False  # somebody has begun from it; who does so next is of another conversation


class Lender(Protocol):
    """Of blocks to snapshots."""

    @property
    def clock(self) -> int:
        """Rises; it dates when something was last used."""

    def lend(self, count: int, before: float) -> list[int] | None:
        """Withhold so many free blocks, whose content is gone then; None: there are not as many that were last used
        before that time."""

    def release(self, blocks: Sequence[int]) -> None: ...


class StatePool:
    """Writes only Request.state, state_source, state_end, snapshots, newest_snapshot, diverged and parts.
    `snapshot_blocks`: how many blocks take the memory of a snapshot, of which none is withheld at first; 0: snapshots
    have memory of their own."""

    def __init__(
        self,
        num_states: int,
        num_snapshots: int,
        cache: PrefixCache,
        block_size: int,
        snapshot_blocks: int,
        lender: Lender,
    ) -> None:
        self.num_states = num_states
        self.num_snapshots = num_snapshots
        self.snapshot_blocks = snapshot_blocks
        self._cache = cache
        self._block_size = block_size
        self._lender = lender
        self._own = list(range(num_states))[::-1]
        slots = list(range(num_states, num_states + num_snapshots))[::-1]
        self._free, self._bare = ([], slots) if snapshot_blocks else (slots, [])  # those with memory, those without
        self._lent: dict[int, list[int]] = {}  # blocks that are withheld, by the slot that has their memory
        self._repeated = self._dropped = 0  # answers, by next turns
        self._idle = Idle([], [])
        self._found: dict[bytes, _Snapshot] = {}
        self._order = Order()  # of them, in which they are evicted
        self._answers: dict[bytes, dict[bytes, None]] = {}  # of those the ones in answers, by `closing`
        self._read: set[int] = set()  # snapshots that rows of the step that is planned begin from
        self.on_disk = False  # whether some are to be written there
        self.unsaved: dict[bytes, None] = {}  # of the findable ones those
        self._computing: dict[int, int] = {}  # slots to which steps in flight save, and how many do
        self._saving: set[int] = set()  # slots that are being written to disk
        self._gone: set[int] = set()  # of those the ones that nobody finds any more
        self._coming: set[int] = set()  # slots that are being read from disk
        self.num_saved = 0
        self.num_evicted = 0

    @property
    def num_findable(self) -> int:
        return len(self._found)

    @property
    def num_lent(self) -> int:
        """Blocks that are withheld, and could be had back now."""
        idle = len(self._free) + len(self._found) - len(self._read | (self._saving - self._gone))
        return self.snapshot_blocks * max(idle, 0)

    def num_lent_to(self, snapshot: bytes) -> int:
        """Of those the ones that can no longer be had back once a row begins from the snapshot."""
        return 0 if self._is_held(self._found[snapshot]) else self.snapshot_blocks

    def begin_step(self) -> None:
        self._read.clear()

    def take_idle(self) -> Idle | None:
        """What has lost its memory since the last call; None: nothing."""
        if not (self._idle.blocks or self._idle.slots):
            return None
        idle, self._idle = self._idle, Idle([], [])
        return idle

    def find(self, content: Content) -> bool:
        """Whether there is a snapshot behind such a block."""
        held = self._found.get(content.hash)
        return held is not None and held.content == content

    def deepest(self, block_hashes: Sequence[bytes], most: int) -> int:
        """How many of the first `most` blocks with these hashes lie before the last snapshot among them, as far as
        hashes tell; 0: there is none."""
        return next((count for count in range(most, 0, -1) if block_hashes[count - 1] in self._found), 0)

    def take(self, request: Request, snapshot: bytes | None, diverged: int) -> None:
        """A slot of its own for a request that is admitted, of which one is free for each that may run. `snapshot`:
        hash of the block that it begins behind; `diverged`: the position to which its blocks were found, or 0."""
        request.state, request.state_source = self._own.pop(), NO_STATE
        request.state_end = len(request.blocks) * self._block_size
        system, request.parts = self._system(request), self._parts(request)
        near = [
            end
            for end in (system, *request.parts)
            if request.state_end < end <= diverged <= end + NEAR_BLOCKS * self._block_size
        ]
        request.diverged = near[-1] if near else diverged  # the one that is kept there will do
        if snapshot is not None:
            held = self._found[snapshot]
            self._touch(snapshot)
            kind = self._order.kind(snapshot)
            if request.state_end == system or kind is Kind.PART:  # of another conversation, whose answer this drops
                self._order.share(snapshot)
                if kind is Kind.PART:
                    self._offer(snapshot)
            else:
                dropped = self._answers.get(snapshot, ())  # who begins behind the prompt does not repeat the answer
                self._order.evict_first(dropped)
                self._repeated += bool(held.closing)
                self._dropped += bool(dropped) and not held.read
                if held.read:
                    self._order.share(snapshot)
                elif kind is Kind.TURN:
                    self._order.count_read(kind)
                held.read = True
            self._touch_system(request, request.state_end)
            self._read.add(held.slot)
            request.state_source = held.slot

    def _touch_system(self, request: Request, end: int) -> None:
        """Of what is kept or read up to `end`: as of blocks, beginnings are used whenever what follows is."""
        if 0 < (system := self._system(request)) < end:
            self._touch(request.block_hashes[system // self._block_size - 1])

    def _touch(self, key: bytes) -> None:
        """It has been used, if it is there."""
        if key in self._found:
            self._order.touch(key, self._lender.clock)

    def release(self, request: Request) -> None:
        """It leaves the running ones; what it has saved stays, if it can be found."""
        self._own.append(request.state)
        self._offer(request.newest_snapshot)
        self._free += [slot for _, slot in request.snapshots]
        request.state = request.state_source = NO_STATE
        request.snapshots, request.newest_snapshot = [], b""

    def row(self, request: Request, start: int, end: int, spare: Callable[[], int]) -> RowState:
        """Of the request's row of positions [start, end). `spare`: how many blocks running requests do not need."""
        source, request.state_source = request.state_source, request.state
        replayed, request.state_end = start - request.state_end, end
        saves = []
        # one behind the first position that is replayed was saved by the row that kept it
        for position in self._wanted(request, start - replayed + bool(replayed), end, decode=end == start + 1):
            if (slot := self._slot(spare)) is not None:
                saves.append((position, slot))
                request.snapshots.append((position // self._block_size, slot))
                self._computing[slot] = self._computing.get(slot, 0) + 1
                self.num_saved += 1
        return RowState(request.state, source, tuple(saves), replayed)

    def keep(self, request: Request, row: StepRow) -> RowState | None:
        """Of the request's row, which gets drafts: which of them are right is not known before the next row."""
        request.state_end = row.start
        return None if row.state is None else replace(row.state, keeps=True)

    def saved_hashes(self, request: Request, row: RowState) -> list[bytes]:
        """The blocks behind which the row saves states, as far as their tokens are known."""
        known = len(request.prompt) + len(request.output)
        ends = [position for position, _ in row.saves if position <= known]
        return [self._cache.content(request, end // self._block_size - 1).hash for end in ends]

    def publish(self, request: Request) -> None:
        """What was saved behind published blocks becomes findable."""
        ready = [(blocks, slot) for blocks, slot in request.snapshots if blocks <= request.num_published]
        if not ready:
            return
        request.snapshots = [each for each in request.snapshots if each not in ready]
        for blocks, slot in ready:
            content = self._cache.content(request, blocks - 1)
            if content.hash in self._found:
                self._free.append(slot)
                continue
            end, closing = blocks * self._block_size, self._closing(request)
            answers = end > len(request.prompt)
            behind = self._cache.content(request, closing // self._block_size - 1).hash if answers and closing else b""
            self._found[content.hash] = _Snapshot(slot, content, behind)
            kind = Kind.TURN
            if end in (request.diverged, self._system(request)):
                kind = Kind.SHARED
            elif end in request.parts:
                kind = Kind.PART
            self._order.add(content.hash, kind, self._lender.clock, counts=not answers)
            if behind:
                self._answers.setdefault(behind, {})[content.hash] = None
            self._touch_system(request, end)
            if answers:
                self._replace_newest(request, content.hash)
                self._order.evict_first(self._unlikely(content.hash, behind))
            elif kind is not Kind.PART:
                self._offer(content.hash)
                if end == closing:  # the next turn finds this one
                    self._order.evict_first(filter(self._is_of_turn, request.block_hashes[: blocks - 1]))

    def _unlikely(self, answer: bytes, prompt: bytes) -> list[bytes]:
        """Of a conversation's last two snapshots the one that its next turn will not begin from, if turns have nearly
        all repeated answers so far, or none."""
        if self._repeated > _NEARLY_ALL * (self._dropped + 1):
            return [prompt] if self._is_of_turn(prompt) else []
        return [answer] if self._dropped > _NEARLY_ALL * (self._repeated + 1) else []

    def _is_of_turn(self, key: bytes) -> bool:
        return key in self._found and self._order.kind(key) is Kind.TURN

    def discard(self, hashes: Iterable[bytes]) -> None:
        """Nobody finds what is behind these blocks."""
        for each in hashes:
            if (held := self._found.pop(each, None)) is not None:
                self._order.remove(each)
                self.unsaved.pop(each, None)
                (self._gone.add if held.slot in self._saving else self._free.append)(held.slot)
                if held.closing:
                    answers = self._answers[held.closing]
                    del answers[each]
                    if not answers:
                        del self._answers[held.closing]

    def discard_slots(self, slots: set[int]) -> None:
        self.discard([key for key, held in self._found.items() if held.slot in slots])

    # ---- to the disk and back

    def _offer(self, key: bytes) -> None:
        """The snapshot, if there is one, is to be written to disk: of a prompt, or an answer's last."""
        held = self._found.get(key)
        if self.on_disk and held is not None and isinstance(held.content.source, bytes):
            self.unsaved[key] = None

    def landed(self, slots: Iterable[int]) -> None:
        """A step has ended that has saved to these slots."""
        for slot in slots:
            self._computing[slot] -= 1
            if not self._computing[slot]:
                del self._computing[slot]

    def next_unsaved(self) -> bytes | None:
        """The block behind which the first computed snapshot is that is to be written."""
        return next((key for key in self.unsaved if self._found[key].slot not in self._computing), None)

    def begin_save(self, key: bytes) -> int:
        """The slot of that snapshot; it does not change before `saved`."""
        del self.unsaved[key]
        slot = self._found[key].slot
        self._saving.add(slot)
        return slot

    def saved(self, slot: int) -> None:
        self._saving.remove(slot)
        if slot in self._gone:
            self._gone.remove(slot)
            self._free.append(slot)

    def begin_read(self, spare: Callable[[], int]) -> int | None:
        """A slot that a snapshot is read into; as in `row`. None: there is none."""
        slot = self._slot(spare)
        if slot is not None:
            self._coming.add(slot)
            self.keep_memory((), slot)
        return slot

    def keep_memory(self, blocks: Container[int], slot: int | None = None) -> None:
        """What is read into these must not be lost to the memory that goes back before the next step."""
        self._idle = Idle(
            [each for each in self._idle.blocks if each not in blocks],
            [each for each in self._idle.slots if each != slot],
        )

    def was_read(self, slot: int, content: Content | None) -> None:
        """None: nothing that could be used."""
        self._coming.remove(slot)
        if content is None or content.hash in self._found or self._cache.find(content) is None:
            self._free.append(slot)
        else:
            self._found[content.hash] = _Snapshot(slot, content, b"")
            self._order.add(content.hash, Kind.TURN, self._lender.clock, counts=False)

    @property
    def lent(self) -> list[list[int]]:
        """Blocks that are withheld."""
        return list(self._lent.values())

    def release_one(self, before: float) -> bool:
        """Give memory back to blocks: that of a free slot which no running request is about to need, or of the first
        snapshot to be evicted, if it was last used before that time. False: there is none."""
        if not self._lent:
            return False
        running = self.num_states - len(self._own)
        if len(self._free) <= (running if before < inf else 0):
            oldest = self._oldest()
            if oldest is None or self._order.used(oldest) >= before:
                return False
            self._evict(oldest)
        slot = self._free.pop()
        self._bare.append(slot)
        self._idle.slots.append(slot)
        self._lender.release(self._lent.pop(slot))
        return True

    def problems(self, requests: Iterable[Request]) -> list[str]:
        own, pending, found = list(self._own), list(self._free), []
        for request in requests:
            if request.state == NO_STATE:
                if request.snapshots:
                    found.append(f"request {request.request_id} has saved states and none of its own")
                continue
            own.append(request.state)
            pending += [slot for _, slot in request.snapshots]
        pending += [*(held.slot for held in self._found.values()), *self._gone, *self._coming]
        if self.snapshot_blocks and sorted(pending) != sorted(self._lent):
            found.append(f"snapshots {sorted(pending)} are in use, blocks are withheld for {sorted(self._lent)}")
        pending += self._bare
        if sorted(own) != list(range(self.num_states)):
            found.append(f"states {sorted(own)} are free or held, there are {self.num_states}")
        if sorted(pending) != list(range(self.num_states, self.num_states + self.num_snapshots)):
            found.append(f"snapshots {sorted(pending)} are free, held or findable, there are {self.num_snapshots}")
        answers: dict[bytes, set[bytes]] = {}
        for key, held in self._found.items():
            if held.closing:
                answers.setdefault(held.closing, set()).add(key)
        if answers != {closing: set(keys) for closing, keys in self._answers.items()}:
            found.append(f"snapshots of answers to {len(answers)} prompts are findable, {len(self._answers)} are known")
        found += self._order.problems(self._found)
        lost = [held.slot for key, held in self._found.items() if key not in self._cache.hashes]
        return found + [f"snapshot {slot} is findable, and its block is not" for slot in lost]

    def _wanted(self, request: Request, start: int, end: int, decode: bool) -> list[int]:
        """Ends of blocks behind which somebody may want to begin: where the system message ends, and parts of the last
        message do; where the prompt ends but for what the template opens the answer with; where requests have parted;
        each in the output, which any token may end."""
        if not self.num_snapshots:
            return []
        size = self._block_size
        if decode and start >= len(request.prompt):
            last = end // size * size
            return [last] if last > start else []
        wanted = {self._system(request), self._closing(request), request.diverged, *request.parts}
        return [
            position
            for position in sorted(wanted)
            if start < position <= end and self._cache.content(request, position // size - 1).hash not in self._found
        ]

    def _closing(self, request: Request) -> int:
        """Where its prompt ends, but for what the template opens the answer with, in full blocks: the next turn may not
        repeat that."""
        opening = _OPENING_TOKENS if request.opening_tokens is None else request.opening_tokens
        return max(len(request.prompt) - opening, 0) // self._block_size * self._block_size

    def _system(self, request: Request) -> int:
        """Where the system message ends, in full blocks; 0: so near the beginning that it is computed again."""
        blocks = min(request.system_tokens, len(request.prompt)) // self._block_size
        return blocks * self._block_size if blocks > NEAR_BLOCKS else 0

    def _parts(self, request: Request) -> tuple[int, ...]:
        """Of the ends of parts between the system message's and the prompt's, in full blocks, those that lie far behind
        the one before, for each may be for nobody; and the last one, behind which other questions may come."""
        size, kept = self._block_size, self._system(request)
        ends = sorted({end // size * size for end in request.part_ends if kept < end})
        ends = ends[: bisect_left(ends, self._closing(request))]
        found = []
        for end in ends:
            far = NEAR_BLOCKS * size if end == ends[-1] else max(_PART_BLOCKS * size, end // _PART_SHARE)
            if end - kept > far:
                found.append(end)
                kept = end
        return tuple(found)

    def _slot(self, spare: Callable[[], int]) -> int | None:
        """A free slot of a snapshot; or one with the memory of blocks, if these were used before the first snapshot to
        be evicted; or that snapshot's. None: there is none, or running requests need the memory."""
        if self.snapshot_blocks and self.snapshot_blocks > spare():
            return None
        if self._free:
            return self._free.pop()
        oldest = self._oldest()
        if self._bare:
            before = inf if oldest is None else self._order.used(oldest)
            if (blocks := self._lender.lend(self.snapshot_blocks, before)) is not None:
                slot = self._bare.pop()
                self._lent[slot] = blocks
                self._idle.blocks.extend(blocks)
                return slot
        if oldest is None:
            return None
        self._evict(oldest)
        return self._free.pop()

    def _oldest(self) -> bytes | None:
        """The first to be evicted that no row begins from."""
        return self._order.first(self._lender.clock, lambda key: self._is_held(self._found[key]))

    def _is_held(self, held: _Snapshot) -> bool:
        return held.slot in self._read or held.slot in self._saving

    def _evict(self, key: bytes) -> None:
        self.discard([key])
        self.num_evicted += 1

    def _replace_newest(self, request: Request, newest: bytes) -> None:
        """Of an output only the newest snapshot stays."""
        held = self._found.get(request.newest_snapshot)
        if held is not None and held.slot not in self._read:
            self.discard([request.newest_snapshot])
        request.newest_snapshot = newest
