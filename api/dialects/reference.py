"""The tables of docs/api.md and docs/agents.md, made from those of fields and of kinds:
`python -m api.dialects.reference` rewrites them."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from api.bodies.body import Body, Field, Status
from api.bodies.fields import CHAT, COMPLETION, GENERATION
from api.bodies.generation import ChatRequest, CompletionRequest, StreamOptions
from api.bodies.tools import ReasoningObject, ThinkingObject
from api.dialects.anthropic import requests as anthropic
from api.dialects.common.content import SchemaFormat
from api.dialects.ollama import requests as ollama
from api.dialects.responses import requests as responses
from api.dialects.responses.compaction import CompactRequest
from api.text.kinds import TABLES as KINDS
from api.text.kinds import Kinds


class Table(NamedTuple):
    """`name`: as docs/api.md marks it. `kind`: a body, or a part of one. `fields`: those to show, if not all."""

    name: str
    kind: type[Body]
    fields: Sequence[Field] = ()


TABLES = (
    Table("every generating endpoint", ChatRequest, GENERATION),
    Table("/v1/chat/completions", ChatRequest, CHAT),
    Table("thinking of a chat", ThinkingObject),
    Table("reasoning of a chat", ReasoningObject),
    Table("/v1/completions", CompletionRequest, COMPLETION),
    Table("stream_options", StreamOptions),
    Table("/v1/responses", responses.ResponsesRequest),
    Table("/v1/responses/compact", CompactRequest),
    Table("reasoning", responses.ReasoningConfig),
    Table("text", responses.TextConfig),
    Table("text.format", responses.TextFormat),
    Table("/v1/messages", anthropic.MessagesRequest),
    Table("thinking", anthropic.Thinking),
    Table("output_config", anthropic.OutputConfig),
    Table("output_config.format", SchemaFormat),
    Table("/api/chat", ollama.OllamaChatRequest),
    Table("/api/generate", ollama.OllamaGenerateRequest),
    Table("options", ollama.OllamaOptions),
    Table("/api/show", ollama.OllamaShowRequest),
    Table("/api/pull", ollama.OllamaPullRequest),
)

_DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = (_DOCS / "api.md", _DOCS / "agents.md")
_BOUNDS = (
    ("minimum", " from {}"),
    ("maximum", " to {}"),
    ("exclusiveMaximum", " below {}"),
    ("maxLength", " of at most {} characters"),
    ("minItems", ", at least {}"),
    ("maxItems", ", at most {}"),
    ("maxProperties", " of at most {} fields"),
)


def tables() -> dict[str, str]:
    """Markdown of each table by its name."""
    of_fields = {f"fields: {table.name}": _table(table) for table in TABLES}
    return of_fields | {f"kinds: {kinds.title}": _kinds(kinds) for kinds in KINDS}


def updated(page: str) -> str:
    """The page with the tables between its markers written again. Raises KeyError for a marker of no table."""
    made = tables()

    def replaced(match: re.Match[str]) -> str:
        return f"{match[1]}\n{made[match[2]]}\n{match[3]}"

    return re.sub(r"(<!-- (.+?: .+?) -->)\n.*?\n?(<!-- end -->)", replaced, page, flags=re.DOTALL)


def _table(table: Table) -> str:
    properties = table.kind.model_json_schema()["properties"]
    order = list(Status)
    rows = sorted(table.fields or table.kind.FIELDS, key=lambda field: order.index(field.status))
    lines = ["| field | | takes | |", "|---|---|---|---|"]
    for field in rows:
        takes = _type(properties[field.name]) if field.status is Status.SUPPORTED else _values(field)
        lines.append(f"| `{field.name}` | {field.status.value} | {takes} | {field.note} |")
    return "\n".join(lines)


def _kinds(kinds: Kinds) -> str:
    """Kinds with one fate and one note share a line."""
    lines = ["| type | | |", "|---|---|---|"]
    rows: dict[tuple[str, str], list[str]] = {}
    for kind in kinds.rows.values():
        fate = kind.fate.value + (f"; {kind.newly.value} where a user newly asks for it" if kind.newly else "")
        rows.setdefault((fate, kind.note), []).append(f"`{kind.name}`")
    lines += [f"| {', '.join(names)} | {fate} | {note} |" for (fate, note), names in rows.items()]
    return "\n".join(lines)


def _values(field: Field) -> str:
    if not field.values:
        return {Status.NO_OP: "anything", Status.REFUSED: "nothing"}.get(field.status, "")
    return "only " + ", ".join(f"`{json.dumps(value)}`" for value in field.values)


def _type(schema: dict[str, Any]) -> str:
    if "anyOf" in schema:
        return " or ".join(_type(one) for one in schema["anyOf"] if one.get("type") != "null")
    if "$ref" in schema:
        return "object"
    if "enum" in schema:
        return " or ".join(f"`{json.dumps(one)}`" for one in schema["enum"])
    kind = schema.get("type", "anything")
    if isinstance(kind, list):
        return " or ".join(kind)
    text = f"list of {_type(schema['items'])}" if "items" in schema else str(kind)
    return text + "".join(form.format(_shown(schema[key])) for key, form in _BOUNDS if key in schema)


def _shown(bound: float) -> str:
    power = bound.bit_length() - 1 if isinstance(bound, int) else 0
    if power >= 31 and bound == 1 << power:
        return f"2^{power}"
    return f"-2^{(-bound).bit_length() - 1}" if isinstance(bound, int) and bound < -(2**31) else f"{bound:g}"


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(updated(page.read_text(encoding="utf-8")), encoding="utf-8")
