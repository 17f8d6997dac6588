"""The wire between the api and the engine: msgspec structs over a pair of ZMQ DEALER sockets (ipc, engine binds).

Each message is a msgpack frame; what a step of the engine says is one frame together (`MessageBatch`). A request's id
is made by the api and never reused. The engine answers each `Submit` with any number of `Tokens` and exactly one of
`Finished`, `Refused`, `Cancelled`, `Failed`; each other call with exactly one `Reply` of the same `call_id`.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from engine.tuning import Order, Tuned
from scheduler.request import SamplingParams


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    pass


# ---- api -> engine


class GrammarSpec(msgspec.Struct, frozen=True, omit_defaults=True):
    """What an output is to be: text of a JSON schema, a regular expression, a JSON list of texts of which it is one, or
    a grammar: GBNF, or Lark as llguidance has it (`<name>` is a token of the vocabulary, `%json {...}` a schema). The
    output ends where that ends.

    `after`: it begins behind the first such token, that of the end of reasoning; anything may stand before. `opens`: so
    only if this token, that of the beginning of reasoning, is the output's first but for white space; else it begins at
    once. None: reasoning has begun. `field`: the request's field that it comes from, for messages."""

    kind: Literal["json_schema", "regex", "choice", "gbnf", "lark"]
    text: str
    after: int | None = None
    opens: int | None = None
    field: str = "grammar"


class Submit(_Message, frozen=True):
    """A request for one answer to `prompt`, token ids. Exactly one terminal message follows."""

    request_id: str
    prompt: list[int]
    sampling: SamplingParams
    grammar: GrammarSpec | None = None
    adapter: str | None = None  # a known adapter's name, None for the base
    tenant: str = "default"
    tenant_weight: float = 1.0
    max_waiting: int | None = None  # of the tenant's requests, this one too; None: what the queue holds
    cache_group: str | None = None  # tenants of one share the prefix cache; None: the tenant is alone
    cache_salt: str = ""  # the prefix cache is shared among requests of one tenant (or group) and salt
    opening_tokens: int | None = None  # of the answer, with which the prompt ends; None: nobody knows
    system_tokens: int = 0  # with which chats behind the same system message and tools begin; 0: nobody knows
    part_ends: tuple[int, ...] = ()  # rising positions where documents or paragraphs of the prompt's last message end
    priority: int = 0
    background: bool = False  # runs only in steps that no live request could use
    timeout_s: float | None = None  # from receipt to the terminal event; past it the request is cancelled


class SetVocabulary(_Message, frozen=True):
    """What the tokens stand for, sent once, before the first request with a grammar: the bytes of each id, b"" for one
    that stands for nothing. Those of `special` are never text. `definition`: the tokenizer as JSON (tokenizers'
    form), for text that a grammar leaves no choice in: it is to be written in the model's own tokens."""

    tokens: list[bytes]
    special: list[int]
    definition: str


class Abort(_Message, frozen=True):
    """The client has gone: `Cancelled` follows unless the request ended first."""

    request_id: str


class StopFound(_Message, frozen=True):
    """The api found a stop string: the request ends as finished ("stop") after `num_tokens` output tokens."""

    request_id: str
    num_tokens: int


class LoadAdapter(_Message, frozen=True):
    """Read an adapter from disk and make it known under `name`. A name already known is replaced if `replace`,
    else refused. `expert_scaling`: "alpha/r", "alpha/sqrt(r)" or "peft", `expert_b_layout`: "rank_major" or
    "grouped_by_expert", where the files leave it open. `pinned`: it stays in host memory; others are evicted when the
    least recently used, and read again when they are wanted."""

    call_id: int
    name: str
    path: str
    replace: bool = False
    expert_scaling: str | None = None
    expert_b_layout: str | None = None
    pinned: bool = False


class UnloadAdapter(_Message, frozen=True):
    """Running requests of the adapter go on to their end; new ones are refused."""

    call_id: int
    name: str


class Tune(_Message, frozen=True):
    """An order to a tuning run, made by its `OpenRun`; `run` is chosen by the api."""

    call_id: int
    run: str
    order: Order


class GetStats(_Message, frozen=True):
    call_id: int


class GetLive(_Message, frozen=True):
    """What `Live` holds, for people who watch."""

    call_id: int


class Drain(_Message, frozen=True):
    """Finish what runs or waits, refuse what is new; `Reply` when nothing is left or after `timeout_s`
    (the rest is then cancelled)."""

    call_id: int
    timeout_s: float


class Shutdown(_Message, frozen=True):
    """End the process. No reply."""


ToEngine = (
    Submit
    | SetVocabulary
    | Abort
    | StopFound
    | LoadAdapter
    | UnloadAdapter
    | Tune
    | GetStats
    | GetLive
    | Drain
    | Shutdown
)


# ---- engine -> api


