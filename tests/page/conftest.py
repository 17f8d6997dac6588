"""A browser and a server over the fake engine, which answers with what it was asked."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.api.conftest import Running, serving
from tests.api.conftest import model_dir as model_dir

if TYPE_CHECKING:
    from testing.page.browser import Browser

ADAPTERS = ("reverse", "gated", "fail", "silent", "refuse")


@pytest.fixture(scope="session")
def window() -> Iterator[Browser]:
    from testing.page.browser import browser, why_not  # here: without selenium the modules of the tests are skipped

    if reason := why_not():
        pytest.skip(reason)
    with browser() as found:
        yield found


@pytest.fixture(scope="session")
def echo(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    flags = [flag for name in ADAPTERS for flag in ("--adapters", f"{name}=/fake/{name}")]
    flags += ["--admin-key", "chief", "--adapter-root", "/fake"]
    folder = tmp_path_factory.mktemp("page")
    flags += ["--fine-tuning", "--data-dir", str(folder / "data")]
    gates = {name: str(folder / name) for name in ("gate", "tuning_gate")}
    with serving(model_dir, folder, *flags, **gates, read_bandwidth=4e9) as running:
        yield running


@pytest.fixture
def page(window: Browser, echo: Running) -> Iterator[Browser]:
    """The page, just opened. Whatever a test does, nothing breaks the policy and nothing leaves the origin."""
    window.open(echo.url)
    window.until(lambda: window.text("#state") == "ready", "the page is not ready")
    yield window
    assert not [line for line in window.logs() if "Content Security" in line or "Uncaught" in line]
    assert window.origins() <= {echo.url}
