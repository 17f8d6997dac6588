"""Parsing, rendering and tokenising: everything whose cost depends on a request's content."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from api.bodies.body import Body
from api.bodies.generation import (
    ChatOptions,
    ChatRequest,
    CompletionOptions,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from api.bodies.parsing import Notes, parse, parse_object
from api.bodies.sampling import check_vocabulary
from api.bodies.values import MAX_CHOICES
from api.errors import ApiError, TooLongError, bad_request
from api.prepare.chat import Chats
from api.prepare.grammars import Grammars
from api.prepare.job import Job, Kind, Prepared, Reading, TextSettings
from api.text.control import Rendered
from api.text.messages import normalise
from api.text.tokenizer import Encoded, Tokenizer, load_tokenizer


def tokenizer_of(settings: TextSettings) -> Tokenizer | None:
    """None with --skip-tokenizer. Raises UserError if there is none otherwise."""
    if settings.model is None:
        return None
    gguf, template = settings.gguf, settings.chat_template
    return load_tokenizer(Path(settings.model), Path(gguf) if gguf else None, Path(template) if template else None)


Form = Callable[["Preparer", Job, bytes, Notes], Prepared]
_MAX_ANSWER_BYTES = 64 << 20  # of /tokenize and /detokenize


class Preparer:
    """`tokenizer` None: prompts are token ids. `forms`: of the kinds that are neither OpenAI's nor of tokens."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        forms: Mapping[Kind, Form],
        *,
        trust_control_tokens: bool,
        unknown_fields: str = "reject",
        tool_format: str = "auto",
        reasoning_format: str = "auto",
    ) -> None:
        self._tokenizer = tokenizer
        self._forms = forms
        self._unknown_fields = unknown_fields
        self._grammars = Grammars()
        self._chats: Chats | None = None
        if tokenizer is not None and tokenizer.template is not None:
            self._chats = Chats(
                tokenizer,
                tokenizer.template,
                trust_control_tokens=trust_control_tokens,
                tool_format=tool_format,
                reasoning_format=reasoning_format,
            )

    def prepare(self, job: Job, raw: bytes) -> Prepared:
        """Raises ApiError or UserError for what is wrong with the request."""
        notes = Notes(self._unknown_fields)
        prepared = self._prepare(job, raw, notes)
        return msgspec.structs.replace(prepared, unknown=notes.unknown, unused=notes.unused, remarks=notes.remarks)

    def _prepare(self, job: Job, raw: bytes, notes: Notes) -> Prepared:
        match job.kind:
            case Kind.CHAT:
                return self._chat(parse(ChatRequest, raw, notes), job, notes)
            case Kind.TEMPLATE:
                chat = self._templates.chat(parse(ChatRequest, raw, notes), None, notes)
                return Prepared(b"", answer=_answer(chat.rendered.restored(), "messages"))
            case Kind.COMPLETION:
                return self.completion(parse(CompletionRequest, raw, notes), job)
            case Kind.TOKENIZE:
                return self._tokenize(parse(TokenizeRequest, raw, notes), notes)
            case Kind.DETOKENIZE:
                given = parse(DetokenizeRequest, raw, notes)
                tokenizer = self._needed("tokens")
                check_vocabulary(given.tokens, job.vocab_size, "tokens")
                text = tokenizer.decode(given.tokens, skip_special_tokens=False)
                return Prepared(_model(given.model), answer=_answer(text, "tokens"))
            case kind:
                return self._forms[kind](self, job, raw, notes)

    def chat_of(self, content: dict[str, Any], job: Job, notes: Notes, words: Mapping[str, str]) -> Prepared:
        """Of a request in another form, as a chat's. `words`: what that form calls a chat's fields."""
        if isinstance(name := content.get("model"), str):
            content["model"] = name.removesuffix(":latest")
        own = Notes(notes.unknown_fields)
        try:
            prepared = self._chat(parse_object(ChatRequest, content), job, own)
        except ApiError as error:
            raise _in_words(error, words) from None
        notes.unknown += own.unknown
        notes.unused += [_renamed(name, words) for name in own.unused]
        notes.remarks += [_renamed(remark, words) for remark in own.remarks]
        if prepared.grammar is None:
            return prepared
        grammar = msgspec.structs.replace(prepared.grammar, field=_renamed(prepared.grammar.field, words))
        return msgspec.structs.replace(prepared, grammar=grammar)

    def _needed(self, param: str) -> Tokenizer:
        if self._tokenizer is None:
            raise bad_request("the server runs without a tokenizer (--skip-tokenizer): send token ids", param)
        return self._tokenizer

    def _chat(self, body: ChatRequest, job: Job, notes: Notes) -> Prepared:
        for where, what in body.offer.remarks:
            notes.remark(where, what)
        chat = self._templates.chat(body, self._grammars.of(body), notes, keeps_states=job.keeps_states)
        grammar = self._grammars.of_chat(chat.grammar_of, body.use, notes)
        whole = self._encoded(chat.rendered, None if body.truncate_prompt_tokens else job)
        ids = _truncated(whole.ids, body, job)
        _check_prompt(ids, "messages", job)
        whole_end = body.truncate_prompt_tokens is None or body.truncation_side == "left"
        whole_beginning = len(ids) == len(whole.ids) or body.truncation_side == "right"
        return Prepared(
            _options(body, ChatOptions),
            [_packed(ids)],
            [_last_said(body)] if body.echo else [],
            bad_words=self._bad_words(body),
            grammar=grammar,
            reading=Reading(
                chat.layout,
                chat.thinking,
                functions=bool(body.functions),
                free=body.use.free if body.use is not None else (),
            ),
            opening_tokens=self._opening_tokens(chat.rendered) if whole_end else None,
            system_tokens=min(whole.shared, len(ids)) if whole_beginning else 0,
            part_ends=[whole.part_ends] if whole_beginning and whole.part_ends else [],
        )

    def _opening_tokens(self, rendered: Rendered) -> int | None:
        if rendered.opening is None:
            return None
        return len(self._needed("messages").encode_rendered(Rendered(rendered.opening, rendered.stand_ins)))

    @property
    def _templates(self) -> Chats:
        self._needed("messages")
        if self._chats is None:
            raise bad_request("the model has no chat template: give one with --chat-template", "messages")
        return self._chats

    def _encoded(self, rendered: Rendered, job: Job | None) -> Encoded:
        """As `Tokenizer.encode_shared`. `job` None: however many tokens there are."""
        tokenizer = self._needed("messages")
        if job is not None:
            _check_length(tokenizer, rendered.text, job, "messages")
        return tokenizer.encode_shared(rendered)

    def completion(self, body: CompletionRequest, job: Job) -> Prepared:
        given: Sequence[Any] = [body.prompt] if isinstance(body.prompt, str) else body.prompt
        if isinstance(given[0], int):
            given = [given]
        if len(given) * body.candidates > MAX_CHOICES:
            raise bad_request(
                f"prompt: {len(given)} prompts with {body.candidates} answers each are more than {MAX_CHOICES}",
                "prompt",
            )
        prompts, texts, ends = [], [], []
        for prompt in given:
            whole = self._raw(prompt, body, job) if isinstance(prompt, str) else Encoded(prompt, 0, [])
            ids = _truncated(whole.ids, body, job)
            _check_prompt(ids, "prompt", job)
            prompts.append(_packed(ids))
            whole_beginning = len(ids) == len(whole.ids) or body.truncation_side == "right"
            ends.append(whole.part_ends if whole_beginning else [])
            if body.echo:
                texts.append(self._echoed(prompt, ids, body))
        options, grammar = _options(body, CompletionOptions), self._grammars.of(body)
        bad_words, part_ends = self._bad_words(body), ends if any(ends) else []
        return Prepared(options, prompts, texts, bad_words=bad_words, grammar=grammar, part_ends=part_ends)

    def _bad_words(self, body: ChatRequest | CompletionRequest) -> list[list[int]]:
        """Every way in which they are written."""
        if not body.bad_words:
            return []
        if self._tokenizer is None:
            raise bad_request("bad_words: the server runs without a tokenizer (--skip-tokenizer)", "bad_words")
        return [tokens for word in body.bad_words for tokens in self._tokenizer.word_tokens(word)]

    def _raw(self, prompt: str, body: CompletionRequest, job: Job) -> Encoded:
        """A raw prompt is the client's from end to end: control tokens written out in it are control tokens."""
        tokenizer = self._needed("prompt")
        if not body.truncate_prompt_tokens:
            _check_length(tokenizer, prompt, job, "prompt")
        if job.keeps_states:
            return tokenizer.encode_parts(prompt, add_special_tokens=body.add_special_tokens)
        return Encoded(tokenizer.encode(prompt, add_special_tokens=body.add_special_tokens), 0, [])

    def _echoed(self, prompt: str | list[int], ids: list[int], body: CompletionRequest) -> str:
        if (
            isinstance(prompt, str) and body.logprobs is None and not body.truncate_prompt_tokens
        ):  # offsets are those of the tokens' text
            return prompt
        return "" if self._tokenizer is None else self._tokenizer.decode(ids, skip_special_tokens=False)

    def _tokenize(self, body: TokenizeRequest, notes: Notes) -> Prepared:
        if body.text is not None:
            ids = self._needed("prompt").encode(body.text, add_special_tokens=body.adds_special_tokens)
        else:
            rendered = self._templates.rendered(
                body.messages or [],
                body.chat_template_kwargs,
                None,
                notes,
                add_generation_prompt=body.add_generation_prompt,
                continue_final_message=False,
            )
            ids = self._encoded(rendered, None).ids
        options = msgspec.json.encode({"model": body.model, "count": len(ids)})
        return Prepared(options, answer=_answer(self._with_pieces(ids) if body.with_pieces else ids, "prompt"))

    def _with_pieces(self, ids: Sequence[int]) -> list[dict[str, Any]]:
        """llama-server's form: a token that is no whole text has its bytes."""
        made = []
        for token in ids:
            data = self._needed("content").token_bytes(token)
            try:
                made.append({"id": token, "piece": data.decode()})
            except UnicodeDecodeError:
                made.append({"id": token, "piece": list(data)})
        return made


