"""The model's tokenizer and chat template, from Hugging Face files or GGUF metadata, without transformers."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
from tokenizers import AddedToken, decoders, normalizers

from api.text.bytelevel import PATTERNS, QWEN2, byte_level_tokenizer, byte_of_char, token_bytes
from api.text.control import Rendered, guarding_characters, hide
from api.text.detokenize import ByteDetokenizer, Detokenizer, TokenTexts, WindowDetokenizer
from api.text.parts import part_ends
from api.text.template import ChatTemplate
from api.text.tiktoken import tiktoken_tokenizer
from engine.errors import ModelFileError, UserError, shown
from engine.files.gguf.file import find_gguf, open_gguf
from engine.files.json_file import read_json
from engine.files.regular import read_text
from engine.messages import SetVocabulary

_CONTROL, _USER_DEFINED = 3, 4  # tokenizer.ggml.token_type
_CONTROL_TEXT = re.compile(r"<[|｜][^<>]+[|｜]>")
_MAX_UNENCODED = 64  # characters in a row that may be in no token
_NFC_SHRINKS = 3  # bytes of text for one of its normal form, at most
_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Encoded(NamedTuple):
    """Tokens of a text; how many of them chats share; how many end the parts of its last message. The token that holds
    such an end is left out: it may be another where other text follows."""

    ids: list[int]
    shared: int
    part_ends: list[int]


class Tokenizer:
    """Text to token ids and back. `template` is None if the model brings none; `tool_template`: the one for chats with
    tools, where it brings another. Decoding is thread-safe."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        template: ChatTemplate | None,
        source: str,
        tool_template: ChatTemplate | None = None,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.template = template
        self.tool_template = tool_template
        self.source = source
        added = backend.get_added_tokens_decoder()
        self._added = frozenset(added)
        self._special = {i for i, token in added.items() if token.special}
        self._control = {i: added[i].content for i in self._special if added[i].content}
        self._normalised_control = any(added[i].normalized for i in self._special)
        self._guards = guarding_characters(
            list(self._control.values()),
            "".join(text for each in (template, tool_template) if each for text in each.strings),
        )
        self._byte_level = isinstance(backend.decoder, decoders.ByteLevel)
        self._token_bytes: dict[int, bytes] = {}  # of those asked for
        self._pieces: dict[tuple[bool, frozenset[str]], TokenTexts] = {}  # by what is shown: a few ways
        self._most_bytes = self._bytes_of_longest_token(added.values())

    @property
    def vocab_size(self) -> int:
        return int(self._backend.get_vocab_size())

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids. Special tokens written out in `text` become those tokens. Raises UserError."""
        return list(self._encoding(text, add_special_tokens=add_special_tokens).ids)

    def _encoding(self, text: str, *, add_special_tokens: bool = False) -> tokenizers.Encoding:
        try:
            return self._backend.encode(text, add_special_tokens=add_special_tokens)
        except BaseException as error:
            # a panic of the Rust library is a BaseException; an Exception is how it reports anything else
            if isinstance(error, Exception) or type(error).__name__ == "PanicException":
                raise UserError(f"this text cannot be tokenised: {str(error)[:200]}", "prompt") from error
            raise

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        trust_control_tokens: bool,
        variables: Mapping[str, Any],
        template: ChatTemplate | None = None,
        **how: Any,
    ) -> Rendered:
        """The chat template's text of `messages` (`template`: another one's); `how` as ChatTemplate.render has it.
        Control tokens in the client's strings stay text unless `trust_control_tokens`. Raises TemplateError."""
        template = template or self.template
        if template is None:
            raise UserError("the model has no chat template: give one with --chat-template", "messages")
        given = (messages, variables)
        (messages, variables), stand_ins = self.guarded(given, trust_control_tokens=trust_control_tokens)
        return Rendered(template.render(messages, variables=variables, **how), stand_ins)

    def guarded(self, values: Any, *, trust_control_tokens: bool) -> tuple[Any, dict[str, str]]:
        """A client's values as a template may have them: no control token can be read out of their strings, unless
        `trust_control_tokens`. With them the stand-ins that a Rendered of them needs."""
        return hide(values, "" if trust_control_tokens else self._guards)

    @property
    def control_tokens(self) -> Mapping[int, str]:
        """Ids and texts of the tokens that no client's text becomes."""
        return self._control

    def added_token(self, text: str) -> int | None:
        """The id of the added token that `text`, all of it, becomes."""
        token = self._backend.token_to_id(text)
        return token if token in self._added else None

    def encode_rendered(self, rendered: Rendered) -> list[int]:
        """Token ids of a template's text: control tokens where the template wrote them, text elsewhere."""
        return self.encode_shared(rendered).ids

    def encode_parts(self, text: str, *, add_special_tokens: bool) -> Encoded:
        """As `encode`, with the ends of the text's parts."""
        encoding = self._encoding(text, add_special_tokens=add_special_tokens)
        return Encoded(list(encoding.ids), 0, [_tokens_before_last(encoding, end) for end in part_ends(text)])

    def encode_shared(self, rendered: Rendered) -> Encoded:
        """The same, with what chats share. Where clients spell control tokens, the last one of these is the end, and
        those of parts are not known."""
        plain, text = rendered.restored(), rendered.text
        if not rendered.stand_ins or not self._spelled(plain, text):
            encoding = self._encoding(plain)
            shared = len(rendered.restored(text[: rendered.shared]))
            begins = [0, *rendered.part_ends]
            lengths = [len(rendered.restored(text[a:b])) for a, b in pairwise(begins)]
            ends = [_tokens_before_last(encoding, end) for end in accumulate(lengths)]
            return Encoded(list(encoding.ids), _tokens_before_last(encoding, shared), ends)
        encoding = self._encoding(text)
        ids: list[int] = []
        at = shared = 0
        for token, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if token in self._control and text[start:end].strip() == self._control[token].strip():
                ids += self._encode_as_text(rendered.restored(text[at:start]))
                ids.append(token)
                at = end
                if end <= rendered.shared:
                    shared = len(ids)
        return Encoded(ids + self._encode_as_text(rendered.restored(text[at:])), shared, [])

    def _spelled(self, plain: str, hidden: str) -> bool:
        """Whether a client's string may hold a control token."""
        if self._normalised_control:  # other spellings may become one
            return True
        return any(plain.count(token) != hidden.count(token) for token in self._control.values())

    def _encode_as_text(self, text: str) -> list[int]:
        self._backend.encode_special_tokens = True
        try:
            return self.encode(text, add_special_tokens=False)
        finally:
            self._backend.encode_special_tokens = False

    def least_tokens(self, text: str) -> int:
        """A number of tokens that `text` has at least, found without tokenising it."""
        if not self._most_bytes:
            return 0
        if text.isascii():
            return len(text) // self._most_bytes
        return len(text.encode()) // (_NFC_SHRINKS * self._most_bytes)

    def _bytes_of_longest_token(self, added: Iterable[AddedToken]) -> int:
        """0 where a token may stand for any number of bytes."""
        normalizer = self._backend.normalizer
        bounded = normalizer is None or isinstance(normalizer, normalizers.NFC)
        if not self._byte_level or not bounded or any(token.lstrip or token.rstrip for token in added):
            return 0
        plain = map(len, self._backend.get_vocab(with_added_tokens=False))  # one character stands for one byte
        return max([0, *plain, *(len(token.content.encode()) for token in added)])

    def word_tokens(self, word: str) -> list[list[int]]:
        """The token sequences that spell a word, at the beginning of a text and after a space."""
        bare = word.lstrip(" ")
        spelt = [self.encode(word, add_special_tokens=False)]
        if bare == word:
            spelt.append(self.encode(" " + word, add_special_tokens=False))
        return [tokens for tokens in spelt if tokens]

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool) -> str:
        return str(self._backend.decode(list(tokens), skip_special_tokens=skip_special_tokens))

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one token; b"" for an id that the tokenizer does not know (vocabularies are padded)."""
        if (known := self._token_bytes.get(token)) is not None:
            return known
        text = self._backend.id_to_token(token)
        if text is None:
            return b""
        found = token_bytes(text) if self._byte_level else self.decode([token], skip_special_tokens=False).encode()
        self._token_bytes[token] = found
        return found

    def vocabulary(self) -> SetVocabulary | None:
        """The bytes of every token, for grammars. Added tokens are no text there. None where a token's text depends on
        its neighbours."""
        if not self._byte_level:
            return None
        known = self._backend.get_vocab(with_added_tokens=True)
        tokens = [b""] * (max(known.values(), default=-1) + 1)
        for text, token in known.items():
            tokens[token] = token_bytes(text)
        special = sorted(self._backend.get_added_tokens_decoder())
        return SetVocabulary(tokens=tokens, special=special, definition=self._backend.to_str())

    def detokenizer(self, *, skip_special_tokens: bool, shown: Iterable[str] = ()) -> Detokenizer:
        """`shown`: control tokens that are not skipped."""
        key = skip_special_tokens, frozenset(shown)
        if (pieces := self._pieces.get(key)) is not None:
            return ByteDetokenizer(pieces)
        hidden = self._special if skip_special_tokens else set()
        if kept := key[1]:
            hidden = {token for token in hidden if self._control.get(token) not in kept}
        if not self._byte_level:
            return WindowDetokenizer(
                lambda tokens: self.decode([t for t in tokens if t not in hidden], skip_special_tokens=False)
            )
        pieces = self._pieces[key] = TokenTexts(lambda token: b"" if token in hidden else self.token_bytes(token))
        return ByteDetokenizer(pieces)


def _tokens_before_last(encoding: tokenizers.Encoding, length: int) -> int:
    """Of a text's tokens those before the one that holds the last of its first `length` characters."""
    for at in range(length - 1, max(length - 1 - _MAX_UNENCODED, -1), -1):
        if (token := encoding.char_to_token(at)) is not None:
            return int(token)
    return 0


