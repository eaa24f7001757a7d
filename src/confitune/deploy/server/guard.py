"""Around every request and connection: bounds what arrives and how long it may take, and counts what is answered.

uvicorn takes a body as long as it comes and as slowly as it comes; here it is counted while it arrives. Nor does
uvicorn hang up on clients that send nothing or read nothing.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from confitune.deploy.server.answers import refusal_response
from confitune.deploy.server.limits import Limits, Refusal, megabytes

_log = logging.getLogger("confitune.serve")
_LINGER_SECONDS = 10.0
_SILENCE_SECONDS = 2.0
_CLIENT_LEFT = 499  # as other servers count it; nobody sees the answer


_IMAGES = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # in a batch


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


class Guard:
    """The middleware around an app."""

    def __init__(self, app: ASGIApp, *, limits: Limits, metrics: Metrics) -> None:
        self._app, self._limits, self._metrics = app, limits, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on with its body under watch."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = _Exchange(scope, receive, send, self._limits, self._metrics)
        try:
            await self._app(scope, exchange.receive, exchange.send)
        except ClientDisconnect:
            exchange.status = exchange.status or _CLIENT_LEFT
        except Exception:
            _log.exception("%s %s failed", scope["method"], scope["path"])
            if exchange.status is None:
                failure = Refusal(500, "internal", "the server failed on this request; its log says why")
                await refusal_response(failure)(scope, exchange.receive, exchange.send)
        finally:
            exchange.release()
            # Paths come from clients: only those that exist become labels.
            route = getattr(scope.get("route"), "path", "other")
            self._metrics.requests.labels(route, str(exchange.status or _CLIENT_LEFT)).inc()


class _Exchange:
    """One request and its answer."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, limits: Limits, metrics: Metrics) -> None:
        headers = Headers(scope=scope)
        length = headers.get("content-length", "")
        self.status: int | None = None
        self._declared = int(length) if length.isdecimal() else 0
        self._unread = self._declared > 0 or "transfer-encoding" in headers
        self._linger = "expect" not in headers  # such a client has not begun to send, and will not after an error
        self._arrived = 0
        self._taken = 0
        self._latest = time.monotonic() + limits.body_seconds
        self._receive, self._send, self._limits, self._metrics = receive, send, limits, metrics

    async def receive(self) -> Message:
        """The next part of the body, or the news that the client has left."""
        if not self._unread:
            return await self._receive()
        if self._arrived == 0:
            self._check(self._declared)
        try:
            message = await asyncio.wait_for(self._receive(), self._latest - time.monotonic())
        except asyncio.TimeoutError:
            self._linger = False
            detail = f"the request's body did not arrive within {self._limits.body_seconds:g} seconds"
            raise Refusal(408, "slow-client", detail) from None
        self._linger = True
        self._unread = message["type"] == "http.request" and message.get("more_body", False)
        count = len(message.get("body", b""))
        self._check(count)
        self._arrived += count
        self._taken += count
        self._metrics.body_bytes += count
        return message

    async def send(self, message: Message) -> None:
        """Pass an answer on; if the body was not read to its end, the connection ends with it."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = [*message.get("headers", []), (b"x-content-type-options", b"nosniff")]
            if self._unread:
                headers.append((b"connection", b"close"))
            message = {**message, "headers": headers}
        elif self._unread and self._linger and not message.get("more_body", False):
            self.release()
            await self._send({**message, "more_body": True})
            await self._drop_the_rest()
            message = {"type": "http.response.body", "body": b"", "more_body": False}
        await self._send(message)

    def release(self) -> None:
        """The body is no longer held."""
        self._metrics.body_bytes -= self._taken
        self._taken = 0

    def _check(self, count: int) -> None:
        if self._arrived + count > self._limits.body_bytes:
            most = megabytes(self._limits.body_bytes)
            raise Refusal(413, "body-too-large", f"the request has more than {most}: send fewer or smaller images")
        if self._metrics.body_bytes + count > self._limits.all_bodies_bytes:
            most = megabytes(self._limits.all_bodies_bytes)
            detail = f"requests under way hold {most} together: try again later"
            raise Refusal(429, "busy-bytes", detail, retry_after=1)

    async def _drop_the_rest(self) -> None:
        """Take what the client still sends: closing on it would reset the connection, and the answer would be lost."""
        end = time.monotonic() + _LINGER_SECONDS
        with suppress(asyncio.TimeoutError):
            while self._unread:
                wait = min(_SILENCE_SECONDS, end - time.monotonic())
                message = await asyncio.wait_for(self._receive(), wait)
                self._unread = message["type"] == "http.request" and message.get("more_body", False)


def bounded_protocol(limits: Limits) -> type[H11Protocol]:
    """HTTP/1.1 that hangs up on clients which do not send their headers or do not read their answers."""

    class BoundedProtocol(H11Protocol):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._due: dict[str, asyncio.TimerHandle] = {}
            self._expect("headers", limits.header_seconds)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.cycle is None or self.cycle.response_complete:  # part of the next request's headers
                self._expect("headers", limits.header_seconds)
            else:
                self._came("headers")

        def pause_writing(self) -> None:
            super().pause_writing()
            self._expect("reading", limits.body_seconds)

        def resume_writing(self) -> None:
            super().resume_writing()
            self._came("reading")

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            self._came("headers")
            self._came("reading")

        def _expect(self, what: str, seconds: float) -> None:
            if what not in self._due:  # to expect it again gives no more time
                # Not close(), which would wait until the client has read everything.
                self._due[what] = self.loop.call_later(seconds, self.transport.abort)

        def _came(self, what: str) -> None:
            if what in self._due:
                self._due.pop(what).cancel()

    return BoundedProtocol
