"""An HTTP request on its way to a replica, and what of it decides where to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

_HOP = frozenset(
    {"connection", "content-length", "host", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade"}
)
DIED = "x-ktserve-died"  # a header of a replica's 503: its server ended before it answered
_PROMPT_BYTES = 1 << 16  # that are kept; the policy looks at fewer


class _Said(msgspec.Struct):
    """Of a body. Values other than the model's name stay as they were written: scanned once, never made objects of."""

    model: msgspec.Raw = msgspec.Raw(b'""')
    previous_response_id: msgspec.Raw = msgspec.Raw(b"null")
    system: msgspec.Raw = msgspec.Raw()
    instructions: msgspec.Raw = msgspec.Raw()
    tools: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()


_BODY = msgspec.json.Decoder(_Said)
_NAME = msgspec.json.Decoder(str)


@dataclass(frozen=True)
class Call:
    """`path` with its query. `model`, `prompt`: of the body; "" where there is none. The prompt is JSON as it was
    written, its beginning. `continues`: it names a response that was kept. `key`: the caller's. `tried`: replicas
    that refused it for now. `catalogue`: the change of adapters that it is to see."""

    method: str
    path: str
    headers: tuple[tuple[str, str], ...]
    body: bytes
    model: str = ""
    prompt: str = ""
    key: str = ""
    continues: bool = False
    tried: tuple[str, ...] = ()
    catalogue: int = 0

    @staticmethod
    def of(method: str, path: str, headers: Iterable[tuple[str, str]], body: bytes) -> Call:
        """Whatever the body is: what it says that decides nothing here is the server's to refuse."""
        kept = tuple((name, value) for name, value in headers if name.lower() not in _HOP)
        named = {name.lower(): value for name, value in kept}
        key = named.get("authorization", named.get("x-api-key", ""))
        if method != "POST" or body.lstrip()[:1] != b"{":
            return Call(method, path, kept, body, key=key)
        try:
            said = _BODY.decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return Call(method, path, kept, body, key=key)
        continues = bytes(said.previous_response_id).strip() not in (b"null", b'""')
        return Call(method, path, kept, body, _model(said), _prompt(said), key, continues)


def kept_headers(headers: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Without those that belong to a connection."""
    return [(name, value) for name, value in headers if name.lower() not in _HOP]


def _model(said: _Said) -> str:
    try:
        return _NAME.decode(said.model)
    except (msgspec.MsgspecError, UnicodeDecodeError):  # no text, or one that is not Unicode
        return ""


def _prompt(said: _Said) -> str:
    """What stands before the answer, in order; enough to find an equal beginning again."""
    found = b""
    for part in (said.system, said.instructions, said.tools, said.prompt, said.messages, said.input):
        found += memoryview(part)[: _PROMPT_BYTES - len(found)]
    return found.decode(errors="replace")
