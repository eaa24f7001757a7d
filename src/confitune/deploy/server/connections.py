"""Connections on which nothing happens, and the end of all of them: what uvicorn leaves open."""

from __future__ import annotations

import asyncio
import socket

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from confitune.deploy.server.batching import Batcher
from confitune.deploy.server.limits import Limits


def bounded_protocol(limits: Limits) -> type[H11Protocol]:
    """HTTP/1.1 that hangs up on clients which do not send their headers or do not read their answers."""

    class BoundedProtocol(H11Protocol):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._headers_due = _Alarm(limits.header_seconds, transport)
            self._reading_due = _Alarm(limits.body_seconds, transport)
            self._headers_due.set()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.cycle is None or self.cycle.response_complete:  # part of the next request's headers
                self._headers_due.set()
            else:
                self._headers_due.clear()

        def pause_writing(self) -> None:
            super().pause_writing()
            self._reading_due.set()

        def resume_writing(self) -> None:
            super().resume_writing()
            self._reading_due.clear()

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            self._headers_due.clear()
            self._reading_due.clear()

    return BoundedProtocol


class _Alarm:
    """Hangs up unless it is cleared in time; to set it again while it runs gives no more time."""

    def __init__(self, seconds: float, transport: asyncio.Transport) -> None:
        self._seconds = seconds
        self._transport = transport
        self._timer: asyncio.TimerHandle | None = None

    def set(self) -> None:
        if self._timer is None:
            # Not close(), which would wait until the client has read everything.
            self._timer = asyncio.get_running_loop().call_later(self._seconds, self._transport.abort)

    def clear(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class DrainingServer(uvicorn.Server):
    """Answers what waits when it is stopped, and refuses what takes too long."""

    def __init__(self, config: uvicorn.Config, batcher: Batcher, seconds: float) -> None:
        super().__init__(config)
        self._batcher = batcher
        self._seconds = seconds

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close the batcher at once: uvicorn would wait for the answers first, and closes the app only then."""
        closing = asyncio.create_task(asyncio.to_thread(self._batcher.close, self._seconds))
        await super().shutdown(sockets)
        if self.force_exit:  # a second Ctrl-C, upon which uvicorn leaves the app open
            await asyncio.to_thread(self._batcher.close)
            await self.lifespan.shutdown()
        await closing