class Logprob(msgspec.Struct, frozen=True, array_like=True):
    token: int
    logprob: float
    rank: int  # 1 = most likely


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Of one position: the token that stands there and the `top` most likely ones (log-softmax of the logits
    before temperature and filters, after penalties and bias)."""

    chosen: Logprob
    top: list[Logprob]


class Planned(_Message, frozen=True):
    """What will be loaded where, before it is: lines for people, the first of `Ready.lines`."""

    lines: list[str]


PlannedKind = Literal["weights", "experts", "kv_cache", "step", "adapters", "other"]


class PlannedItem(msgspec.Struct, frozen=True):
    """What memory is for. `label`: for people."""

    kind: PlannedKind
    label: str
    num_bytes: int


class PlannedMemory(msgspec.Struct, frozen=True):
    """A device's memory as it was planned, in bytes. `limit_bytes`: the smaller of what exists and what is allowed;
    `free_bytes`: of it, before anything was loaded."""

    device: str  # "CPU", "GPU 0"
    limit_bytes: int
    free_bytes: int
    items: list[PlannedItem]


ATTENTION_STAGE = "Attention kernels"  # of `Loading`: those that flashinfer has not compiled before are compiled


class Loading(_Message, frozen=True):
    """Progress while the model loads: shown as a bar."""

    stage: str
    done: int
    total: int


class AdapterInfo(msgspec.Struct, frozen=True):
    name: str
    path: str
    uid: int
    version: int
    format: str
    rank: int
    num_bytes: int
    warnings: list[str] = []
    pinned: bool = False


class Ready(_Message, frozen=True):
    """The engine serves, without adapters: the api loads those. `lines` is for people (memory plan, backends chosen
    and why)."""

    model_name: str
    vocab_size: int
    max_model_len: int
    bos_token_id: int | None
    eos_token_ids: list[int]
    lines: list[str]
    memory: list[PlannedMemory] = []  # of each device; none: the engine has planned nothing
    keeps_states: bool = False  # of sequences; `Submit.opening_tokens` and what follows it are of use


class FatalError(_Message, frozen=True):
    """The engine cannot start or go on; the process ends with status 1. `user` tells a mistake in the
    configuration or the files (print the message alone) from a fault of ours (print `detail` too)."""

    message: str
    user: bool
    detail: str = ""


class Tokens(_Message, frozen=True, gc=False):  # so many a step that the collector would run in every second one
    """New output tokens of a request, one step's or several merged. The first one carries the prompt's
    log-probabilities if they were asked for (None at position 0)."""

    request_id: str
    tokens: list[int]
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    # with the first tokens:
    cached_tokens: int = 0  # prompt tokens served from the prefix cache
    queued_s: float = 0.0  # from arrival until the request first ran


class Finished(_Message, frozen=True):
    request_id: str
    reason: str  # "stop" (end-of-sequence token, stop token or stop string) or "length"
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    stop_token: int | None = None  # the token that ended it; it is none of `output_tokens`
    stop_logprobs: TokenLogprobs | None = None  # that token's, if log-probabilities were asked for


class Refused(_Message, frozen=True):
    """Never ran. `status` is the HTTP status it amounts to (400, 404, 429, 503)."""

    request_id: str
    status: int
    code: str  # "queue_full", "too_long", "unknown_adapter", "adapter_failed", "invalid_grammar", "draining", ...
    message: str
    field: str | None = None
    retry_after_s: float | None = None


class Cancelled(_Message, frozen=True):
    request_id: str
    reason: str  # "client", "timeout" or "shutdown"


class Failed(_Message, frozen=True):
    """A fault while the request ran: the engine's, or of what was asked for (`status` 400)."""

    request_id: str
    message: str
    status: int = 500


class LiveRow(msgspec.Struct, frozen=True):
    """A running request."""

    request_id: str
    tenant: str
    adapter: str | None
    prompt_tokens: int
    cached_tokens: int  # of the prompt, from the prefix cache
    computed_tokens: int  # positions whose keys and values are there
    output_tokens: int
    max_tokens: int
    blocks: int


class Live(msgspec.Struct, frozen=True, kw_only=True):
    """The engine at `time_s` (its monotonic clock). What is counted, is counted from the engine's start."""

    time_s: float
    waiting: int
    steps: int
    prefill_tokens: int
    decode_tokens: int
    block_tokens: int  # positions that a block holds
    blocks_total: int
    blocks_used: int
    blocks_cached: int  # free ones that the prefix cache still finds
    rows: list[LiveRow]
    tenant_service: dict[str, float]  # by tenant, in weighted tokens
    weight_bytes_read: int | None  # of experts' base weights; None: the expert backends do not count
    read_bandwidth: float | None = None  # of the memory they lie in, in bytes a second; None: it was not measured
    experts_touched: int  # distinct experts of a layer in a step, summed over `expert_layers` of them
    expert_layers: int  # layers whose experts were counted, summed over steps
    expert_choices: dict[int, list[int]]  # by layer that is counted: how often rows chose each expert


class AdapterMoved(_Message, frozen=True):
    """Where the nearest copy of an adapter that serves is now."""

    name: str
    residency: str  # "disk", "host" or "slot"


class Reply(_Message, frozen=True):
    call_id: int
    ok: bool
    error: str | None = None
    field: str | None = None
    status: int = 200  # HTTP status of an error
    adapter: AdapterInfo | None = None
    stats: dict[str, Any] | None = None
    live: Live | None = None
    tuned: Tuned | None = None


FromEngine = (
    Planned | Loading | Ready | FatalError | Tokens | Finished | Refused | Cancelled | Failed | AdapterMoved | Reply
)


class MessageBatch(_Message, frozen=True):
    """What a step of the engine said, in order: one frame costs the api less than many."""

    messages: list[FromEngine]


encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
_decode_frame = msgspec.msgpack.Decoder(FromEngine | MessageBatch).decode


def decode_from_engine(frame: bytes) -> list[FromEngine]:
    """The messages of a frame. Raises msgspec.DecodeError."""
    message = _decode_frame(frame)
    return message.messages if isinstance(message, MessageBatch) else [message]
