"""What people do in the playground, in a real browser."""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("selenium", reason="selenium is not installed")

from testing.page.browser import Browser, Keys
from tests.api.conftest import Running, serving

ENDED = (
    "return document.querySelectorAll('.answer.working').length == 0 && document.querySelectorAll('.answer').length > 0"
)


def choose(page: Browser, *models: str) -> None:
    """A column for each."""
    for _ in models[1:]:
        page.click("#add-column")
    for select, model in zip(page.all(".column select"), models, strict=True):
        select.send_keys(model)


def send(page: Browser, text: str) -> None:
    page.fill("#prompt", text)
    page.press(Keys.ENTER)


def ask(page: Browser, text: str) -> None:
    send(page, text)
    page.until(lambda: page.script(ENDED), "the answer did not end")


def sent(echo: Running) -> dict:
    return echo.wait_for("Submit")[-1]


def test_a_conversation_of_two_turns(page: Browser, echo: Running) -> None:
    ask(page, "hello world")
    assert page.text(".answer .text") == "user\nhello world\nassistant"
    before = len(sent(echo)["prompt"])
    ask(page, "and again")
    second = page.text(".answer:last-child .text")
    assert second.count("hello world") == 2 and "and again" in second, "the history is sent too"
    assert len(sent(echo)["prompt"]) > before
    page.click("#clear")
    ask(page, "third")
    assert "hello" not in page.text(".answer .text")


def test_a_reload_keeps_the_conversation(page: Browser, echo: Running) -> None:
    choose(page, "reverse")
    next(button for button in page.all(".prompts button") if button.text.startswith("Explain")).click()
    page.until(lambda: page.script("return !!document.querySelector('.answer:not(.working)')"), "no answer")
    asked, said = page.text(".mine"), page.text(".answer .text")
    numbers = page.text(".answer .numbers")
    assert asked.startswith("Explain") and "context" in numbers and " of 2048" in numbers
    page.driver.refresh()
    page.until(lambda: page.text("#state") == "ready", "the page did not come back")
    assert (page.text(".mine"), page.text(".answer .text")) == (asked, said)
    assert page.script("return document.querySelector('.column select').value") == "reverse"
    ask(page, "and again")
    assert asked in page.text(".turns"), "the history is still shown"
    page.click("#clear")
    page.driver.refresh()
    page.until(lambda: page.text("#state") == "ready", "the page did not come back")
    assert not page.all(".mine") and len(page.all(".prompts button")) == 3


def test_streaming_appears_and_stop_ends_it(page: Browser, echo: Running) -> None:
    choose(page, "gated")
    send(page, "a long tale")
    page.until(lambda: "a long tale" in page.text(".answer.working .text"), "nothing was streamed")
    assert page.find("#stop").is_displayed() and not page.find("#send").is_displayed()
    page.click("#stop")
    page.until(lambda: page.script(ENDED), "it was not stopped")
    assert "stopped" in page.text(".answer .numbers")
    echo.wait_for("Abort")
    assert page.find("#send").is_displayed()


def test_base_and_two_adapters_side_by_side(page: Browser) -> None:
    choose(page, "tiny", "reverse", "fail")
    ask(page, "abc")
    plain, reverse, failed = (page.text(f".column:nth-child({i}) .answer") for i in (1, 2, 3))
    assert "abc" in plain and "cba" in reverse and "a fault of the fake" in failed
    lefts = [column.rect["x"] for column in page.all(".column")]
    assert lefts == sorted(set(lefts)), "three columns, side by side"


def test_columns_are_stacked_on_a_phone(window: Browser, echo: Running) -> None:
    window.open(echo.url, 390, 844)
    window.until(lambda: window.text("#state") == "ready", "the page is not ready")
    choose(window, "tiny", "reverse", "gated")
    tops = [column.rect["y"] for column in window.all(".column")]
    assert tops == sorted(set(tops)) and len({column.rect["x"] for column in window.all(".column")}) == 1
    for tab in window.all("[role=tab]"):
        tab.click()
        assert window.script("return document.documentElement.scrollWidth") <= 390, "nothing is wider than the screen"


