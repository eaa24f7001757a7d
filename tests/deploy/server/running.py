"""The server in a thread of the tests' process."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from confitune.deploy.server import Limits
from confitune.deploy.server.app import address_of, listen, uvicorn_server


@contextmanager
def running_server(predictor: Any, *, host: str = "127.0.0.1", limits: Limits | None = None) -> Iterator[str]:
    """Gives its address; the server is stopped at the end of the block."""
    server = uvicorn_server(predictor, limits or Limits(), [host])
    with listen(host, 0) as listening:
        thread = threading.Thread(target=server.run, args=([listening],), name="confitune-serve")
        thread.start()
        try:
            yield address_of(listening)
        finally:
            server.should_exit = True
            thread.join()
