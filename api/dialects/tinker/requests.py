"""The JSON bodies of Tinker's clients. A field that is not here is refused, and so is a value that would change what
comes out and is not served."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

import msgspec

from api.bodies.parsing import why_no_json
from api.errors import bad_request
from scheduler.request import SamplingParams

_T = TypeVar("_T", bound="_Request")
_Id = Annotated[str, msgspec.Meta(max_length=200)]
_Seq = Annotated[int, msgspec.Meta(ge=1, lt=2**31)]
_Ttl = Annotated[int, msgspec.Meta(ge=3600, le=10 * 366 * 86_400)]
_Note = Annotated[dict[_Id, _Id], msgspec.Meta(max_length=64)]  # what is kept with weights
_Metadata = Annotated[dict[str, Any], msgspec.Meta(max_length=64)]
_MOST_TOKENS, _MOST_SAMPLES, _MOST_STOPS = 1 << 20, 256, 64


class _Request(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    type: str | None = None  # the request's name again


class ClientConfig(_Request, frozen=True):
    sdk_version: str | None = None


class CreateSession(_Request, frozen=True):
    """Tags, metadata and names are for people: they are not kept."""

    tags: list[str] = []
    user_metadata: _Metadata | None = None
    sdk_version: str | None = None
    project_id: str | None = None
    display_name: str | None = None


class Heartbeat(_Request, frozen=True):
    session_id: _Id


class LoraConfig(_Request, frozen=True):
    rank: Annotated[int, msgspec.Meta(ge=1, le=4096)]
    seed: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class Optimizer(_Request, frozen=True):
    version: int | None = None

    def check(self) -> None:
        """Raises ApiError."""
        if self.type != "adamw":
            raise bad_request(f"optimizer_config.type: 'adamw' is expected, got {self.type!r}", "optimizer_config")


class CreateModel(_Request, frozen=True):
    session_id: _Id
    model_seq_id: Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
    base_model: str
    lora_config: LoraConfig | None = None
    optimizer_config: Optimizer | None = None
    user_metadata: _Metadata | None = None


class Model(_Request, frozen=True):
    model_id: _Id


class AdamParams(_Request, frozen=True):
    learning_rate: Annotated[float, msgspec.Meta(ge=0, le=1e3)] = 1e-4
    beta1: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.95
    eps: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1e-12
    weight_decay: Annotated[float, msgspec.Meta(ge=0, le=1e3)] = 0.0
    grad_clip_norm: Annotated[float, msgspec.Meta(ge=0, le=1e9)] = 0.0


class OptimStepRequest(_Request, frozen=True):
    model_id: _Id
    seq_id: _Seq
    adam_params: AdamParams


class SaveWeights(_Request, frozen=True):
    model_id: _Id
    seq_id: _Seq
    path: str | None = None
    overwrite: bool = False
    user_metadata: _Note | None = None
    ttl_seconds: _Ttl | None = None


class SaveForSampler(SaveWeights, frozen=True):
    sampling_session_seq_id: int | None = None
    kind: str = "snapshot"


class SetTtl(_Request, frozen=True):
    ttl_seconds: _Ttl | None


class LoadWeights(_Request, frozen=True):
    path: str
    optimizer: bool
    model_id: _Id | None = None
    seq_id: _Seq | None = None
    session_id: _Id | None = None
    model_seq_id: Annotated[int, msgspec.Meta(ge=0, lt=2**31)] | None = None
    base_model: str | None = None
    optimizer_config: Optimizer | None = None
    user_metadata: _Metadata | None = None


class CreateSampler(_Request, frozen=True):
    session_id: _Id
    sampling_session_seq_id: int
    base_model: str | None = None
    model_path: str | None = None


class Chunk(_Request, frozen=True):
    tokens: Annotated[list[Annotated[int, msgspec.Meta(ge=0, lt=2**31)]], msgspec.Meta(max_length=_MOST_TOKENS)] = []


class Prompt(_Request, frozen=True):
    chunks: list[Chunk]

    @property
    def tokens(self) -> list[int]:
        """Raises ApiError for images and sounds."""
        if any(chunk.type != "encoded_text" for chunk in self.chunks):
            raise bad_request("prompt.chunks: 'encoded_text' is expected", "prompt")
        return [token for chunk in self.chunks for token in chunk.tokens]


class Sampling(_Request, frozen=True):
    max_tokens: Annotated[int, msgspec.Meta(ge=1, lt=2**31)] | None = None
    seed: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] | None = None
    stop: str | list[str | int] | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] = 1.0
    top_k: Annotated[int, msgspec.Meta(ge=-1, lt=2**31)] = -1
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0


class SampleRequest(_Request, frozen=True):
    prompt: Prompt
    sampling_params: Sampling
    num_samples: Annotated[int, msgspec.Meta(ge=1, le=_MOST_SAMPLES)] = 1
    base_model: str | None = None
    model_path: str | None = None
    sampling_session_id: _Id | None = None
    seq_id: int | None = None
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] = 0
    topk_sample_logprobs: int = 0
    prompt_alt_tokens_k: int = 0
    target_prompt_logprobs: Any = None
    prompt_logprobs_last_n: int | None = None
    record_stability_info: bool | None = None

    @property
    def stops(self) -> list[str]:
        given = self.sampling_params.stop
        return [given] if isinstance(given, str) else [each for each in given or () if isinstance(each, str)]

    def params(self) -> SamplingParams:
        """Raises ApiError for what is not served."""
        for name in ("topk_sample_logprobs", "prompt_alt_tokens_k", "target_prompt_logprobs", "prompt_logprobs_last_n",
                     "record_stability_info"):  # fmt: skip
            if getattr(self, name):
                raise bad_request(f"{name} is not served here: leave it out", name, "unsupported_field")
        given = self.sampling_params
        stop = given.stop if isinstance(given.stop, list) else []
        if len(stop) > _MOST_STOPS or any(not each or len(each) > 1000 for each in self.stops):
            raise bad_request(f"stop: at most {_MOST_STOPS} of 1 to 1000 characters", "sampling_params.stop")
        if 0 < given.temperature < 1e-6:
            raise bad_request("temperature: 0 (greedy) or a number from 1e-06 to 2", "sampling_params.temperature")
        wanted = bool(self.prompt_logprobs) or self.topk_prompt_logprobs > 0
        return SamplingParams(
            max_tokens=given.max_tokens or 2**31 - 1,
            temperature=given.temperature,
            top_p=max(given.top_p, 1e-6),
            top_k=max(given.top_k, 0),
            seed=given.seed,
            logprobs=0,
            prompt_logprobs=self.topk_prompt_logprobs if wanted else None,
            stop_token_ids=tuple(each for each in stop if isinstance(each, int)),
            ignore_eos=given.stop == [],
        )


class Retrieve(_Request, frozen=True):
    request_id: _Id
    allow_metadata_only: bool = False


class WeightsInfo(_Request, frozen=True):
    tinker_path: str


def read(kind: type[_T], raw: bytes) -> _T:
    """Raises ApiError 400 that names the field."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        what, _, where = str(error).partition(" - at `$.")
        field = where.rstrip("`").split("[")[0] or None
        if not isinstance(error, msgspec.ValidationError):
            what = f"the body is not a JSON object: {why_no_json(raw, error)}"
        raise bad_request(f"{field}: {what}" if field else what, field) from None