def test_parameters_are_sent(page: Browser, echo: Running) -> None:
    page.click("#open-settings")
    given = {"temperature": "0.7", "top_p": "0.9", "max_tokens": "7", "seed": "42", "stop": "zzz"}
    for name, value in given.items():
        page.fill(f"[data-field={name}]", value)
    page.fill("[data-field=system]", "Be brief.")
    ask(page, "hello")
    sampling = sent(echo)["sampling"]
    assert sampling["temperature"] == 0.7 and sampling["top_p"] == 0.9 and sampling["max_tokens"] == 7
    assert page.text(".answer .text").startswith("system")
    assert "cut off at max tokens" in page.text(".answer .numbers")
    page.fill("[data-field=tools]", "[{")
    ask(page, "hello")
    assert "Tools: this is not JSON." in page.text(".answer:last-child .error")


def test_token_probabilities_on_hover_and_by_keys(page: Browser) -> None:
    page.click("#open-settings")
    page.click("[data-field=logprobs]")
    ask(page, "hello")
    assert page.text(".tokens").replace("<|im_start|>", "").startswith("user\nhello")
    page.script("document.querySelector('.tokens span').focus()")
    first = page.text("#token-card")
    assert "78 %" in first, "exp(-0.25), as the engine has it"
    assert len(page.all("#token-card > div")) == 5
    page.press(Keys.ARROW_RIGHT)
    assert page.text("#token-card") != first
    page.click(".foot button")
    assert page.find(".answer .text").is_displayed() and not page.find(".tokens").is_displayed()


def test_the_curl_command_does_the_same(page: Browser, echo: Running, tmp_path: Path) -> None:
    text = 'it\'s $HOME `x` "q" \\ ü'
    ask(page, text)
    next(button for button in page.all(".foot button") if button.text == "curl").click()
    command = page.text("#curl-text")
    words = shlex.split(command)
    body = json.loads(words[words.index("-d") + 1])
    assert body["messages"] == [{"role": "user", "content": text}] and body["model"] == "tiny"
    answer = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60)
    assert answer.returncode != 0 or "data: [DONE]" in answer.stdout
    page.click("#curl-close")


@pytest.mark.parametrize(
    "model,words", [("refuse", "The server is busy. Try again in 3 s."), ("fail", "The server failed at this request.")]
)
def test_errors_are_in_plain_words_and_can_be_retried(page: Browser, model: str, words: str) -> None:
    choose(page, model)
    ask(page, "hello world")
    assert words in page.text(".answer .error") or "The server could not finish this answer." in page.text(".error")
    next(button for button in page.all(".foot button") if button.text == "Retry").click()
    page.until(lambda: page.script(ENDED), "it was not tried again")
    assert len(page.all(".answer")) == 1 and len(page.all(".mine")) == 1


def test_keys_stay_in_the_tab(window: Browser, model_dir: Path, tmp_path: Path) -> None:
    flags = ["--api-key", "s3cret=a", "--admin-key", "chief", "--adapters", "reverse=/fake/reverse"]
    with serving(model_dir, tmp_path, *flags) as running:
        window.open(running.url)
        window.until(lambda: "needs a key" in window.text("#state"), "the page does not ask for a key")
        window.click("#open-settings")
        window.fill("#key", "s3cret")
        for field in ("#key", "#admin-key"):
            shown = f"return getComputedStyle(document.querySelector('{field}')).webkitTextSecurity"
            assert window.script(shown) == "disc", "the key can be read on the screen"
        window.press(Keys.TAB)
        window.until(lambda: window.text("#state") == "ready", "the key is not used")
        ask(window, "hello")
        assert "hello" in window.text(".answer .text")
        next(button for button in window.all(".foot button") if button.text == "curl").click()
        assert "s3cret" not in window.text("#curl-text") and "KTSERVE_API_KEY" in window.text("#curl-text")
        window.click("#curl-close")
        assert "s3cret" not in window.script("return JSON.stringify({...localStorage}) + document.cookie")
        window.click("#tab-live")
        window.until(lambda: "admin key" in window.text("#live-note"), "the live view needs the admin key")
        window.fill("#admin-key", "chief")
        window.until(lambda: "running" in window.text("#rows-text"), "the admin key is not used")


