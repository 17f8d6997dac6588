"""Stop strings against a search of the whole text."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from api.text.stops import StopMachine, StopStrings

ALPHABET = "abé👋"


def naive(text: str, stops: list[str]) -> tuple[str, bool]:
    """The text before the stop string that ends first (of those, the one that begins first)."""
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)], True
    return text, False


@st.composite
def chunked(draw: st.DrawFn) -> list[str]:
    text = draw(st.text(ALPHABET, max_size=30))
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=8)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@settings(max_examples=500)
@given(chunked(), st.lists(st.text(ALPHABET, min_size=1, max_size=4), min_size=1, max_size=4))
def test_any_chunking_is_the_whole_text_search(chunks: list[str], stops: list[str]) -> None:
    machine = StopMachine(StopStrings(stops))
    shown, seen = "", ""
    for chunk in chunks:
        seen += chunk
        shown += machine.push(chunk)
        expected, found = naive(seen, stops)
        assert machine.found == found
        assert expected.startswith(shown), "text was shown that is not certain"
        if found:
            assert shown == expected
            break
        held = seen[len(shown) :]
        assert held == "" or any(stop.startswith(held) for stop in stops), "more is held back than needed"
    shown += machine.finish()
    assert (shown, machine.found) == naive(seen, stops)


def test_after_a_match_nothing_more_comes() -> None:
    machine = StopMachine(StopStrings(["END"]))
    assert machine.push("oneEN") == "one"
    assert machine.push("Dtwo") == ""
    assert machine.found
    assert machine.push("three") == "" and machine.finish() == ""


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopStrings(["a", ""])