def load_tokenizer(model: Path, gguf: Path | None = None, chat_template: Path | None = None) -> Tokenizer:
    """The tokenizer of a model: Hugging Face files in (or beside) `model`, else the GGUF file's metadata.
    `chat_template` replaces the model's own template. Raises UserError if there is none."""
    folder = model if model.is_dir() else model.parent
    with _faults_of(folder):
        return _load(folder, gguf or model, chat_template)


def _load(folder: Path, weights: Path, chat_template: Path | None) -> Tokenizer:
    config = _tokenizer_config(folder)
    metadata: Mapping[str, Any] = {}
    if weights.is_file() or any(weights.glob("*.gguf")):
        metadata = open_gguf(find_gguf(weights)).metadata
    backend, source = _from_files(folder, config), str(folder)
    special = _special_tokens(config, folder)
    if backend is None and "tokenizer.ggml.tokens" in metadata:
        backend, special = _from_gguf(metadata)
        source = str(weights)
    if backend is None:
        raise UserError(
            f"{folder}: no tokenizer (tokenizer.json, tiktoken.model, vocab.json and merges.txt, or GGUF metadata); "
            "--skip-tokenizer serves prompts of token ids",
            "model",
        )
    _mark_control_tokens(backend)
    backend.encode("one text, whatever it is")  # parts that do not fit each other are found only here
    template, with_tools = _template_sources(folder, config, metadata, chat_template)
    of_tools = ChatTemplate(with_tools, special) if with_tools else None
    return Tokenizer(backend, ChatTemplate(template, special) if template else None, source, of_tools)


