"""Answers in harmony, gpt-oss' form: messages in channels, and grammars that hold an answer to it.

<|channel|>analysis<|message|> REASONING <|end|><|start|>assistant
<|channel|>commentary to=functions.NAME <|constrain|>json<|message|> {...} <|call|>
<|channel|>final<|message|> TEXT <|return|>
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from api.errors import bad_request
from api.text.calls.definitions import ToolUse
from api.text.calls.formats import CHANNEL, CONSTRAIN, END, HARMONY_MARKERS, MESSAGE, START
from api.text.calls.grammars import enforced, json_rule, wanted
from api.text.calls.literals import ANY, Literals, TokenOf, in_slashes, no_tokens
from engine.messages import GrammarSpec


def grammar_in_channels(
    use: ToolUse | None, answer: GrammarSpec | None, token_of: TokenOf = no_tokens
) -> GrammarSpec | None:
    """Reasoning and words before a call are free; what comes last is a call, or a final text that is `answer`. None if
    nothing has to be enforced. `token_of`: of HARMONY_MARKERS. Raises ApiError 400 if both cannot be."""
    answer = answer if use is None else wanted(use, answer)
    held = use is not None and (use.must or any(tool.strict for tool in use.tools))
    if answer is None and not held:
        return None
    texts = Literals(HARMONY_MARKERS, token_of)
    rule, thought = texts.until("thought", f"{END}{START}assistant")
    channel, message = texts.written(CHANNEL), texts.written(MESSAGE)
    last = [*(["call"] if use is not None else []), *(["final"] if use is None or not use.must else [])]
    rules = [
        f"start: said* ({' | '.join(last)})",
        f'said: {channel} ("analysis" | "commentary") {message} {thought}',
        rule,
    ]
    if "final" in last:
        rules.append(f'final: {channel} "final" {message} {ANY if answer is None else _expression(answer)}')
    if use is not None:
        rules += _calls(use, texts)
    return GrammarSpec("lark", "\n".join(rules) + "\n", field="tools" if answer is None else answer.field)


def _calls(use: ToolUse, texts: Literals) -> Iterator[str]:
    schemas = enforced(use)
    yield "call: " + " | ".join(f"call_{i}" for i in range(len(schemas)))
    for i, (name, schema) in enumerate(schemas.items()):
        head = texts.written(f"{CHANNEL}commentary to=functions.{name} {CONSTRAIN}json{MESSAGE}")
        yield f"call_{i}: {head} {json_rule(schema)}"


def _expression(answer: GrammarSpec) -> str:
    """What a final text is to be, in Lark."""
    match answer.kind:
        case "json_schema":
            return json_rule(json.loads(answer.text))
        case "choice":
            return f"({' | '.join(map(json.dumps, json.loads(answer.text)))})"
        case "regex":
            return f"/{in_slashes(answer.text)}/"
        case kind:
            message = f"a {kind} grammar does not go with answers in channels: send a JSON schema, a regex or a choice"
            raise bad_request(f"{answer.field}: {message}", answer.field)
