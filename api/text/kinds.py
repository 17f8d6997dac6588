"""What becomes of every kind of block, item, tool and choice that a request may hold: one table.

What a user newly asks for and cannot have is a 400 that names it. What stands in a history (calls, results, records of
a vendor's own features) or in a list of offers (tools that the vendor's service would run) never is: it is read,
becomes a short line of text where the model should know of it, or is left out and named in `warnings`. A kind that the
table lacks is left out. docs/agents.md is written from it (api/dialects/reference.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from api.errors import shortened


class Fate(Enum):
    READ = "read"
    LINE = "a line of text"
    LEFT_OUT = "left out"
    REFUSED = "refused"


@dataclass(frozen=True)
class Kind:
    """`note`: what it becomes, or why not. `newly`: its fate in a message in which a user newly asks for it, where that
    is another one."""

    name: str
    fate: Fate
    note: str
    newly: Fate | None = None


@dataclass(frozen=True)
class Kinds:
    """The kinds that stand in one place of a request."""

    title: str
    rows: Mapping[str, Kind]

    def fate(self, name: str, *, newly: bool = False) -> Fate:
        """`newly`: it is of a message in which a user newly asks for something."""
        kind = self.rows.get(name)
        if kind is None:
            return Fate.REFUSED if newly else Fate.LEFT_OUT
        return kind.newly or kind.fate if newly else kind.fate

    @property
    def names_read(self) -> tuple[str, ...]:
        return tuple(kind.name for kind in self.rows.values() if kind.fate is Fate.READ)


def _table(title: str, *groups: Iterator[Kind]) -> Kinds:
    return Kinds(title, {kind.name: kind for group in groups for kind in group})


def _read(note: str, *names: str) -> Iterator[Kind]:
    return (Kind(name, Fate.READ, note) for name in names)


def _line(note: str, *names: str, newly: Fate | None = None) -> Iterator[Kind]:
    return (Kind(name, Fate.LINE, note, newly) for name in names)


def _out(note: str, *names: str, newly: Fate | None = None) -> Iterator[Kind]:
    return (Kind(name, Fate.LEFT_OUT, note, newly) for name in names)


def _refused(note: str, *names: str) -> Iterator[Kind]:
    return (Kind(name, Fate.REFUSED, note) for name in names)


_NEWLY = Fate.REFUSED
_TEXT_ONLY = "the model reads text only"
_SERVICE = "the vendor's service runs it"
_OF_CLIENT = "its schema is the vendor's own; offer a tool with a schema"

# ---- Anthropic

BLOCKS = _table(
    "`/v1/messages`: blocks of messages and of results",
    _read("its text", "text"),
    _read("the reasoning of its message, as far as the template keeps it", "thinking"),
    _read("a call", "tool_use"),
    _read("a result", "tool_result"),
    _read("title, source and text", "search_result"),
    _read("the summary; without one it is left out", "compaction"),
    _read("a definition in it is offered; a tool that it names has been offered from the beginning", "tool_addition"),
    _read("the tool is offered no more", "tool_removal"),
    _line(_TEXT_ONLY, "image", newly=_NEWLY),
    _line("its text is read; a line where it has none", "document", newly=_NEWLY),
    _line("that there is a file", "container_upload", newly=_NEWLY),
    _line("the call and its input", "server_tool_use", "mcp_tool_use"),
    _line(
        "titles, addresses and texts, the first of them",
        "web_search_tool_result",
        "web_fetch_tool_result",
        "advisor_tool_result",
        "code_execution_tool_result",
        "bash_code_execution_tool_result",
        "text_editor_code_execution_tool_result",
        "tool_search_tool_result",
        "mcp_tool_result",
    ),
    _line("the tool's name", "tool_reference"),
    _line("titles and addresses of the tabs", "browser_state"),
    _out("nobody here can read it", "redacted_thinking"),
    _out("tools of another server", "mcp_tool_listing"),
    _out("which of the vendor's models answered", "fallback"),
)
DOCUMENTS = _table(
    "`/v1/messages`: sources of documents",
    _read("its text", "text"),
    _read("the texts of its blocks", "content"),
    _line(_TEXT_ONLY, "base64", newly=_NEWLY),
    _line("nothing is fetched", "url", "file", newly=_NEWLY),
)
ANTHROPIC_TOOLS = _table(
    "`/v1/messages`: tools",
    _read("offered", "custom"),
    _out(
        _OF_CLIENT,
        "bash_20241022", "bash_20250124", "text_editor_20241022", "text_editor_20250124", "text_editor_20250429",
        "text_editor_20250728", "computer_20241022", "computer_20250124", "computer_20251124", "memory_20250818",
        "browser_toolset_20260801", "computer_toolset_20260801",
    ),
    _out(
        _SERVICE,
        "code_execution_20250522", "code_execution_20250825", "code_execution_20260120", "code_execution_20260521",
        "web_search_20250305", "web_search_20260209", "web_search_20260318", "web_fetch_20250910",
        "web_fetch_20260209", "web_fetch_20260309", "web_fetch_20260318", "advisor_20260301", "mcp_toolset",
        "tool_search_tool_bm25", "tool_search_tool_bm25_20251119", "tool_search_tool_regex",
        "tool_search_tool_regex_20251119",
    ),
)  # fmt: skip
ANTHROPIC_CHOICES = _table(
    "`/v1/messages`: `tool_choice`",
    _read("the model decides", "auto"),
    _read("a call; with no tool left to call, as `auto`", "any"),
    _read("a call of that tool", "tool"),
    _read("no tools", "none"),
)

# ---- OpenAI's Responses

ITEMS = _table(
    "`/v1/responses`: items of the input",
    _read("a message", "message"),
    _read("a call", "function_call", "custom_tool_call", "local_shell_call", "shell_call", "apply_patch_call"),
    _read(
        "a result",
        "function_call_output", "custom_tool_call_output", "local_shell_call_output", "shell_call_output",
        "apply_patch_call_output",
    ),
    _read("the reasoning of the assistant's message, as far as the template keeps it", "reasoning"),
    _read("its tools are offered with the others", "additional_tools", "tool_search_output"),
    _line("the call and its output", "mcp_call", "code_interpreter_call"),
    _out(
        "a record of what the vendor's service did",
        "web_search_call", "file_search_call", "image_generation_call", "computer_call", "computer_call_output",
        "tool_search_call", "mcp_list_tools", "mcp_approval_request", "mcp_approval_response", "program",
        "program_output",
    ),
    _read("the summary, if this server wrote it; another's is left out", "compaction", "context_compaction"),
    _read("the answer is a summary, if the input ends with it; elsewhere it is left out", "compaction_trigger"),
    _out("items are not kept one by one: send them, or `previous_response_id`", "item_reference"),
    _out("a client's own record", "ghost_snapshot"),
    _out("the request's own fields hold", "configuration_update"),
)  # fmt: skip
PARTS = _table(
    "`/v1/responses`: parts of messages and of outputs",
    _read("its text", "input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text"),
    _line(_TEXT_ONLY, "input_image", "computer_screenshot", newly=_NEWLY),
    _line("nothing is unpacked or fetched: send its text", "input_file", newly=_NEWLY),
    _out("nobody here can read it", "encrypted_content"),
)
TOOLS = _table(
    "`/v1/responses`: tools",
    _read("offered", "function"),
    _read("its tools are offered as `NAMESPACE__NAME`; calls come back with `name` and `namespace`", "namespace"),
    _read("offered as a call with one text; a grammar holds where it compiles", "custom"),
    _out(
        _SERVICE,
        "web_search", "web_search_2025_08_26", "web_search_preview", "web_search_preview_2025_03_11", "file_search",
        "mcp", "code_interpreter", "programmatic_tool_calling", "image_generation", "tool_search",
    ),
    _out(_OF_CLIENT, "computer", "computer_use_preview", "computer_use", "local_shell", "shell", "apply_patch"),
)  # fmt: skip
CHOICES = _table(
    "`/v1/responses`: `tool_choice`",
    _read("the model decides", "auto"),
    _read("a call; with no tool left to call, as `auto`", "required"),
    _read("no tools", "none"),
    _read("a call of that tool", "function", "custom"),
    _read("the named ones of the tools, `auto` or `required`", "allowed_tools"),
    _refused(
        "a call of a tool that is not there",
        "file_search", "web_search", "web_search_preview", "web_search_preview_2025_03_11", "computer",
        "computer_use", "computer_use_preview", "code_interpreter", "image_generation", "mcp",
        "programmatic_tool_calling", "apply_patch", "shell",
    ),
)  # fmt: skip

# ---- OpenAI's chat

CHAT_PARTS = _table(
    "`/v1/chat/completions`: parts of messages",
    _read("its text", "text", "refusal", "input_text", "output_text"),
    _line(_TEXT_ONLY, "image_url", "input_audio", "video_url", "audio_url", newly=_NEWLY),
    _line("nothing is unpacked or fetched: send its text", "file", newly=_NEWLY),
    _out("reasoning is a field of its own, `reasoning_content`", "thinking"),
)
CHAT_CALLS = _table(
    "`/v1/chat/completions`: `tool_calls`",
    _read("a call", "function", "custom"),
)
CHAT_TOOLS = _table(
    "`/v1/chat/completions`: tools",
    _read("offered", "function"),
    _read("offered as a call with one text; a grammar holds where it compiles", "custom"),
)
CHAT_CHOICES = _table(
    "`/v1/chat/completions`: `tool_choice`",
    _read("the model decides", "auto"),
    _read("a call; with no tool left to call, as `auto`", "required", "any"),
    _read("no tools", "none"),
    _read("a call of that tool", "function", "custom"),
    _read("the named ones of the tools, `auto` or `required`", "allowed_tools"),
)

TABLES = (
    BLOCKS, DOCUMENTS, ANTHROPIC_TOOLS, ANTHROPIC_CHOICES, ITEMS, PARTS, TOOLS, CHOICES, CHAT_PARTS, CHAT_CALLS,
    CHAT_TOOLS, CHAT_CHOICES,
)  # fmt: skip


# ---- lines of text in place of what is not read

FREE_TEXT = "input"  # the argument that a call of a tool of free text has
_MOST_TOLD = 1000  # characters of a line
_MOST_LEVELS = 8
_TELLING = (
    "title", "url", "tool_name", "text", "stdout", "stderr", "output", "error_code", "logs", "content", "tabs",
    "tool_references",
)  # fmt: skip


def unread(kind: str, name: str = "") -> str:
    """The line in place of an image or a file."""
    what = kind.removeprefix("input_").removesuffix("_url").replace("_", " ")
    return f"{what}{f' {shortened(name)}' if name else ''}: this model reads text only"


class Content:
    """The text of a message, of texts and of lines in place of other things, each on a line of its own."""

    def __init__(self) -> None:
        self._text = ""
        self._after_line = False

    def text(self, text: str) -> None:
        if self._after_line and text and not text.startswith("\n"):
            self._text += "\n"
        self._text += text
        self._after_line = self._after_line and not text

    def line(self, text: str) -> None:
        if self._text and not self._text.endswith("\n"):
            self._text += "\n"
        self._text += f"[{text}]"
        self._after_line = True

    def __str__(self) -> str:
        return self._text


def told(*things: Any) -> str:
    """The texts in a record of a vendor's feature that a reader would look at, the first of them."""
    text = " | ".join(" ".join(each.split()) for each in _texts(list(things)) if each.strip())
    return text if len(text) <= _MOST_TOLD else f"{text[: _MOST_TOLD - 3]}..."


def _texts(thing: Any, depth: int = 0) -> Iterator[str]:
    if isinstance(thing, str):
        yield thing
    elif depth < _MOST_LEVELS and isinstance(thing, list | dict):
        inner = thing if isinstance(thing, list) else [thing.get(key) for key in _TELLING]
        for each in inner:
            yield from _texts(each, depth + 1)