def _mark_control_tokens(backend: tokenizers.Tokenizer) -> None:
    """Added tokens that look like control tokens are such, also where a vendor's file does not say so: DeepSeek's has
    `<｜User｜>` for a word, which any client's text could hold."""
    backend.add_special_tokens(
        [
            AddedToken(token.content, special=True, normalized=token.normalized, lstrip=token.lstrip,
                       rstrip=token.rstrip, single_word=token.single_word)
            for token in backend.get_added_tokens_decoder().values()
            if not token.special and _CONTROL_TEXT.fullmatch(token.content)
        ]
    )  # fmt: skip


@contextmanager
def _faults_of(place: Path) -> Iterator[None]:
    """One error that names the place for what a file of a wrong form makes of this code and of `tokenizers`. That
    library raises plain Exception for its faults, and panics in Rust for some."""
    try:
        yield
    except UserError:
        raise
    except OSError as error:
        raise ModelFileError(f"{error.filename or place}: cannot be read: {error.strerror}", "model") from error
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        why = str(error) if type(error) is Exception else f"{type(error).__name__}: {error}"
        raise ModelFileError(f"{place}: not a sound tokenizer: {why[:500]}", "model") from error


def _tokenizer_config(folder: Path) -> dict[str, Any]:
    path = folder / "tokenizer_config.json"
    return read_json(path) if path.is_file() else {}


def _from_files(folder: Path, config: Mapping[str, Any]) -> tokenizers.Tokenizer | None:
    path = folder / "tokenizer.json"
    if path.is_file():
        with _faults_of(path):
            backend = tokenizers.Tokenizer.from_str(read_text(path))
        _add_missing(backend, config, path)
        return backend
    if (path := folder / "tiktoken.model").is_file():
        with _faults_of(path):
            return tiktoken_tokenizer(path, config)
    vocab_path, merges_path = folder / "vocab.json", folder / "merges.txt"
    if not (vocab_path.is_file() and merges_path.is_file()):
        return None
    vocab = read_json(vocab_path)
    tokens = sorted(vocab, key=vocab.__getitem__)
    if [vocab[token] for token in tokens] != list(range(len(tokens))):
        raise ModelFileError(f"{vocab_path}: the ids of {len(tokens)} tokens are not 0 to {len(tokens) - 1}", "model")
    _check_bytes(tokens, vocab_path)
    lines = read_text(merges_path).splitlines()
    merges = [_merge(line, merges_path) for line in lines if line and not line.startswith("#version")]
    backend = byte_level_tokenizer(tokens, merges, [])
    _add_missing(backend, config, vocab_path)
    return backend


