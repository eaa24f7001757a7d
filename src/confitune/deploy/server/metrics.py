"""What a server counts, for Prometheus."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
_IMAGES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Metrics:
    """The counters of one app; a registry of its own, so that apps in one process do not mix."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)  # memory, time and open files, where the system tells
        self._requests = Counter("confitune_requests", "Requests answered", ("route", "status"), registry=self.registry)
        self._rejected = Counter(
            "confitune_rejected", "Requests refused by a limit, by reason", ("reason",), registry=self.registry
        )
        self._images = Counter("confitune_images", "Images answered", registry=self.registry)
        self._seconds = Histogram(
            "confitune_predict_seconds",
            "From the end of a request's body to its answer",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._batch_images = Histogram(
            "confitune_batch_images", "Images in a batch", buckets=_IMAGES, registry=self.registry
        )
        self._batch_seconds = Histogram(
            "confitune_batch_seconds", "The network's time for a batch", buckets=_SECONDS, registry=self.registry
        )

    def watch(self, *, queue: Callable[[], int], body_bytes: Callable[[], int]) -> None:
        """Ask these whenever the numbers are read."""
        queued = Gauge("confitune_queue_images", "Images that wait for a batch", registry=self.registry)
        queued.set_function(queue)
        held = Gauge("confitune_body_bytes", "Bytes of requests under way", registry=self.registry)
        held.set_function(body_bytes)

    def request(self, route: str, status: int) -> None:
        """Count an answered request."""
        self._requests.labels(route, str(status)).inc()

    def rejected(self, reason: str) -> None:
        """Count a request that a limit refused."""
        self._rejected.labels(reason).inc()

    def answered(self, images: int, seconds: float) -> None:
        """Count a request whose images were all predicted."""
        self._images.inc(images)
        self._seconds.observe(seconds)

    def batch(self, images: int, seconds: float) -> None:
        """Count a batch."""
        self._batch_images.observe(images)
        self._batch_seconds.observe(seconds)

    def text(self) -> bytes:
        """Everything in Prometheus' text format."""
        return generate_latest(self.registry)
