"""Connections: whoever is silent makes room, and nobody keeps the server busy with the wrapping of a body."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from confitune.deploy.server.limits import Limits

_SPARE = 64  # connections beside those of the limit: for health, and to be told 503
_AT_ONCE = 16384  # bytes that are taken apart before anyone else has a turn


def bounded_protocol(limits: Limits) -> type[asyncio.Protocol]:
    """uvicorn's protocol with bounds on connections.

    uvicorn counts connections whether they ask anything or not, and turns everyone away above a number. And a body in
    pieces of one byte costs it a thousand times the work of a whole one.
    """

    class Bounded(H11Protocol):
        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._since, self._wrapping, self._body = self.loop.time(), 0, 0
            if len(self.connections) > limits.connections:
                idle: list[Any] = [other for other in self.connections if other is not self and not _asks(other)]
                if idle:
                    min(idle, key=lambda other: other._since).transport.abort()
                elif len(self.connections) > limits.connections + _SPARE:
                    transport.abort()

        def data_received(self, data: bytes) -> None:
            for start in range(0, len(data), _AT_ONCE):
                part, cycle = data[start : start + _AT_ONCE], self.cycle
                before = 0 if cycle is None else len(cycle.body)
                super().data_received(part)
                if self.cycle is not cycle:
                    self._wrapping = self._body = before = 0
                gained = 0 if self.cycle is None else max(len(self.cycle.body) - before, 0)
                self._body += gained
                self._wrapping += len(part) - gained
                if self._wrapping > max(self._body, _AT_ONCE) + _AT_ONCE:
                    self.transport.abort()
                    return

    return Bounded


def _asks(connection: Any) -> bool:
    return connection.cycle is not None and not connection.cycle.response_complete
