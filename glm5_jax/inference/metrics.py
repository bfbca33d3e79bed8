"""Exports metrics of an engine and its replies to Prometheus."""

from collections.abc import Iterator

import prometheus_client
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from glm5_jax.inference.engine import Engine
from glm5_jax.inference.request import Handle

_COUNTERS = {
    "num_steps": "Steps of the engine",
    "num_overlapped": "Steps launched before the previous one had finished",
    "num_requests": "Requests submitted",
    "prompt_tokens": "Tokens of their prompts",
    "cached_tokens": "Prompt tokens read from the cache",
    "received_tokens": "Prompt tokens whose pages came from another engine",
    "new_tokens": "Tokens generated",
    "host_seconds": "Seconds of the host's part of steps",
    "waiting_seconds": "Seconds the host waited for the device",
}
_GAUGES = {
    "num_running": "Requests with pages",
    "num_waiting": "Requests that wait for pages",
    "num_free_pages": "Free pages",
    "num_cached_pages": "Pages that hold prefixes",
    "num_preempted": "Number of preemptions",
    "version": "Version of the weights",
}
_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)


class EngineMetrics:
    """Registry that reads an engine at each scrape and counts replies as they end.

    Attributes:
      kind: content type of `text`.
    """

    kind = prometheus_client.CONTENT_TYPE_LATEST

    def __init__(self, engine: Engine):
        self._engine = engine
        self._registry = prometheus_client.CollectorRegistry()
        self._registry.register(self)
        self._finished = prometheus_client.Counter(
            "glm5_replies", "Replies by finish reason", ["reason"], registry=self._registry
        )
        self._first_token, self._per_token = (
            prometheus_client.Histogram(name, text, buckets=_SECONDS, registry=self._registry)
            for name, text in (
                ("glm5_first_token_seconds", "Time from submission to the first token"),
                ("glm5_token_seconds", "Mean time per token after the first"),
            )
        )

    def observe(self, handle: Handle) -> None:
        """Counts a finished reply and its latencies."""
        self._finished.labels(handle.finish_reason).inc()
        if handle.first_token_at is not None:
            self._first_token.observe(handle.first_token_at - handle.submitted_at)
            if len(handle.tokens) > 1 and handle.ended_at is not None:
                self._per_token.observe(
                    (handle.ended_at - handle.first_token_at) / (len(handle.tokens) - 1)
                )

    def text(self) -> bytes:
        """Returns all metrics in Prometheus' text format."""
        return prometheus_client.generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Yields the engine's counters and gauges, as the registry expects."""
        for name, text in _COUNTERS.items():
            value = getattr(self._engine.stats, name)
            yield CounterMetricFamily(f"glm5_{name}", text, value=value)
        accepted = self._engine.stats.accepted
        if len(accepted) > 1:
            by_tokens = CounterMetricFamily(
                "glm5_decodes",
                "Decodes with drafts by the number of tokens they gave",
                labels=["tokens"],
            )
            for number, count in enumerate(accepted, 1):
                by_tokens.add_metric([str(number)], count)
            yield by_tokens
        for name, text in _GAUGES.items():
            yield GaugeMetricFamily(f"glm5_{name}", text, value=getattr(self._engine, name))
