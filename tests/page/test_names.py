"""Names, folders, messages and labels are hostile too: every view shows them as text."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("selenium", reason="selenium is not installed")

from testing.page.browser import Browser
from tests.api.conftest import Running
from tests.page.test_rendering import HOSTILE, ONE_PAGE

SHOW = """
const [text, done] = arguments;
const files = ["adapters", "chat", "live", "plan", "tuning"].map((name) => import(`/page/${name}.js`));
Promise.all(files).then(([{ Adapters }, { Chat }, { Live }, { showPlan }, { Tuning }]) => {
  const views = (window.views ??= {
    adapters: new Adapters(() => {}), chat: new Chat(), live: new Live(), tuning: new Tuning(() => {}),
  });
  const models = [{ id: `base ${text}`, root: text }, { id: text, parent: "base", root: text, residency: text }];
  views.adapters.offer(models);
  views.chat.offer(models);
  views.chat.suit([text]);
  showPlan({ memory: [{ device: text, limit_bytes: 9, free_bytes: 8,
    items: [{ kind: "experts", label: text, num_bytes: 7 }] }], lines: [text] });
  views.live.samples = [];
  views.live.take({ time_s: 1, waiting: 0, steps: 1, prefill_tokens: 0, decode_tokens: 1, block_tokens: 16,
    blocks_total: 9, blocks_used: 1, blocks_cached: 1, tenant_service: { [text]: 1 }, weight_bytes_read: null,
    read_bandwidth: null, experts_touched: 0, expert_layers: 0, expert_choices: {},
    rows: [{ request_id: text, tenant: text, adapter: text, prompt_tokens: 1, cached_tokens: 0, computed_tokens: 1,
      output_tokens: 0, max_tokens: 1, blocks: 1 }] });
  const job = { id: text, user_provided_suffix: text, status: "running", model: text, fine_tuned_model: text,
    created_at: 1, seed: 1, metadata: { [text]: text }, error: { message: text },
    method: { type: "supervised", supervised: { hyperparameters: { [text]: text } } } };
  views.tuning.showJobs([job], false);
  views.tuning.showJob(job);
  views.tuning.showCheckpoints(job, [
    { fine_tuned_model_checkpoint: text, step_number: 1, metrics: { train_loss: 1 } }]);
  views.tuning.events = [{ id: text, created_at: 1, level: text, type: "message", message: text, data: {} }];
  views.tuning.showEvents();
  const places = ["#adapter-rows", "#adapters-base", "#columns", "#plan", "#plan-lines", "#tenants", "#rows",
    "#job-rows", "#job-name", "#job-facts", "#checkpoints", "#events"].map((css) => document.querySelector(css));
  const nodes = places.flatMap((place) => [...place.querySelectorAll("*")]);
  done({
    lost: places.filter((place) => !place.textContent.includes(text)).map((place) => place.id),
    tags: [...new Set(nodes.map((node) => node.tagName))],
    attributes: [...new Set(nodes.flatMap((node) => node.getAttributeNames()))],
    pwned: window.pwned ?? null,
  });
});
"""
ALLOWED = {
    "B", "BR", "BUTTON", "CODE", "DD", "DIV", "DT", "EM", "HEADER", "I", "LI", "OPTGROUP", "OPTION", "P", "SECTION",
    "SELECT", "SMALL", "SPAN", "TD", "TR", "UL",
}  # fmt: skip
ATTRIBUTES = {
    "aria-current", "aria-label", "class", "data-job", "disabled", "hidden", "label", "role", "selected", "style",
    "tabindex", "title", "type", "value",
}  # fmt: skip


def show(page: Browser, text: str) -> None:
    page.driver.set_script_timeout(60)
    seen: dict[str, Any] = page.driver.execute_async_script(SHOW, text)
    assert seen["lost"] == [] and seen["pwned"] is None
    assert set(seen["tags"]) <= ALLOWED and set(seen["attributes"]) <= ATTRIBUTES


@settings(max_examples=40, suppress_health_check=ONE_PAGE)
@given(parts=st.lists(st.sampled_from(HOSTILE) | st.text(max_size=8), min_size=1, max_size=4))
def test_every_view_shows_names_as_text(page: Browser, parts: list[str]) -> None:
    show(page, "".join(parts).encode("utf-8", "replace").decode())


@pytest.mark.parametrize("width", [320, 390])
def test_long_names_make_no_view_wider_than_the_screen(window: Browser, echo: Running, width: int) -> None:
    window.open(echo.url, width, 700)
    window.until(lambda: window.text("#state") == "ready", "the page is not ready")
    show(window, "x" * 300)
    for tab in window.all("[role=tab]"):
        tab.click()
        window.script("for (const panel of document.querySelectorAll('.panel')) panel.hidden = false")
        assert window.script("return document.documentElement.scrollWidth") <= width, tab.text
        wider = "return [...document.querySelectorAll('main:not([hidden])')].map((n) => n.scrollWidth - n.clientWidth)"
        assert window.script(wider) == [0], tab.text
