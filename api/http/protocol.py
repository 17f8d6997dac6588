"""What clients may send, with the range of every number. What becomes of each field is in api/http/fields.py.

The ranges are what sampling can compute in float32 and int64: a temperature of 1e-40 or a top_p of 1e-50 would
underflow to zero on the way.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    PlainValidator,
    field_validator,
    model_validator,
)

from api.errors import bad_request, shortened
from api.http.chat_fields import ReasoningFields, ToolFields
from api.http.structured import StructuredOutput
from scheduler.request import SamplingParams

MAX_CHOICES = 128
MAX_LOGPROBS = 20
MAX_MESSAGES = 8192
MAX_TOOLS = 1024
MAX_TOKEN_IDS = 2**18
MIN_TEMPERATURE = 1e-6
MIN_TOP_P = 1e-6
REQUEST_ID = "^[!-~]{1,128}$"  # what may stand in a header
_INT64 = 2**63
_INT32 = 2**31
_TOKEN_ID = re.compile("0|[1-9][0-9]{0,9}")
NUMBER = "^-?[0-9]{1,20}([.][0-9]{1,20})?([eE][+-]?[0-9]{1,3})?$"


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())


def _integer(value: Any) -> Any:
    """Numbers as some clients write them: 8.0, "8"."""
    value = _number(value)
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _number(value: Any) -> Any:
    if not isinstance(value, str) or re.fullmatch(NUMBER, value) is None:
        return value
    return int(value) if value.lstrip("-").isdecimal() else float(value)


_Integer = BeforeValidator(_integer)
_Number = BeforeValidator(_number)


def _objects(value: Any) -> Any:
    """By hand, because a wrong list would be one complaint for each of its elements."""
    if isinstance(value, list):
        for i, message in enumerate(value[: MAX_MESSAGES + 1]):
            if not isinstance(message, dict):
                raise ValueError(f"[{i}] is not an object but {shortened(message)}")
    return value


Messages = Annotated[list[dict[str, Any]], BeforeValidator(_objects), Field(min_length=1, max_length=MAX_MESSAGES)]
_Prompts = str | list[str] | list[int] | list[list[int]]


def _one_kind(value: Any) -> Any:
    """By hand, for the same reason: a union would check a wrong list once for each of its members."""
    if isinstance(value, str):
        return value
    kinds = set(map(type, value)) if isinstance(value, list) else set()
    if kinds not in ({str}, {int}, {list}) or (kinds == {list} and any(set(map(type, ids)) - {int} for ids in value)):
        raise ValueError("a text, a list of token ids, or a list of either is expected")
    return value


Prompts = Annotated[_Prompts, PlainValidator(_one_kind, json_schema_input_type=_Prompts)]


class StreamOptions(Body):
    include_usage: bool = False
    continuous_usage_stats: bool = False


def _one_stop(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _not_zero(count: int) -> int:
    if count == 0:
        raise ValueError("-1 or a number from 1 is expected")
    return count


def _not_tiny(temperature: float) -> float:
    if 0 < temperature < MIN_TEMPERATURE:
        raise ValueError(f"0 (greedy) or a number from {MIN_TEMPERATURE:g} to 2 is expected")
    return temperature


Penalty = Annotated[float, Field(ge=-2, le=2), _Number]
Temperature = Annotated[float, Field(ge=0, le=2), AfterValidator(_not_tiny), _Number]
Count = Annotated[int, Field(ge=0, lt=_INT32), _Integer]
PositiveCount = Annotated[int, Field(ge=1, lt=_INT32), _Integer]
Alternatives = Annotated[int, Field(ge=0, le=MAX_LOGPROBS), _Integer]
Choices = Annotated[int, Field(ge=1, le=MAX_CHOICES), _Integer]
TokenId = Annotated[int, Field(ge=0, lt=_INT32)]
StopString = Annotated[str, Field(min_length=1, max_length=1000)]
_Stops = list[StopString]
Stops = Annotated[_Stops, Field(max_length=16), BeforeValidator(_one_stop, json_schema_input_type=StopString | _Stops)]
RequestId = Annotated[str, Field(pattern=REQUEST_ID)]


class GenerationRequest(Body):
    """Common to chat and text completions. None: the model's default (generation_config.json), else OpenAI's."""

    model: str | None = None
    max_tokens: Count | None = None
    temperature: Temperature | None = None
    top_p: Annotated[float, Field(ge=MIN_TOP_P, le=1), _Number] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=_INT32), _Integer] | None = None
    min_p: Annotated[float, Field(ge=0, le=1), _Number] | None = None
    seed: Annotated[int, Field(ge=-_INT64, lt=_INT64), _Integer] | None = None
    stop: Stops = []
    stop_token_ids: list[TokenId] = Field(default=[], max_length=64)
    include_stop_str_in_output: bool = False
    n: Choices = 1
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: Annotated[float, Field(ge=0.01, le=10), _Number] | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100), _Number]] = Field(default={}, max_length=1024)
    min_tokens: Count = 0
    bad_words: list[StopString] = Field(default=[], max_length=128)
    allowed_token_ids: Annotated[list[TokenId], FailFast()] = Field(default=[], min_length=1, max_length=MAX_TOKEN_IDS)
    stream: bool = False
    stream_options: StreamOptions | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    prompt_logprobs: Alternatives | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, lt=_INT32), _Integer, AfterValidator(_not_zero)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    request_id: RequestId | None = None
    priority: Annotated[int, Field(ge=-1000, le=1000), _Integer] = 0

    @field_validator("logit_bias", mode="after")
    @classmethod
    def _token_ids(cls, value: dict[str, float]) -> dict[str, float]:
        for key in value:
            if not _TOKEN_ID.fullmatch(key):
                raise ValueError(f"keys are token ids in decimal digits, got {shortened(key)}")
        return value

    @model_validator(mode="after")
    def _options_need_stream(self) -> GenerationRequest:
        if self.stream_options is not None and not self.stream:
            raise bad_request("stream_options is only allowed with stream: true", "stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise bad_request("prompt_logprobs is only allowed without stream: true", "prompt_logprobs")
        return self

    @property
    def candidates(self) -> int:
        """Answers that are made for each prompt; `n` of them are given."""
        return self.n


class ChatOptions(GenerationRequest):
    """A chat request without what becomes the prompt."""

    max_tokens: PositiveCount | None = None
    max_completion_tokens: PositiveCount | None = None
    logprobs: bool = False
    top_logprobs: Alternatives | None = None

    @model_validator(mode="after")
    def _consistent(self) -> ChatOptions:
        if self.top_logprobs is not None and not self.logprobs:
            raise bad_request("top_logprobs needs logprobs: true", "top_logprobs")
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            raise bad_request("max_tokens and max_completion_tokens differ; send one of them", "max_completion_tokens")
        return self

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def output_tokens(self) -> int | None:
        return self.max_completion_tokens if self.max_tokens is None else self.max_tokens


class ChatRequest(ChatOptions, StructuredOutput, ToolFields, ReasoningFields):
    messages: Messages
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = {}

    @model_validator(mode="after")
    def _one_ending(self) -> ChatRequest:
        if self.continue_final_message and (
            self.add_generation_prompt and "add_generation_prompt" in self.model_fields_set
        ):
            raise bad_request(
                "continue_final_message and add_generation_prompt exclude each other", "continue_final_message"
            )
        return self


class CompletionOptions(GenerationRequest):
    """A completion request without its prompt."""

    echo: bool = False
    logprobs: Alternatives | None = None
    best_of: Choices | None = None

    @model_validator(mode="after")
    def _consistent(self) -> CompletionOptions:
        if self.best_of is not None and self.best_of < self.n:
            raise bad_request(f"best_of {self.best_of} is less than n ({self.n})", "best_of")
        if self.candidates > self.n and self.stream:
            raise bad_request("best_of above n is only allowed without stream: true", "best_of")
        if self.max_tokens == 0 and not self.echo:
            raise bad_request("max_tokens 0 is only allowed with echo: true", "max_tokens")
        return self

    @property
    def candidates(self) -> int:
        return self.best_of or self.n

    @property
    def num_logprobs(self) -> int | None:
        """The chosen tokens' are needed to choose the best."""
        return 0 if self.logprobs is None and self.candidates > self.n else self.logprobs

    @property
    def output_tokens(self) -> int | None:
        return self.max_tokens


