"""What an answer's `warnings` header may hold, whatever the request has."""

import string

import h11
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request

from api.http.middleware import note
from api.prepare.job import Prepared

_TEXTS = st.lists(st.text(max_size=60) | st.text(alphabet=string.whitespace + "x\x00é", max_size=600), max_size=12)


@given(remarks=_TEXTS, unknown=_TEXTS, unused=_TEXTS)
def test_warnings_may_be_sent(remarks: list[str], unknown: list[str], unused: list[str]) -> None:
    """Wherever the text is cut: a value that begins or ends in a blank would cost the whole answer."""
    request = Request({"type": "http", "state": {}})
    note(request, Prepared(b"{}", remarks=remarks, unknown=unknown, unused=unused))
    warnings = getattr(request.state, "warnings", "")
    head = h11.Response(status_code=200, headers=[("warnings", warnings), ("content-length", "0")])
    sent = h11.Connection(h11.SERVER)
    assert sent.send(head)
    if unknown:
        assert warnings


def test_no_cut_ends_in_a_blank() -> None:
    for length in range(40):
        request = Request({"type": "http", "state": {}})
        note(request, Prepared(b"{}", remarks=["x" * length + " a b c" * 400]))
        h11.Response(status_code=200, headers=[("warnings", request.state.warnings)])
        assert 990 < len(request.state.warnings) <= 1000
