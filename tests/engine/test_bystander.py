"""Whatever parameters the api accepts, a request beside them gets the tokens that it gets alone, bit for bit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from api.bodies.generation import ChatRequest
from api.bodies.parsing import parse
from api.bodies.sampling import sampling_params
from api.errors import ApiError
from engine.messages import Cancelled, Failed, Finished, Refused, Submit, decode_to_engine, encode
from testing.harness import Harness, Result
from testing.models.tiny import tiny_model

VOCABULARY = 128
IDS = st.integers(0, VOCABULARY - 1)
EDGES = st.sampled_from([0, 1e-300, 1e-50, 1e-40, 1e-7, 1e-6, 0.01, 0.5, 1, 1.5, 2, 10, -2, -1e-40])
WHOLE = st.sampled_from([-1, 0, 1, 5, 127, 128, 129, 2**31 - 1, 2**31, 2**32, 2**62, 2**63 - 1, 2**63, 2**64])
PARAMETERS = st.fixed_dictionaries(
    {},
    optional={
        "temperature": EDGES | st.floats(0, 2),
        "top_p": EDGES | st.floats(0, 1),
        "top_k": WHOLE,
        "min_p": EDGES | st.floats(0, 1),
        "seed": WHOLE | st.integers(-(2**63), 2**63 - 1),
        "presence_penalty": EDGES,
        "frequency_penalty": EDGES,
        "repetition_penalty": EDGES | st.floats(0.01, 10),
        "logit_bias": st.dictionaries(IDS.map(str), st.floats(-100, 100), max_size=VOCABULARY),
        "stop_token_ids": st.lists(IDS, max_size=8),
        "logprobs": st.just(True),
        "priority": st.integers(-1000, 1000),
        "ignore_eos": st.booleans(),
    },
)


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    folder: Path = tmp_path_factory.mktemp("model")
    tiny_model(vocab_size=VOCABULARY).save_pretrained(folder)
    engine = Harness(folder)
    yield engine
    engine.close()


def result(harness: Harness, rid: str) -> Result:
    harness.run()
    return harness.results.pop(rid)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(PARAMETERS, st.lists(IDS, min_size=1, max_size=20), st.booleans())
def test_accepted_parameters_hurt_no_bystander(
    harness: Harness, parameters: dict[str, Any], prompt: list[int], drawn: bool
) -> None:
    raw = {"model": "m", "messages": [{"role": "user", "content": ""}], **parameters}
    try:
        body = parse(ChatRequest, json.dumps(raw).encode())
    except ApiError as error:
        assert error.status == 400 and error.param is not None
        return
    bystander: dict[str, Any] = {"max_tokens": 6, "temperature": 0.8 if drawn else 0.0, "seed": 7, "top_p": 0.9}
    alone = result(harness, harness.submit([5, 6, 7, 8], **bystander))
    rid = harness.submit([5, 6, 7, 8], **bystander)
    message = Submit(request_id=f"{rid}x", prompt=prompt, sampling=sampling_params(body, {}, 6, 0))
    harness.results[f"{rid}x"] = Result()
    sent = decode_to_engine(encode(message))
    assert isinstance(sent, Submit)
    harness.core.handle(sent)
    beside = result(harness, rid)
    assert isinstance(beside.end, Finished) and beside.tokens == alone.tokens
    end = harness.results.pop(f"{rid}x").end
    assert isinstance(end, Finished) and not isinstance(end, Refused | Cancelled | Failed)
