"""Pages of /metrics: those of several servers as one, and where a server's adapters are."""

from __future__ import annotations

import re
from collections.abc import Mapping

from prometheus_client.parser import text_string_to_metric_families

_RESIDENT = "ktserve_adapter_resident"
_PLACES = ("slot", "host")
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


def resident(page: str) -> dict[str, list[str]]:
    """Adapters by place, "slot" or "host"; those on disk are left out. `page`: of /metrics."""
    lines = "".join(f"{line}\n" for line in page.splitlines() if line.startswith(f"{_RESIDENT}{{"))
    found: dict[str, list[str]] = {place: [] for place in _PLACES}
    for family in text_string_to_metric_families(lines):
        for sample in family.samples:
            if sample.labels.get("place") in found and sample.value:
                found[sample.labels["place"]].append(sample.labels["model_name"])
    return found
