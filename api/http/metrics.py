"""Prometheus metrics. Counters and histograms are our own: the library's keep every label forever, and take several
microseconds for each observation."""

from __future__ import annotations

import re
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

_TTFT_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 120)
_ITL_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)
_TOTAL_S = (0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)

_WHO = ["tenant", "model_name"]
UNLOADED = "(unloaded)"  # no adapter can have this name


class Count:
    """Of one set of labels; it only grows."""

    def __init__(self) -> None:
        self.value = 0.0

    def inc(self, amount: float = 1) -> None:
        self.value += amount


class Counter:
    """By the values of `labels`; to be registered, and read as the library's own."""

    def __init__(self, name: str, help: str, labels: Sequence[str]) -> None:
        self._name, self._help, self._labels = name, help, tuple(labels)
        self._counts: dict[tuple[str, ...], Count] = {}

    def __call__(self, *values: str) -> Count:
        count = self._counts.get(values)
        if count is None:
            count = self._counts[values] = Count()
        return count

    def merge(self, label: str, value: str, into: str) -> None:
        """Add what has `value` as that label to what has `into`, so that sums stay as they are."""
        at = self._labels.index(label)
        for values in [values for values in self._counts if values[at] == value]:
            self(*values[:at], into, *values[at + 1 :]).inc(self._counts.pop(values).value)

    def collect(self) -> Iterator[Metric]:
        """The registry's interface."""
        family = CounterMetricFamily(self._name, self._help, labels=self._labels)
        for values, count in self._counts.items():
            family.add_metric(values, count.value)
        yield family


class Series:
    """Observations of one label. `bounds`: the largest values of its buckets, which rise; one more takes the rest."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """So many times the same value."""
        self.counts[bisect_left(self._bounds, value)] += count
        self.sum += value * count


class Histogram:
    """By tenant; to be registered, and read as the library's own."""

    def __init__(self, name: str, help: str, bounds: Sequence[float]) -> None:
        self._name, self._help, self._bounds = name, help, bounds
        self._series: dict[str, Series] = {}

    def labels(self, tenant: str) -> Series:
        series = self._series.get(tenant)
        if series is None:
            series = self._series[tenant] = Series(self._bounds)
        return series

    def collect(self) -> Iterator[Metric]:
        """The registry's interface."""
        family = HistogramMetricFamily(self._name, self._help, labels=["tenant"])
        names = [*(str(float(bound)) for bound in self._bounds), "+Inf"]
        for tenant, series in self._series.items():
            buckets = list(zip(names, accumulate(series.counts), strict=True))
            family.add_metric([tenant], buckets, sum_value=series.sum)
        yield family


class _Reported(NamedTuple):
    """A metric that is made of what the engine reports: `of` is a counter's or gauge's key, or two to divide."""

    name: str
    help: str
    of: tuple[str, ...]
    counter: bool = False


_REPORTED = (
    _Reported("num_requests_running", "requests in the batch", ("running",)),
    _Reported("num_requests_waiting", "requests in the queue", ("waiting",)),
    _Reported("kv_cache_usage_perc", "share of the KV blocks in use, 0 to 1", ("blocks_used", "blocks_total")),
    _Reported("prefix_cache_queries", "prompt tokens looked up in the prefix cache", ("prefix_lookup_tokens",), True),
    _Reported("prefix_cache_hits", "prompt tokens found in the prefix cache", ("prefix_hit_tokens",), True),
    _Reported("kv_disk_hits", "tokens whose blocks were read from disk (--kv-disk)", ("disk_hit_tokens",), True),
    _Reported("kv_disk_read_bytes", "KV blocks read from disk", ("disk_read_bytes",), True),
    _Reported("kv_disk_written_bytes", "KV blocks written to disk", ("disk_written_bytes",), True),
    _Reported("kv_disk_evictions", "KV blocks deleted from disk for others", ("disk_evictions",), True),
    _Reported("kv_disk_damaged_blocks", "KV blocks on disk that were not usable", ("disk_damaged_blocks",), True),
    _Reported("kv_disk_usage_perc", "share of --kv-disk in use, 0 to 1", ("disk_bytes", "disk_budget_bytes")),
    _Reported("num_preemptions", "requests that gave their place up", ("preemptions",), True),
    _Reported("adapter_requests", "requests that began to run with an adapter", ("adapter_uses",), True),
    _Reported("adapter_queries", "requests with an adapter that came", ("adapter_queries",), True),
    _Reported("adapter_hits", "those of them whose adapter was in a slot", ("adapter_hits",), True),
    _Reported("adapter_slot_loads", "adapters copied into a slot", ("adapter_slot_loads",), True),
    _Reported("adapter_wait_seconds", "time that adapters waited for a slot", ("adapter_wait_s",), True),
    _Reported("adapter_load_seconds", "time to fill slots, reading folders again included", ("adapter_load_s",), True),
    _Reported("adapter_disk_reads", "adapters read again because requests wanted them", ("adapter_reads_again",), True),
    _Reported("adapter_evictions", "adapters that left host memory for others", ("adapter_evictions",), True),
    _Reported("adapters_known", "adapters that requests can name", ("adapters_known",)),
    _Reported(
        "adapters_in_host_memory", "those of them in host memory, and retiring ones", ("adapters_in_host_memory",)
    ),
    _Reported("adapter_slots_usage_perc", "share of the adapter slots in use, 0 to 1", ("slots_used", "slots_total")),
    _Reported("experts_touched", "distinct experts of a layer in a step, summed", ("experts_touched",), True),
    _Reported("expert_layers", "layers whose experts were counted, summed over steps", ("expert_layers",), True),
    _Reported("expert_read_bytes", "base weights of experts that the CPU went through", ("expert_read_bytes",), True),
    _Reported("expert_choices", "experts that tokens were routed to", ("expert_choices",), True),
    _Reported("expert_gpu_hits", "those of them that were on the GPU", ("expert_gpu_hits",), True),
    _Reported(
        "memory_read_bandwidth_bytes_per_second",
        "how fast memory is read, measured at start (--measure-bandwidth)",
        ("memory_read_bandwidth",),
    ),
)


