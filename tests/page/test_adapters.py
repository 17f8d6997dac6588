"""The view of adapters."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("selenium", reason="selenium is not installed")

from testing.page.browser import Browser, Keys
from tests.api.conftest import Running


def as_admin(page: Browser, key: str = "chief") -> None:
    page.click("#tab-adapters")
    page.click("#open-settings")
    page.fill("#admin-key", key)
    page.press(Keys.TAB)
    page.until(lambda: page.find("#adapter-panel").is_displayed(), "the key is not used")


def listed(page: Browser) -> Callable[[str], bool]:
    names = "return [...document.querySelectorAll('#adapter-rows td:first-child')].map((n) => n.textContent)"
    return lambda name: name in page.script(names)


def test_without_the_key_there_is_the_list_alone(page: Browser) -> None:
    page.click("#tab-adapters")
    page.until(lambda: listed(page)("reverse"), "the adapters are not listed")
    assert "in host memory" in page.text("#adapter-rows")
    assert page.find("#adapters-locked").is_displayed() and not page.find("#adapter-panel").is_displayed()
    assert not page.all("#adapter-rows button")


def test_load_replace_and_unload(page: Browser, echo: Running) -> None:
    as_admin(page)
    page.driver.refresh()
    page.until(lambda: page.find("#adapter-panel").is_displayed(), "the key is not kept")
    page.fill("#adapter-name", "fresh")
    page.fill("#adapter-path", "/fake/fresh")
    page.click("#adapter-pinned")
    page.press(Keys.ENTER)
    page.until(lambda: "fresh, version 1, is loaded" in page.text("#adapter-status"), "it was not loaded")
    page.until(lambda: listed(page)("fresh"), "it is not listed")
    assert "pinned" in page.text("#adapter-rows tr:last-child")
    page.click("[aria-label='Replace fresh']")
    page.until(lambda: page.text("#adapter-send") == "Replace", "the form is not filled in")
    assert page.script("return document.querySelector('#adapter-path').value") == "/fake/fresh"
    page.fill("#adapter-path", "/fake/fresher")
    page.click("#adapter-send")
    page.until(lambda: "fresh, version 2, is loaded" in page.text("#adapter-status"), "it was not replaced")
    page.until(lambda: "/fake/fresher" in page.text("#adapter-rows"), "the new folder is not shown")
    assert echo.wait_for("LoadAdapter")[-1]["pinned"]
    page.click("[aria-label='Unload fresh']")
    page.confirm(False)
    assert listed(page)("fresh")
    page.click("[aria-label='Unload fresh']")
    page.confirm(True)
    page.until(lambda: not listed(page)("fresh"), "it is still listed")
    assert "fresh is unloaded" in page.text("#adapter-status")


@pytest.mark.parametrize(
    "key,path,reason",
    [
        ("chief", "/fake/reverse", "already loaded"),
        ("chief", "/elsewhere", "not an absolute path below an --adapter-root"),
        ("chief", "/fake/../<b>", "not an absolute path below an --adapter-root"),
        ("wrong", "/fake/reverse", "the admin key is missing or wrong"),
    ],
)
def test_errors_are_shown_with_their_reason(page: Browser, key: str, path: str, reason: str) -> None:
    as_admin(page, key)
    page.fill("#adapter-name", "reverse")
    page.fill("#adapter-path", path)
    page.click("#adapter-send")
    page.until(lambda: reason in page.text("#adapters-note"), "the reason is not shown")
    assert page.find("#adapters-note").is_displayed()
    page.until(lambda: page.find("#adapter-send").is_enabled(), "it cannot be tried again")
    assert "loaded" not in page.text("#adapter-status")
