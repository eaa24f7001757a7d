"""Around every request: bounds what arrives and how long it may take, and counts what is answered.

uvicorn takes a body as long as it comes and as slowly as it comes; here it is counted while it arrives.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from confitune.deploy.server.answers import refusal_response
from confitune.deploy.server.limits import Limits, megabytes
from confitune.deploy.server.metrics import Metrics
from confitune.deploy.server.refusal import Refusal

_log = logging.getLogger("confitune.serve")
_LINGER_SECONDS = 10.0
_SILENCE_SECONDS = 2.0
_CLIENT_LEFT = 499  # as other servers count it; nobody sees the answer


class BytesHeld:
    """How many bytes of bodies are in memory, over all requests."""

    def __init__(self, most: int) -> None:
        self.held = 0
        self._most = most

    def check(self, count: int) -> None:
        """Refuse if so many more are too many."""
        if self.held + count > self._most:
            detail = f"requests under way hold {megabytes(self._most)} together: try again later"
            raise Refusal(429, "busy-bytes", detail, retry_after=1)


class Guard:
    """The middleware around an app."""

    def __init__(self, app: ASGIApp, *, limits: Limits, metrics: Metrics, held: BytesHeld) -> None:
        self._app = app
        self._limits = limits
        self._metrics = metrics
        self._held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on with its body under watch."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = _Exchange(scope, receive, send, self._limits, self._held)
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
            self._metrics.request(route, exchange.status or _CLIENT_LEFT)


class _Exchange:
    """One request and its answer."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, limits: Limits, held: BytesHeld) -> None:
        headers = Headers(scope=scope)
        length = headers.get("content-length", "")
        self.status: int | None = None
        self._declared = int(length) if length.isdecimal() else 0
        self._unread = self._declared > 0 or "transfer-encoding" in headers
        self._linger = "expect" not in headers  # such a client has not begun to send, and will not after an error
        self._arrived = 0
        self._taken = 0
        self._latest = time.monotonic() + limits.body_seconds
        self._receive = receive
        self._send = send
        self._limits = limits
        self._held = held

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
        self._held.held += count
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
        self._held.held -= self._taken
        self._taken = 0

    def _check(self, count: int) -> None:
        if self._arrived + count > self._limits.body_bytes:
            raise Refusal(
                413,
                "body-too-large",
                f"the request has more than {megabytes(self._limits.body_bytes)}: send fewer or smaller images",
            )
        self._held.check(count)

    async def _drop_the_rest(self) -> None:
        """Take what the client still sends: closing on it would reset the connection, and the answer would be lost."""
        end = time.monotonic() + _LINGER_SECONDS
        with suppress(asyncio.TimeoutError):
            while self._unread:
                wait = min(_SILENCE_SECONDS, end - time.monotonic())
                message = await asyncio.wait_for(self._receive(), wait)
                self._unread = message["type"] == "http.request" and message.get("more_body", False)
