"""The wire between the api and the engine: msgspec structs over a pair of ZMQ DEALER sockets (ipc, engine binds).

Each message is one msgpack frame. A request's id is made by the api and unique for ever. The engine answers each
`Submit` with any number of `Tokens` and exactly one of `Finished`, `Refused`, `Cancelled`, `Failed`; each other
call with exactly one `Reply` of the same `call_id`.
"""

from __future__ import annotations

from typing import Any

import msgspec

from scheduler.request import SamplingParams


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    pass


# ---- api -> engine


class Submit(_Message, frozen=True):
    request_id: str
    prompt: list[int]
    sampling: SamplingParams
    adapter: str | None = None  # a known adapter's name, None for the base
    tenant: str = "default"
    tenant_weight: float = 1.0
    priority: int = 0
    timeout_s: float | None = None  # from receipt to the terminal event; past it the request is cancelled


class Abort(_Message, frozen=True):
    """The client has gone: `Cancelled` follows unless the request ended first."""

    request_id: str


class StopFound(_Message, frozen=True):
    """The api found a stop string: the request ends as finished ("stop") after `num_tokens` output tokens."""

    request_id: str
    num_tokens: int


class LoadAdapter(_Message, frozen=True):
    """Read an adapter from disk and make it known under `name`. A name already known is replaced if `replace`,
    else refused. `expert_scaling`: "alpha/r" or "alpha/sqrt(r)", where the files leave it open."""

    call_id: int
    name: str
    path: str
    replace: bool = False
    expert_scaling: str | None = None


class UnloadAdapter(_Message, frozen=True):
    """Running requests of the adapter go on to their end; new ones are refused."""

    call_id: int
    name: str


class GetStats(_Message, frozen=True):
    call_id: int


class Drain(_Message, frozen=True):
    """Finish what runs or waits, refuse what is new; `Reply` when nothing is left or after `timeout_s`
    (the rest is then cancelled)."""

    call_id: int
    timeout_s: float


class Shutdown(_Message, frozen=True):
    """End the process. No reply."""


ToEngine = Submit | Abort | StopFound | LoadAdapter | UnloadAdapter | GetStats | Drain | Shutdown


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


class Ready(_Message, frozen=True):
    """The engine serves. `lines` is what a person should be told (memory plan, backends chosen and why)."""

    model_name: str
    vocab_size: int
    max_model_len: int
    bos_token_id: int | None
    eos_token_ids: list[int]
    adapters: list[AdapterInfo]
    lines: list[str]


class FatalError(_Message, frozen=True):
    """The engine cannot start or go on; the process ends with status 1. `user` tells a mistake in the
    configuration or the files (print the message alone) from a fault of ours (print `detail` too)."""

    message: str
    user: bool
    detail: str = ""


class Tokens(_Message, frozen=True):
    """New output tokens of a request, one step's or several merged. The first one carries the prompt's
    log-probabilities if they were asked for (None at position 0)."""

    request_id: str
    tokens: list[int]
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    cached_tokens: int = 0  # prompt tokens served from the prefix cache


class Finished(_Message, frozen=True):
    request_id: str
    reason: str  # "stop" (end-of-sequence token, stop token or stop string) or "length"
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    stop_token: int | None = None  # the token that ended it; it was not sent as output


class Refused(_Message, frozen=True):
    """Never ran. `status` is the HTTP status it amounts to (400, 404, 429, 503)."""

    request_id: str
    status: int
    code: str  # "queue_full", "too_long", "unknown_adapter", "adapter_failed", "draining", ...
    message: str
    field: str | None = None
    retry_after_s: float | None = None


class Cancelled(_Message, frozen=True):
    request_id: str
    reason: str  # "client", "timeout" or "shutdown"


class Failed(_Message, frozen=True):
    """A fault of the engine while the request ran (500)."""

    request_id: str
    message: str


class Reply(_Message, frozen=True):
    call_id: int
    ok: bool
    error: str | None = None
    field: str | None = None
    status: int = 200  # HTTP status of an error
    adapter: AdapterInfo | None = None
    stats: dict[str, Any] | None = None


FromEngine = Loading | Ready | FatalError | Tokens | Finished | Refused | Cancelled | Failed | Reply

encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode
