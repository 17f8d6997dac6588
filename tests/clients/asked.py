"""When these tests run, and what they ask the demo model, which has learnt it."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any

import pytest

WEATHER_QUESTION = "What is the weather in Paris?"
WEATHER_RESULT = {"sky": "snowy", "degrees": 3}
WEATHER_ANSWER = "It is snowy in Paris, 3 degrees."
FILL_QUESTION = "Tom is 7. Give me name and age as JSON."
FILL_ANSWER = {"name": "Tom", "age": 7}
SUM_QUESTION = "What is 2 + 3?"
SUM_ANSWER = "2 + 3 = 5."
TOO_LONG = "word " * 5000
CITY: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def needs(*modules: str) -> None:
    """Skips the module that calls it, unless `make test-clients` runs it and the clients are there."""
    if "KTSERVE_TEST_CLIENTS" not in os.environ:
        pytest.skip("only make test-clients runs it", allow_module_level=True)
    if missing := [module for module in modules if find_spec(module) is None]:
        pytest.skip(f"not installed: {', '.join(missing)} (make test-clients)", allow_module_level=True)
