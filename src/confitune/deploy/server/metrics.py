"""What a server counts, for Prometheus."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector

_IMAGES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Metrics:
    """The counters of one app; a registry of its own, so that apps in one process do not mix.

    Args:
        queue: gives how many images wait for a batch.
    """

    def __init__(self, queue: Callable[[], int]) -> None:
        self.body_bytes = 0  # of requests under way
        self.registry = own = CollectorRegistry()
        ProcessCollector(registry=own)  # memory, time and open files, where the system tells
        self.requests = Counter("confitune_requests", "Requests answered", ("route", "status"), registry=own)
        self.images = Counter("confitune_images", "Images answered", registry=own)
        about = "From the end of a request's body to its answer"
        self.seconds = Histogram("confitune_predict_seconds", about, registry=own)
        self.batch_images = Histogram("confitune_batch_images", "Images in a batch", buckets=_IMAGES, registry=own)
        about = "The network's time for a batch"
        self.batch_seconds = Histogram("confitune_batch_seconds", about, registry=own)
        Gauge("confitune_queue_images", "Images that wait for a batch", registry=own).set_function(queue)
        Gauge("confitune_body_bytes", "Bytes of requests under way", registry=own).set_function(lambda: self.body_bytes)

    def batch(self, images: int, seconds: float) -> None:
        """Count a batch."""
        self.batch_images.observe(images)
        self.batch_seconds.observe(seconds)