class CompletionRequest(CompletionOptions, StructuredOutput):
    prompt: Prompts
    add_special_tokens: bool = True


class MessagesRequest(Body):
    """Anthropic's Messages. `max_tokens` may be left out, as for a count of tokens."""

    model: str | None = None
    messages: Messages
    max_tokens: PositiveCount | None = None
    system: str | list[dict[str, Any]] | None = None
    stop_sequences: list[StopString] = Field(default=[], max_length=16)
    stream: bool = False
    temperature: Temperature | None = None
    top_p: Annotated[float, Field(ge=MIN_TOP_P, le=1), _Number] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=_INT32), _Integer] | None = None
    tools: list[dict[str, Any]] = Field(default=[], max_length=MAX_TOOLS)
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None


class ResponsesRequest(Body):
    """OpenAI's Responses."""

    model: str | None = None
    input: str | Messages
    instructions: str | None = None
    previous_response_id: Annotated[str, Field(max_length=200)] | None = None
    store: bool = True
    stream: bool = False
    max_output_tokens: PositiveCount | None = None
    temperature: Temperature | None = None
    top_p: Annotated[float, Field(ge=MIN_TOP_P, le=1), _Number] | None = None
    tools: list[dict[str, Any]] = Field(default=[], max_length=MAX_TOOLS)
    tool_choice: str | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    metadata: dict[str, str] = Field(default={}, max_length=16)


