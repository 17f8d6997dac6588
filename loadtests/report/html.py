"""One HTML page of a load test: tables and plots, nothing loaded from elsewhere."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

from loadtests.chaos.watch import Held
from loadtests.load.limits import error_share, percentile_ms
from loadtests.load.records import Answer, Stage
from loadtests.report.document import document, facts, plots, table
from loadtests.report.svg import Line, plot

_WINDOWS = 40
_LINES = 8  # groups that a plot can tell apart


def page(
    title: str,
    stages: Sequence[Stage],
    broken: Sequence[str],
    held: Sequence[tuple[float, Held]] = (),
    setting: Mapping[str, str] | None = None,
) -> str:
    """`broken`: limits that were not kept; `held`: what a server held, by time of day; `setting`: what was run, where
    and when."""
    answers = [answer for stage in stages for answer in stage.answers]
    verdict = "".join(f'<p class="bad">{escape(line)}</p>' for line in broken) or "<p>All limits were kept.</p>"
    parts = [facts(setting or {}), verdict, "<p>Latencies in milliseconds.</p>", _stages(stages)]
    if len(stages) > 1:
        parts += ["<h2>By concurrency</h2>", plots(_curves(stages))]
    began = min((stage.began_s for stage in stages), default=0.0)
    parts += ["<h2>Over time</h2>", plots(_over_time(answers, began))]
    parts += ["<h2>By group</h2>", _groups(answers), plots([_groups_over_time(answers, began)])]
    if held:
        parts += ["<h2>Held by the server</h2>", plots(_held(held, began))]
    return document(title, parts)


COLUMNS = ("answers", "failed", "tok/s", "TTFT p50", "TTFT p99", "ITL p50", "ITL p99", "answer p50", "answer p99")


def row(answers: Sequence[Answer], duration_s: float) -> list[str]:
    """By COLUMNS; milliseconds."""
    times = [percentile_ms(kind, answers, p) for kind in ("ttft", "itl", "e2e") for p in (50, 99)]
    tokens = sum(answer.tokens for answer in answers) / duration_s
    shown = ["" if math.isnan(value) else f"{value:.0f}" if value >= 10 else f"{value:.1f}" for value in times]
    return [str(len(answers)), str(sum(answer.failed for answer in answers)), f"{tokens:.1f}", *shown]


def _stages(stages: Sequence[Stage]) -> str:
    rows = [[stage.label, f"{stage.concurrency:.1f}", *row(stage.answers, stage.duration_s)] for stage in stages]
    return table(["", "open on average", *COLUMNS], rows)


def _curves(stages: Sequence[Stage]) -> list[str]:
    ordered = sorted(stages, key=lambda stage: stage.concurrency)
    tokens = [(stage.concurrency, stage.tokens_s) for stage in ordered]
    found = [plot([Line("tok/s", tokens)], title="Throughput against concurrency", x="open on average", y="tok/s")]
    for kind in ("ttft", "itl"):
        lines = [
            Line(f"p{p}", [(stage.concurrency, percentile_ms(kind, stage.answers, p)) for stage in ordered])
            for p in (50, 99)
        ]
        found.append(plot(lines, title=f"{kind.upper()} against concurrency", x="open on average", y="ms"))
    return found


def _over_time(answers: Sequence[Answer], began_s: float) -> list[str]:
    windows = _windows(answers, began_s)
    found = []
    for kind, name in (("ttft", "Time to first token"), ("itl", "Inter-token latency"), ("e2e", "Whole answers")):
        lines = [Line(f"p{p}", [(at, percentile_ms(kind, some, p)) for at, _, some in windows]) for p in (50, 95, 99)]
        found.append(plot(lines, title=name, x="seconds", y="ms"))
    tokens = [(at, sum(answer.tokens for answer in some) / wide) for at, wide, some in windows]
    errors = [(at, 100 * error_share(some)) for at, _, some in windows]
    found.append(plot([Line("tok/s", tokens)], title="Tokens of answers that began then", x="seconds", y="tok/s"))
    return [*found, plot([Line("failed", errors)], title="Failed answers", x="seconds", y="%")]


def _windows(answers: Sequence[Answer], began_s: float) -> list[tuple[float, float, list[Answer]]]:
    """(middle, width, answers that began within), in seconds; empty windows are left out."""
    end = max((answer.began_s for answer in answers), default=began_s) - began_s
    wide = max(end / _WINDOWS, 1e-3)
    found: dict[int, list[Answer]] = {}
    for answer in answers:
        found.setdefault(int((answer.began_s - began_s) / wide), []).append(answer)
    return [((number + 0.5) * wide, wide, some) for number, some in sorted(found.items())]


def _by_group(answers: Sequence[Answer]) -> dict[str, list[Answer]]:
    found: dict[str, list[Answer]] = {}
    for answer in answers:
        found.setdefault(answer.group, []).append(answer)
    return dict(sorted(found.items(), key=lambda item: -len(item[1])))


def _groups(answers: Sequence[Answer]) -> str:
    first = min((answer.began_s for answer in answers), default=0.0)
    span = max((answer.began_s + answer.total_s for answer in answers), default=1.0) - first
    rows = []
    for name, some in _by_group(answers).items():
        outcomes = [answer.outcome for answer in some]
        more = [str(outcomes.count(outcome)) for outcome in ("refused", "hung up")]
        rows.append([name, *row(some, max(span, 1e-3)), *more])
    return table(["group", *COLUMNS, "refused", "hung up"], rows)


def _groups_over_time(answers: Sequence[Answer], began_s: float) -> str:
    lines = []
    for name, some in list(_by_group(answers).items())[:_LINES]:
        lines.append(Line(name, [(at, percentile_ms("ttft", own, 50)) for at, _, own in _windows(some, began_s)]))
    return plot(lines, title="Time to first token, median by group", x="seconds", y="ms")


def _held(held: Sequence[tuple[float, Held]], began_s: float) -> list[str]:
    found = []
    kinds = (
        ("MiB", ("api_mib", "engine_mib")),
        ("count", ("files", "threads")),
        ("in use", ("blocks_used", "slots_used")),
    )
    for unit, names in kinds:
        lines = [Line(name, [(at - began_s, now.rows()[name]) for at, now in held]) for name in names]
        found.append(plot(lines, title=", ".join(names), x="seconds", y=unit))
    return found
