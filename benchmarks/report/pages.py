"""What is made from the files in benchmarks/results: tables of README.md and docs, plots, the shares that plans expect.

    python -m benchmarks.report.pages

A table stands between `<!-- results of NAME: begin -->` and its end, NAME a file of results or `summary`; what people
wrote around it stays. A machine's first results get a section at the end of docs/performance.md, and a plot.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.first_answer import Step, transcript
from benchmarks.record import RESULTS
from benchmarks.report import efficiency
from benchmarks.report.beside import families, formats, llamacpp
from benchmarks.report.expected import table as expected_table
from benchmarks.report.roofline import plot
from benchmarks.report.serving import batches, tenants, tuning, uploads
from benchmarks.report.summary import summary
from benchmarks.report.tables import render

ROOT = Path(__file__).parents[2]
_NAMES = ("performance", "performance-gpu", "running", "tenants", "batches", "tuning-service")
PAGES = (ROOT / "README.md", *(ROOT / "docs" / f"{name}.md" for name in _NAMES))
_BEGIN = re.compile(r"<!-- results of (\S+): begin -->")


def load(name: str) -> dict[str, Any]:
    """A file of results, by its name."""
    data: dict[str, Any] = json.loads((RESULTS / name).read_text())
    return data


def table(name: str) -> str:
    """Markdown between the markers of NAME, these not included."""
    if name == "summary":
        return summary(load)
    data = load(name)
    kinds: dict[str, Callable[[dict[str, Any]], str]] = {
        "expected": expected,
        "first-answer": first_answer,
        "families": families,
        "formats": formats,
        "tenants": lambda data: with_origin(data, tenants(data["rows"])),
        "batches": lambda data: with_origin(data, f"{batches(data['rows'])}\n\n{uploads(data['uploads'])}"),
        "tuning": lambda data: with_origin(data, tuning(data)),
        "gpu-llamacpp": llamacpp,
    }
    for kind, made in kinds.items():
        if name.startswith(kind):
            return made(data)
    return render(data, image(name))


def first_answer(data: dict[str, Any]) -> str:
    return with_origin(data, transcript([Step(**step) for step in data["steps"]]))


def expected(data: dict[str, Any]) -> str:
    return with_origin(data, expected_table(data["rows"]))


def with_origin(data: dict[str, Any], text: str) -> str:
    """Where the figures of `text` come from before it."""
    return f"{data['hardware']}, {data['date']}, commit {data['commit']}: `{data['command']}`\n\n{text}"


def image(name: str) -> str:
    return f"roofline-{name.removesuffix('.json')}.svg"


def insert(page: str, name: str, text: str) -> str:
    """The page with the table of `name` replaced; ValueError if its end is missing."""
    begin, end = (f"<!-- results of {name}: {word} -->" for word in ("begin", "end"))
    before, _, behind = page.partition(begin)
    _, closed, after = behind.partition(end)
    if not closed:
        raise ValueError(f"the page has {begin} without its end")
    return f"{before}{begin}\n\n{text}\n\n{end}{after}"


def with_section(page: str, name: str) -> str:
    """The page with an empty section for a machine's results behind the last, if it has none."""
    if f"<!-- results of {name}: begin -->" in page:
        return page
    machine = load(name)["machine"]
    title = f"Results: {machine['cpu'].partition(',')[0]}, {machine['threads']} threads"
    markers = "\n\n".join(f"<!-- results of {name}: {word} -->" for word in ("begin", "end"))
    return f"{page.rstrip()}\n\n## {title}\n\n{markers}\n"


def filled(page: str) -> str:
    """The page with all of its tables as the results have them."""
    for name in _BEGIN.findall(page):
        page = insert(page, name, table(name))
    return page


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    for path in PAGES:
        page = path.read_text()
        if path.name == "performance.md":
            for results in sorted(RESULTS.glob("cpu*.json")):
                page = with_section(page, results.name)
                if svg := plot(load(results.name)):
                    (path.parent / image(results.name)).write_text(svg)
        path.write_text(filled(page))
        print(f"{path.relative_to(ROOT)}: {', '.join(_BEGIN.findall(page))}")
    efficiency.OUT.write_text(efficiency.content())
    print(efficiency.OUT.relative_to(ROOT))


if __name__ == "__main__":
    main()
