"""What a client reads of an error, however long what it has sent."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.dialects.tinker.requests import CreateSampler, SampleRequest, read
from api.errors import ApiError, bad_request


@given(st.integers(0, 9000), st.integers(0, 9000) | st.none())
def test_a_message_has_an_end(message: int, param: int | None) -> None:
    error = bad_request("m" * message, None if param is None else "p" * param)
    told = error.body()["error"]
    assert len(told["message"]) <= 4003 and told["message"].startswith("m" * min(message, 4000))
    assert str(error) == told["message"]
    assert told["param"] == (None if param is None else "p" * min(param, 500))


@pytest.mark.parametrize("kind", [CreateSampler, SampleRequest])
@given(name=st.text(min_size=1).map(lambda text: text * 9000))
def test_so_has_one_that_names_an_unknown_field(kind: type[CreateSampler | SampleRequest], name: str) -> None:
    with pytest.raises(ApiError) as caught:
        read(kind, json.dumps({name: 1}).encode())
    assert len(caught.value.message) <= 4003