class Metrics:
    """`stats` is what the engine last reported: each of its numbers becomes the gauge ktserve_engine_<key>; those of a
    mapping, and those under KEY/NAME, become one gauge with the label "name". Names are vLLM's after `ktserve_` where
    it has one for the same thing. `serves` says of a model's name whether requests can ask for it: only such names are
    labels, all others' counts have one together, so that adapters that come and go leave nothing behind."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.serves: Callable[[str], bool] = lambda model: True
        self.stats: Mapping[str, Any] = {}
        self.engine_up = False
        self.restarts = 0
        self.residency: Mapping[str, str] = {}  # of adapters: "slot", "host" or "disk"
        self.usage_lines_lost = 0
        self.requests = self._counter("requests", "ended requests by outcome", ["outcome", *_WHO])
        self.prompt_tokens = self._counter("prompt_tokens", "prompt tokens of ended requests", _WHO)
        self.cached_tokens = self._counter("prompt_tokens_cached", "those that came from the prefix cache", _WHO)
        self.output_tokens = self._counter("generation_tokens", "tokens delivered", _WHO)
        self.limited = self._counter("requests_limited", "requests refused for a tenant's limits", ["tenant"])
        self.ttft = self._histogram("time_to_first_token_seconds", "receipt to first token", _TTFT_S)
        self.itl = self._histogram("inter_token_latency_seconds", "between tokens of a request", _ITL_S)
        self.queue = self._histogram("request_queue_time_seconds", "in the queue before it first ran", _TTFT_S)
        self.total = self._histogram("e2e_request_latency_seconds", "receipt to end of a request", _TOTAL_S)
        self.registry.register(self)

    def model_label(self, model: str) -> str:
        """What a model's counts are labelled with now."""
        return model if self.serves(model) else UNLOADED

    def unloaded(self, model: str) -> None:
        """Requests can no longer ask for it: its counts join those of the others of which that is so."""
        for counter in (self.requests, self.prompt_tokens, self.cached_tokens, self.output_tokens):
            counter.merge("model_name", model, UNLOADED)

    def _counter(self, name: str, help: str, labels: list[str]) -> Counter:
        counter = Counter(f"ktserve_{name}", help, labels)
        self.registry.register(counter)
        return counter

    def _histogram(self, name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(f"ktserve_{name}", help, buckets)
        self.registry.register(histogram)
        return histogram

    def collect(self) -> Iterator[Metric]:
        """The registry's interface for metrics that are read when asked for."""
        yield GaugeMetricFamily("ktserve_engine_up", "whether the engine serves", value=float(self.engine_up))
        yield GaugeMetricFamily("ktserve_engine_restarts", "restarts of the engine", value=float(self.restarts))
        yield CounterMetricFamily("ktserve_usage_lines_lost", "lines of --usage-log", value=self.usage_lines_lost)
        for name, help, keys, counter in _REPORTED:
            found = [float(self.stats[key]) for key in keys if key in self.stats]
            if len(found) == len(keys):
                value = found[0] / max(found[1], 1.0) if len(found) == 2 else found[0]
                kind = CounterMetricFamily if counter else GaugeMetricFamily
                yield kind(f"ktserve_{name}", help, value=value)
        places = GaugeMetricFamily(
            "ktserve_adapter_resident", "adapters in slots and in host memory", labels=["model_name", "place"]
        )
        for adapter, place in self.residency.items():
            if place != "disk":
                places.add_metric([adapter, place], 1.0)
        yield places
        if "running_adapters" in self.stats:
            yield self._adapters()
        labelled: dict[str, dict[str, float]] = {}
        for key, value in self.stats.items():
            if isinstance(value, Mapping):
                labelled.setdefault(key, {}).update(value)
            elif isinstance(value, bool | int | float):
                key, named, label = key.partition("/")
                if named:
                    labelled.setdefault(key, {})[label] = value
                else:
                    yield GaugeMetricFamily(_name(key), "reported by the engine", value=float(value))
        for key, values in labelled.items():
            family = GaugeMetricFamily(_name(key), "reported by the engine", labels=["name"])
            for label, number in values.items():
                family.add_metric([str(label)], float(number))
            yield family

    def _adapters(self) -> Metric:
        """vLLM's form, which routers read: names in labels, the time as the value."""
        labels = ["running_lora_adapters", "waiting_lora_adapters", "max_lora"]
        family = GaugeMetricFamily(
            "ktserve_lora_requests_info", "adapters of running and waiting requests", labels=labels
        )
        who = [",".join(self.stats[key]) for key in ("running_adapters", "waiting_adapters")]
        family.add_metric([*who, str(self.stats["slots_total"])], time.time())
        return family

    def render(self) -> bytes:
        return bytes(generate_latest(self.registry))


def _name(key: str) -> str:
    return "ktserve_engine_" + re.sub(r"\W", "_", key)
