"""How requests of each dialect become chats or completions: what the process that prepares prompts is given."""

from __future__ import annotations

from collections.abc import Mapping

from api.dialects.anthropic import requests as anthropic
from api.dialects.ollama import requests as ollama
from api.dialects.responses import compaction
from api.dialects.responses import requests as responses
from api.prepare.job import Kind
from api.prepare.prompts import Form

FORMS: Mapping[Kind, Form] = {
    Kind.MESSAGES: anthropic.prepare,
    Kind.RESPONSES: responses.prepare,
    Kind.COMPACT: compaction.prepare,
    Kind.OLLAMA_CHAT: ollama.prepare_chat,
    Kind.OLLAMA_GENERATE: ollama.prepare_generate,
}
