"""Prometheus metrics under vLLM's names, so that dashboards made for it show this server too."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from holotron.engine.async_llm import Generation

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
# name in the metrics, name in `LLM.stats()`, what it is
_GAUGES = (
    ("vllm:num_requests_running", "running", "Requests that the engine advances at each step."),
    ("vllm:num_requests_waiting", "waiting", "Requests that wait for a place in the engine."),
    ("vllm:kv_cache_usage_perc", "kv_usage", "Share of the pages for keys and values in use, 0 to 1."),
)
_COUNTERS = (
    ("vllm:prefix_cache_queries", "prefix_queries", "Prompt tokens looked up in the prefix cache."),
    ("vllm:prefix_cache_hits", "prefix_hits", "Prompt tokens found in the prefix cache."),
    ("vllm:num_preemptions", "preemptions", "Requests that lost their place and had to start again."),
)

Stats = Callable[[], Mapping[str, float]]


class ServerMetrics:
    """One registry for one server. `stats` reads the engine, `depth` the queue of preprocessing."""

    def __init__(self, model: str, stats: Stats, depth: Callable[[], int]) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_EngineState(model, stats, depth))

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, ("model_name", *labels), registry=self.registry)

        def histogram(name: str, text: str) -> Histogram:
            found = Histogram(name, text, ("model_name",), registry=self.registry, buckets=_SECONDS)
            return found.labels(model)

        self._prompt = counter("vllm:prompt_tokens", "Prompt tokens of requests that ended.").labels(model)
        self._output = counter("vllm:generation_tokens", "Output tokens of requests that ended.").labels(model)
        self._ended = counter("vllm:request_success", "Requests that ended, by how.", "finished_reason")
        self._refused = counter("holotron:requests_refused", "Answers other than 2xx, by status.", "status")
        self._first = histogram("vllm:time_to_first_token_seconds", "Request received to first output token.")
        self._between = histogram("vllm:inter_token_latency_seconds", "Gaps between output tokens, pooled.")
        self._whole = histogram("vllm:e2e_request_latency_seconds", "Request received to last output token.")
        self._queued = histogram("vllm:request_queue_time_seconds", "Time a request waited in the engine.")
        self._model = model

    def ended(self, generation: Generation, started: float) -> None:
        """Count a request that ended or was given up; `started` is when it was received, of `perf_counter`."""
        sequence, arrivals = generation.sequence, generation.arrivals
        self._prompt.inc(len(sequence.prompt))
        self._output.inc(arrivals[-1][1] if arrivals else 0)
        reason = sequence.finish_reason or "abort"
        self._ended.labels(self._model, reason).inc()
        if not arrivals:
            return
        self._first.observe(arrivals[0][0] - started)
        self._whole.observe(arrivals[-1][0] - started)
        self._queued.observe(sequence.metrics.queue_s)
        for gap in token_gaps(arrivals):
            self._between.observe(gap)

    def refused(self, status: int) -> None:
        self._refused.labels(self._model, str(status)).inc()

    def text(self) -> bytes:
        return generate_latest(self.registry)


def token_gaps(arrivals: list[tuple[float, int]]) -> Iterator[float]:
    """Seconds between consecutive tokens; those that came in one step are 0 apart."""
    yield from [0.0] * (arrivals[0][1] - 1)
    for (before, had), (now, has) in pairwise(arrivals):
        yield now - before
        yield from [0.0] * (has - had - 1)


class _EngineState(Collector):
    """Read when asked for."""

    def __init__(self, model: str, stats: Stats, depth: Callable[[], int]) -> None:
        self._model, self._stats, self._depth = model, stats, depth

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        for name, key, text in _GAUGES:
            yield self._gauge(name, text, stats.get(key, 0.0))
        for name, key, text in _COUNTERS:
            yield self._counter(name, text, stats.get(key, 0.0))
        wanted, encoded = stats.get("tiles_requested", 0.0), stats.get("tiles_encoded", 0.0)
        yield self._counter("vllm:mm_cache_queries", "Image tiles looked up in the vision cache.", wanted)
        yield self._counter("vllm:mm_cache_hits", "Image tiles found in the vision cache.", wanted - encoded)
        text = "Requests that wait for their images and text to be read, or are being read."
        yield self._gauge("holotron:preprocessing_queue_depth", text, self._depth())

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=["model_name"])
        family.add_metric([self._model], value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, text, labels=["model_name"])
        family.add_metric([self._model], value)
        return family
