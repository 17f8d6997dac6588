"""Bodies of /tokenize and /detokenize."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import FailFast, Field, model_validator

from api.errors import bad_request
from api.http.bodies.values import Body, Messages, TokenId


class TokenizeRequest(Body):
    """`prompt`, or `messages` as the chat template renders them."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] = Field(default={})

    @model_validator(mode="after")
    def _one_source(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise bad_request("send either prompt or messages", "prompt")
        return self


class DetokenizeRequest(Body):
    model: str | None = None
    tokens: Annotated[list[TokenId], FailFast()]
