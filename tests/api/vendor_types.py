"""The types that the vendors' packages publish: members of unions, what each writes into a field, and examples."""

from __future__ import annotations

import sys
import types
import typing
from collections.abc import Iterable, Iterator
from typing import Any

import typing_extensions
from hypothesis import strategies as st

_QUALIFIERS = {typing.Annotated, typing_extensions.Required, typing_extensions.NotRequired}
_UNIONS = {typing.Union, types.UnionType}
_MOST_LEVELS = 6


def members(kind: Any) -> Iterator[Any]:
    """The members of a union, of unions in it, and of the elements of lists in it."""
    kind = _bare(kind)
    origin = typing.get_origin(kind)
    if origin in _UNIONS:
        for member in typing.get_args(kind):
            yield from members(member)
    elif _is_list(origin):
        yield from members(typing.get_args(kind)[0])
    else:
        yield kind


def _bare(kind: Any) -> Any:
    while typing.get_origin(kind) in _QUALIFIERS:
        kind = typing.get_args(kind)[0]
    return kind


def _is_list(origin: Any) -> bool:
    return isinstance(origin, type) and issubclass(origin, Iterable) and not issubclass(origin, dict)


def fields(kind: type) -> dict[str, Any]:
    """What each field of a TypedDict or a model holds."""
    found: dict[str, Any] = {}
    for owner in (*reversed(kind.__mro__), *getattr(kind, "__orig_bases__", ()), kind):
        if owner is object or not hasattr(owner, "__annotations__") or owner.__module__ == "pydantic.main":
            continue
        for name, annotation in owner.__annotations__.items():
            source = annotation.__forward_arg__ if isinstance(annotation, typing.ForwardRef) else annotation
            if isinstance(source, str) and "ClassVar" in source:
                continue
            if isinstance(source, str):
                names = {**vars(typing), **vars(typing_extensions), **vars(sys.modules[owner.__module__])}
                source = eval(source, names)  # the packages' own text
            found[name] = source
    return found


def written(kind: Any, name: str = "type") -> frozenset[str]:
    """The texts that a member may have in a field; empty if that is not one of a few texts."""
    values = members(fields(kind).get(name)) if isinstance(kind, type) else ()
    return frozenset(
        text for value in values if typing.get_origin(value) is typing.Literal for text in typing.get_args(value)
    )


def types_of(union: Any, name: str = "type") -> frozenset[str]:
    """The same of all members of a union."""
    return frozenset(text for member in members(union) for text in written(member, name))


def examples(kind: Any, level: int = 0) -> st.SearchStrategy[Any]:
    """Values of a type, as JSON has them."""
    kind = _bare(kind)
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        return st.sampled_from(inner)
    if origin in _UNIONS:
        kept = [each for each in inner if level < _MOST_LEVELS or not _is_object(each)] or list(inner)
        return st.one_of([examples(each, level) for each in kept])
    if isinstance(origin, type) and issubclass(origin, dict):
        return st.dictionaries(st.sampled_from("abc"), examples(inner[1], level + 1), max_size=2)
    if _is_list(origin):
        return st.lists(examples(inner[0], level + 1), max_size=0 if level > _MOST_LEVELS else 2)
    if _is_object(kind):
        return _objects(kind, level)
    simple = {
        str: st.sampled_from(["", "a", "look at this\nfile"]),
        int: st.integers(0, 9),
        float: st.sampled_from([0.0, 0.5]),
        bool: st.booleans(),
        type(None): st.none(),
        None: st.none(),
        object: st.just({"type": "object"}),
    }
    return simple.get(kind, st.just("aGk="))


def _is_object(kind: Any) -> bool:
    return isinstance(kind, type) and hasattr(kind, "__required_keys__")


def _objects(kind: type, level: int) -> st.SearchStrategy[Any]:
    annotations = fields(kind)
    required = {name for name, each in annotations.items() if typing.get_origin(each) is typing_extensions.Required}
    required |= set(kind.__required_keys__) & set(annotations)  # type: ignore[attr-defined]
    values = {name: examples(each, level + 1) for name, each in annotations.items()}
    values |= {name: st.just("f") for name, each in annotations.items() if name == "name" and _bare(each) is str}
    needed = {name: values[name] for name in sorted(required)}
    optional = {name: values[name] for name in sorted(set(values) - required)}
    return st.fixed_dictionaries(needed, optional=optional if level < 2 else {})
