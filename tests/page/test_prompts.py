"""What an empty chat offers."""

from __future__ import annotations

import json
import shlex
from itertools import product

import pytest

pytest.importorskip("selenium", reason="selenium is not installed")

from demo.paths import MODEL_FILE
from testing.page.browser import Browser
from tests.page.test_playground import ENDED, ask

DEMO = f"/somewhere/{MODEL_FILE}"
MADE = """
const [cases, done] = arguments;
import("/page/prompts.js").then(({ promptsFor }) => done(cases.map(([models, can]) => promptsFor(models, can))));
"""
CAN_CALL = """
const done = arguments[0];
import("/page/chat.js").then(({ Chat }) => {
  document.querySelector("#columns").replaceChildren();
  const chat = new Chat();
  chat.offer([{ id: "tiny" }]);
  chat.suit(["tools"]);
  done();
});
"""


def test_three_prompts_suit_the_model(page: Browser) -> None:
    cases = [
        [
            [{"id": "base", "root": root, "parent": None}, *({"id": f"a{i}", "parent": "base"} for i in range(count))],
            can,
        ]
        for root, count, can in product((DEMO, "/models/other"), (0, 1, 3), ([], ["tools"], ["thinking", "tools"]))
    ]
    for (models, can), prompts in zip(cases, page.driver.execute_async_script(MADE, cases), strict=True):
        demo, adapters = models[0]["root"] == DEMO, len(models) > 1
        assert len({prompt["text"] for prompt in prompts}) == 3
        assert any("tools" in prompt for prompt in prompts) == (demo or "tools" in can)
        assert any("bat and a ball" in prompt["text"] for prompt in prompts) == (not demo and "thinking" in can)
        assert any("story about a fox" in prompt["text"] for prompt in prompts) == demo
        beside = [prompt["models"] for prompt in prompts if "models" in prompt]
        assert beside == ([[model["id"] for model in models[:3]]] if adapters else [])


def test_a_prompt_for_base_and_adapters_opens_their_columns(page: Browser) -> None:
    page.until(lambda: len(page.all(".prompts button")) == 3, "no prompts")
    next(button for button in page.all(".prompts button") if "tiny beside reverse and gated" in button.text).click()
    chosen = "return [...document.querySelectorAll('.column select')].map((select) => select.value)"
    assert page.script(chosen) == ["tiny", "reverse", "gated"]
    assert page.text(".mine").count("Introduce yourself in one sentence.") == 3
    page.click("#stop")
    page.until(lambda: page.script(ENDED), "it was not stopped")


def tools_sent(page: Browser) -> list[str]:
    """With the last answer's request."""
    page.until(lambda: page.script(ENDED), "the answer did not end")
    [button for button in page.all(".foot button") if button.text == "curl"][-1].click()
    words = shlex.split(page.text("#curl-text"))
    page.click("#curl-close")
    return [tool["function"]["name"] for tool in json.loads(words[words.index("-d") + 1]).get("tools", [])]


def test_a_prompts_tool_lasts_as_long_as_its_conversation(page: Browser) -> None:
    page.driver.execute_async_script(CAN_CALL)
    next(button for button in page.all(".prompts button") if "weather" in button.text).click()
    assert tools_sent(page) == ["get_weather"]
    page.driver.refresh()
    page.until(lambda: page.text("#state") == "ready", "the page did not come back")
    ask(page, "and tomorrow?")
    assert tools_sent(page) == ["get_weather"]
    page.click("#clear")
    ask(page, "hello")
    assert tools_sent(page) == []
