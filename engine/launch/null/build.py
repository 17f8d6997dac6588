"""From settings to an engine without a model."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import fields
from itertools import islice
from pathlib import Path

from engine.attention.base import BLOCK_SIZE
from engine.config import CPU_BATCHED_TOKENS, EngineConfig, check_settings
from engine.core import EngineCore
from engine.errors import ModelFileError, UserError
from engine.files.gguf.file import GGUFFile, find_gguf, open_gguf
from engine.files.gguf.header import GGUFArray
from engine.launch.null.runner import NullModel, NullRunner
from engine.lora.adapter import AdapterWeights
from engine.lora.adapters import Adapters
from engine.lora.budget import AdapterSize
from engine.lora.reader_process import ParsedAdapter, ParseRequest
from engine.messages import FromEngine, Ready
from engine.null import NullSettings, null_settings
from engine.planning.drafts import make_drafter, mtp_drafts
from engine.weights.gguf import GGUFSource
from scheduler.config import SchedulerConfig
from scheduler.scheduler import Scheduler

_MODEL_LEN = 8192
_KV_TOKENS = 1 << 20
_WORDS = 64
_USED = {
    "model", "gguf", "served_model_name", "max_model_len", "adapters", "max_adapter_slots", "max_num_seqs",
    "max_num_batched_tokens", "kv_cache_tokens", "prefix_caching", "max_queue", "itl_target_ms", "overlap", "speculate",
    "check_integrity", "seed",
}  # fmt: skip


class NullReader:
    """Every folder is an adapter without weights, whether it exists or not."""

    def parse(self, request: ParseRequest) -> ParsedAdapter:
        weights = AdapterWeights(request.name, "null", path=request.path)
        return ParsedAdapter(AdapterSize(0, 0), lambda: weights, lambda: None)

    def close(self) -> None:
        """There is nothing to end."""


def build_null(config: EngineConfig, send: Callable[[FromEngine], None]) -> tuple[EngineCore, Ready]:
    """`config.gguf` is the file whose vocabulary is spoken. Raises UserError; ModelFileError for that file."""
    settings = null_settings(config.model)
    _check(config)
    file = open_gguf(find_gguf(Path(config.gguf or "")))
    model = GGUFSource(file).config
    name, length = config.served_model_name or "null", config.max_model_len or _MODEL_LEN
    scheduler = Scheduler(_scheduler_config(config, length, model.eos_token_ids), make_drafter(config))

    def fill(slot: int, weights: AdapterWeights) -> None:
        time.sleep(settings.load_ms / 1000)

    core = EngineCore(
        scheduler,
        NullRunner(settings, NullModel(model, _words(file), settings.answer)),
        Adapters(model, name, NullReader(), fill),
        send,
        overlap=bool(config.overlap),
        check_integrity=config.check_integrity,
    )
    ready = Ready(
        model_name=name,
        vocab_size=model.vocab_size,
        max_model_len=length,
        bos_token_id=model.bos_token_id,
        eos_token_ids=list(model.eos_token_ids),
        lines=[_line(settings, file.path)],
    )
    return core, ready


def _check(config: EngineConfig) -> None:
    """Raises UserError for settings of what is not there."""
    check_settings(config)
    if mtp_drafts(config):
        raise UserError(
            f"--speculate {config.speculate}: the null engine has no layer that predicts; ngram:K or suffix:K make "
            "drafts from texts",
            "speculate",
        )
    defaults = EngineConfig()
    for setting in fields(config):
        value = getattr(config, setting.name)
        if setting.name not in _USED and value != getattr(defaults, setting.name):
            flag = "--" + setting.name.replace("_", "-")
            raise UserError(f"{flag} {value}: the null engine has no weights to place; leave it out", setting.name)


def _scheduler_config(config: EngineConfig, length: int, eos: tuple[int, ...]) -> SchedulerConfig:
    try:
        return SchedulerConfig(
            num_blocks=max(1, (config.kv_cache_tokens or _KV_TOKENS) // BLOCK_SIZE),
            block_size=BLOCK_SIZE,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens or max(CPU_BATCHED_TOKENS, config.max_num_seqs),
            max_model_len=length,
            max_queue=config.max_queue,
            num_adapter_slots=config.max_adapter_slots,
            eos_token_ids=eos,
            prefix_caching=config.prefix_caching,
            itl_target_s=None if config.itl_target_ms is None else config.itl_target_ms / 1000,
        )
    except ValueError as error:
        raise UserError(str(error)) from None


def _words(file: GGUFFile) -> list[int]:
    """Ids of some tokens that are a space and a word."""
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    texts = map(str, tokens if isinstance(tokens, GGUFArray) else ())
    words = (i for i, text in enumerate(texts) if text[:1] in ("Ġ", "▁") and len(text) > 3 and text[1:].isalpha())
    if not (found := list(islice(words, _WORDS))):
        raise ModelFileError(f"{file.path}: its vocabulary has no tokens of a space and a word", "gguf")
    return found


def _line(settings: NullSettings, vocabulary: Path) -> str:
    times = f"{settings.step_ms:g} ms, {settings.row_us:g} us a row, {settings.token_us:g} us a token"
    return f"no model: a step takes {times}; answers of {settings.answer} words of {vocabulary.name}"
