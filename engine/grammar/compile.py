"""From a grammar's text to a matcher over a vocabulary. Torch-free; the library, llguidance, is imported when the
first grammar comes.

Nothing is computed ahead over the vocabulary: states are made as tokens need them. The limits bound what a grammar may
cost: reading it, one mask (some 10 ms), and the states that are kept (2 kB each). Beyond one of them it is refused, or
the request that has got so far ends.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

from engine.errors import UserError
from engine.messages import GrammarSpec, SetVocabulary

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer
    from llguidance._lib import JsonCompileOptions

MAX_TEXT = 2**18  # characters of a grammar
_MAX_MESSAGE = 500
_MAX_PLACES = 2000  # subschemas that are looked at for the place of an error
_ONE_OF = "the branches of oneOf may overlap, which is not supported: write anyOf, or branches that exclude each other"
# These come before what a schema says itself (`x-guidance`). Whitespace is bounded: a model may write nothing else.
_JSON: JsonCompileOptions = {
    "lenient": False,
    "coerce_one_of": False,
    "whitespace_pattern": r"[ ]?|\n[ \t]{0,40}",
    "item_separator": ",",
    "key_separator": ":",
}


def tokenizer_of(vocabulary: SetVocabulary, eos_token_ids: Sequence[int], vocab_size: int) -> LLTokenizer:
    """The vocabulary as a trie: some 0.5 s and 50 MB for 150,000 tokens, and Python stands still meanwhile. Ids up to
    `vocab_size` that the vocabulary does not know are never allowed."""
    from llguidance import LLTokenizer, TokenizerWrapper

    tokens = [*vocabulary.tokens[:vocab_size], *[b""] * (vocab_size - len(vocabulary.tokens))]
    special = [token for token in {*vocabulary.special, *eos_token_ids} if token < vocab_size]
    made = _Tokens(tokens, list(eos_token_ids), special, vocabulary.definition)
    return LLTokenizer(TokenizerWrapper(made), eos_token=list(eos_token_ids))


class _Tokens:
    """What llguidance asks of a tokenizer. Text that a grammar forces is allowed in these tokens only, so they must be
    the model's own: in others it has not learnt to go on."""

    bos_token_id = None

    def __init__(self, tokens: list[bytes], eos_token_ids: list[int], special: list[int], definition: str) -> None:
        self.tokens, self.eos_token_id, self.special_token_ids = tokens, eos_token_ids[0], special
        self._token_of = {token: i for i, token in enumerate(tokens) if len(token) == 1}
        self._tokenizer = Tokenizer.from_str(definition)
        self._tokenizer.encode_special_tokens = True  # a grammar's text is text

    def __call__(self, text: bytes) -> list[int]:
        """Byte by byte where the text is cut inside a character, or the tokenizer would change it."""
        try:
            ids: list[int] = self._tokenizer.encode(text.decode(), add_special_tokens=False).ids
        except UnicodeDecodeError:
            ids = []
        if b"".join(self.tokens[token] for token in ids) == text:
            return ids
        return [self._token_of[text[i : i + 1]] for i in range(len(text))]


def limits() -> LLParserLimits:
    """What one grammar may take of time and memory, in llguidance's units."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=100_000,
        step_max_items=50_000,
        max_items_in_row=2_000,
        max_lexer_states=20_000,
        max_grammar_size=200_000,
        verbose_errors=False,
    )


def check(spec: GrammarSpec) -> None:
    """Raises UserError for a text that is no grammar, or one beyond the limits, whatever the vocabulary."""
    from llguidance import LLMatcher

    failed, notes = LLMatcher.validate_grammar_with_warnings(_source(spec), limits=limits())
    if failed:
        place = _place(spec.text, notes[0]) if spec.kind == "json_schema" else ""
        raise _wrong(spec, place + (_ONE_OF if "coerce_one_of" in notes[0] else notes[0]))


def matcher_of(spec: GrammarSpec, tokenizer: LLTokenizer) -> LLMatcher:
    """A matcher at the beginning, its first mask known. Raises UserError. Python's lock is free meanwhile."""
    from llguidance import LLMatcher

    matcher = LLMatcher(tokenizer, _source(spec), log_level=0, limits=limits())
    if not matcher.is_error():
        matcher.compute_bitmask()
    if matcher.is_error():
        raise _wrong(spec, matcher.get_error())
    return matcher


def _source(spec: GrammarSpec) -> str:
    """The library's own form of it."""
    if len(spec.text) > MAX_TEXT:
        raise _wrong(spec, f"{len(spec.text)} characters; at most {MAX_TEXT} are allowed")
    try:
        return str(_read(spec))
    except ValueError as error:  # what is no JSON, no GBNF, or no text
        raise _wrong(spec, str(error)) from None


def _read(spec: GrammarSpec) -> object:
    from llguidance import LLMatcher, grammar_from, regex_to_lark

    match spec.kind:
        case "json_schema":
            schema = {"true": "{}", "false": '{"enum": []}'}.get(spec.text, spec.text)  # the options need an object
            return LLMatcher.grammar_from_json_schema(schema, overrides=_JSON)
        case "regex":  # \d, \w and \s are ASCII's, which every dialect's hold
            return LLMatcher.grammar_from_regex(regex_to_lark(spec.text, "dws"))
        case "choice":
            return LLMatcher.grammar_from_regex("|".join(map(_literal, json.loads(spec.text))))
        case "gbnf":
            return grammar_from("gbnf", spec.text)
        case "lark":
            return LLMatcher.grammar_from_lark(spec.text)


def _literal(text: str) -> str:
    """As a regular expression."""
    return "".join(char if char.isascii() and char.isalnum() else f"\\x{{{ord(char):x}}}" for char in text)


def _wrong(spec: GrammarSpec, why: str) -> UserError:
    return UserError(f"{spec.field}: {why.strip()[:_MAX_MESSAGE]}", spec.field)


# ---- the place of what is wrong in a schema, which the library does not tell


def _place(text: str, complaint: str) -> str:
    """A JSON pointer to the innermost subschema that alone has the same complaint, and a colon."""
    from llguidance import LLMatcher

    root = json.loads(text)
    if not isinstance(root, dict):
        return ""
    shared = {name: root[name] for name in ("$defs", "definitions") if name in root}
    left, place, schema, looked = True, "#", root, 0
    while left:
        left = False
        for pointer, inner in _subschemas(schema):
            looked += 1
            if looked > _MAX_PLACES:
                return f"{place}: "
            alone = inner if schema is root and pointer.split("/")[1] in shared else {**shared, **inner}
            source = LLMatcher.grammar_from_json_schema(json.dumps(alone), overrides=_JSON)
            failed, notes = LLMatcher.validate_grammar_with_warnings(source, limits=limits())
            if failed and notes[0] == complaint:
                place, schema, left = place + pointer, inner, True
                break
    return f"{place}: "


def _subschemas(schema: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for keyword, value in schema.items():
        if keyword in ("properties", "patternProperties", "$defs", "definitions") and isinstance(value, dict):
            inside = [(f"/{_escaped(name)}", inner) for name, inner in value.items()]
        elif keyword in ("allOf", "anyOf", "oneOf", "prefixItems", "items") and isinstance(value, list):
            inside = [(f"/{i}", inner) for i, inner in enumerate(value)]
        elif keyword in ("items", "additionalProperties", "additionalItems"):
            inside = [("", value)]
        else:
            continue
        for pointer, inner in inside:
            if isinstance(inner, dict):
                yield f"/{keyword}{pointer}", inner


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")
