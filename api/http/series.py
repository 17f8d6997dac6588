"""Counters whose series can be merged, and a histogram of many equal observations at a time: the library's keep every
label forever and take several microseconds for each observation."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric


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
