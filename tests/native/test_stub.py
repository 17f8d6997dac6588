"""The committed stub says what the built module has: names, signatures and docstrings."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

stubgen = pytest.importorskip("nanobind.stubgen")


def normal(text: str) -> str:
    """The same for any layout of the code and any indentation of the docstrings."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node.value = " ".join(node.value.split())
    return ast.unparse(tree)


def test_the_stub_is_that_of_the_module() -> None:
    """To renew it: python -m nanobind.stubgen -m native._native -o native/_native.pyi && ruff format native"""
    from native import _native

    made = stubgen.StubGen(_native)
    made.put(_native)
    committed = Path(__file__).parents[2] / "native"
    assert normal((committed / "_native.pyi").read_text()) == normal(made.get())
