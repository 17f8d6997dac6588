"""The forms in which models write calls: one table."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from api.text.calls.history import HISTORIES, Message
from api.text.calls.json_call import JsonCalls
from api.text.calls.marked_call import DEEPSEEK_MARKS, DEEPSEEK_V3_MARKS, KIMI_MARKS, MarkedCalls, Marks
from api.text.calls.reader import CallReader
from api.text.calls.xml_call import GLM_TAGS, MINIMAX_TAGS, QWEN_TAGS, Tags, XmlCalls

Parameters = Mapping[str, Mapping[str, Mapping[str, Any]]]  # function -> parameter -> its schema
_ALPHABET = string.ascii_letters + string.digits


@dataclass(frozen=True)
class ToolFormat:
    """`signs`: texts that a chat template of this form holds. `opens` and `closes` surround calls; `closes` None: they
    go on to the end of the answer. `bare`: an answer that begins with an object may be a call without a marker. `tags`:
    of a call that is no JSON object; `marks`: of one whose parts stand between tokens. `channels`: the whole answer is
    in messages to recipients (api/text/channels.py).
    `arguments`: their key; `listed`: the objects stand in a list. `id_prefix`, `id_length`: of the ids that its
    templates accept. `history`: a name of HISTORIES, of messages as its templates expect them."""

    name: str
    signs: tuple[str, ...]
    opens: str
    closes: str | None = None
    bare: bool = False
    tags: Tags | None = None
    marks: Marks | None = None
    channels: bool = False
    arguments: str = "arguments"
    listed: bool = False
    id_prefix: str = "call_"
    id_length: int = 24
    history: str = "plain"

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that control tokens may be and that count."""
        parts = self.tags or self.marks
        return (self.opens, self.closes or "", *(parts.all if parts is not None else ()))

    def messages(self, messages: Sequence[Message]) -> list[Message]:
        """As templates of this form expect them."""
        return HISTORIES[self.history](messages)

    def described(self, definition: dict[str, Any]) -> dict[str, Any]:
        """A tool's definition as templates of this form expect it: harmony's needs a description."""
        if not self.channels:
            return definition
        return {**definition, "function": {"description": "", **definition["function"]}}

    def new_id(self) -> str:
        return self.id_prefix + "".join(secrets.choice(_ALPHABET) for _ in range(self.id_length))

    def reader(
        self, first: int, parameters: Parameters, limit: int | None, new_id: Callable[[], str] | None = None
    ) -> CallReader:
        """For calls from number `first` of the answer, at most `limit` of them."""
        new_id = new_id or self.new_id
        if self.tags is not None:
            return XmlCalls(first, new_id, limit, tags=self.tags, parameters=parameters)
        if self.marks is not None:
            return MarkedCalls(first, new_id, limit, marks=self.marks)
        return JsonCalls(first, new_id, limit, enclosed=self.closes is not None)


HERMES = ToolFormat("hermes", ("<tool_call>",), "<tool_call>", "</tool_call>")
START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"  # harmony's tokens
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
HARMONY_MARKERS = (START, CHANNEL, MESSAGE, CONSTRAIN, END, CALL, RETURN)
HARMONY = ToolFormat("harmony", (CHANNEL, MESSAGE, CALL), CHANNEL, channels=True, history="in_channels")
_DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_KIMI = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
FORMATS = (  # the first whose signs a template has
    HARMONY,
    ToolFormat(
        "deepseek_v3", (*_DEEPSEEK, "<｜tool▁sep｜>", "```json"), *_DEEPSEEK, marks=DEEPSEEK_V3_MARKS, history="as_sent"
    ),
    ToolFormat("deepseek_v31", (*_DEEPSEEK, "<｜tool▁sep｜>"), *_DEEPSEEK, marks=DEEPSEEK_MARKS, history="as_sent"),
    ToolFormat("kimi_k2", (*_KIMI, "<|tool_call_begin|>"), *_KIMI, marks=KIMI_MARKS, history="numbered"),
    ToolFormat(
        "qwen3_coder", ("<tool_call>", "<function=", "<parameter="), "<tool_call>", "</tool_call>", tags=QWEN_TAGS
    ),
    ToolFormat("glm4", ("<tool_call>", "<arg_key>", "<arg_value>"), "<tool_call>", "</tool_call>", tags=GLM_TAGS),
    ToolFormat(
        "minimax_m2",
        ("minimax:tool_call>", '<invoke name="'),
        "<minimax:tool_call>",
        "</minimax:tool_call>",
        tags=MINIMAX_TAGS,
    ),
    HERMES,
    ToolFormat(
        "mistral", ("[TOOL_CALLS]", "[AVAILABLE_TOOLS]"), "[TOOL_CALLS]", listed=True, id_prefix="", id_length=9
    ),
    ToolFormat("llama3", ("<|python_tag|>",), "<|python_tag|>", bare=True, arguments="parameters"),
)
FORMAT_NAMES = tuple(one.name for one in FORMATS)


def format_named(name: str) -> ToolFormat:
    """Raises KeyError."""
    return {one.name: one for one in FORMATS}[name]


def format_of(template: str) -> ToolFormat | None:
    """The form that a chat template writes calls in, None if it is none of the table."""
    return next((one for one in FORMATS if all(sign in template for sign in one.signs)), None)
