"""YAML from people is read as it is written, or refused with its line."""

from __future__ import annotations

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from ktserve.strict_yaml import MAX_BYTES, YamlError, compose, load

NAMES = st.text("abcdefgh_", min_size=1, max_size=6)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=8,
)


class _NoAnchors(yaml.SafeDumper):
    def ignore_aliases(self, data: object) -> bool:
        return True


@given(value=st.dictionaries(NAMES, VALUES, max_size=4))
def test_what_is_written_is_read(value: dict[str, object]) -> None:
    text = yaml.dump(value, Dumper=_NoAnchors, allow_unicode=True)
    assert load(text.encode()) == yaml.safe_load(text)


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ("a: 1\nb:\n  c: 1\n  c: 2\n", 4, "c is written twice, first in line 3"),
        ("a: 1\nb: &x 2\n", 2, "anchors and aliases"),
        ("a: 1\n? [1]\n: 2\n", 2, "a plain word"),
        ("a: 1\n---\nb: 1\n", 2, "not YAML"),
        ("a: 1\n[x: y\n", 3, "not YAML"),
        ("a: 1\nb: !!python/object:os.system 1\n", 2, "not read here"),
        ("a: " + "[" * 17 + "]" * 17, 1, "nested too deeply: at most 16"),
        ("a: 2020-99-99\n", None, "not read here"),
    ],
)
def test_what_is_refused_is_named_with_its_line(text: str, line: int | None, said: str) -> None:
    with pytest.raises(YamlError, match=said) as caught:
        load(text.encode())
    assert caught.value.line == line


def test_bytes_are_bounded_and_utf8() -> None:
    assert compose(b"") is None and load(b"# nothing\n") is None
    with pytest.raises(YamlError, match=f"at most {MAX_BYTES}"):
        compose(b" " * (MAX_BYTES + 1))
    with pytest.raises(YamlError, match="not UTF-8") as caught:
        compose(b"a: 1\nb: \xff\n")
    assert caught.value.line == 2


@given(data=st.binary(max_size=40) | st.text("ab:-[]{}&*!? \n'\"", max_size=40).map(str.encode))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    try:
        load(data)
    except YamlError as error:
        assert error.line is None or error.line >= 1