TOKEN_BYTES = 4


def _packed(ids: Sequence[int]) -> bytes:
    return array("i", ids).tobytes()


def unpacked(data: bytes) -> list[int]:
    ids = array("i")
    ids.frombytes(data)
    return ids.tolist()


def _truncated(ids: list[int], body: ChatRequest | CompletionRequest, job: Job) -> list[int]:
    """The last or first `truncate_prompt_tokens` of them; -1: what fits beside the output."""
    keep = body.truncate_prompt_tokens
    if keep == -1:
        keep = max(1, job.max_model_len - max(1, body.output_tokens or 1))
    if keep is None:
        return ids
    return ids[-keep:] if body.truncation_side == "left" else ids[:keep]


def _renamed(field: str, words: Mapping[str, str]) -> str:
    """A chat's field in the words of another form; the first of them that fits."""
    for name, other in words.items():
        if field == name or field.startswith((f"{name}.", f"{name}[")):
            return other + field.removeprefix(name)
    return field


def _in_words(error: ApiError, words: Mapping[str, str]) -> ApiError:
    """The error of a chat, of the request in another form that became it."""
    if error.param is None:
        return error
    param = _renamed(error.param, words)
    message = error.message.replace(error.param, param)
    if isinstance(error, TooLongError):
        return TooLongError(message, param, error.prompt_tokens, error.output_tokens, error.limit)
    return ApiError(error.status, message, param=param, code=error.code, retry_after_s=error.retry_after_s)