def test_by_keyboard_alone(page: Browser, echo: Running) -> None:
    """Tab reaches everything that is seen; Enter sends, Escape stops; arrows change tabs."""
    page.press(Keys.TAB)
    assert page.script("return document.activeElement.className") == "skip"
    page.press(Keys.ENTER)
    choose(page, "gated")
    page.script("document.querySelector('#prompt').focus()")
    page.press("hello" + Keys.SHIFT + Keys.ENTER + Keys.NULL + "world" + Keys.ENTER)
    page.until(lambda: "hello\nworld" in page.text(".answer.working .text"), "Enter did not send")
    page.press(Keys.ESCAPE)
    page.until(lambda: page.script(ENDED), "Escape did not stop")
    reached = set()
    for _ in range(30):
        page.press(Keys.TAB)
        focused = page.driver.switch_to.active_element
        reached.add(focused.get_attribute("id") or focused.text or focused.tag_name)
        assert page.script(
            "return document.activeElement.matches(':focus-visible') || document.activeElement === document.body"
        )
    assert {"tab-chat", "theme", "open-settings", "prompt", "send", "clear", "Retry", "curl"} <= reached
    page.script("document.querySelector('#tab-chat').focus()")
    page.press(Keys.ARROW_RIGHT)
    page.until(lambda: page.find("#adapters").is_displayed(), "the arrow did not change the tab")
    page.press(Keys.ARROW_LEFT + Keys.ARROW_LEFT)
    page.until(lambda: page.find("#live").is_displayed(), "the arrows do not go round")


def test_every_control_has_a_name(page: Browser) -> None:
    page.click("#open-settings")
    nameless = page.script(
        "return [...document.querySelectorAll('button, input, select, textarea, canvas[tabindex]')].filter(n =>"
        " !(n.textContent.trim() || n.getAttribute('aria-label') || n.labels?.length)).map(n => n.outerHTML)"
    )
    assert nameless == []


def test_live_shows_the_batch_and_the_experts(page: Browser) -> None:
    choose(page, "gated")
    send(page, "hello")
    page.until(lambda: page.text(".answer.working .text"), "nothing was streamed")
    page.click("#tab-live")
    page.until(lambda: page.text("#rows").count("gated") == 1, "the running request is not shown")
    page.until(lambda: "2 layers of 3 experts" in page.text("#expert-text"), "the experts are not shown")
    page.until(
        lambda: "touches 1.5 experts of a layer" in page.text("#touched-text"), "the experts of a step are not shown"
    )
    page.until(lambda: page.text("#decode-rate") not in ("–", "0"), "there is no rate")
    page.until(lambda: page.text("#bytes-rate") not in ("–", "0"), "there is no rate of bytes")
    page.until(lambda: page.text("#bytes-share").endswith("% of 4"), "nor its share of what memory can do")
    page.script("document.querySelector('#experts').focus()")
    page.press(Keys.ARROW_DOWN)
    assert "Layer" in page.text("#expert-text")


def test_below_a_prefix(window: Browser, model_dir: Path, tmp_path: Path) -> None:
    with serving(model_dir, tmp_path, "--root-path", "/apps/llm") as server:
        window.open(f"{server.url}/apps/llm")
        window.until(lambda: window.text("#state") == "ready", "the page is not ready")
        ask(window, "hello")
        assert server.received("Submit")
        window.click("#tab-live")
        window.until(lambda: window.text("#decode-rate") != "–", "the live view shows nothing")
        window.click("#tab-adapters")
        assert window.find("#adapters-none").is_displayed()
        window.click("#tab-tuning")
        window.until(lambda: "--fine-tuning" in window.text("#jobs-none"), "why there are no jobs is not said")
        asked = [url for url in window.requested() if url.startswith(server.url)]
        assert asked and all(url.removeprefix(server.url).startswith("/apps/llm") for url in asked), asked


def test_live_shows_the_memory_plan_and_what_memory_can_do(page: Browser) -> None:
    page.click("#tab-live")
    page.until(lambda: "6.0 GiB" in page.text("#plan"), "the plan is not shown")
    assert "CPU 8.0 GiB needed of 12.0 GiB free (16.0 GiB in all), 4.0 GiB left" in page.text(".device")
    assert page.text(".device li:first-child") == "in use before the start4.0 GiB"
    assert "experts <b>6.0 GiB" in page.text(".device li") and "note: fake" in page.text("#plan-lines")
    widths = "return [...document.querySelectorAll('.device .stack i')].map((n) => n.getBoundingClientRect().width)"
    taken, experts, cache = page.script(widths)
    assert abs(taken - experts * 4 / 6) < 1 and abs(cache - experts * 2 / 6) < 1
    page.until(lambda: "this memory was measured at 4 GB/s" in page.text("#roof-text"), "the roof is not shown")
    page.until(lambda: "GB a step" in page.text("#roof-text"), "what a step reads is not shown")
    assert page.script("return document.querySelector('#roof .now').style.getPropertyValue('--share')") != "0"
