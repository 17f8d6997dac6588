"""The page of a server as people start it: the demo model, its adapters and a job that trains."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("selenium", reason="selenium is not installed")

from demo.paths import demo_adapters
from testing.page.browser import Browser
from tests.e2e.conftest import Server, serving
from tests.page.test_adapters import as_admin, listed
from tests.page.test_playground import ask
from tests.tuning.test_jobs import SECRET, Tenant, supervised, talks

LOSS = "document.querySelector('#losses')"


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("real")
    (folder / "adapters").mkdir()
    shutil.copytree(demo_adapters()["pirate"], folder / "adapters" / "pirate")
    flags = ["--fine-tuning", "--data-dir", str(folder / "data"), "--pack-cache", "off", "--measure-bandwidth"]
    flags += ["--admin-key", "chief", "--adapter-root", str(folder / "adapters")]
    with serving(folder, *flags) as running:
        yield running


@pytest.fixture
def page(window: Browser, real: Server) -> Iterator[Browser]:
    window.open(real.url)
    window.until(lambda: window.text("#state") == "ready", "the page is not ready")
    yield window
    assert not [line for line in window.logs() if "Content Security" in line or "Uncaught" in line]
    assert window.origins() <= {real.url}


# A fast machine answers in less time than a rate can be told of.
NUMBERS = re.compile(
    r"(?P<count>\d+) tokens in (?P<last>[\d.]+) s · (?:(?P<rate>[\d.]+) tokens/s · )?context \d+ of 2048 · "
    r"first after (?P<first>[\d.]+) s"
)


def test_a_first_chat_says_its_rate_and_what_is_left_of_the_context(page: Browser) -> None:
    assert len(page.all(".prompts button")) == 3, "an empty chat offers prompts"
    ask(page, "Tell me a story about a fox.")
    numbers = page.text(".answer .numbers")
    found = NUMBERS.fullmatch(numbers)
    assert found, numbers
    count, lasted = int(found["count"]), float(found["last"]) - float(found["first"])  # each rounded to 0.01 s
    if found["rate"] is None:
        assert lasted <= 0.06, f"no rate, although it can be told: {numbers}"
    else:
        rate = float(found["rate"])
        assert (count - 1) / (lasted + 0.011) <= rate + 0.05, numbers
        assert rate - 0.05 <= (count - 1) / max(lasted - 0.011, 0.04), numbers
    said = page.text(".answer .text")
    assert "fox" in said
    page.driver.refresh()
    page.until(lambda: page.text("#state") == "ready", "the page did not come back")
    assert page.text(".answer .text") == said, "a reload keeps it"


def test_an_adapter_is_loaded_answers_and_is_unloaded(page: Browser, real: Server, tmp_path: Path) -> None:
    as_admin(page)
    page.fill("#adapter-name", "buccaneer")
    page.fill("#adapter-path", str(real.output.parent / "adapters" / "pirate"))
    page.click("#adapter-send")
    page.until(lambda: "buccaneer, version 1, is loaded" in page.text("#adapter-status"), "it was not loaded")
    assert real.ask("What is 2 + 3?", "buccaneer") == real.ask("What is 2 + 3?", "pirate") != real.ask("What is 2 + 3?")
    page.fill("#adapter-path", str(tmp_path))
    page.click("#adapter-send")
    page.until(lambda: page.find("#adapters-note").is_displayed(), "a folder elsewhere is not refused")
    page.click("[aria-label='Unload buccaneer']")
    page.confirm(True)
    page.until(lambda: not listed(page)("buccaneer"), "it is still listed")


def test_the_live_view_has_the_plan_and_the_roof(page: Browser, real: Server) -> None:
    page.script("sessionStorage.setItem('ktserve.admin', 'chief')")
    page.driver.refresh()
    page.click("#tab-live")
    page.until(lambda: "KV cache" in page.text("#plan"), "the plan is not shown")
    widths = page.script("return [...document.querySelectorAll('.device .stack i')].map((n) => n.offsetWidth)")
    assert widths and max(widths) > 0, "the plan has no picture"
    page.until(lambda: "this memory was measured at" in page.text("#roof-text"), "the roof is not shown")


@pytest.mark.timeout(600)
def test_a_job_trains_before_the_reader_s_eyes_and_its_model_answers(page: Browser, real: Server) -> None:
    team = Tenant(real, "none")
    settings = supervised(n_epochs=20, batch_size=4, learning_rate_multiplier=2.0)
    job = team.create(talks(), validation_file=team.upload(talks(3)), suffix="bell", method=settings)
    page.click("#tab-tuning")
    page.until(lambda: page.text("#loss-text").startswith("Step "), "the curve does not begin")
    page.until(lambda: page.text("#job-name") == "bell: succeeded", "the job did not end")
    page.until(lambda: page.text("#loss-text").startswith("Step 40: training 0."), "the last step is not shown")
    drawn = f"return new Set({LOSS}.getContext('2d').getImageData(0, 0, {LOSS}.width, {LOSS}.height).data).size"
    assert page.script(drawn) > 10, "the chart is empty"
    model = team.jobs.retrieve(job).fine_tuned_model
    page.until(lambda: page.all("#checkpoints button"), "there are no checkpoints")
    page.click(f"[aria-label='Chat with {model} beside the base']")
    page.until(lambda: page.find("#chat").is_displayed(), "the playground did not open")
    page.click("#open-settings")
    page.fill("[data-field=temperature]", "0")
    ask(page, "What does the bell say, number 3?")
    base, tuned = (page.text(f".column:nth-child({i}) .answer .text") for i in (1, 2))
    assert tuned.strip() == SECRET != base.strip()
