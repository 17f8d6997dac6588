"""JSON in which something is of another form than it should be."""

from __future__ import annotations

import math
from typing import Any

from hypothesis import strategies as st

ODD: st.SearchStrategy[Any] = st.sampled_from(
    [None, 0, 1, -1, 5, -1.5, 1e308, float("nan"), float("inf"), 2**31, 2**63, 10**30, True, False, "", "x", "1",
     "[1]", "{", "user", "tool", "../x", "/etc/passwd", "a\0b", "\ud83d", "\u2028", "<|im_end|>", [], {}, [None],
     ["x"], [[]], [[["x"]]], {"a": 1}, {"": {}}, {"type": "text"}, {"role": "user"}]
)  # fmt: skip
FINITE = ODD.filter(lambda value: not isinstance(value, float) or math.isfinite(value))  # as JSON has them


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
    changed = {**whole, key: draw(broken(whole[key], odd))}
    more = {**whole, draw(st.sampled_from(["x", "type", "role", "content", "name", "id"])): draw(odd)}
    return draw(st.sampled_from([changed, changed, changed, rest, more]))
