"""What a server takes, and how it says no."""

from __future__ import annotations

from dataclasses import dataclass

from confitune.errors import ConfituneError

_MB = 1_000_000


@dataclass(frozen=True)
class Limits:
    """Bounds of memory and time, whatever clients send. How many pixels an image may have is the predictor's to say.

    Args:
        body_bytes: of one request.
        image_bytes: of one image file.
        images: in one request; no more than `queue_images`.
        pixels: of all images in one request: a file of a few bytes can take a second to decode.
        all_bodies_bytes: of all requests under way together.
        queue_images: decoded or to be decoded, and not yet in a batch; above, requests are answered 429.
        max_batch: images the network sees at once.
        max_wait_ms: how long the first image of a batch waits for others.
        decoders: threads that decode images; each may hold one decoded at full size.
        body_seconds: a client may take to send a body.
        request_seconds: from the end of the body to the answer.
        shutdown_seconds: requests under way when the server is stopped may take; then they are cut off.
        connections: at once; above, whoever asks nothing is dropped for who comes, and requests are answered 503.
    """

    body_bytes: int = 32 * _MB
    image_bytes: int = 16 * _MB
    images: int = 64
    pixels: int = 200_000_000
    all_bodies_bytes: int = 256 * _MB
    queue_images: int = 256
    max_batch: int = 32
    max_wait_ms: float = 5.0
    decoders: int = 4
    body_seconds: float = 30.0
    request_seconds: float = 30.0
    shutdown_seconds: int = 5
    connections: int = 512


@dataclass(eq=False)
class Refusal(ConfituneError):
    """Ends a request with an HTTP status, a word for programs and a sentence for people.

    Args:
        status: of the answer.
        error: what was wrong in one word that stays the same.
        detail: what was wrong and what to do.
        image: the image it is about.
        retry_after: seconds after which it may go better.
    """

    status: int
    error: str
    detail: str
    image: str | None = None
    retry_after: int | None = None

    def __str__(self) -> str:
        return self.detail


def unknown_task(name: str) -> Refusal:
    """There is no such task, or no longer."""
    return Refusal(404, "unknown-task", f"there is no task {name[:100]!r}; /v1/tasks lists those that there are")


def megabytes(count: int) -> str:
    """A number of bytes in words.

    >>> megabytes(32_000_000), megabytes(1_500)
    ('32 MB', '0.0015 MB')
    """
    return f"{count / _MB:g} MB"
