"""Model text is hostile: whatever it is, the page shows it as text."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("selenium", reason="selenium is not installed")

from testing.page.browser import Browser, Keys

HOSTILE = [
    "<script>window.pwned = 1</script>",
    "<img src=x onerror='window.pwned = 1'>",
    "<svg/onload=window.pwned=1>",
    "<iframe srcdoc='<script>parent.pwned=1</script>'></iframe>",
    "<style>*{display:none}</style>",
    "<a href='javascript:window.pwned=1'>x</a>",
    "[x](javascript:window.pwned=1)",
    "[x](JaVaScRiPt:window.pwned=1)",
    "[x](data:text/html,<script>1</script>)",
    "[x](vbscript:1)",
    "![x](http://outside.invalid/pixel.png)",
    "![x](//outside.invalid/pixel.png)",
    "<http://outside.invalid>",
    "</div></body><script>window.pwned=1</script>",
    "`</code><script>window.pwned=1</script>`",
    "```html\n<script>window.pwned=1</script>\n```",
    '```"onload=window.pwned=1\nx',
    "| a | b |\n|---|---|\n| <img src=x onerror=window.pwned=1> | `x` |",
    "> <b onclick=window.pwned=1>x</b>",
    "- [x](javascript:1)\n  - <script>1</script>",
    "\u202e\u0000\ufeff\ud7ff",
]
ALLOWED = {
    "A", "BLOCKQUOTE", "BUTTON", "CODE", "DIV", "EM", "H3", "H4", "H5", "H6", "HR", "LI", "OL", "P", "PRE", "S",
    "SPAN", "STRONG", "TABLE", "TBODY", "TD", "TH", "THEAD", "TR", "UL",
}  # fmt: skip
RENDER = """
const [text, done] = arguments;
import("/page/markdown.js").then(({ render }) => {
  const at = document.createElement("div");
  document.body.append(at);
  for (const part of [text.slice(0, text.length / 2), text]) render(at, part);
  const fresh = document.createElement("div");
  render(fresh, text);
  const nodes = [...at.querySelectorAll("*")];
  done({
    tags: [...new Set(nodes.map((n) => n.tagName))],
    attributes: [...new Set(nodes.flatMap((n) => n.getAttributeNames()))],
    links: nodes.filter((n) => n.href).map((n) => [n.protocol, n.rel, n.target]),
    text: at.textContent, same: at.isEqualNode(fresh), pwned: window.pwned ?? null,
  });
  at.remove();
});
"""


MARKUP = """
const [text, done] = arguments;
import("/page/markdown.js").then(({ render }) => {
  const at = document.createElement("div");
  render(at, text);
  done([at.innerHTML, at.querySelector("pre")?.textContent]);
});
"""


def rendered(page: Browser, text: str) -> dict[str, Any]:
    page.driver.set_script_timeout(60)
    seen: dict[str, Any] = page.driver.execute_async_script(RENDER, text)
    assert set(seen["tags"]) <= ALLOWED
    assert set(seen["attributes"]) <= {"class", "href", "target", "rel", "type", "tabindex", "start"}
    assert all(link[0] in ("http:", "https:", "mailto:") and "noopener" in link[1] for link in seen["links"])
    assert seen["pwned"] is None
    assert seen["same"], "a streamed answer looks like a whole one"
    return seen


MARKS = [
    *"*_`|a!)\\",
    "**",
    "__",
    "```",
    "~~",
    "[",
    "](",
    "\n|---|---|\n",
    "> ",
    "- ",
    "1. ",
    "# ",
    "\n",
    "  ",
    "http://x.y",
]


ONE_PAGE = [HealthCheck.function_scoped_fixture]  # every example renders into nodes of its own


@settings(max_examples=80, suppress_health_check=ONE_PAGE)
@given(parts=st.lists(st.sampled_from(HOSTILE + MARKS) | st.text(max_size=8), max_size=24))
def test_whatever_a_model_writes_stays_text(page: Browser, parts: list[str]) -> None:
    rendered(page, "".join(parts).encode("utf-8", "replace").decode())


@settings(suppress_health_check=ONE_PAGE)
@given(words=st.lists(st.text("abcxyz<>&\"'", min_size=1, max_size=6), min_size=1, max_size=12))
def test_nothing_is_lost(page: Browser, words: list[str]) -> None:
    text = " ".join(words)
    assert rendered(page, f"x {text}")["text"] == f"x {text}"


CODE = ["#", "//", "/*", "*/", "--", '"', "'", "`", '"""', "\\", "\n", "def f(x):", " 12.5 ", "select", "<b>", "é"]
COLOURED = """
const [language, code, done] = arguments;
import(new URL("page/highlight.js", location)).then(({ highlight }) => {
  const nodes = highlight(code, language);
  const classes = nodes.filter((node) => node.nodeType).map((node) => node.className);
  done([nodes.map((node) => node.textContent ?? node).join(""), classes]);
});
"""


@settings(max_examples=60, suppress_health_check=ONE_PAGE)
@given(
    code=st.lists(st.sampled_from(CODE), max_size=20).map("".join), language=st.sampled_from(["py", "js", "sql", ""])
)
def test_coloured_code_is_the_same_text(page: Browser, code: str, language: str) -> None:
    text, _ = page.driver.execute_async_script(COLOURED, language, code)
    assert text == code


