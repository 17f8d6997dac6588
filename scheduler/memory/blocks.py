"""KV blocks: who holds them, which are free, and in which order free ones are evicted.

free   --take/grow-->  held (by n requests or in-flight steps)  --release-->  free
A free block keeps its content, and stays findable, until it is given to somebody else: least recently freed first.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Container, Iterable, Sequence
from itertools import chain, islice
from math import inf
from typing import NamedTuple

from scheduler.errors import IntegrityError
from scheduler.memory.prefix import PrefixCache
from scheduler.memory.states import NEAR_BLOCKS, StatePool
from scheduler.request import Request


class Match(NamedTuple):
    """The blocks in the cache that a waiting request could begin with."""

    blocks: list[int]
    num_tokens: int  # positions that need not be computed
    num_free: int  # of the blocks, those that are free now; with those that its snapshot keeps from being free
    rewrite: bool  # the last block is complete but for its last position, which is computed again
    snapshot: bytes | None = None  # hash of the block behind which the state is that it begins with
    diverged: int = 0  # position up to which blocks were found, far behind the last state; 0: not so


class BlockManager:
    """`num_blocks` blocks of `block_size` positions; writes only Request.blocks, block_hashes,
    num_findable and num_published.

    A findable block is never written: a request writes only blocks it got from `grow`, or the last one of a full
    hit, which `take` makes unfindable first.
    """

    def __init__(self, num_blocks: int, block_size: int, prefix_caching: bool) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.cache = PrefixCache(block_size)
        self._caching = prefix_caching
        self.states: StatePool | None = None  # of a model that keeps some: a hit needs one, too
        self._holders = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self.num_free_cached = 0  # free blocks that are still findable
        self.clock = 0  # counts what was released
        self._freed = [0] * num_blocks  # of a free block: when

    @property
    def num_free(self) -> int:
        """Those too that are withheld for snapshots, and can be had back."""
        return len(self._free) + (0 if self.states is None else self.states.num_lent)

    @property
    def num_unused(self) -> int:
        """Free blocks that nobody can find."""
        return len(self._free) - self.num_free_cached

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def match(self, request: Request) -> Match:
        """The longest cached beginning of prompt and output that leaves at least the last token to compute."""
        blocks: list[int] = []
        if not self.looks_up(request):
            return Match(blocks, 0, 0, False)
        total = len(request.prompt) + len(request.output)
        for index in range(total // self.block_size):
            block = self.cache.find(self.cache.content(request, index))
            if block is None:
                break
            blocks.append(block)
        if self.states is not None:
            return self._match_state(request, blocks, total, self.states)
        num_tokens = len(blocks) * self.block_size
        rewrite = num_tokens == total
        if rewrite and self._holders[blocks[-1]]:
            blocks.pop()  # others read it: compute the whole block elsewhere
            num_tokens -= self.block_size
            rewrite = False
        elif rewrite:
            num_tokens -= 1
        return Match(blocks, num_tokens, sum(not self._holders[block] for block in blocks), rewrite)

    def num_findable(self, request: Request) -> int:
        """Positions at the request's beginning that a match would find, as far as hashes tell. Cheap to ask again."""
        if not self.looks_up(request):
            return 0
        count = request.num_findable
        if count and request.block_hashes[count - 1] not in self.cache.hashes:
            count = 0
        total = len(request.prompt) + len(request.output)
        while (count + 1) * self.block_size <= total and self.cache.content(request, count).hash in self.cache.hashes:
            count += 1
        request.num_findable = count
        if self.states is not None:
            count = self.states.deepest(request.block_hashes, count)
        return min(count * self.block_size, total - 1)

    def _match_state(self, request: Request, found: list[int], total: int, states: StatePool) -> Match:
        """The longest beginning of the found blocks behind which there is a state."""
        most = min(len(found), (total - 1) // self.block_size)
        count = states.deepest(request.block_hashes, most)
        while count and not states.find(self.cache.content(request, count - 1)):
            count = states.deepest(request.block_hashes, count - 1)
        blocks, snapshot = found[:count], request.block_hashes[count - 1] if count else None
        return Match(
            blocks,
            count * self.block_size,
            sum(not self._holders[block] for block in blocks) + (states.num_lent_to(snapshot) if snapshot else 0),
            rewrite=False,
            snapshot=snapshot,
            diverged=most * self.block_size if most > count + NEAR_BLOCKS else 0,
        )

    def hits_soon(self, request: Request, match: Match, completed: Container[bytes]) -> bool:
        """Whether a request that begins with this match would begin later with what the blocks of these hashes add."""
        index = len(match.blocks)
        last = (len(request.prompt) + len(request.output) - 1) // self.block_size  # a hit beyond would not help
        if not completed or not self.looks_up(request):
            return False
        ahead = range(index, min(index + 1, last) if self.states is None else last)
        return any(self.cache.content(request, i).hash in completed for i in ahead)

    def hashes(self, request: Request, start: int, end: int) -> list[bytes]:
        """Of the blocks that computing positions [start, end), whose tokens are known, completes."""
        if not self._caching:
            return []
        return [self.cache.content(request, i).hash for i in range(start // self.block_size, end // self.block_size)]

    def hold(self, blocks: Iterable[int]) -> None:
        """Add a holder to each of some findable blocks, until `release`."""
        for block in blocks:
            if not self._holders[block]:
                del self._free[block]
                self.num_free_cached -= 1
            self._holders[block] += 1

    def take(self, request: Request, match: Match) -> None:
        """Make a match the beginning of the request's blocks."""
        self.hold(match.blocks)
        request.blocks = array("i", match.blocks)
        request.num_published = len(match.blocks)
        if match.rewrite:
            self.cache.discard(match.blocks[-1])
            request.num_published -= 1

    def grow(self, request: Request, num_tokens: int) -> bool:
        """Give the request blocks for `num_tokens` positions; all of them or (False) none."""
        need = self.blocks_for(num_tokens) - len(request.blocks)
        if not self.make_room(need):
            return False
        request.blocks.extend(self.take_free(max(need, 0)))
        return True

    def lend(self, count: int, before: float) -> list[int] | None:
        """`scheduler.memory.states.Lender`."""
        newest = next(islice(self._free, count - 1, None), None)
        if newest is None or (newest in self.cache and self._freed[newest] >= before):
            return None
        return self.take_free(count)

    def make_room(self, count: int) -> bool:
        """Whether so many blocks are free. Before what is cached is evicted, snapshots are that were used before."""
        while count > self.num_unused and self.states is not None:
            newest = next(islice(self._free, count - 1, None), None)
            if not self.states.release_one(inf if newest is None else self._freed[newest]):
                break
        return count <= len(self._free)

    def take_free(self, count: int) -> list[int]:
        """So many of the free blocks, of which there are enough, with one holder each."""
        taken = []
        for _ in range(count):
            block, _ = self._free.popitem(last=False)
            self.num_free_cached -= block in self.cache
            self._forget(block)
            self._holders[block] = 1
            taken.append(block)
        return taken

    def trim(self, request: Request, num_tokens: int) -> None:
        """Take back the blocks beyond `num_tokens` positions, which no step in flight may read."""
        need = self.blocks_for(num_tokens)
        self.release(request.blocks[need:])
        del request.blocks[need:]

    def release(self, blocks: Sequence[int]) -> None:
        """Take one holder away from each. Tail first, so that beginnings, which more requests share, live longest."""
        self.clock += 1
        for block in reversed(blocks):
            self._freed[block] = self.clock
            self._holders[block] -= 1
            if self._holders[block] < 0:
                raise IntegrityError(f"block {block} was released more often than it was taken")
            if not self._holders[block]:
                self._free[block] = None
                if block in self.cache:
                    self.num_free_cached += 1
                else:
                    self._free.move_to_end(block, last=False)  # nobody can find it: it goes first

    def publish(self, request: Request) -> list[int]:
        """Make the request's full, launched blocks of known tokens findable; returns those that became so."""
        known = min(request.num_computed, len(request.prompt) + len(request.output))
        published = []
        if self._caching:
            for index in range(request.num_published, known // self.block_size):
                if self.cache.insert(request.blocks[index], self.cache.content(request, index)):
                    published.append(request.blocks[index])
                request.num_published = index + 1
            if self.states is not None:
                self.states.publish(request)
        return published

    def unpublish(self, block: int) -> None:
        if block in self._free:
            self.num_free_cached -= block in self.cache
            self._free.move_to_end(block, last=False)
        self._forget(block)

    def _forget(self, block: int) -> None:
        """Nobody finds the block, nor the state behind it."""
        if self.states is not None and (content := self.cache.content_of(block)) is not None:
            self.states.discard((content.hash,))
        self.cache.discard(block)

    def looks_up(self, request: Request) -> bool:
        """Whether it may begin with cached blocks: prompt log-probabilities need every position's logits."""
        return self._caching and request.sampling.prompt_logprobs is None

    def problems(self, holders: Iterable[Sequence[int]]) -> list[str]:
        """What contradicts `holders`, the block lists of all requests and in-flight steps."""
        counts = [0] * self.num_blocks
        for blocks in chain(holders, () if self.states is None else self.states.lent):
            for block in blocks:
                counts[block] += 1
        found = []
        for block, (have, want) in enumerate(zip(self._holders, counts, strict=True)):
            if have != want:
                found.append(f"block {block} has {have} holders, {want} are known")
            if (block in self._free) == bool(want):
                found.append(f"block {block} is {'free' if want else 'not free'} with {want} holders")
        if self.num_free_cached != sum(block in self.cache for block in self._free):
            found.append(f"{self.num_free_cached} free blocks are said to be findable")
        return found + self.cache.problems()
