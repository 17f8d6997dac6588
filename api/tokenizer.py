"""The model's tokenizer and chat template, from Hugging Face files or GGUF metadata, without transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders

from api.text.bytelevel import byte_level_tokenizer, token_bytes
from api.text.detokenize import ByteDetokenizer, Detokenizer, WindowDetokenizer
from api.text.files import read_json
from api.text.template import ChatTemplate
from engine.errors import ModelFileError, UserError
from engine.weights.gguf_file import find_gguf, open_gguf

_CONTROL, _USER_DEFINED = 3, 4  # tokenizer.ggml.token_type
_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """Text to token ids and back. Thread-safe. `template` is None if the model brings none."""

    def __init__(self, backend: tokenizers.Tokenizer, template: ChatTemplate | None, source: str) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.template = template
        self.source = source
        self._special = {i for i, token in backend.get_added_tokens_decoder().items() if token.special}
        self._byte_level = isinstance(backend.decoder, decoders.ByteLevel)

    @property
    def vocab_size(self) -> int:
        return int(self._backend.get_vocab_size())

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids. Special tokens written out in `text` become those tokens."""
        return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool) -> str:
        return str(self._backend.decode(list(tokens), skip_special_tokens=skip_special_tokens))

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one token; b"" for an id that the tokenizer does not know (vocabularies are padded)."""
        text = self._backend.id_to_token(token)
        if text is None:
            return b""
        return token_bytes(text) if self._byte_level else self.decode([token], skip_special_tokens=False).encode()

    def token_text(self, token: int) -> str:
        """One token alone, U+FFFD where it is not whole characters."""
        return self.token_bytes(token).decode(errors="replace")

    def detokenizer(self, *, skip_special_tokens: bool) -> Detokenizer:
        if not self._byte_level:
            return WindowDetokenizer(lambda tokens: self.decode(tokens, skip_special_tokens=skip_special_tokens))
        hidden = self._special if skip_special_tokens else set()
        return ByteDetokenizer(lambda token: b"" if token in hidden else self.token_bytes(token))


def load_tokenizer(model: Path, gguf: Path | None = None, chat_template: Path | None = None) -> Tokenizer:
    """The tokenizer of a model: Hugging Face files in (or beside) `model`, else the GGUF file's metadata.
    `chat_template` replaces the model's own template. Raises UserError if there is none."""
    folder = model if model.is_dir() else model.parent
    config = _tokenizer_config(folder)
    metadata: Mapping[str, Any] = {}
    weights = gguf or model
    if weights.is_file() or any(weights.glob("*.gguf")):
        metadata = open_gguf(find_gguf(weights)).metadata
    backend, source = _from_files(folder, config), str(folder)
    special = _special_tokens(config, folder)
    if backend is None and "tokenizer.ggml.tokens" in metadata:
        backend, special = _from_gguf(metadata)
        source = str(weights)
    if backend is None:
        raise UserError(
            f"{folder}: no tokenizer (tokenizer.json, or vocab.json and merges.txt, or GGUF metadata); "
            "--skip-tokenizer serves prompts of token ids",
            "model",
        )
    template = _template_source(folder, config, metadata, chat_template)
    return Tokenizer(backend, ChatTemplate(template, special) if template else None, source)


def _tokenizer_config(folder: Path) -> dict[str, Any]:
    path = folder / "tokenizer_config.json"
    return read_json(path) if path.is_file() else {}


def _from_files(folder: Path, config: Mapping[str, Any]) -> tokenizers.Tokenizer | None:
    path = folder / "tokenizer.json"
    if path.is_file():
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises plain Exception for every fault of a file
            raise ModelFileError(f"{path}: {error}", "model") from error
        _add_missing(backend, config, path)
        return backend
    vocab_path, merges_path = folder / "vocab.json", folder / "merges.txt"
    if not (vocab_path.is_file() and merges_path.is_file()):
        return None
    vocab = read_json(vocab_path)
    tokens = sorted(vocab, key=lambda token: int(vocab[token]))
    lines = merges_path.read_text(encoding="utf-8").splitlines()
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
    kind, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "qwen2")
    if kind != "gpt2" or pre != "qwen2":
        raise ModelFileError(
            f"the GGUF file's tokenizer is {kind!r} with pre-tokenizer {pre!r}; 'gpt2' with 'qwen2' is supported: "
            "put the model's tokenizer.json beside the file",
            "model",
        )
    tokens = [str(token) for token in metadata["tokenizer.ggml.tokens"]]
    if len(set(tokens)) != len(tokens):
        raise ModelFileError("the GGUF file's tokenizer.ggml.tokens has equal entries", "model")
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
    return byte_level_tokenizer(tokens, merges, added, bos_token=bos), special


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


def _template_source(
    folder: Path, config: Mapping[str, Any], metadata: Mapping[str, Any], chosen: Path | None
) -> str | None:
    if chosen is not None:
        if not chosen.is_file():
            raise UserError(f"{chosen}: no such file", "chat_template")
        return chosen.read_text(encoding="utf-8")
    if (path := folder / "chat_template.jinja").is_file():
        return path.read_text(encoding="utf-8")
    if (path := folder / "chat_template.json").is_file():
        config = {**config, "chat_template": read_json(path).get("chat_template")}
    source = config.get("chat_template")
    if isinstance(source, list):  # several named ones
        named = {entry["name"]: entry["template"] for entry in source}
        source = named.get("default")
    if source is None:
        source = metadata.get("tokenizer.chat_template")
    return str(source) if source is not None else None
