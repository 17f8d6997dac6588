"""What the fields of bodies hold, with the range of every number. What becomes of each field is in `Body.FIELDS`.

The ranges are what sampling can compute in float32 and int64: a temperature of 1e-40 or a top_p of 1e-50 would
underflow to zero on the way; a top_p below the least is the least.
"""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator

from api.errors import shortened

MAX_CHOICES = 128
MAX_LOGPROBS = 20
MAX_MESSAGES = 8192
MAX_TOKEN_IDS = 2**18
MIN_TEMPERATURE = 1e-6
MIN_TOP_P = 1e-6
REQUEST_ID = "^[!-~]{1,128}$"  # what may stand in a header
INT64 = 2**63
INT32 = 2**31
TOKEN_ID = re.compile("0|[1-9][0-9]{0,9}")
NUMBER = "^-?[0-9]{1,20}([.][0-9]{1,20})?([eE][+-]?[0-9]{1,3})?$"


def _integer(value: Any) -> Any:
    """Numbers as some clients write them: 8.0, "8"."""
    value = _number(value)
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _number(value: Any) -> Any:
    if not isinstance(value, str) or re.fullmatch(NUMBER, value) is None:
        return value
    return int(value) if value.lstrip("-").isdecimal() else float(value)


Integer = BeforeValidator(_integer)
Number = BeforeValidator(_number)


def _objects(value: Any) -> Any:
    """Those before the last one are history: what is none there is left out where they are read."""
    if isinstance(value, list) and 0 < len(value) <= MAX_MESSAGES and not isinstance(value[-1], dict):
        raise ValueError(f"[{len(value) - 1}] is not an object but {shortened(value[-1])}")
    return value


AnyMessages = Annotated[
    list[Any],
    BeforeValidator(_objects, json_schema_input_type=list[dict[str, Any]]),
    Field(max_length=MAX_MESSAGES),
]
Messages = Annotated[AnyMessages, Field(min_length=1)]
_Prompts = str | list[str] | list[int] | list[list[int]]


def _one_kind(value: Any) -> Any:
    """By hand, for the same reason: a union would check a wrong list once for each of its members."""
    if isinstance(value, str):
        return value
    value = _ids(value)
    kinds = set(map(type, value)) if isinstance(value, list) else set()
    if kinds not in ({str}, {int}, {list}) or (kinds == {list} and any(set(map(type, ids)) - {int} for ids in value)):
        raise ValueError("a text, a list of token ids, or a list of either is expected")
    return value


Prompts = Annotated[_Prompts, PlainValidator(_one_kind, json_schema_input_type=_Prompts)]


def _one_stop(value: Any) -> Any:
    """Some clients write an empty text for none."""
    stops = [value] if isinstance(value, str) else value
    return [stop for stop in stops if stop != ""] if isinstance(stops, list) else stops


def _not_zero_top_p(top_p: float) -> float:
    """0 stands for the most likely token alone."""
    return max(top_p, MIN_TOP_P)


def not_zero(count: int) -> int:
    if count == 0:
        raise ValueError("-1 or a number from 1 is expected")
    return count


def _not_tiny(temperature: float) -> float:
    if 0 < temperature < MIN_TEMPERATURE:
        raise ValueError(f"0 (greedy) or a number from {MIN_TEMPERATURE:g} to 2 is expected")
    return temperature


Penalty = Annotated[float, Field(ge=-2, le=2), Number]
Temperature = Annotated[float, Field(ge=0, le=2), AfterValidator(_not_tiny), Number]
Count = Annotated[int, Field(ge=0, lt=INT32), Integer]
TopP = Annotated[float, Field(ge=0, le=1), AfterValidator(_not_zero_top_p), Number]
PositiveCount = Annotated[int, Field(ge=1, lt=INT32), Integer]
Output = Annotated[int, Field(ge=-1, lt=INT32), Integer]  # tokens; -1: what fits
PositiveOutput = Annotated[Output, AfterValidator(not_zero)]
Alternatives = Annotated[int, Field(ge=0, le=MAX_LOGPROBS), Integer]
Choices = Annotated[int, Field(ge=1, le=MAX_CHOICES), Integer]
TokenId = Annotated[int, Field(ge=0, lt=INT32)]


def _ids(value: Any) -> Any:
    """Ids as some clients write them: 8.0."""
    if isinstance(value, list) and float in set(map(type, value)):
        return [_integer(each) if isinstance(each, float) else each for each in value]
    return value


WholeNumbers = BeforeValidator(_ids)
StopString = Annotated[str, Field(min_length=1, max_length=1000)]
_StopList = Annotated[list[StopString], Field(max_length=16)]
_AnyStop = Annotated[str, Field(max_length=1000)]
_AnyStops = Annotated[list[_AnyStop], Field(max_length=16)]
Stops = Annotated[_StopList, BeforeValidator(_one_stop, json_schema_input_type=_AnyStop | _AnyStops)]
RequestId = Annotated[str, Field(pattern=REQUEST_ID)]