def _last_said(body: ChatRequest) -> str:
    """The text of an assistant's message at the end of a chat that has been checked."""
    (last,) = normalise(body.messages[-1:], Notes("ignore"))
    return str(last["content"]) if last["role"] == "assistant" else ""


def _model(name: str | None) -> bytes:
    return msgspec.json.encode({"model": name})


def _answer(value: str | list[int] | list[dict[str, Any]], param: str) -> list[bytes]:
    """As JSON. ApiError 400 for one that is larger than any client can use."""
    content = msgspec.json.encode(value)
    if len(content) > _MAX_ANSWER_BYTES:
        size = f"{len(content) >> 20} MiB, more than {_MAX_ANSWER_BYTES >> 20}"
        raise bad_request(f"{param}: the answer takes {size}; send it in parts", param)
    return [content]


def _options(body: Body, kind: type[Body]) -> bytes:
    return body.model_dump_json(include=set(kind.model_fields), exclude_unset=True).encode()


def _check_prompt(ids: Sequence[int], param: str, job: Job) -> None:
    if not ids:
        raise bad_request(f"{param}: the prompt is empty", param)
    if len(ids) >= job.max_model_len:
        raise too_long(len(ids), job.max_model_len, param)
    check_vocabulary(ids, job.vocab_size, param)


def _check_length(tokenizer: Tokenizer, text: str, job: Job, param: str) -> None:
    """Refuses what cannot fit however it is tokenised, before time is spent on it."""
    least = tokenizer.least_tokens(text)
    if least >= job.max_model_len:
        raise too_long(least, job.max_model_len, param, f"at least {least} tokens ({len(text)} characters)")


def too_long(tokens: int, limit: int, param: str, length: str | None = None) -> ApiError:
    """OpenAI's error for a prompt of so many tokens (`length`: in words), which leaves no room within `limit`."""
    return TooLongError(
        f"This model's maximum context length is {limit} tokens. However, your {param} resulted in "
        f"{length or f'{tokens} tokens'}, and at least one is for the output. Please reduce the length of the {param}.",
        param,
        tokens,
        None,
        limit,
    )
