"""Around every request: bounds what arrives and how long it may take.

uvicorn takes a body as long as it comes and as slowly as it comes; here it is counted while it arrives.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from confitune.deploy.server.answers import refusal_response
from confitune.deploy.server.limits import Limits, Refusal, megabytes

_log = logging.getLogger("confitune.serve")
_LINGER_SECONDS = 10.0
_SILENCE_SECONDS = 2.0
_ADDRESS = re.compile(r"([\d.]+|\[[\da-f:.]+\])(:\d+)?")  # in numbers, with or without a port


@dataclass
class Load:
    """Requests under way, and the bytes of their bodies."""

    requests: int = 0
    body_bytes: int = 0


class Guard:
    """The middleware around an app.

    Args:
        hosts: names of the server. A request for another name comes from a page of that name, which got a browser to
            ask here by changing its own address; addresses in numbers, and localhost, cannot be changed so.
    """

    def __init__(self, app: ASGIApp, *, limits: Limits, load: Load, hosts: Iterable[str] = ()) -> None:
        self._app, self._limits, self._load = app, limits, load
        self._hosts = {"localhost", "", *(host.lower() for host in hosts)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on with its body under watch."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = _Exchange(scope, receive, send, self._limits, self._load)
        self._load.requests += 1
        try:
            refusal = self._refusal(scope)
            await (self._app if refusal is None else refusal_response(refusal))(scope, exchange.receive, exchange.send)
        except ClientDisconnect:
            pass  # nobody is there to be answered
        except Exception:
            _log.exception("%s %s failed", scope["method"], scope["path"])
            if not exchange.answered:
                failure = Refusal(500, "internal", "the server failed on this request; its log says why")
                await refusal_response(failure)(scope, exchange.receive, exchange.send)
        finally:
            self._load.requests -= 1
            exchange.release()

    def _refusal(self, scope: Scope) -> Refusal | None:
        """Why a request is not passed on. Health is told however busy the server is."""
        if self._load.requests > self._limits.connections and scope["path"] != "/healthz":
            return Refusal(503, "busy", "too many requests are under way: try again later", retry_after=1)
        host = Headers(scope=scope).get("host", "").lower()
        if host.partition(":")[0] not in self._hosts and not _ADDRESS.fullmatch(host):
            return Refusal(
                421, "unknown-host", f"this server does not go by {host[:100]!r}: start it with --allow-host"
            )
        return None


class _Exchange:
    """One request and its answer."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, limits: Limits, load: Load) -> None:
        headers = Headers(scope=scope)
        length = headers.get("content-length", "")
        self.answered = False
        self._declared = int(length) if length.isdecimal() else 0
        self._unread = self._declared > 0 or "transfer-encoding" in headers
        self._linger = "expect" not in headers  # such a client has not begun to send, and will not after an error
        self._arrived = 0
        self._taken = 0
        self._latest = time.monotonic() + limits.body_seconds
        self._scope, self._receive, self._send, self._limits, self._load = scope, receive, send, limits, load

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
        body = message.get("body", b"")
        count = len(body)
        self._check(count)
        self._scope["body_end"] = (self._scope.get("body_end", b"") + body[-4:])[-4:]
        self._arrived += count
        self._taken += count
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
        self._load.body_bytes -= self._taken
        self._taken = 0

    def _check(self, count: int) -> None:
        if self._arrived + count > self._limits.body_bytes:
            most = megabytes(self._limits.body_bytes)
            raise Refusal(413, "body-too-large", f"the request has more than {most}: send fewer or smaller images")
        if self._load.body_bytes + count > self._limits.all_bodies_bytes:
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
