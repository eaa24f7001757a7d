"""What can be asked of the server: by programs, and by people, who get a page."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from importlib.resources import files
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.requests import ClientDisconnect

from confitune.deploy.predictor import MOST_GUESSED, Prediction, Predictor, too_many_to_guess
from confitune.deploy.server.answers import (
    ClassScore,
    Health,
    ImagePrediction,
    PredictAnswer,
    RequestLimits,
    TaskEntry,
    TasksAnswer,
    documented,
)
from confitune.deploy.server.batching import Batcher
from confitune.deploy.server.forms import Sent, read_sent
from confitune.deploy.server.limits import Limits, Refusal, unknown_task
from confitune.deploy.server.metrics import Metrics

_TOP = 5
_MOST = 1000

# Written by hand: a body that is read while it arrives has no parameters from which FastAPI could derive this.
_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["images"],
                    "properties": {
                        "images": {"type": "array", "items": {"type": "string", "format": "binary"}, "minItems": 1},
                        "task": {
                            "type": "array",
                            "items": {"type": "string"},
                            "description": "one for all images or one for each; empty or none: guess it",
                        },
                        "top": {"type": "integer", "minimum": 1, "maximum": _MOST, "default": _TOP},
                    },
                }
            },
            "image/*": {"schema": {"type": "string", "format": "binary"}},
        },
    }
}

_PAGE = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
# Even a class or file name that got past the page's care could not run, nor ask anything of another server.
_PAGE_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def add_routes(app: FastAPI, predictor: Predictor, batcher: Batcher, metrics: Metrics, limits: Limits) -> None:
    """The programs' side of an app."""

    @app.post(
        "/v1/predict",
        summary="Classify images",
        response_model=PredictAnswer,
        responses=documented(400, 404, 408, 413, 415, 422, 429, 500, 503, 504),
        openapi_extra=_BODY,
    )
    async def predict(
        request: Request,
        task: Annotated[list[str] | None, Query(description="as in the form; for an image as the body")] = None,
        top: Annotated[int, Query(ge=1, le=_MOST, description="classes wanted, best first")] = _TOP,
    ) -> Response:
        """Send one or many images as files of a form, or one image as the body.

        Images of one request may be of different tasks. Without a task, it is guessed for each image.
        """
        batcher.check_room()  # before the body, which a full server need not take
        sent = await read_sent(request, limits)
        began = time.perf_counter()
        tasks = _tasks_of(sent, task or [], predictor)
        wanted = _top_of(sent, top)
        answers = batcher.submit(sent.images, tasks, wanted)
        names = [name for name, _ in sent.images]
        del sent  # the files: decoders have them
        found = await _wait(request, answers, limits.request_seconds)
        seconds = time.perf_counter() - began
        metrics.images.inc(len(found))
        metrics.seconds.observe(seconds)
        content = PredictAnswer(
            predictions=[_shown(name, prediction, wanted) for name, prediction in zip(names, found, strict=True)],
            milliseconds=round(1000 * seconds, 2),
        )
        return Response(content.model_dump_json(), media_type="application/json")

    @app.get("/v1/tasks", summary="The tasks the model has learned")
    async def tasks() -> TasksAnswer:
        return TasksAnswer(
            name=predictor.name,
            tasks=[TaskEntry(name=name, **vars(info)) for name, info in predictor.tasks.items()],
            limits=RequestLimits(body_bytes=limits.body_bytes, image_bytes=limits.image_bytes, images=limits.images),
        )

    @app.get("/healthz", summary="Whether images are being answered", responses=documented(503))
    async def healthz() -> Health:
        if not batcher.healthy:
            raise Refusal(503, "closing", "images are not being answered")
        return Health(status="ok")

    @app.get("/metrics", summary="Counters for Prometheus", response_class=Response)
    async def read_metrics() -> Response:
        return Response(generate_latest(metrics.registry), headers={"Content-Type": CONTENT_TYPE_LATEST})


def add_page(app: FastAPI) -> None:
    """The people's side of an app. Paths are looked up, never opened: there is nothing to climb out of."""
    for path, (name, kind) in _PAGE.items():
        content = files("confitune.deploy.server").joinpath("page", name).read_bytes()
        app.add_api_route(path, _endpoint(content, kind), include_in_schema=False)


def _endpoint(content: bytes, kind: str) -> Callable[[], Awaitable[Response]]:
    async def asset() -> Response:
        return Response(content, headers=_PAGE_HEADERS | {"Content-Type": kind})

    return asset


def _tasks_of(sent: Sent, queried: list[str], predictor: Predictor) -> list[str | None]:
    """One task for each image, None to guess it."""
    count = len(sent.images)
    if not count:
        raise Refusal(422, "no-images", "the form has no images: put them into the field 'images'")
    tasks = sent.tasks or queried or [""]
    if len(tasks) not in (1, count):
        raise Refusal(422, "bad-field", f"{len(tasks)} tasks for {count} images: give one for all, or one for each")
    for name in tasks:
        if name and name not in predictor.tasks:
            raise unknown_task(name, predictor.tasks)
        if not name and len(predictor.tasks) > MOST_GUESSED:
            raise Refusal(422, "bad-field", f"task: {too_many_to_guess(len(predictor.tasks))}")
    return [name or None for name in (tasks * count if len(tasks) == 1 else tasks)]


def _top_of(sent: Sent, queried: int) -> int:
    if not sent.top:
        return queried
    text = sent.top[0].strip()
    if not (text.isascii() and text.isdecimal() and len(text) <= 4 and 1 <= int(text) <= _MOST):
        raise Refusal(422, "bad-field", f"top: a whole number from 1 to {_MOST}, not {text[:20]!r}")
    return int(text)


async def _wait(request: Request, answers: Sequence[Future[Prediction]], seconds: float) -> list[Prediction]:
    """All answers; if one fails, takes too long or the client leaves, the others cost no more work."""
    found = asyncio.gather(*map(asyncio.wrap_future, answers))
    found.add_done_callback(_retrieved)
    left = asyncio.ensure_future(_client_leaves(request))
    either: set[asyncio.Future[Any]] = {found, left}
    try:
        done, _ = await asyncio.wait(either, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if found in done:
            return found.result()
        if left in done:
            raise ClientDisconnect
        raise Refusal(504, "timeout", f"there was no answer within {seconds:g} seconds: try again later", retry_after=1)
    finally:
        left.cancel()
        found.cancel()
        for answer in answers:
            answer.cancel()


def _retrieved(found: asyncio.Future[Any]) -> None:
    """What becomes of answers that are no longer waited for is not an error worth a line in the log."""
    if not found.cancelled():
        found.exception()


async def _client_leaves(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _shown(name: str, prediction: Prediction, top: int) -> ImagePrediction:
    return ImagePrediction(
        image=name,
        task=prediction.task,
        task_confidence=prediction.task_confidence,
        unknown=prediction.task is None,
        classes=[ClassScore(name=label, probability=p) for label, p in prediction.classes[:top]],
    )
