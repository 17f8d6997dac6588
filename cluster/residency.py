"""Where a server's adapters are, as its /metrics tell."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

_NAME = "ktserve_adapter_resident"
_PLACES = ("slot", "host")


def resident(page: str) -> dict[str, list[str]]:
    """Adapters by place, "slot" or "host"; those on disk are left out. `page`: of /metrics."""
    lines = "".join(f"{line}\n" for line in page.splitlines() if line.startswith(f"{_NAME}{{"))
    found: dict[str, list[str]] = {place: [] for place in _PLACES}
    for family in text_string_to_metric_families(lines):
        for sample in family.samples:
            if sample.labels.get("place") in found and sample.value:
                found[sample.labels["place"]].append(sample.labels["model_name"])
    return found
