"""The metrics of several servers as one page."""

from __future__ import annotations

import re
from collections.abc import Mapping

_SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(\{)?(.*)", re.S)


def merged(pages: Mapping[str, str]) -> str:
    """Pages in Prometheus' text format, by replica. Each sample gets the label `replica`; families stay together."""
    families: dict[str, tuple[list[str], list[str]]] = {}  # what is said of each, samples
    for replica, page in pages.items():
        described, samples = families.setdefault("", ([], []))
        for line in page.splitlines():
            if line.startswith("#"):
                words = line.split(maxsplit=3)
                if len(words) < 3 or words[1] not in ("HELP", "TYPE"):
                    continue
                described, samples = families.setdefault(words[2], ([], []))
                if line not in described and len(described) < 2:
                    described.append(line)
            elif found := _SAMPLE.fullmatch(line):
                name, labelled, rest = found.groups()
                samples.append(
                    f'{name}{{replica="{replica}"{("," if rest[:1] != "}" else "") if labelled else "}"}{rest}'
                )
    return "".join(f"{line}\n" for described, samples in families.values() for line in [*described, *samples])