def _add_missing(backend: tokenizers.Tokenizer, config: Mapping[str, Any], path: Path) -> None:
    """Tokens that only tokenizer_config.json knows."""
    entries = config.get("added_tokens_decoder") or {}
    known = backend.get_added_tokens_decoder()
    for index, entry in sorted((int(key), entry) for key, entry in entries.items()):
        if index in known:
            continue
        flags = {key: bool(entry[key]) for key in ("single_word", "lstrip", "rstrip", "normalized") if key in entry}
        token = AddedToken(entry["content"], special=bool(entry.get("special", False)), **flags)
        backend.add_tokens([token])
        if backend.token_to_id(entry["content"]) != index:
            raise ModelFileError(
                f"{path}: tokenizer_config.json puts the added token {entry['content']!r} at {index}, "
                f"the tokenizer at {backend.token_to_id(entry['content'])}",
                "model",
            )


def _from_gguf(metadata: Mapping[str, Any]) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    kind, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", QWEN2)
    if kind != "gpt2" or pre not in PATTERNS:
        raise ModelFileError(
            f"the GGUF file's tokenizer is {kind!r} with pre-tokenizer {pre!r}; 'gpt2' with {', '.join(PATTERNS)} is "
            "supported: put the model's tokenizer.json beside the file",
            "model",
        )
    tokens = [str(token) for token in metadata["tokenizer.ggml.tokens"]]
    if len(set(tokens)) != len(tokens):
        raise ModelFileError("the GGUF file's tokenizer.ggml.tokens has equal entries", "model")
    _check_bytes(tokens, "tokenizer.ggml.tokens")
    types = [int(kind) for kind in metadata.get("tokenizer.ggml.token_type", ())] or [1] * len(tokens)
    if len(types) != len(tokens):
        raise ModelFileError(f"the GGUF file has {len(tokens)} tokens but {len(types)} token types", "model")
    merges = [_merge(str(line), "tokenizer.ggml.merges") for line in metadata.get("tokenizer.ggml.merges", ())]
    added = [
        AddedToken(token, special=kind == _CONTROL, normalized=False)
        for token, kind in zip(tokens, types, strict=True)
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    special = {}
    for name, key in (("bos_token", "bos"), ("eos_token", "eos"), ("unk_token", "unknown"), ("pad_token", "padding")):
        index = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if index is not None and 0 <= int(index) < len(tokens):
            special[name] = tokens[int(index)]
    bos = special.get("bos_token") if metadata.get("tokenizer.ggml.add_bos_token") else None
    return byte_level_tokenizer(tokens, merges, added, bos_token=bos, pre=pre), special


def _check_bytes(tokens: list[str], where: Path | str) -> None:
    """A byte without a token would vanish from every text."""
    if missing := len(byte_of_char().keys() - set(tokens)):
        raise ModelFileError(f"{where}: {missing} of the 256 bytes have no token", "model")


def _merge(line: str, where: Path | str) -> tuple[str, str]:
    left, space, right = line.partition(" ")
    if not space or not left or not right:
        raise ModelFileError(f"{where}: {line!r} is not a merge of two tokens", "model")
    return left, right


def _special_tokens(config: Mapping[str, Any], folder: Path) -> dict[str, str]:
    path = folder / "special_tokens_map.json"
    merged = {**(read_json(path) if path.is_file() else {}), **config}
    special = {}
    for name in _SPECIAL_NAMES:
        value = merged.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            special[name] = text
    return special


def _template_sources(
    folder: Path, config: Mapping[str, Any], metadata: Mapping[str, Any], chosen: Path | None
) -> tuple[str | None, str | None]:
    """The chat template, and another one for chats with tools if the model has one."""
    if chosen is not None:
        if not os.path.isfile(chosen):
            raise UserError(f"--chat-template {str(chosen)[:200]}: no such file", "chat_template")
        return read_text(chosen), None
    if (path := folder / "chat_template.jinja").is_file():
        beside = folder / "additional_chat_templates" / "tool_use.jinja"
        return read_text(path), read_text(beside) if beside.is_file() else None
    if (path := folder / "chat_template.json").is_file():
        config = {**config, "chat_template": read_json(path).get("chat_template")}
    source, with_tools = config.get("chat_template"), None
    if isinstance(source, list):  # several named ones
        named = {entry["name"]: entry["template"] for entry in source}
        source, with_tools = named.get("default"), named.get("tool_use")
    if source is None:
        source = metadata.get("tokenizer.chat_template")
        with_tools = with_tools or metadata.get("tokenizer.chat_template.tool_use")
    for each in (source, with_tools):
        if not (each is None or isinstance(each, str)):
            raise ModelFileError(f"{folder}: chat_template is {shown(each)}; allowed is a template's text", "model")
    return (with_tools, None) if source is None else (source, with_tools)
