"""The three protobuf messages of Tinker's clients: ForwardBackwardRequest is read, ForwardBackwardOutput and
SampleResponse are written. Source: the protocol-buffers encoding guide, and the field numbers of the public client.

A body is read within its own length: no number in it makes anything larger than the body itself.
"""

from __future__ import annotations

import math
import struct
from array import array
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from api.errors import bad_request
from engine.tuning import LOSSES, Sample

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_TYPES = {1: "f", 2: "q", 3: "i"}  # float32, int64, int32: of the arrays' items
_MOST_DATA = 4096
_SHAPE_BYTES = 64
_MOST_FIELDS = 1 << 17  # a datum has about 20

Value = int | bytes


class ForwardBackward(msgspec.Struct, frozen=True):
    model_id: str
    seq_id: int
    samples: list[Sample]
    loss: str
    settings: dict[str, float]
    forward_only: bool


class _Whole:
    """A body whose fields are counted, those of the messages within it too."""

    def __init__(self) -> None:
        self.left = _MOST_FIELDS


def fields(data: bytes, whole: _Whole) -> Iterator[tuple[int, Value]]:
    """Number and value of each field of a message, which is a part of the `whole`. Raises ApiError 400 for what is
    none."""
    at, end = 0, len(data)
    while at < end:
        whole.left -= 1
        if whole.left < 0:
            raise bad_request(f"the body has more than {_MOST_FIELDS} fields: send fewer data at a time", "data")
        key, at = _varint(data, at)
        kind = key & 7
        if kind == _VARINT:
            value, at = _varint(data, at)
            yield key >> 3, value
            continue
        if kind == _BYTES:
            size, at = _varint(data, at)
        else:
            size = {_FIXED64: 8, _FIXED32: 4}.get(kind, -1)
        if size < 0 or at + size > end:
            raise bad_request("the body is no protobuf message of a forward_backward")
        yield key >> 3, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            break
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise bad_request("the body is no protobuf message of a forward_backward")


def model_of(data: bytes) -> str:
    """The run that a forward_backward is for. Raises ApiError 400."""
    for number, value in fields(data, _Whole()):
        if number == 1:
            return _text(value)
    raise bad_request("model_id is missing", "model_id")


def read_forward_backward(data: bytes) -> ForwardBackward:
    """Raises ApiError 400 that names what is wrong with which datum."""
    whole = _Whole()
    model_id, loss, seq_id, forward_only = "", "cross_entropy", 0, False
    data_of: list[bytes] = []
    settings: dict[str, float] = {}
    for number, value in fields(data, whole):
        if number == 1:
            model_id = _text(value)
        elif number == 2:
            seq_id = _number(value)
        elif number == 3:
            data_of.append(_bytes(value))
        elif number == 4:
            loss = _text(value)
        elif number == 5:
            name, setting = _entry(_bytes(value), whole)
            settings[name] = _double(setting)
        elif number == 6:
            forward_only = bool(_number(value))
        elif number == 7:
            name, setting = _entry(_bytes(value), whole)
            if any(part == 2 for part, _ in fields(setting, whole)):
                raise bad_request(f"loss_fn_config.{name[:80]}: a number is expected", "loss_fn_config")
    if loss not in LOSSES or loss == "dpo":
        known = ", ".join(name for name in LOSSES if name != "dpo")
        raise bad_request(f"loss_fn: {loss[:60]!r}; allowed are {known}", "loss_fn")
    if not 1 <= len(data_of) <= _MOST_DATA:
        raise bad_request(f"data: {len(data_of)} items; allowed are 1 to {_MOST_DATA}", "data")
    samples = [_sample(datum, loss, f"data[{number}]", whole) for number, datum in enumerate(data_of)]
    return ForwardBackward(model_id, seq_id, samples, loss, settings, forward_only)


def _sample(data: bytes, loss: str, where: str, whole: _Whole) -> Sample:
    tokens: list[int] = []
    inputs: dict[str, array[float]] = {}
    for number, value in fields(data, whole):
        if number == 1:
            for part, chunk in fields(_bytes(value), whole):
                if part != 1:
                    raise bad_request(f"{where}.model_input: texts alone can be trained on", "data")
                for place, ids in fields(_bytes(chunk), whole):
                    if place == 1:
                        tokens += map(int, _array(_bytes(ids), "i", where))
        elif number == 2:
            name, tensor = _entry(_bytes(value), whole)
            inputs[name] = _tensor(tensor, f"{where}.loss_fn_inputs.{name[:40]}", whole)
    targets = inputs.pop("target_tokens", None)
    if targets is None:
        raise bad_request(f"{where}.loss_fn_inputs.target_tokens is missing", "data")
    wanted = LOSSES[loss]
    if loss == "cross_entropy":
        inputs.setdefault("weights", array("f", [1.0]) * len(targets))
    if unknown := sorted(set(inputs) - set(wanted)):
        raise bad_request(f"{where}.loss_fn_inputs.{unknown[0][:40]}: {loss} takes {', '.join(wanted)}", "data")
    for name, values in {"target_tokens": targets, **inputs}.items():
        if not all(map(math.isfinite, values)):
            raise bad_request(f"{where}.loss_fn_inputs.{name}: finite numbers are expected", "data")
    places = [int(target) for target in targets]
    if targets.typecode == "f" and places != targets.tolist():
        raise bad_request(f"{where}.loss_fn_inputs.target_tokens: whole numbers are expected", "data")
    numbers = {name: list(map(float, values)) for name, values in inputs.items()}
    return Sample(tokens, places, numbers)


