"""What Ollama's clients send, and what becomes of each field."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from api.bodies.body import Body, alias, no_op, refused, supported
from api.bodies.tools import Definitions, Effort
from api.bodies.values import INT32, INT64, MIN_TOP_P, Integer, Messages, Number, Penalty, Stops, Temperature


class OllamaOptions(Body):
    FIELDS = (
        supported("temperature", "0: greedy"),
        supported("top_p", "1: off"),
        supported("top_k", "0 or -1: off"),
        supported("min_p", "0: off"),
        supported("seed", "see above"),
        supported("num_predict", "most tokens of output; below 0: what fits"),
        supported("stop", "a text or a list"),
        supported("repeat_penalty", "see `repetition_penalty`"),
        supported("presence_penalty", "see above"),
        supported("frequency_penalty", "see above"),
        no_op("num_ctx", "the context is the server's"),
        no_op("num_batch", "batches are the server's"),
        no_op("num_gpu", "placement is the server's"),
        no_op("num_thread", "threads are the server's"),
        no_op("main_gpu", "placement is the server's"),
        no_op("use_mmap", "memory is the server's"),
        no_op("numa", "memory is the server's"),
        no_op("num_keep", "the context is not shifted"),
        no_op("low_vram", "memory is the server's"),
        no_op("f16_kv", "memory is the server's"),
        no_op("use_mlock", "memory is the server's"),
        no_op("logits_all", "there is no such answer"),
        no_op("vocab_only", "there is no such answer", False),
        no_op("embedding_only", "there is no such answer", False),
        no_op("mirostat_tau", "there is no such sampler to set"),
        no_op("mirostat_eta", "there is no such sampler to set"),
        refused("typical_p", "no such filter", 1.0),
        refused("repeat_last_n", "penalties look at all tokens", -1),
        refused("mirostat", "no such sampler", 0),
        refused("tfs_z", "no such filter", 1.0),
        refused("penalize_newline", "penalties look at all tokens", True),
    )

    temperature: Temperature | None = None
    top_p: Annotated[float, Field(ge=MIN_TOP_P, le=1), Number] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=INT32), Integer] | None = None
    min_p: Annotated[float, Field(ge=0, le=1), Number] | None = None
    seed: Annotated[int, Field(ge=-INT64, lt=INT64), Integer] | None = None
    num_predict: Annotated[int, Field(ge=-2, lt=INT32), Integer] | None = None
    stop: Stops = Field(default=[])
    repeat_penalty: Annotated[float, Field(ge=0.01, le=10), Number] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None


class _OllamaRequest(Body):
    FIELDS = (
        supported("model", "as everywhere; `:latest` at its end is left out"),
        supported("stream", "true unless given: a line of JSON each"),
        supported("format", '`"json"` or a JSON schema'),
        supported("think", "true or false: see `enable_thinking`; a text: see `reasoning_effort`"),
        supported("options", "its fields are below"),
        no_op("keep_alive", "the model stays"),
        refused("logprobs", "/v1/chat/completions gives log-probabilities", False),
        refused("top_logprobs", "/v1/chat/completions gives log-probabilities", 0),
    )

    model: str | None = None
    stream: bool = True
    format: Literal["", "json"] | dict[str, Any] | None = None
    think: bool | Effort | None = None
    options: OllamaOptions | None = None


class OllamaChatRequest(_OllamaRequest):
    FIELDS = (
        *_OllamaRequest.FIELDS,
        supported("messages", "without images; the answer goes on with an assistant's text at the end"),
        supported("tools", "functions"),
    )

    messages: Messages
    tools: Definitions = Field(default=[])


class OllamaGenerateRequest(_OllamaRequest):
    FIELDS = (
        *_OllamaRequest.FIELDS,
        supported("prompt", "a user's message, or the whole prompt if `raw`"),
        supported("system", "the first message"),
        supported("raw", "no chat template"),
        refused("images", "the model reads text only", []),
        refused("width", "the model writes text only"),
        refused("height", "the model writes text only"),
        refused("steps", "the model writes text only"),
        refused("suffix", "the model does not fill in the middle", ""),
        refused("template", "the server's template is used (`--chat-template`)", ""),
        refused("context", "send the messages to /api/chat", []),
    )

    prompt: Annotated[str, Field(min_length=1)]
    system: str | None = None
    raw: bool = False


class OllamaShowRequest(Body):
    FIELDS = (
        supported("model", "as everywhere"),
        alias("name", "model"),
        no_op("verbose", "there is no more to show"),
    )

    model: str | None = None
