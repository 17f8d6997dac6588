"""A headless Chromium for tests of the page, where one is installed (Debian: chromium and chromium-driver)."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver import Chrome, ChromeOptions, ChromeService
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.expected_conditions import alert_is_present
from selenium.webdriver.support.wait import WebDriverWait

from testing.waiting import PATIENCE_S, eventually

BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def why_not() -> str | None:
    """What is missing for a browser; None: nothing."""
    if not any(map(shutil.which, BROWSERS)):
        return f"no browser ({', '.join(BROWSERS)}) is installed"
    return None if shutil.which("chromedriver") else "chromedriver (Debian: chromium-driver) is not installed"


class Browser:
    """A page in a window of its own."""

    def __init__(self, driver: Chrome) -> None:
        self.driver = driver
        self._requested: list[str] = []

    def open(self, url: str, width: int = 1280, height: int = 800, dark: bool = False) -> None:
        """With empty storage. The media are set without a window: their size is exact."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        self.driver.get(f"{url}/page/icon.svg")  # of the origin, without scripts
        self.driver.execute_script("localStorage.clear(); sessionStorage.clear()")
        self.logs()
        self.driver.get("about:blank")
        self.requested()
        self._requested.clear()
        self.driver.get(url)
        self.until(lambda: self.text("#state") != "connecting", "the page did not find its server")

    def find(self, css: str) -> WebElement:
        return self.driver.find_element(By.CSS_SELECTOR, css)

    def all(self, css: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, css)

    def text(self, css: str) -> str:
        """Of all that match, as it is in the document (hidden or not)."""
        code = "return [...document.querySelectorAll(arguments[0])].map((n) => n.textContent).join('\\n\\n')"
        return str(self.script(code, css))

    def script(self, code: str, *arguments: Any) -> Any:
        return self.driver.execute_script(code, *arguments)

    def click(self, css: str) -> None:
        """An element, which the page may replace meanwhile."""

        def clicked() -> bool:
            try:
                self.find(css).click()
            except StaleElementReferenceException:
                return False
            return True

        eventually(clicked)

    def fill(self, css: str, value: str) -> None:
        field = self.find(css)
        field.clear()
        field.send_keys(value)

    def press(self, *keys: str) -> None:
        """To whatever has the focus."""
        self.driver.switch_to.active_element.send_keys(*keys)

    def confirm(self, yes: bool) -> None:
        """Answers the browser's question, which may yet have to come."""
        alert = WebDriverWait(self.driver, PATIENCE_S).until(alert_is_present())
        alert.accept() if yes else alert.dismiss()

    def until(self, check: Any, what: str) -> None:
        try:
            eventually(check)
        except AssertionError:
            raise AssertionError(f"{what}; the page shows: {self.text('main:not([hidden])')[:2000]}") from None

    def logs(self) -> list[str]:
        """The console's messages since the last call, refusals of the content security policy among them."""
        return [entry["message"] for entry in self._log("browser")]

    def requested(self) -> list[str]:
        """Addresses of all requests since the page was opened."""
        for entry in self._log("performance"):
            message = json.loads(entry["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                self._requested.append(message["params"]["request"]["url"])
        return self._requested

    def _log(self, kind: str) -> list[dict[str, Any]]:
        """What the browser has logged since the last call."""
        entries: list[dict[str, Any]] = self.driver.get_log(kind)  # type: ignore[no-untyped-call]
        return entries

    def origins(self) -> set[str]:
        return {f"{parts.scheme}://{parts.netloc}" for parts in map(urlsplit, self.requested())}


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    options = ChromeOptions()
    options.binary_location = next(filter(None, map(shutil.which, BROWSERS)))
    for flag in ("--headless=new", "--disable-dev-shm-usage", "--disable-gpu", "--hide-scrollbars"):
        options.add_argument(flag)
    if os.geteuid() == 0:
        options.add_argument("--no-sandbox")  # Chromium's sandbox does not start as root
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = Chrome(options, ChromeService(shutil.which("chromedriver")))
    try:
        yield Browser(driver)
    finally:
        driver.quit()


__all__ = ["Browser", "Keys", "browser", "why_not"]