def _tensor(data: bytes, where: str, whole: _Whole) -> array[float]:
    dense, kind, shape = b"", 1, []
    for number, value in fields(data, whole):
        if number == 1:
            dense = _bytes(value)
        elif number == 2:
            raise bad_request(f"{where}: a dense tensor is expected", "data")
        elif number == 3:
            kind = _number(value)
        elif number == 4:
            shape += [value] if isinstance(value, int) else _packed(value, where)
    if kind not in _TYPES:
        raise bad_request(f"{where}: its type is {kind}; allowed are float32, int64 and int32", "data")
    if len(shape) > 1:
        raise bad_request(f"{where}: its shape is {shape[:8]}; one dimension is expected", "data")
    return _array(dense, _TYPES[kind], where)


def _array(data: bytes, kind: str, where: str) -> array[float]:
    found: array[float] = array(kind)
    if len(data) % found.itemsize:
        raise bad_request(f"{where}: {len(data)} bytes are no whole number of items", "data")
    found.frombytes(data)
    return found


def _packed(data: bytes, where: str) -> list[int]:
    """Of a shape."""
    if len(data) > _SHAPE_BYTES:
        raise bad_request(f"{where}: one dimension is expected", "data")
    found, at = [], 0
    while at < len(data):
        value, at = _varint(data, at)
        found.append(value)
    return found


def _entry(data: bytes, whole: _Whole) -> tuple[str, bytes]:
    """Of a map: key and value."""
    name, found = "", b""
    for number, value in fields(data, whole):
        if number == 1:
            name = _text(value)
        elif number == 2:
            found = _bytes(value)
    return name, found


def _bytes(value: Value) -> bytes:
    if isinstance(value, int):
        raise bad_request("the body is no protobuf message of a forward_backward")
    return value


def _text(value: Value) -> str:
    return _bytes(value).decode("utf-8", "replace")


def _number(value: Value) -> int:
    if not isinstance(value, int):
        raise bad_request("the body is no protobuf message of a forward_backward")
    return value


def _double(value: bytes) -> float:
    if len(value) != 8:
        raise bad_request("loss_fn_config: a number is expected", "loss_fn_config")
    found = float(struct.unpack("<d", value)[0])
    if not math.isfinite(found):
        raise bad_request("loss_fn_config: a finite number is expected", "loss_fn_config")
    return found


# ---- answers


def field(number: int, value: bytes) -> bytes:
    """Of bytes, a text or a message."""
    return _encoded(number << 3 | _BYTES) + _encoded(len(value)) + value


def _encoded(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def forward_backward_output(logprobs: Sequence[bytes], metrics: Mapping[str, float]) -> bytes:
    """`logprobs`: float32 of each datum."""
    ends = array("q", [0])
    for each in logprobs:
        ends.append(ends[-1] + len(each))
    tensor = field(1, b"".join(logprobs)) + field(2, ends.tobytes()) + _encoded(3 << 3) + _encoded(1)
    record = field(2, field(1, b"logprobs") + field(2, tensor)) + _encoded(3 << 3) + _encoded(len(logprobs))
    entries = (
        field(1, name.encode()) + _encoded(2 << 3 | _FIXED64) + struct.pack("<d", v) for name, v in metrics.items()
    )
    return field(1, b"scalar") + field(2, record) + b"".join(field(3, entry) for entry in entries)


class Sampled(msgspec.Struct):
    """One answer. `tokens` and their log-probabilities, the token that ended it included."""

    tokens: list[int] = []
    logprobs: list[float] = []
    ended: bool = False  # by a stop; else it was as long as it may be
    prompt_logprobs: list[float] | None = None  # NaN at 0
    top: list[list[tuple[int, float]]] = []  # of each of the prompt's tokens
    cached_tokens: int = 0


def sample_response(samples: Sequence[Sampled], top_k: int) -> bytes:
    """`top_k`: alternatives of the prompt's tokens that were asked for; 0: none."""
    first = samples[0]
    out = b""
    for each in samples:
        stop = _encoded(1 << 3) + _encoded(0 if each.ended else 1)
        numbers = field(3, array("f", each.logprobs).tobytes())
        out += field(1, stop + field(2, array("i", each.tokens).tobytes()) + numbers)
    if first.prompt_logprobs is not None:
        out += field(2, array("f", first.prompt_logprobs).tobytes())
    if top_k and first.prompt_logprobs is not None:
        ids, logprobs = array("i"), array("f")
        for row in first.top:
            padded = [*row, *[(0, -99999.0)] * top_k][:top_k]
            ids.extend(token for token, _ in padded)
            logprobs.extend(logprob for _, logprob in padded)
        sizes = _encoded(3 << 3) + _encoded(top_k) + _encoded(4 << 3) + _encoded(len(first.top))
        out += field(3, field(1, ids.tobytes()) + field(2, logprobs.tobytes()) + sizes)
    return out + _encoded(4 << 3) + _encoded(first.cached_tokens)
