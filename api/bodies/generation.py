"""Bodies of /v1/chat/completions and /v1/completions, and of /tokenize and /detokenize."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, FailFast, Field, field_validator, model_validator

from api.bodies import shapes
from api.bodies.body import Body, no_op, supported
from api.bodies.fields import CHAT, COMPLETION, GENERATION, STREAM_OPTIONS
from api.bodies.structured import StructuredOutput
from api.bodies.tools import ReasoningFields, ToolFields
from api.bodies.values import (
    INT32,
    INT64,
    MAX_TOKEN_IDS,
    TOKEN_ID,
    Alternatives,
    Choices,
    Count,
    Integer,
    Messages,
    Number,
    Output,
    Penalty,
    PositiveOutput,
    Prompts,
    RequestId,
    Stops,
    StopString,
    Temperature,
    TokenId,
    TopP,
    WholeNumbers,
    not_zero,
)
from api.errors import bad_request, shortened


class StreamOptions(Body):
    FIELDS = STREAM_OPTIONS

    include_usage: bool = False
    continuous_usage_stats: bool = False


class SamplingFields(Body):
    """How tokens are chosen and where they end. None: the model's default (generation_config.json), else OpenAI's."""

    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: Annotated[int, Field(ge=-1, lt=INT32), Integer] | None = None
    min_p: Annotated[float, Field(ge=0, le=1), Number] | None = None
    seed: Annotated[int, Field(ge=-INT64, lt=INT64), Integer] | None = None
    stop: Stops = Field(default=[])
    stop_token_ids: Annotated[list[TokenId], WholeNumbers] = Field(default=[], max_length=64)
    include_stop_str_in_output: bool = False
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: Annotated[float, Field(ge=0.01, le=10), Number] | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100), Number]] = Field(default={}, max_length=1024)
    min_tokens: Count = 0
    bad_words: list[StopString] = Field(default=[], max_length=128)
    allowed_token_ids: Annotated[list[TokenId], FailFast(), WholeNumbers] = Field(
        default=[], min_length=1, max_length=MAX_TOKEN_IDS
    )
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, lt=INT32), Integer, AfterValidator(not_zero)] | None = None
    truncation_side: Literal["left", "right"] = "left"
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    priority: Annotated[int, Field(ge=-1000, le=1000), Integer] = 0

    @field_validator("logit_bias", mode="after")
    @classmethod
    def _token_ids(cls, value: dict[str, float]) -> dict[str, float]:
        for key in value:
            if not TOKEN_ID.fullmatch(key):
                raise ValueError(f"keys are token ids in decimal digits, got {shortened(key)}")
        return value


class GenerationRequest(SamplingFields):
    """Common to chat and text completions."""

    model: str | None = None
    max_tokens: Output | None = None
    n: Choices = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    prompt_logprobs: Alternatives | None = None
    request_id: RequestId | None = None

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

    max_tokens: PositiveOutput | None = None
    max_completion_tokens: PositiveOutput | None = None
    logprobs: bool = False
    top_logprobs: Alternatives | None = None
    echo: bool = False

    @model_validator(mode="after")
    def _consistent(self) -> ChatOptions:
        if self.top_logprobs and not self.logprobs:
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
    FIELDS = (*GENERATION, *CHAT)
    SHAPES = {  # noqa: RUF012
        **shapes.SAMPLING,
        **shapes.STRUCTURED,
        "messages": shapes.CHAT_MESSAGES,
        "tools": shapes.CHAT_TOOLS,
        "tool_choice": shapes.CHAT_CHOICE,
        "logprobs": shapes.LOGPROBS,
        "stream": shapes.STREAM,
    }
    NEEDS = {  # noqa: RUF012
        "top_logprobs": ["logprobs"],
        "tool_choice": ["tools"],
        "stream_options": ["stream"],
    }

    messages: Messages
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = Field(default={})

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
    FIELDS = (*GENERATION, *COMPLETION)
    SHAPES = {  # noqa: RUF012
        **shapes.SAMPLING,
        **shapes.STRUCTURED,
        "prompt": shapes.PROMPT,
        "stream": shapes.STREAM,
    }
    NEEDS = {"stream_options": ["stream"]}  # noqa: RUF012

    prompt: Prompts
    add_special_tokens: bool = True


class TokenizeRequest(Body):
    """`prompt`, or `messages` as the chat template renders them; or llama-server's `content`, to which special tokens
    are added with `add_special` alone, `with_pieces` with the tokens' texts."""

    SHAPES = {"messages": shapes.CHAT_MESSAGES}  # noqa: RUF012
    ONE_OF = ("prompt", "content", "messages")
    FIELDS = (
        supported("model", "as everywhere"),
        supported("prompt", "a text"),
        supported("content", "a text, as llama-server has it"),
        supported("messages", "a chat"),
        supported("add_special_tokens", "of a `prompt`"),
        supported("add_special", "of a `content`"),
        supported("with_pieces", "tokens with their texts"),
        supported("add_generation_prompt", "of `messages`"),
        supported("chat_template_kwargs", "of `messages`"),
        no_op("parse_special", "control tokens are read", True),
        no_op("return_token_strs", "see `with_pieces`", False),
    )

    model: str | None = None
    prompt: str | None = None
    content: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool = True
    add_special: bool = False
    with_pieces: bool = False
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] = Field(default={})

    @model_validator(mode="after")
    def _one_source(self) -> TokenizeRequest:
        if sum(given is not None for given in (self.prompt, self.content, self.messages)) != 1:
            raise bad_request("send one of prompt, content and messages", "prompt")
        return self

    @property
    def text(self) -> str | None:
        return self.content if self.prompt is None else self.prompt

    @property
    def adds_special_tokens(self) -> bool:
        return self.add_special_tokens if self.content is None else self.add_special


class DetokenizeRequest(Body):
    SHAPES = {"tokens": shapes.IDS}  # noqa: RUF012

    model: str | None = None
    tokens: Annotated[list[TokenId], FailFast(), WholeNumbers]
