"""What `/metrics` tells Prometheus: counters of the engine, read when asked, and what the server itself has timed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from p99lab.engine.events import TokenEvent
from p99lab.engine.stats import DEVICE_BOUNDS_S, EngineStats
from p99lab.serving.engine_client import EngineClient

LONG_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0)
SHORT_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)


class Metrics:
    """The metrics of one server, in a registry of their own. Times begin when a request's body has arrived.

    `labels` are put on what this server itself has counted and timed, not on what the engine has.
    """

    def __init__(self, engine: EngineClient, labels: Mapping[str, str]) -> None:
        own = CollectorRegistry()
        self._registry = CollectorRegistry()
        self._registry.register(EngineCollector(engine))
        self._registry.register(Labelled(own, labels))
        self._requests = Counter(
            "p99lab_requests", "HTTP requests by path and how they ended", ("path", "outcome"), registry=own
        )
        self._prompt_tokens = Counter("p99lab_prompt_tokens", "Tokens of prompts that were answered", registry=own)
        self._generated_tokens = Counter("p99lab_generated_tokens", "Tokens sampled", registry=own)
        self._ttft = Histogram(
            "p99lab_time_to_first_token_seconds", "Arrival to first token", registry=own, buckets=LONG_S
        )
        self._itl = Histogram("p99lab_inter_token_latency_seconds", "Token to token", registry=own, buckets=SHORT_S)
        self._e2e = Histogram("p99lab_e2e_latency_seconds", "Arrival to last token", registry=own, buckets=LONG_S)
        self._queue_time = Histogram(
            "p99lab_queue_time_seconds", "Of that, waiting for pages and a step", registry=own, buckets=(0.0, *LONG_S)
        )

    def count(self, path: str, outcome: str) -> None:
        """One HTTP request has ended."""
        self._requests.labels(path, outcome).inc()

    def watch(self, num_prompt_tokens: int, arrival_s: float) -> Watch:
        """Follow one choice; `arrival_s` is on the engine's clock."""
        return Watch(self, num_prompt_tokens, arrival_s)

    def first_token(self, num_prompt_tokens: int, since_arrival_s: float) -> None:
        self._prompt_tokens.inc(num_prompt_tokens)
        self._ttft.observe(since_arrival_s)
        self._generated_tokens.inc()

    def next_token(self, since_last_s: float) -> None:
        self._itl.observe(since_last_s)
        self._generated_tokens.inc()

    def end(self, since_arrival_s: float, queue_s: float | None) -> None:
        """`queue_s` None: the engine does not know."""
        self._e2e.observe(since_arrival_s)
        if queue_s is not None:
            self._queue_time.observe(queue_s)

    def render(self) -> bytes:
        """In Prometheus' text format."""
        return generate_latest(self._registry)


class Watch:
    """Times one choice by its events."""

    def __init__(self, metrics: Metrics, num_prompt_tokens: int, arrival_s: float) -> None:
        self._metrics = metrics
        self._num_prompt_tokens = num_prompt_tokens
        self._arrival_s = arrival_s
        self._last_s: float | None = None

    def add(self, event: TokenEvent) -> None:
        if event.token_id is not None:
            if self._last_s is None:
                self._metrics.first_token(self._num_prompt_tokens, event.time_s - self._arrival_s)
            else:
                self._metrics.next_token(event.time_s - self._last_s)
            self._last_s = event.time_s
        if event.finish_reason is not None:
            queue_s = None if event.usage is None else event.usage.timeline.queue_s
            self._metrics.end(event.time_s - self._arrival_s, queue_s)


class Labelled(Collector):
    """What a registry collects, each sample with more labels."""

    def __init__(self, registry: CollectorRegistry, labels: Mapping[str, str]) -> None:
        self._registry = registry
        self._labels = labels

    def collect(self) -> Iterator[Metric]:
        for metric in self._registry.collect():
            metric.samples = [sample._replace(labels={**sample.labels, **self._labels}) for sample in metric.samples]
            yield metric


class EngineCollector(Collector):
    """The engine's own account. Its counters begin anew when the engine is reconfigured."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats()
        yield GaugeMetricFamily("p99lab_requests_waiting", "Requests without pages", stats.num_waiting)
        yield GaugeMetricFamily("p99lab_requests_running", "Requests that hold pages", stats.num_running)
        pages = GaugeMetricFamily("p99lab_pages", "Pages of the KV pool by state", labels=["state"])
        pages.add_metric(["free"], stats.num_free_pages)
        pages.add_metric(["cached"], stats.num_cached_pages)
        pages.add_metric(["active"], stats.num_active_pages)
        yield pages
        yield _counter("p99lab_prefix_cache_queried_tokens", "Prompt tokens looked up", stats.num_queried_tokens)
        yield _counter("p99lab_prefix_cache_cached_tokens", "Of these, found", stats.num_cached_tokens)
        yield _counter("p99lab_preemptions", "Requests that gave way", stats.num_preemptions)
        yield _counter("p99lab_page_waits", "Requests that waited for pages", stats.num_page_waits)
        yield _counter("p99lab_steps", "Steps of the engine", stats.num_steps)
        yield _counter("p99lab_step_tokens", "Tokens computed by them", stats.num_step_tokens)
        yield _counter("p99lab_step_busy_seconds", "Time spent in them", stats.busy_s)
        yield _counter("p99lab_graph_steps", "Steps replayed from a CUDA graph", stats.num_graph_steps)
        yield _counter("p99lab_fallback_steps", "Steps left to slower kernels", stats.num_fallback_steps)
        yield _counter("p99lab_padded_tokens", "Tokens that graphs computed for nobody", stats.num_padded_tokens)
        yield _counter("p99lab_moved_pages", "Pages moved to lie in one run", stats.num_moved_pages)
        yield _counter("p99lab_shared_tokens", "Tokens of rows in a prefix group", stats.num_shared_tokens)
        yield _device_times(stats)
        if stats.step_p50_s is not None and stats.step_p99_s is not None and stats.step_max_s is not None:
            recent = GaugeMetricFamily("p99lab_recent_step_seconds", "Times of recent steps", labels=["quantile"])
            recent.add_metric(["0.5"], stats.step_p50_s)
            recent.add_metric(["0.99"], stats.step_p99_s)
            recent.add_metric(["1"], stats.step_max_s)
            yield recent


def _device_times(stats: EngineStats) -> HistogramMetricFamily:
    """Of no steps where the device has no clock of its own."""
    bounds = [*map(str, DEVICE_BOUNDS_S), "+Inf"]
    buckets = [*zip(bounds, accumulate(stats.num_by_device_s), strict=True)]
    name, documentation = "p99lab_step_device_seconds", "Times of steps by the device's own clock"
    return HistogramMetricFamily(name, documentation, buckets=buckets, sum_value=stats.device_s)


def _counter(name: str, documentation: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(name, documentation, value)
