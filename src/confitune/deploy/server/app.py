"""The server's parts put together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from confitune.deploy.predictor import Predictor
from confitune.deploy.server.batching import Batcher
from confitune.deploy.server.limits import Limits
from confitune.deploy.server.packages import require_server_packages

if TYPE_CHECKING:
    from fastapi import FastAPI


def create_app(predictor: Predictor, limits: Limits | None = None) -> FastAPI:
    """A predictor as an ASGI app, for any server of such apps; `serve` runs it with uvicorn.

    Its threads start and end with the app's lifespan. Limits of connections are the server's: `serve` sets them.
    """
    require_server_packages()
    from fastapi import FastAPI

    import confitune
    from confitune.deploy.server.answers import handle_errors
    from confitune.deploy.server.guard import BytesHeld, Guard
    from confitune.deploy.server.metrics import Metrics
    from confitune.deploy.server.page import add_page
    from confitune.deploy.server.routes import add_routes

    limits = limits or Limits()
    metrics = Metrics()
    batcher = Batcher(predictor, limits, on_batch=metrics.batch)
    held = BytesHeld(limits.all_bodies_bytes)
    metrics.watch(queue=lambda: batcher.waiting, body_bytes=lambda: held.held)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        batcher.start()
        yield
        await asyncio.to_thread(batcher.close, limits.shutdown_seconds)

    app = FastAPI(
        title=f"confitune: {predictor.name}",
        version=confitune.__version__,
        lifespan=lifespan,
        # Their pages load scripts from elsewhere; /openapi.json is there for any viewer.
        docs_url=None,
        redoc_url=None,
    )
    app.state.batcher = batcher
    app.add_middleware(Guard, limits=limits, metrics=metrics, held=held)
    handle_errors(app, metrics)
    add_routes(app, predictor, batcher, metrics, limits)
    add_page(app)
    return app
