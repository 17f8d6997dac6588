"""What clients may send. A field that is neither here nor a no-op is refused: nothing is accepted and ignored."""

from __future__ import annotations

import difflib
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from api.errors import ApiError, bad_request
from scheduler.request import SamplingParams

MAX_CHOICES = 128
MAX_LOGPROBS = 20
_INT64 = 2**63


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())


class StreamOptions(_Body):
    include_usage: bool = False


Penalty = Annotated[float, Field(ge=-2, le=2)]
StopString = Annotated[str, Field(min_length=1, max_length=1000)]


class GenerationRequest(_Body):
    """Common to chat and text completions. None: the model's default (generation_config.json), else OpenAI's."""

    model: str
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-_INT64, lt=_INT64)] | None = None
    stop: list[StopString] = Field(default=[], max_length=16)
    stop_token_ids: list[Annotated[int, Field(ge=0)]] = Field(default=[], max_length=64)
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] = Field(default={}, max_length=1024)
    stream: bool = False
    stream_options: StreamOptions | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    return_token_ids: bool = False
    priority: Annotated[int, Field(ge=-1000, le=1000)] = 0

    @field_validator("stop", mode="before")
    @classmethod
    def _one_stop(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @field_validator("logit_bias", mode="after")
    @classmethod
    def _token_ids(cls, value: dict[str, float]) -> dict[str, float]:
        for key in value:
            if not key.isdecimal():
                raise ValueError(f"keys are token ids, got {key!r}")
        return value

    @model_validator(mode="after")
    def _options_need_stream(self) -> GenerationRequest:
        if self.stream_options is not None and not self.stream:
            raise bad_request("stream_options is only allowed with stream: true", "stream_options")
        return self


class ChatRequest(GenerationRequest):
    messages: list[dict[str, Any]] = Field(min_length=1)
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = {}

    @model_validator(mode="after")
    def _consistent(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise bad_request("top_logprobs needs logprobs: true", "top_logprobs")
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            raise bad_request("max_tokens and max_completion_tokens differ; send one of them", "max_completion_tokens")
        if self.continue_final_message and (
            self.add_generation_prompt and "add_generation_prompt" in self.model_fields_set
        ):
            raise bad_request(
                "continue_final_message and add_generation_prompt exclude each other", "continue_final_message"
            )
        return self

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def output_tokens(self) -> int | None:
        return self.max_completion_tokens if self.max_tokens is None else self.max_tokens


class CompletionRequest(GenerationRequest):
    prompt: str | list[str] | list[int] | list[list[int]]
    echo: bool = False
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    @model_validator(mode="after")
    def _consistent(self) -> CompletionRequest:
        if self.max_tokens == 0 and not self.echo:
            raise bad_request("max_tokens 0 is only allowed with echo: true", "max_tokens")
        return self

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def output_tokens(self) -> int | None:
        return self.max_tokens


class LoadAdapterRequest(_Body):
    lora_name: Annotated[str, Field(min_length=1, max_length=200)]
    lora_path: Annotated[str, Field(min_length=1, max_length=4096)]
    replace: bool = False
    expert_scaling: Literal["alpha/r", "alpha/sqrt(r)"] | None = None


class UnloadAdapterRequest(_Body):
    lora_name: Annotated[str, Field(min_length=1, max_length=200)]


class TokenizeRequest(_Body):
    """`prompt`, or `messages` as the chat template renders them."""

    model: str
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = Field(default=None, min_length=1)
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] = {}

    @model_validator(mode="after")
    def _one_source(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise bad_request("send either prompt or messages", "prompt")
        return self


class DetokenizeRequest(_Body):
    model: str
    tokens: list[Annotated[int, Field(ge=0)]]


_ANY = object()
# Fields that clients send and that change nothing here: field -> the values that are a no-op.
_NO_OPS: dict[str, tuple[Any, ...]] = {
    "user": (_ANY,),
    "safety_identifier": (_ANY,),
    "metadata": (_ANY,),
    "prompt_cache_key": (_ANY,),
    "store": (False,),
    "parallel_tool_calls": (True, False),
    "service_tier": ("auto", "default"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "suffix": ("",),
    "best_of": (1,),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
    "moderation": (),
    "prompt_cache_retention": (),
    "prompt_cache_options": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": (),
    "bad_words": (),
    "min_tokens": (0,),
    "use_beam_search": (False,),
    "length_penalty": (1.0,),
    "prompt_logprobs": (),
    "stream_options.include_obfuscation": (False,),
}

_Model = TypeVar("_Model", bound=_Body)


def parse(kind: type[_Model], raw: bytes) -> _Model:
    """Raises ApiError 400 that names the first wrong field. `null` is the same as absent."""
    try:
        body = msgspec.json.decode(raw, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise bad_request(f"the body is not a JSON object: {error}") from None
    body = _without_no_ops(kind, {key: value for key, value in body.items() if value is not None}, "")
    options = body.get("stream_options")
    if isinstance(options, dict):
        options = {key: value for key, value in options.items() if value is not None}
        body["stream_options"] = _without_no_ops(StreamOptions, options, "stream_options.")
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        raise _readable(error) from None


def _without_no_ops(kind: type[_Body], body: dict[str, Any], prefix: str) -> dict[str, Any]:
    kept = {}
    for key, value in body.items():
        if key in kind.model_fields:
            kept[key] = value
            continue
        name = prefix + key
        if name not in _NO_OPS:
            near = difflib.get_close_matches(key, kind.model_fields, 1)
            hint = f"; did you mean {prefix + near[0]!r}?" if near else ""
            raise bad_request(f"unknown field {name!r}{hint}", name, "unknown_field")
        allowed = (body.get("n", 1),) if name == "best_of" else _NO_OPS[name]
        if not any(one is _ANY or (one == value and type(one) is type(value)) for one in allowed):
            only = f" (only {', '.join(map(repr, allowed))})" if allowed else ""
            raise bad_request(f"{name!r} is not supported yet{only}", name, "unsupported_field")
    return kept


def _readable(error: ValidationError) -> ApiError:
    first = error.errors(include_url=False, include_context=False)[0]
    # a union's members (prompt) report under names such as list[int]; those are not the client's field names
    location = [str(part) for part in first["loc"]]
    if location[:1] == ["prompt"]:
        return bad_request("prompt: a text, a list of token ids, or a list of either is expected", "prompt")
    name = ".".join(location) or None
    text = first["msg"].removeprefix("Value error, ")
    given = first["input"]
    shown = "" if isinstance(given, dict) or first["type"] == "missing" else f", got {_short(given)}"
    if name is None:
        return bad_request(text)
    return bad_request(f"{name}: {text[:1].lower()}{text[1:]}{shown}", name)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def sampling_params(
    body: ChatRequest | CompletionRequest, defaults: dict[str, Any], max_tokens: int, choice: int
) -> SamplingParams:
    """What the engine gets. `defaults` hold the model's temperature, top_p, ... `choice` numbers the n answers:
    each gets a seed of its own, the first one the request's."""

    def value(name: str, otherwise: float) -> Any:
        given = getattr(body, name)
        return defaults.get(name, otherwise) if given is None else given

    echo_logprobs = body.logprobs if isinstance(body, CompletionRequest) and body.echo else None
    return SamplingParams(
        max_tokens=max_tokens,
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
        prompt_logprobs=echo_logprobs,
        stop_token_ids=tuple(body.stop_token_ids),
        ignore_eos=body.ignore_eos,
    )


def derived_seed(seed: int, choice: int) -> int:
    """The seed of answer number `choice`: well apart, in 0 .. 2^63 - 1 (0x9E37... is 2^64 / golden ratio)."""
    return (seed + choice * 0x9E3779B97F4A7C15) % _INT64
