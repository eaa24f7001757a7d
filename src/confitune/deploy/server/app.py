"""The server: its parts put together as an app, and run until it is stopped.

Its packages are an extra, imported where they are needed: whoever only learns or predicts does not need them.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from confitune.deploy.predictor import Predictor
from confitune.deploy.server.batching import Batcher
from confitune.deploy.server.limits import Guard, Limits, Load
from confitune.errors import ConfituneError

if TYPE_CHECKING:
    import uvicorn
    from fastapi import FastAPI

_PACKAGES = ("fastapi", "uvicorn", "python_multipart")
_BACKLOG = 2048
_SPARE = 64  # connections beside those of the limit: for health, and to be told 503
_AT_ONCE = 16384  # bytes that are taken apart before anyone else has a turn


def require_server_packages() -> None:
    """Say how to install what the server needs, if it is missing."""
    if not all(map(find_spec, _PACKAGES)):
        raise ConfituneError("the server needs packages that are not installed: pip install 'confitune[serve]'")


def create_app(predictor: Predictor, limits: Limits | None = None, hosts: Sequence[str] = ()) -> FastAPI:
    """A predictor as an ASGI app, for any server of such apps; `serve` runs it with uvicorn.

    Its threads start and end with the app's lifespan. Limits of connections are the server's: `serve` sets them.

    Args:
        hosts: host names to accept, besides localhost and IP addresses.
    """
    require_server_packages()
    from fastapi import FastAPI

    import confitune
    from confitune.deploy.server.routes import add_page, add_routes, handle_errors

    limits = limits or Limits()
    batcher, load = Batcher(predictor, limits), Load()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        batcher.start()
        yield
        await asyncio.to_thread(batcher.close)

    app = FastAPI(
        title=f"confitune: {predictor.name}",
        version=confitune.__version__,
        lifespan=lifespan,
        # Their pages load scripts from elsewhere; /docs is a page of our own.
        docs_url=None,
        redoc_url=None,
    )
    app.add_middleware(Guard, limits=limits, load=load, hosts=hosts)
    handle_errors(app)
    add_routes(app, predictor, batcher, load, limits)
    add_page(app)
    return app


def serve(
    predictor: Predictor,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    limits: Limits | None = None,
    hosts: Sequence[str] = (),
    announce: Callable[[str], object] = print,
) -> None:
    """Answer requests until Ctrl-C.

    Args:
        predictor: no one else may use it meanwhile.
        host: the address to listen on; 0.0.0.0 listens on all, for anyone who can reach this machine.
        port: 0 takes a free one.
        hosts: host names to accept, besides `host`, localhost and IP addresses.
        announce: called with one line that has the address, once connections are taken.
    """
    server = uvicorn_server(predictor, limits or Limits(), [host, *hosts])
    with listen(host, port) as listening:
        announce(f"serving {predictor.name} at {address_of(listening)} (Ctrl-C stops it)")
        with suppress(KeyboardInterrupt):  # uvicorn has closed everything by then, and passes it on
            server.run([listening])


def listen(host: str, port: int) -> socket.socket:
    """A socket that takes connections."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
        bound = socket.create_server(address, family=family, backlog=_BACKLOG, dualstack_ipv6=both)
    except OSError as error:
        why = error.strerror or error
        raise ConfituneError(f"cannot listen on {host}, port {port}: {why}; port 0 takes a free one") from error
    # The protocol is named: only then asyncio sends at once, and an answer does not take 40 ms longer.
    return socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP, fileno=bound.detach())


def address_of(listening: socket.socket) -> str:
    """The URL of a server on that socket."""
    host, port, *_ = listening.getsockname()
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def uvicorn_server(predictor: Predictor, limits: Limits, hosts: Sequence[str]) -> uvicorn.Server:
    """The app with a server around it; it stops when its `should_exit` is set."""
    app = create_app(predictor, limits, hosts)
    import uvicorn

    config = uvicorn.Config(
        app,
        http=_bounded_protocol(limits),
        ws="none",
        lifespan="on",
        log_config=None,
        log_level="critical",  # anyone can provoke its warnings, as often as they like
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=_BACKLOG,
        timeout_graceful_shutdown=limits.shutdown_seconds,
    )
    return uvicorn.Server(config)


def _bounded_protocol(limits: Limits) -> type[asyncio.Protocol]:
    """uvicorn's protocol with bounds on connections.

    uvicorn counts connections whether they ask anything or not, and turns everyone away above a number. And a body in
    pieces of one byte costs it a thousand times the work of a whole one. Here whoever is silent makes room, and nobody
    keeps the server busy with the wrapping of a body.
    """
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class Bounded(H11Protocol):
        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._since, self._wrapping, self._body = self.loop.time(), 0, 0
            if len(self.connections) > limits.connections:
                others: list[Any] = [other for other in self.connections if other is not self]
                idle = [other for other in others if other.cycle is None or other.cycle.response_complete]
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
