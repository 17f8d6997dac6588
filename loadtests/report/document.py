"""The frame of a report: one HTML page with nothing loaded from elsewhere."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

import psutil

_STYLE = "body{font:14px sans-serif;margin:2em}table{border-collapse:collapse;margin:1em 0}\
td,th{padding:.2em .8em;text-align:right;border-bottom:1px solid #e5e7eb}td:first-child,th:first-child{text-align:left}\
.facts td{text-align:left}.scroll{overflow-x:auto}.plots{display:grid;gap:1em;\
grid-template-columns:repeat(auto-fit,minmax(min(30em,100%),1fr))}svg{width:100%;height:auto;border:1px solid #e5e7eb}\
.bad{color:#b91c1c}"


def document(title: str, parts: Sequence[str]) -> str:
    """`parts`: HTML."""
    head = '<!doctype html><html lang="en"><meta charset="utf-8">'
    head += '<meta name="viewport" content="width=device-width, initial-scale=1">'
    head += f"<title>{escape(title)}</title><style>{_STYLE}</style>"
    return head + f"<h1>{escape(title)}</h1>" + "\n".join(parts) + "</html>\n"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = "".join(f"<th>{escape(name)}</th>" for name in head)
    return f'<div class="scroll"><table><tr>{cells}</tr>{_rows(rows)}</table></div>'


def facts(named: Mapping[str, str]) -> str:
    """What was measured, where and when."""
    return f'<table class="facts">{_rows(list(named.items()))}</table>'


def plots(svgs: Sequence[str]) -> str:
    """As many side by side as the window has room for."""
    return f'<div class="plots">{"".join(svgs)}</div>'


def machine() -> str:
    """This one: its CPU, logical CPUs, memory and system."""
    try:
        info = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        info = ""
    model = re.search(r"^model name\s*:\s*(.+)$", info, re.M)
    cpu = model[1].strip() if model else platform.processor() or platform.machine()
    memory = psutil.virtual_memory().total / 2**30
    return f"{cpu}, {os.cpu_count()} CPUs, {memory:.0f} GiB, {platform.system()} {platform.release()}"


def _rows(rows: Sequence[Sequence[str]]) -> str:
    return "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
