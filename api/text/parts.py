"""Where parts of a long message end, documents or paragraphs, behind which other prompts may go on in another way."""

from __future__ import annotations

import re

_LEAST = 256  # characters between two ends
_PARAGRAPH = 4096  # likewise before the end of a paragraph, where the text marks ends of documents
_END = re.compile(
    r"(?P<marked>(?:</[\w:.-]{1,64}>|^[ \t]*(?:-{3,}|={3,}|\*{3,}|_{3,}|`{3,}|~{3,}))[ \t]*\n)|\n[ \t]*\n", re.MULTILINE
)


def part_ends(text: str) -> list[int]:
    """Rising positions in `text` behind lines that end with a closing tag, lines that are a rule or fence, and blank
    lines: the first of each stretch of some length, and the last one, behind which a question may stand."""
    ends = [(found.end(), found["marked"] is not None) for found in _END.finditer(text)]
    marks = any(marked for _, marked in ends)
    kept, before = [], 0
    for end, marked in ends:
        if end - before >= (_LEAST if marked or not marks else _PARAGRAPH):
            kept.append(end)
            before = end
    if ends and ends[-1][0] > before:
        kept.append(ends[-1][0])
    return kept
