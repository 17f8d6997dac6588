"""What the api and the preparing process say to each other: msgpack frames with a length in front."""

from __future__ import annotations

import struct
from enum import Enum

import msgspec

from api.text.segments import Layout
from engine.messages import GrammarSpec
from scheduler.request import ThinkingBudget

LENGTH = struct.Struct("<Q")


class Kind(Enum):
    CHAT = "chat"
    TEMPLATE = "template"
    COMPLETION = "completion"
    TOKENIZE = "tokenize"
    DETOKENIZE = "detokenize"
    RESPONSES = "responses"
    COMPACT = "compact"
    MESSAGES = "messages"
    OLLAMA_CHAT = "ollama chat"
    OLLAMA_GENERATE = "ollama generate"


class Job(msgspec.Struct, frozen=True):
    """A body to prepare; its bytes follow in a frame of their own. `history`: JSON of the messages before it;
    `keeps_states`: the engine does, so `Prepared.opening_tokens`, `system_tokens` and `part_ends` are asked
    for."""

    kind: Kind
    vocab_size: int
    max_model_len: int
    history: bytes | None = None
    keeps_states: bool = False


class Reading(msgspec.Struct, frozen=True):
    """How a chat's answer is read: its layout and its budget of reasoning; `functions`: calls are given in their older
    form; `free`: the tools whose calls have a text in place of arguments."""

    layout: Layout
    thinking: ThinkingBudget | None = None
    functions: bool = False
    free: tuple[str, ...] = ()


class Prepared(msgspec.Struct, frozen=True, tag=True):
    """`options`: JSON of the body's other fields, those of a chat unless the prompt is raw (`is_raw`). `prompts`: int32
    token ids of each prompt. `texts`: what `echo` repeats. `bad_words`: the body's, as tokens. `answer`: JSON that the
    client gets, in pieces; it follows in a frame of its own. `unknown`: fields that nobody knows; `unused`: known ones
    that change nothing; `remarks`: what else became of parts of the body. `grammar`: what the output is to be;
    `reading`: how a chat's is read. `opening_tokens`: of the answer, which the template has written behind the last
    message; None: it is not known. `system_tokens`: with which chats behind the same system message and tools begin;
    0: it is not known. `part_ends`: of each prompt, the tokens before the ends of parts of its last message."""

    options: bytes
    prompts: list[bytes] = []
    texts: list[str] = []
    bad_words: list[list[int]] = []
    answer: list[bytes] = []
    is_raw: bool = False
    messages: bytes = b""  # JSON of a response's messages, those before it included
    is_summary: bool = False  # the response is a summary of a conversation
    head: bytes = b""  # JSON of the fields that a response repeats
    names: dict[str, tuple[str, str]] = {}  # of a response's tools in namespaces: their own names, and the namespaces
    previous: str | None = None  # the response whose messages are needed: nothing is prepared without them
    unknown: list[str] = []
    unused: list[str] = []
    remarks: list[str] = []
    grammar: GrammarSpec | None = None
    reading: Reading | None = None
    opening_tokens: int | None = None
    system_tokens: int = 0
    part_ends: list[list[int]] = []


class Declined(msgspec.Struct, frozen=True, tag=True):
    """An ApiError. `too_long`: tokens of the prompt and their limit, of a TooLongError."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    too_long: tuple[int, int] | None = None


class TextSettings(msgspec.Struct, frozen=True):
    """What the process needs to load a tokenizer; `model` None: there is none."""

    model: str | None
    gguf: str | None = None
    chat_template: str | None = None
    trust_control_tokens: bool = False
    unknown_fields: str = "warn"
    tool_format: str = "auto"
    reasoning_format: str = "auto"
    cpu_limit_s: float = 10.0


encode = msgspec.msgpack.Encoder().encode
decode_job = msgspec.msgpack.Decoder(Job).decode
decode_answer = msgspec.msgpack.Decoder(Prepared | Declined).decode
