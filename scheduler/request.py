"""A request and everything the scheduler knows about it."""

from __future__ import annotations

import enum
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec


class ThinkingBudget(msgspec.Struct, frozen=True):
    """At most `num_tokens` of reasoning; then the tokens `closing` are forced. Reasoning begins behind the token
    `begin` among the first few of the output, None: at once; it ends with the token `end`."""

    num_tokens: int
    begin: int | None
    end: int
    closing: tuple[int, ...]


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a request's tokens are chosen. Ranges are checked before a request is made, by the api and the engine.

    `temperature` 0 is greedy. `top_k` 0 and `top_p` 1 switch the filter off. `logprobs` is the number of
    alternatives per output token (0: only the chosen token's), None: no log-probabilities at all;
    `prompt_logprobs` likewise for the prompt's tokens. Before `min_tokens` neither a stop nor an end-of-sequence token
    comes; none of `bad_words`, token sequences, ever does; `allowed_token_ids` are the only ones that come, if given.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    bad_words: tuple[tuple[int, ...], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    thinking: ThinkingBudget | None = None

    @property
    def greedy(self) -> bool:
        """Whether the greedy token is all that is wanted: nothing changes the logits (but perhaps a mask), nobody asks
        for them."""
        plain = self.presence_penalty == self.frequency_penalty == 0.0 and self.repetition_penalty == 1.0
        return self.temperature == 0.0 and plain and not self.logit_bias and self.logprobs is None

    def ending_tokens(self, eos_token_ids: Iterable[int]) -> set[int]:
        """The tokens that end the output."""
        return {*self.stop_token_ids, *(() if self.ignore_eos else eos_token_ids)}


class AdapterKey(NamedTuple):
    """One version of one adapter. `uid` 0 is the base model, which needs no slot but slot 0."""

    uid: int
    version: int


BASE = AdapterKey(0, 0)


_BACKGROUND = "\0"  # in no tenant's name


def is_background(account: str) -> bool:
    return account.endswith(_BACKGROUND)


class Status(enum.Enum):
    WAITING = "waiting"  # in the queue, holds no blocks
    RUNNING = "running"  # holds blocks and an adapter slot
    PREEMPTED = "preempted"  # in the queue again, its tokens are kept, its blocks are gone
    FINISHED = "finished"
    REFUSED = "refused"
    CANCELLED = "cancelled"
    FAILED = "failed"

    @property
    def terminal(self) -> bool:
        return self in (Status.FINISHED, Status.REFUSED, Status.CANCELLED, Status.FAILED)


class _Referable:
    """With slots, yet there may be weak references to it."""

    __slots__ = ("__weakref__",)


@dataclass(eq=False, slots=True)
class Request(_Referable):
    """The owner of each field is written beside it; nobody else writes it."""

    # set once by whoever makes the request
    request_id: str
    prompt: list[int]
    sampling: SamplingParams
    adapter: AdapterKey = BASE
    tenant: str = "default"
    priority: int = 0  # smaller runs first
    deadline: float | None = None  # in the scheduler's clock, seconds
    background: bool = False  # runs only in steps that no live request could use
    held: bool = False  # waits for something of its own, until `Scheduler.release`; or, set by DiskBlocks, for a read
    cache_group: str | None = None  # tenants of one share the prefix cache; None: the tenant is alone
    cache_salt: str = ""  # the prefix cache is shared among requests of one tenant (or group) and salt
    opening_tokens: int | None = None  # of the answer, with which the prompt ends; None: nobody knows
    system_tokens: int = 0  # with which others behind the same system message and tools begin; 0: nobody knows
    part_ends: tuple[int, ...] = ()  # rising positions where documents or paragraphs of the prompt's last message end
    # of everything but tokens that its KV depends on, model and adapter; b"": its blocks stay in this process's memory
    kv_digest: bytes = b""

    # Scheduler
    status: Status = Status.WAITING
    arrival: int = -1  # order of arrival, 0, 1, 2, ...
    arrival_s: float = 0.0
    queued_s: float = 0.0  # from arrival until it first ran
    output: list[int] = field(default_factory=list)  # committed tokens
    num_in_flight: int = 0  # tokens that launched, uncommitted steps will append, accepted drafts aside (0 or 1 a step)
    num_drafts: int = 0  # in flight; the request is not planned again before they are accepted or rejected
    num_computed: int = 0  # positions whose KV is (or will be, once launched steps ended) in blocks
    num_cached: int = 0  # prompt positions first served from the prefix cache
    num_preemptions: int = 0
    slot: int = 0  # adapter slot while running; 0 is the base
    stop_reason: str | None = None
    rank: float = 0.0  # arrival_s + priority * aging_s; smaller is served first, so waiting makes up for priority
    fetched: bool = False  # has waited for blocks on disk since it last ran, and does not again
    ending: frozenset[int] = frozenset()  # the tokens that end its output
    most_output: int = 0  # tokens of output at most
    turn: float = -1.0  # when it last had a row in a step that left out others: the step, and the place in it
    num_charged: int = 0  # positions the tenant has been charged for; recomputed ones are not charged again

    # BlockManager
    blocks: array[int] = field(default_factory=lambda: array("i"))  # block ids, in order of position
    block_hashes: list[bytes] = field(default_factory=list)  # chained hashes of the full blocks of known tokens
    num_findable: int = (
        0  # leading blocks that were in the prefix cache when it was last asked while the request waited
    )
    num_published: int = 0  # leading blocks that were found in, or offered to, the prefix cache

    # StatePool, of a model whose layers keep states
    state: int = -1  # its slot while it runs
    state_source: int = -1  # the slot that its next row begins from; -1: with nothing
    state_end: int = 0  # position before which its state is: drafts of the last row are not in it
    snapshots: list[tuple[int, int]] = field(default_factory=list)  # (blocks before it, slot), not findable yet
    newest_snapshot: bytes = b""  # hash of the block behind which its output's newest one is
    diverged: int = 0  # position behind which it and others with the same beginning part
    parts: tuple[int, ...] = ()  # of `part_ends`, in full blocks, those where snapshots are kept

    # asked every step
    greedy: bool = field(init=False)
    account: str = field(init=False)  # who is charged for service, running slots and queue: background work has its own

    def __post_init__(self) -> None:
        self.greedy = self.sampling.greedy
        self.account = f"{self.tenant}{_BACKGROUND}" if self.background else self.tenant

    @property
    def cache_owner(self) -> str:
        """Whose blocks of the prefix cache it may find."""
        return f"tenant {self.tenant}" if self.cache_group is None else f"group {self.cache_group}"

    @property
    def cache_source(self) -> AdapterKey | bytes:
        """Whose KV the blocks of the prefix cache are that it may find."""
        return self.kv_digest or self.adapter

    @property
    def num_tokens(self) -> int:
        """Prompt and output, those still in flight counted."""
        return len(self.prompt) + len(self.output) + self.num_in_flight

    def tokens(self, start: int, end: int) -> list[int]:
        """The tokens at [start, end), without what launched steps are still to deliver."""
        prompt = len(self.prompt)
        return self.prompt[start:end] + self.output[max(start - prompt, 0) : max(end - prompt, 0)]

    def token(self, position: int) -> int | None:
        """The token at `position`, or None while a launched step is still to deliver it."""
        if position < len(self.prompt):
            return self.prompt[position]
        position -= len(self.prompt)
        return self.output[position] if position < len(self.output) else None
