"""What a server tells Prometheus."""

from collections.abc import Iterator

import prometheus_client
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from glm5_jax.inference.engine import Engine
from glm5_jax.inference.request import Handle

_COUNTERS = {
    "num_steps": "Steps of the engine",
    "num_overlapped": "Steps sent off while the one before was computed",
    "num_requests": "Requests taken",
    "prompt_tokens": "Tokens of their prompts",
    "cached_tokens": "Tokens of prompts that were found in the cache",
    "new_tokens": "Tokens drawn",
    "host_seconds": "Seconds the host spent on its own part",
    "waiting_seconds": "Seconds the host waited for the device",
}
_GAUGES = {
    "num_running": "Requests with pages",
    "num_waiting": "Requests that wait for pages",
    "num_free_pages": "Pages that nothing uses",
    "num_cached_pages": "Pages that hold prefixes",
    "num_preempted": "How often a request gave its pages back",
    "version": "Version of the weights",
}
_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)


class Gauges:
    """Reads an engine when asked, and counts replies as they end.

    Attributes:
      kind: the content type of `text`.
    """

    kind = prometheus_client.CONTENT_TYPE_LATEST

    def __init__(self, engine: Engine):
        self._engine = engine
        self._registry = prometheus_client.CollectorRegistry()
        self._registry.register(self)
        self._ends = prometheus_client.Counter(
            "glm5_replies", "Replies by what ended them", ["reason"], registry=self._registry
        )
        self._first, self._each = (
            prometheus_client.Histogram(name, text, buckets=_SECONDS, registry=self._registry)
            for name, text in (
                ("glm5_first_token_seconds", "From a request to its first token"),
                ("glm5_token_seconds", "Of each further token of a reply, on average"),
            )
        )

    def observe(self, handle: Handle) -> None:
        """Counts a reply that has ended."""
        self._ends.labels(handle.finish_reason).inc()
        if handle.first is not None:
            self._first.observe(handle.first - handle.submitted)
            if len(handle.tokens) > 1:
                self._each.observe((handle.ended - handle.first) / (len(handle.tokens) - 1))

    def text(self) -> bytes:
        """All of it, as Prometheus reads it."""
        return prometheus_client.generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """For the registry: what the engine knows."""
        for name, text in _COUNTERS.items():
            value = getattr(self._engine.counts, name)
            yield CounterMetricFamily(f"glm5_{name}", text, value=value)
        accepted = self._engine.counts.accepted
        if len(accepted) > 1:
            kept = CounterMetricFamily(
                "glm5_decodes", "Decodes with drafts by the tokens they gave", labels=["tokens"]
            )
            for number, count in enumerate(accepted, 1):
                kept.add_metric([str(number)], count)
            yield kept
        for name, text in _GAUGES.items():
            yield GaugeMetricFamily(f"glm5_{name}", text, value=getattr(self._engine, name))
