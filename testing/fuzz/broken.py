"""JSON in which something is of another form than it should be."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

ODD: st.SearchStrategy[Any] = st.sampled_from(
    [None, 0, 1, -1, 5, -1.5, 1e308, float("nan"), float("inf"), True, False, "", "x", "1", "[1]", "{", "null", "../x",
     "/etc/passwd", "a\0b", "\ud83d", "\u2028", [], {}, [None], ["x"], [[]], [[["x"]]], {"a": 1}, {"": {}}, 10**30,
     2**63, 2**31]
)  # fmt: skip


@st.composite
def broken(draw: st.DrawFn, whole: Any, odd: st.SearchStrategy[Any] = ODD) -> Any:
    """`whole` with a value of another form, at any depth, or something left out, doubled or added."""
    if not isinstance(whole, dict | list) or not whole or draw(st.integers(0, 6)) == 0:
        return draw(odd)
    if isinstance(whole, list):
        at = draw(st.integers(0, len(whole) - 1))
        within = [draw(broken(whole[at], odd))]
        return [*whole[:at], *draw(st.sampled_from([[], within, within, [whole[at]] * 2])), *whole[at + 1 :]]
    key = draw(st.sampled_from(sorted(whole)))
    rest = {name: value for name, value in whole.items() if name != key}
    within = {**whole, key: draw(broken(whole[key], odd))}
    return draw(st.sampled_from([within, within, within, rest, {**whole, draw(st.sampled_from(["x", "type"])): 5}]))
