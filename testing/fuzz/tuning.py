"""Bodies for what trains: OpenAI's jobs, and Tinker's runs with their messages in protobuf."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Mapping
from typing import Any

import httpx
import msgspec
from hypothesis import strategies as st

from api.dialects.tinker import requests as r
from api.dialects.tinker.wire import field
from engine.tuning import LOSSES

BATCH = "/api/v1/forward_backward"
_JSON = dict[str, Any]
_ADAM = {"learning_rate": 1e-4, "grad_clip_norm": 1.0}
_PROMPT = {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]}
_SAVED = {"path": "kept", "overwrite": True}
_ENDPOINTS: dict[str, tuple[_JSON, type[msgspec.Struct]]] = {
    "client/config": ({}, r.ClientConfig),
    "create_session": ({}, r.CreateSession),
    "session_heartbeat": ({"session_id": "@session_id"}, r.Heartbeat),
    "create_model": (
        {"session_id": "@session_id", "model_seq_id": 0, "base_model": "demo", "lora_config": {"rank": 2}},
        r.CreateModel,
    ),
    "get_info": ({"model_id": "@model_id"}, r.Model),
    "unload_model": ({"model_id": "none"}, r.Model),
    "optim_step": ({"model_id": "@model_id", "adam_params": _ADAM}, r.OptimStepRequest),
    "save_weights": ({"model_id": "@model_id", **_SAVED}, r.SaveWeights),
    "save_weights_for_sampler": ({"model_id": "@model_id", "sampling_session_seq_id": 1}, r.SaveForSampler),
    "load_weights": (
        {"path": "tinker://@model_id/weights/kept", "optimizer": True, "model_id": "@model_id"},
        r.LoadWeights,
    ),
    "create_sampling_session": (
        {"session_id": "@session_id", "sampling_session_seq_id": 1, "base_model": "demo"},
        r.CreateSampler,
    ),
    "asample": ({"prompt": _PROMPT, "sampling_params": {"max_tokens": 2}, "base_model": "demo"}, r.SampleRequest),
    "retrieve_future": ({"request_id": "@request_id"}, r.Retrieve),
    "weights_info": ({"tinker_path": "tinker://@model_id/weights/kept"}, r.WeightsInfo),
}
ENDPOINTS = {f"/api/v1/{name}": (good, kind.__struct_fields__) for name, (good, kind) in _ENDPOINTS.items()}
_ORDERED = tuple(f"/api/v1/{name}" for name, (_, kind) in _ENDPOINTS.items() if "seq_id" in kind.__struct_fields__)
_SEQ_IDS = st.integers(1, 40)


def opened(client: httpx.Client) -> dict[str, str]:
    """The ids of a run that is open: what `@NAME` in a body stands for."""
    session = client.post("/api/v1/create_session", json={}).raise_for_status().json()["session_id"]
    new = {"session_id": session, "model_seq_id": 0, "base_model": "demo", "lora_config": {"rank": 2}}
    made = client.post("/api/v1/create_model", json=new).raise_for_status().json()
    request = {"request_id": made["request_id"]}
    while (answer := client.post("/api/v1/retrieve_future", json=request).json()).get("type") == "try_again":
        pass
    if "error" in answer:
        raise AssertionError(f"no run could be opened: {answer['error']}")
    return {"session_id": session, "model_id": made["model_id"], **request}


def named(good: _JSON, ids: Mapping[str, str]) -> _JSON:
    """With the ids of a run in the place of their names."""

    def filled(value: Any) -> Any:
        for name, known in ids.items():
            value = value.replace(f"@{name}", known)
        return value

    return {name: filled(value) if isinstance(value, str) else value for name, value in good.items()}


def numbers(path: str) -> st.SearchStrategy[_JSON]:
    """Of a run's order: any of the first ones."""
    return st.builds(lambda seq_id: {"seq_id": seq_id} if path in _ORDERED else {}, _SEQ_IDS)


def batches(ids: Mapping[str, str]) -> st.SearchStrategy[bytes]:
    """Messages that may be right, and such whose numbers, types or lengths are not."""

    def whole(loss: str, data: list[bytes], seq_id: int, more: bytes) -> bytes:
        head = field(1, ids["model_id"].encode()) + b"\x10" + bytes([seq_id])
        return head + b"".join(data) + field(4, loss.encode()) + more

    def of(loss: str) -> st.SearchStrategy[bytes]:
        data = st.lists(_datum_with(list(LOSSES[loss])), min_size=1, max_size=3) | st.lists(_ODD, max_size=3)
        names = st.just(loss) | st.sampled_from([*LOSSES, "", "custom"])
        return st.builds(whole, names, data, _SEQ_IDS, st.just(b"") | st.just(b"\x30\x01") | _SETTING)

    return st.sampled_from(list(LOSSES)).flatmap(of)


_FLOATS = st.sampled_from([0.0, 1.0, -1.0]) | st.floats(-10, 10, width=32) | st.floats(width=32)
_TOKENS = st.lists(st.integers(0, 300) | st.integers(-(2**31), 2**31 - 1), max_size=6)
_SETTING = st.builds(
    lambda name, value: field(5, field(1, name.encode()) + b"\x11" + struct.pack("<d", value)),
    st.sampled_from(["beta", "clip_low_threshold", "clip_high_threshold", "", "x"]),
    st.floats(),
)


def _datum(tokens: list[int], targets: list[int], values: list[float], names: list[str], kind: int) -> bytes:
    text = field(1, field(1, field(1, array("i", tokens).tobytes())))
    data, found = array("f", values).tobytes(), text + _tensor("target_tokens", array("q", targets).tobytes(), 2)
    return field(3, found + b"".join(_tensor(name, data, kind) for name in names))


def _tensor(name: str, data: bytes, kind: int) -> bytes:
    return field(2, field(1, name.encode()) + field(2, field(1, data) + b"\x18" + bytes([kind])))


_NAMES = st.lists(st.sampled_from(["weights", "logprobs", "advantages", "x"]), unique=True, max_size=3)
_ODD = st.builds(_datum, _TOKENS, _TOKENS, st.lists(_FLOATS, max_size=6), _NAMES, st.integers(0, 5))


def _datum_with(names: list[str]) -> st.SearchStrategy[bytes]:
    """As many of each as of the others."""

    def of(count: int) -> st.SearchStrategy[bytes]:
        tokens, values = (st.lists(each, min_size=count, max_size=count) for each in (st.integers(0, 300), _FLOATS))
        return st.builds(_datum, tokens, tokens, values, st.just(names), st.just(1))

    return st.integers(1, 5).flatmap(of)
