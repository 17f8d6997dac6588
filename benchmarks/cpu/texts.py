"""Prompts and the answers that are due to them, cut from the project's own files: four kinds of what servers are asked.

code    a module; the module with one of its names changed
tools   files that an agent has read, call by call; its next calls
quotes  paragraphs; sentences of them, quoted one after the other
chat    a heading; the prose below it

Tokens are words, digits and signs, numbered as they occur: what drafts are made of is which of them come again.
"""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle, pairwise
from pathlib import Path

_ROOT = Path(__file__).parents[2]
_TOKEN = re.compile(r" ?[A-Za-z]{1,8}|\d|\s+|[^\sA-Za-z\d]")
_FIRST = 10  # tokens before it have meanings of their own in many vocabularies


@dataclass(frozen=True)
class Exchange:
    prompt: list[int]
    answer: list[int]


def exchanges(kind: str, vocabulary: int, most_prompt: int, answer: int) -> Iterator[Exchange]:
    """Without end; no answer comes twice before all have come. Prompts are cut at the front, answers are of `answer`
    tokens."""
    ids: dict[str, int] = {}

    def encode(text: str) -> list[int]:
        found = _TOKEN.findall(text)
        return [ids.setdefault(token, _FIRST + len(ids) % (vocabulary - _FIRST)) for token in found]

    found: dict[tuple[int, ...], Exchange] = {}
    for prompt, due in KINDS[kind]():
        asked, wanted = encode(prompt)[-most_prompt:], encode(due)[:answer]
        if len(wanted) == answer:
            found.setdefault(tuple(wanted), Exchange(asked, wanted))
    yield from cycle(found.values())


def _code() -> Iterator[tuple[str, str]]:
    for path in _modules():
        text = path.read_text()
        start = text.find("\ndef ") + 1
        body = text[start : start + 1200]
        names = Counter(re.findall(r"\b[a-z_]{4,}\b", body))
        for name in ("self", "return", "None", "from", "import"):
            names.pop(name, None)
        if start and names:
            old = names.most_common(1)[0][0]
            yield f"{body}\n\nRename `{old}` to `the_{old}`.\n", re.sub(rf"\b{old}\b", f"the_{old}", body)


def _tools() -> Iterator[tuple[str, str]]:
    paths = list(_modules())

    def call(path: Path) -> str:
        arguments = {"path": str(path.relative_to(_ROOT)), "offset": 0, "limit": 40}
        return json.dumps({"name": "read_file", "arguments": arguments}) + "\n"

    for first in range(0, len(paths) - 9, 3):
        seen, next_ones = paths[first : first + 3], paths[first + 3 : first + 9]
        listing = "".join(f"{path.relative_to(_ROOT)}\n" for path in paths[first : first + 9])
        yield listing + "".join(call(path) + path.read_text()[:200] for path in seen), "".join(map(call, next_ones))


def _quotes() -> Iterator[tuple[str, str]]:
    rng = random.Random(0)
    paragraphs = [text for _, text in _prose()]
    for first in range(0, len(paragraphs) - 3, 2):
        page = "\n\n".join(paragraphs[first : first + 3])
        sentences = re.findall(r"[A-Z][^.]{40,}\.", page)
        if len(sentences) > 3:
            said = rng.sample(sentences, min(6, len(sentences)))
            quoted = "\n".join(f'It says: "{one}" ({i})' for i, one in enumerate(said))
            yield f"{page}\n\nWhat does the page say?\n", quoted


def _chat() -> Iterator[tuple[str, str]]:
    prose = list(_prose())
    for (heading, text), (_, more) in pairwise(prose):
        yield f"Tell me about this: {heading}\n", f"{text}\n\n{more}"


def _modules() -> Iterator[Path]:
    for folder in ("engine", "scheduler", "api"):
        yield from sorted((_ROOT / folder).rglob("*.py"))


def _prose() -> Iterator[tuple[str, str]]:
    """(heading, paragraph) of the docs, without tables, lists and commands."""
    for path in sorted((_ROOT / "docs").glob("*.md")):
        heading = path.stem
        for block in path.read_text().split("\n\n"):
            if block.startswith("#"):
                heading = block.strip("# \n")
            elif len(block) > 200 and block[0].isalpha():
                yield heading, block


KINDS: dict[str, Callable[[], Iterator[tuple[str, str]]]] = {
    "code": _code,
    "tools": _tools,
    "quotes": _quotes,
    "chat": _chat,
}