def test_code_is_coloured_by_its_language(page: Browser) -> None:
    code = 'def f(): return "a" + 12  # note'
    _, classes = page.driver.execute_async_script(COLOURED, "python", code)
    assert classes == ["code-word", "code-word", "code-string", "code-number", "code-comment"]
    assert page.driver.execute_async_script(COLOURED, "text", code)[1] == []


ANSWERED = "return document.querySelectorAll('.answer:not(.working)').length"


def test_hostile_answers_are_inert(page: Browser) -> None:
    """One conversation with all of them: opening a page takes longer than an answer."""
    before = page.script(ANSWERED)
    for number, text in enumerate(HOSTILE, before + 1):
        page.fill("#prompt", "")
        page.script("document.querySelector('#prompt').value = arguments[0]", text)
        page.find("#prompt").send_keys(Keys.ENTER)
        page.until(lambda number=number: page.script(ANSWERED) == number, f"no answer to {text!r}")
        assert page.script("return window.pwned ?? null") is None, text
        assert not page.all(".turns :is(script, img, iframe, svg, style, object)"), text


@pytest.mark.parametrize(
    "text,html",
    [
        ("a **b** *c* `d` ~~e~~", "<p>a <strong>b</strong> <em>c</em> <code>d</code> <s>e</s></p>"),
        ("# T\ntext", '<h3 class="head">T</h3><p>text</p>'),
        ("- a\n- b\n  - c", "<ul><li>a</li><li>b<ul><li>c</li></ul></li></ul>"),
        ("3. a\n4. b", '<ol start="3"><li>a</li><li>b</li></ol>'),
        ("> q\n> r", "<blockquote><p>q\nr</p></blockquote>"),
        ("snake_case_name and 2 * 3 * 4", "<p>snake_case_name and 2 * 3 * 4</p>"),
        (
            "|a|b|\n|-|-|\n|1|2|",
            "<table><thead><tr><th>a</th><th>b</th></tr></thead><tbody><tr><td>1</td><td>2</td></tr></tbody></table>",
        ),
        ("```\nx < y\n", None),
    ],
)  # fmt: skip
def test_markdown(page: Browser, text: str, html: str | None) -> None:
    got, pre = page.driver.execute_async_script(MARKUP, text)
    assert got == html if html is not None else pre == "x < y\n"


def test_hours_of_work_are_not_needed_for_any_text(page: Browser) -> None:
    """Long runs of what opens something and never closes it."""
    for mark in ("*", "_", "`", "[", "~~", "**a ", "[a](", "> ", "- ", "|", "http://", "\\"):
        rendered(page, mark * (60_000 // len(mark)))


CHUNKS = [
    {"delta": {"role": "assistant", "content": ""}},
    {"delta": {"reasoning_content": "Let me "}},
    {"delta": {"reasoning_content": "think <b>."}},
    {"delta": {"content": "It is **so**."}},
    {"delta": {"tool_calls": [{"index": 0, "id": "c1", "function": {"name": "weather", "arguments": ""}}]}},
    {"delta": {"tool_calls": [{"index": 0, "function": {"arguments": '{"city": "'}}]}},
    {"delta": {"tool_calls": [{"index": 1, "id": "c2", "function": {"name": "time", "arguments": "{}"}}]}},
    {"delta": {"tool_calls": [{"index": 0, "function": {"arguments": 'Paris"}'}}]}},
    {"delta": {}, "finish_reason": "tool_calls"},
]
ANSWER = """
const [chunks, done] = arguments;
import("/page/answer.js").then(({ Answer }) => {
  let results = null;
  const answer = new Answer({ retry() {}, curl() {}, results(given) { results = given; } });
  document.body.append(answer.node);
  for (const choice of chunks) answer.take({ choices: [choice] });
  answer.end();
  answer.node.querySelectorAll(".call textarea").forEach((field, i) => { field.value = `result ${i}`; });
  const send = [...answer.node.querySelectorAll("button")].find((button) => button.textContent === "Send results");
  send.click();
  done({
    reasoning: answer.node.querySelector(".reasoning div").textContent,
    open: answer.node.querySelector(".reasoning").open,
    text: answer.text.textContent, calls: [...answer.node.querySelectorAll(".call b")].map((n) => n.textContent),
    message: answer.message, results, again: send.disabled,
  });
  answer.node.remove();
});
"""


def test_reasoning_and_tool_calls_are_shown_and_answered(page: Browser) -> None:
    seen = page.driver.execute_async_script(ANSWER, CHUNKS)
    assert seen["reasoning"] == "Let me think <b>." and not seen["open"]
    assert seen["text"] == "It is so." and seen["calls"] == ["weather", "time"]
    assert [call["function"]["arguments"] for call in seen["message"]["tool_calls"]] == ['{"city": "Paris"}', "{}"]
    assert [(m["role"], m["tool_call_id"], m["content"]) for m in seen["results"]] == [
        ("tool", "c1", "result 0"),
        ("tool", "c2", "result 1"),
    ]
    assert seen["again"]
