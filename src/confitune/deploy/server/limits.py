"""What a server takes, and how it says no."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

from confitune.errors import ConfituneError

_MB = 1_000_000
_TASKS_SHOWN = 20


@dataclass(frozen=True)
class Limits:
    """Bounds of memory and time, whatever clients send. How many pixels an image may have is the predictor's to say.

    Args:
        body_bytes: of one request.
        image_bytes: of one image file.
        images: in one request.
        all_bodies_bytes: of all requests under way together.
        queue_images: decoded or to be decoded, and not yet in a batch; above, requests are answered 429.
        max_batch: images the network sees at once.
        max_wait_ms: how long the first image of a batch waits for others.
        decoders: threads that decode images; each may hold one decoded at full size.
        header_seconds: a client may take from connecting, or from the first byte of a further request, to the end of
            its headers.
        body_seconds: a client may take to send a body, and again to read an answer.
        request_seconds: from the end of the body to the answer.
        shutdown_seconds: images that wait when the server is stopped may take; then they are answered 503.
        connections: at once; above, uvicorn answers 503.

    >>> Limits(images=4, queue_images=8).queue_images
    8
    """

    body_bytes: int = 32 * _MB
    image_bytes: int = 16 * _MB
    images: int = 64
    all_bodies_bytes: int = 256 * _MB
    queue_images: int = 256
    max_batch: int = 32
    max_wait_ms: float = 5.0
    decoders: int = 4
    header_seconds: float = 10.0
    body_seconds: float = 30.0
    request_seconds: float = 30.0
    shutdown_seconds: float = 5.0
    connections: int = 512

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value < 0 or (value == 0 and field.name not in ("max_wait_ms", "shutdown_seconds")):
                raise ConfituneError(f"the server's {field.name} must be more than 0, not {value}")
        # What no empty server could take would be refused as 'busy' for ever.
        if self.images > self.queue_images:
            raise ConfituneError(
                f"a request may have {self.images} images, and the queue takes only {self.queue_images}: "
                "raise queue_images or lower images"
            )
        if self.body_bytes > self.all_bodies_bytes:
            raise ConfituneError(
                f"a request may have {megabytes(self.body_bytes)}, and all together only "
                f"{megabytes(self.all_bodies_bytes)}: raise all_bodies_bytes or lower body_bytes"
            )


@dataclass(eq=False)
class Refusal(ConfituneError):
    """Ends a request with an HTTP status, a word for programs and a sentence for people.

    Args:
        status: of the answer.
        error: what was wrong in one word that stays the same.
        detail: what was wrong and what to do.
        image: the image it is about.
        tasks: those that there are.
        retry_after: seconds after which it may go better.
    """

    status: int
    error: str
    detail: str
    image: str | None = None
    tasks: tuple[str, ...] | None = None
    retry_after: int | None = None

    def __str__(self) -> str:
        return self.detail


def unknown_task(name: str, known: Iterable[str]) -> Refusal:
    """The refusal of a task that the model has not learned, with those that it has.

    >>> str(unknown_task("cats", ["birds", "pets"]))
    "there is no task 'cats'; there are: birds, pets"
    """
    names = tuple(known)
    shown = names[:_TASKS_SHOWN]
    more = f" and {len(names) - len(shown)} more" if len(names) > len(shown) else ""
    detail = f"there is no task {name[:100]!r}; there are: {', '.join(shown)}{more}"
    return Refusal(404, "unknown-task", detail, tasks=shown)


def megabytes(count: int) -> str:
    """A number of bytes in words.

    >>> megabytes(32_000_000), megabytes(1_500)
    ('32 MB', '0.0015 MB')
    """
    return f"{count / _MB:g} MB"