class OllamaOptions(Body):
    temperature: Temperature | None = None
    top_p: Annotated[float, Field(ge=MIN_TOP_P, le=1), _Number] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=_INT32), _Integer] | None = None
    min_p: Annotated[float, Field(ge=0, le=1), _Number] | None = None
    seed: Annotated[int, Field(ge=-_INT64, lt=_INT64), _Integer] | None = None
    num_predict: Annotated[int, Field(ge=-2, lt=_INT32), _Integer] | None = None
    stop: Stops = []
    repeat_penalty: Annotated[float, Field(ge=0.01, le=10), _Number] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None


class _OllamaRequest(Body):
    model: str | None = None
    stream: bool = True
    format: str | dict[str, Any] | None = None
    think: bool | None = None
    options: OllamaOptions | None = None


class OllamaChatRequest(_OllamaRequest):
    messages: Messages
    tools: list[dict[str, Any]] = Field(default=[], max_length=MAX_TOOLS)


class OllamaGenerateRequest(_OllamaRequest):
    prompt: Annotated[str, Field(min_length=1)]
    system: str | None = None
    raw: bool = False


class OllamaShowRequest(Body):
    model: str | None = None


class LoadAdapterRequest(Body):
    lora_name: Annotated[str, Field(min_length=1, max_length=200)]
    lora_path: Annotated[str, Field(min_length=1, max_length=4096)]
    replace: bool = False
    load_inplace: bool = False  # vLLM's name for the same
    expert_scaling: Literal["alpha/r", "alpha/sqrt(r)", "peft"] | None = None


class UnloadAdapterRequest(Body):
    lora_name: Annotated[str, Field(min_length=1, max_length=200)]


class TokenizeRequest(Body):
    """`prompt`, or `messages` as the chat template renders them."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] = {}

    @model_validator(mode="after")
    def _one_source(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise bad_request("send either prompt or messages", "prompt")
        return self


class DetokenizeRequest(Body):
    model: str | None = None
    tokens: Annotated[list[TokenId], FailFast()]


def check_vocabulary(tokens: Iterable[int], vocab_size: int, param: str) -> None:
    """Raises ApiError 400 for an id that is no token."""
    for token in tokens:
        if not 0 <= token < vocab_size:
            raise bad_request(
                f"{param}: token id {shortened(token)} is outside the vocabulary (0 to {vocab_size - 1})", param
            )


def sampling_params(
    body: ChatOptions | CompletionOptions,
    defaults: dict[str, Any],
    max_tokens: int,
    choice: int,
    bad_words: Sequence[Sequence[int]] = (),
) -> SamplingParams:
    """What the engine gets. `defaults` hold the model's temperature, top_p, ... `choice` numbers the n answers:
    each gets a seed of its own, the first one the request's. `bad_words`: the body's, as tokens."""

    def value(name: str, otherwise: float) -> Any:
        given = getattr(body, name)
        return defaults.get(name, otherwise) if given is None else given

    asked = [body.prompt_logprobs, body.logprobs if isinstance(body, CompletionOptions) and body.echo else None]
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=body.min_tokens,
        temperature=float(value("temperature", 1.0)),
        top_p=float(value("top_p", 1.0)),
        top_k=max(0, int(value("top_k", 0))),
        min_p=float(value("min_p", 0.0)),
        seed=None if body.seed is None else derived_seed(body.seed, choice),
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        repetition_penalty=float(value("repetition_penalty", 1.0)),
        logit_bias={int(token): bias for token, bias in body.logit_bias.items()},
        logprobs=body.num_logprobs,
        prompt_logprobs=max((count for count in asked if count is not None), default=None),
        stop_token_ids=tuple(body.stop_token_ids),
        ignore_eos=body.ignore_eos,
        bad_words=tuple(map(tuple, bad_words)),
        allowed_token_ids=tuple(body.allowed_token_ids) or None,
    )


def derived_seed(seed: int, choice: int) -> int:
    """The seed of answer number `choice`: well apart, in 0 .. 2^63 - 1 (0x9E37... is 2^64 / golden ratio)."""
    return (seed + choice * 0x9E3779B97F4A7C15) % _INT64
