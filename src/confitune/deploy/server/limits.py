"""What a server accepts from clients, how it refuses, and the middleware that does so.

uvicorn takes bodies of any length, however slowly they come; here they are counted while they arrive. Starlette limits
one body and the parts of a form (see `routes.py`), but neither all bodies together nor how long they take.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from confitune.errors import ConfituneError

if TYPE_CHECKING:
    from starlette.responses import Response
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

_log = logging.getLogger("confitune.serve")
_MB = 1_000_000
_LINGER_SECONDS = 10.0
_SILENCE_SECONDS = 2.0
_ADDRESS = re.compile(r"([\d.]+|\[[\da-f:.]+\])(:\d+)?")  # in numbers, with or without a port


@dataclass(frozen=True)
class Limits:
    """Bounds of memory and time, whatever clients send. The predictor limits the pixels of one image."""

    body_bytes: int = 32 * _MB  # of one request
    image_bytes: int = 16 * _MB  # of one image file
    images: int = 64  # in one request; no more than `queue_images`
    pixels: int = 200_000_000  # of all images in one request: a file of a few bytes can take a second to decode
    all_bodies_bytes: int = 256 * _MB  # of all requests under way together
    queue_images: int = 256  # decoded or to be decoded, and not yet in a batch; above, requests are answered 429
    max_batch: int = 32  # images the network sees at once
    max_wait_ms: float = 5.0  # how long the first image of a batch waits for others
    decoders: int = 4  # threads that decode images; each may hold one decoded at full size
    body_seconds: float = 30.0  # a client may take to send a body
    request_seconds: float = 30.0  # from the end of the body to the answer
    shutdown_seconds: int = 5  # requests under way when the server is stopped may take; then they are cut off
    connections: int = 512  # above, whoever asks nothing is dropped for who comes, and requests are answered 503


@dataclass(eq=False)
class Refusal(ConfituneError):
    """Ends a request."""

    status: int  # of HTTP
    error: str  # for programs: what was wrong, in one word that stays the same
    detail: str  # for people: what was wrong and what to do
    image: str | None = None  # that it is about
    retry_after: int | None = None  # seconds after which it may go better

    def __str__(self) -> str:
        return self.detail

    def response(self) -> Response:
        """As an answer."""
        from starlette.responses import JSONResponse

        values = {"error": self.error, "detail": self.detail, "image": self.image}
        headers = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        return JSONResponse({name: text for name, text in values.items() if text is not None}, self.status, headers)


def unknown_task(name: str) -> Refusal:
    """There is no such task, or no longer."""
    return Refusal(404, "unknown-task", f"there is no task {name[:100]!r}; /v1/tasks lists those that there are")


@dataclass
class Load:
    """Requests under way, and the bytes of their bodies."""

    requests: int = 0
    body_bytes: int = 0


class Guard:
    """The middleware around an app.

    Args:
        hosts: the server's names. A request for another name comes from a page of that name, which has pointed its own
            name here (DNS rebinding); IP addresses and localhost are safe from that.
    """

    def __init__(self, app: ASGIApp, *, limits: Limits, load: Load, hosts: Iterable[str] = ()) -> None:
        self._app, self._limits, self._load = app, limits, load
        self._hosts = {"localhost", "", *(host.lower() for host in hosts)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on with its body under watch."""
        from starlette.requests import ClientDisconnect

        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = _Exchange(scope, receive, send, self._limits, self._load)
        self._load.requests += 1
        try:
            refusal = self._refusal(scope)
            answer = self._app if refusal is None else refusal.response()
            await answer(scope, exchange.receive, exchange.send)
        except ClientDisconnect:
            pass  # nobody is there to be answered
        except Exception:
            _log.exception("%s %s failed", scope["method"], scope["path"])
            if not exchange.answered:
                failure = Refusal(500, "internal", "the server failed on this request; its log says why")
                await failure.response()(scope, exchange.receive, exchange.send)
        finally:
            self._load.requests -= 1
            exchange.release()

    def _refusal(self, scope: Scope) -> Refusal | None:
        """Why a request is not passed on. Health is told however busy the server is."""
        if self._load.requests > self._limits.connections and scope["path"] != "/healthz":
            return Refusal(503, "busy", "too many requests are under way: try again later", retry_after=1)
        host = dict(scope["headers"]).get(b"host", b"").decode("latin-1").lower()
        if host.partition(":")[0] not in self._hosts and not _ADDRESS.fullmatch(host):
            return Refusal(
                421, "unknown-host", f"this server does not go by {host[:100]!r}: start it with --allow-host"
            )
        return None


class _Exchange:
    """One request and its answer."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, limits: Limits, load: Load) -> None:
        headers = dict(scope["headers"])
        length = headers.get(b"content-length", b"")
        self.answered = False
        self._declared = int(length) if length.isdigit() else 0
        self._unread = self._declared > 0 or b"transfer-encoding" in headers
        self._linger = b"expect" not in headers  # such a client has not begun to send, and will not after an error
        self._held = 0  # bytes of the body
        self._latest = time.monotonic() + limits.body_seconds
        self._scope, self._receive, self._send, self._limits, self._load = scope, receive, send, limits, load

    async def receive(self) -> Message:
        """The next part of the body, or the news that the client has left."""
        if not self._unread:
            return await self._receive()
        if self._held == 0:
            self._check(self._declared)
        try:
            message = await asyncio.wait_for(self._receive(), self._latest - time.monotonic())
        except asyncio.TimeoutError:
            self._linger = False
            detail = f"the request's body did not arrive within {self._limits.body_seconds:g} seconds"
            raise Refusal(408, "slow-client", detail) from None
        self._linger = True
        self._unread = message["type"] == "http.request" and message.get("more_body", False)
        body = message.get("body", b"")
        count = len(body)
        self._check(count)
        self._scope["body_end"] = (self._scope.get("body_end", b"") + body[-4:])[-4:]
        self._held += count
        self._load.body_bytes += count
        return message

    async def send(self, message: Message) -> None:
        """Pass an answer on; if the body was not read to its end, the connection ends with it."""
        if message["type"] == "http.response.start":
            self.answered = True
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
        self._load.body_bytes -= self._held
        self._held = 0

    def _check(self, count: int) -> None:
        most, most_of_all = self._limits.body_bytes, self._limits.all_bodies_bytes
        if self._held + count > most:
            detail = f"the request has more than {most / 1e6:g} MB: send fewer or smaller images"
            raise Refusal(413, "body-too-large", detail)
        if self._load.body_bytes + count > most_of_all:
            detail = f"requests under way hold {most_of_all / 1e6:g} MB together: try again later"
            raise Refusal(429, "busy-bytes", detail, retry_after=1)

    async def _drop_the_rest(self) -> None:
        """Take what the client still sends: closing on it would reset the connection, and the answer would be lost."""
        end = time.monotonic() + _LINGER_SECONDS
        with suppress(asyncio.TimeoutError):
            while self._unread:
                wait = min(_SILENCE_SECONDS, end - time.monotonic())
                message = await asyncio.wait_for(self._receive(), wait)
                self._unread = message["type"] == "http.request" and message.get("more_body", False)
