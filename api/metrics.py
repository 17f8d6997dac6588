"""Prometheus metrics. What is told by name (tenants) is left out where names are not for everybody."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily

_TTFT_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 120)
_ITL_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)
_TOTAL_S = (0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Metrics:
    """`stats` is what the engine last reported: each of its numbers becomes the gauge ktserve_engine_<key>, each
    mapping a gauge with the label "name", if `show_names`."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.stats: Mapping[str, Any] = {}
        self.show_names = True
        self.engine_up = False
        self.restarts = 0
        self.requests = Counter("ktserve_requests", "requests by outcome", ["outcome"], registry=self.registry)
        self.prompt_tokens = Counter("ktserve_prompt_tokens", "prompt tokens of ended requests", registry=self.registry)
        self.cached_tokens = Counter(
            "ktserve_cached_prompt_tokens", "prompt tokens from the prefix cache", registry=self.registry
        )
        self.output_tokens = Counter("ktserve_output_tokens", "tokens delivered", registry=self.registry)
        self.ttft = Histogram(
            "ktserve_time_to_first_token_seconds", "receipt to first token", buckets=_TTFT_S, registry=self.registry
        )
        self.itl = Histogram(
            "ktserve_inter_token_latency_seconds", "between tokens of a request", buckets=_ITL_S, registry=self.registry
        )
        self.total = Histogram(
            "ktserve_request_seconds", "receipt to end of a request", buckets=_TOTAL_S, registry=self.registry
        )
        self.registry.register(self)

    def finished(
        self, outcome: str, *, seconds: float, prompt_tokens: int, cached_tokens: int, output_tokens: int
    ) -> None:
        self.requests.labels(outcome).inc()
        self.total.observe(seconds)
        if outcome != "refused":
            self.prompt_tokens.inc(prompt_tokens)
            self.cached_tokens.inc(cached_tokens)
            self.output_tokens.inc(output_tokens)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """The registry's interface for metrics that are read when asked for."""
        yield GaugeMetricFamily("ktserve_engine_up", "whether the engine serves", value=float(self.engine_up))
        yield GaugeMetricFamily("ktserve_engine_restarts", "restarts of the engine", value=float(self.restarts))
        for key, value in self.stats.items():
            name = "ktserve_engine_" + re.sub(r"\W", "_", key)
            if isinstance(value, Mapping):
                family = GaugeMetricFamily(name, "reported by the engine", labels=["name"])
                for label, number in value.items() if self.show_names else ():
                    family.add_metric([str(label)], float(number))
                yield family
            elif isinstance(value, bool | int | float):
                yield GaugeMetricFamily(name, "reported by the engine", value=float(value))

    def render(self) -> bytes:
        return bytes(generate_latest(self.registry))
