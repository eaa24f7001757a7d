"""Runs the server until it is stopped."""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING

from confitune.deploy.predictor import Predictor
from confitune.deploy.server.app import create_app
from confitune.deploy.server.limits import Limits
from confitune.deploy.server.packages import require_server_packages
from confitune.errors import ConfituneError

if TYPE_CHECKING:
    import uvicorn

_BACKLOG = 2048
_MORE_SECONDS = 2.0  # for answers to be written after the last image


def serve(
    predictor: Predictor,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    limits: Limits | None = None,
    announce: Callable[[str], object] = print,
) -> None:
    """Answer requests until Ctrl-C.

    Args:
        predictor: what answers; the server is its only user.
        host: the address to listen on; 0.0.0.0 is every one of this machine, for anyone who can reach it.
        port: 0 takes a free one.
        limits: of memory and time; None is the defaults.
        announce: is given one line with the address, once connections are taken.
    """
    require_server_packages()
    with _listen(host, port) as listening:
        server = _server(predictor, limits or Limits())
        announce(f"serving {predictor.name} at {_address(listening)} (Ctrl-C stops it)")
        with suppress(KeyboardInterrupt):  # uvicorn has closed everything by then, and passes it on
            server.run([listening])


@contextmanager
def running_server(
    predictor: Predictor, *, host: str = "127.0.0.1", port: int = 0, limits: Limits | None = None
) -> Iterator[str]:
    """The server in a thread of this program, stopped at the end of the block; gives its address."""
    require_server_packages()
    with _listen(host, port) as listening:
        server = _server(predictor, limits or Limits())
        thread = threading.Thread(target=server.run, args=([listening],), name="confitune-serve")
        thread.start()
        try:
            yield _address(listening)
        finally:
            server.should_exit = True
            thread.join()


def _listen(host: str, port: int) -> socket.socket:
    if not 0 <= port <= 65535:
        raise ConfituneError(f"a port is a number from 0, for a free one, to 65535, not {port}")
    with ExitStack() as on_error:
        try:
            family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            # The protocol is named: only then asyncio sends at once, and an answer does not take 40 ms longer.
            listening = on_error.enter_context(socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP))
            if os.name == "posix":  # elsewhere it would let two servers share a port
                listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(address)
            listening.listen(_BACKLOG)
        except OSError as error:
            raise ConfituneError(f"cannot listen on {host}, port {port}: {_why(error)}") from error
        on_error.pop_all()
        return listening


def _why(error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return "it is in use; choose another port, or 0 for a free one"
    if error.errno == errno.EACCES:
        return "that is not allowed; choose a port from 1024 on"
    if error.errno == errno.EADDRNOTAVAIL or isinstance(error, socket.gaierror):
        return "this machine has no such address; 127.0.0.1 is always there, 0.0.0.0 is all there are"
    return str(error)


def _address(listening: socket.socket) -> str:
    host, port, *_ = listening.getsockname()
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _server(predictor: Predictor, limits: Limits) -> uvicorn.Server:
    import uvicorn

    from confitune.deploy.server.connections import DrainingServer, bounded_protocol

    app = create_app(predictor, limits)
    config = uvicorn.Config(
        app,
        http=bounded_protocol(limits),
        ws="none",
        lifespan="on",
        log_config=None,
        log_level="error",  # anyone can provoke its warnings, as often as they like
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=_BACKLOG,
        limit_concurrency=limits.connections,
        timeout_graceful_shutdown=round(limits.shutdown_seconds + _MORE_SECONDS),
    )
    return DrainingServer(config, app.state.batcher, limits.shutdown_seconds)
