"""What can be asked of the server, by programs and by people, who get a page; and what goes over the wire."""

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import Future
from http import HTTPStatus
from importlib.resources import files
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response
from pydantic import BaseModel, Field
from starlette.datastructures import ImmutableMultiDict, UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Route

from confitune.deploy.predictor import Prediction, Predictor
from confitune.deploy.server.batching import Batcher
from confitune.deploy.server.limits import Limits, Load, Refusal, unknown_task


class ClassScore(BaseModel):
    """A class and how probable it is."""

    name: str
    probability: float = Field(description="0 to 1; those of a task add up to 1, or to the confidence in the task")


class OtherScore(ClassScore):
    """A class of another task."""

    task: str


class ImagePrediction(BaseModel):
    """What was found in one image."""

    image: str = Field(description="the file's name, as it was sent")
    task: str | None = Field(description="null if the image looks like nothing that was learned")
    task_confidence: float | None = Field(description="of a guessed task, 0 to 1; null where the task was given")
    unknown: bool = Field(description="true if the image looks like nothing that was learned")
    classes: list[ClassScore] = Field(description="best first; if unknown, what it looks like most")
    others: list[OtherScore] = Field(description="where the task was not given: classes of other tasks, best first")
    version: str = Field(description="of the model that answered: another one after every change of it")


class PredictAnswer(BaseModel):
    """Predictions in the order of the images."""

    predictions: list[ImagePrediction]
    milliseconds: float = Field(description="from the end of the request's body to the answer")


class LearnedTask(BaseModel):
    """A task the model has learned: some of its record."""

    name: str
    classes: list[str]
    accuracy: float | None = Field(description="in percent, on images it was not trained on; null if not measured")
    images: int = Field(description="it was learned from")
    learned: str = Field(description="ISO date")


class TasksAnswer(BaseModel):
    """The model and its tasks in the order they were learned."""

    name: str
    version: str = Field(description="another one after every change of the model")
    tasks: list[LearnedTask]
    limits: dict[str, int] = Field(description="of a request: body_bytes, image_bytes and images")


class ErrorAnswer(BaseModel):
    """Why there is no other answer."""

    error: str = Field(description="for programs: busy, unknown-task, unreadable-image, ...")
    detail: str = Field(description="for people: what was wrong and what to do")
    image: str | None = Field(default=None, description="the image it is about")


ERRORS: dict[int | str, dict[str, Any]] = {"4XX": {"model": ErrorAnswer}, "5XX": {"model": ErrorAnswer}}

_LONGEST_FIELD = 1024  # bytes
_LONGEST_NAME = 200
_HOW = "send images as files of a form (multipart/form-data, field 'images'), or one as the body (image/...)"
_TOP = 5
_MOST = 1000

_TASK = {
    "type": "array",
    "items": {"type": "string"},
    "description": "one for all images or one for each; empty or none: guess it",
}
_CLASSES = {"type": "integer", "minimum": 1, "maximum": _MOST, "default": _TOP, "description": "wanted, best first"}
_FILE = {"type": "string", "format": "binary"}
_FIELDS = {"images": {"type": "array", "items": _FILE, "minItems": 1}, "task": _TASK, "top": _CLASSES}
# Written by hand: FastAPI cannot derive that a body is a form or an image.
_REQUEST: dict[str, Any] = {
    "parameters": [
        {"name": "task", "in": "query", "schema": _TASK, "description": "for an image as the body"},
        {"name": "top", "in": "query", "schema": _CLASSES, "description": "for an image as the body"},
    ],
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {"schema": {"type": "object", "required": ["images"], "properties": _FIELDS}},
            "image/*": {"schema": _FILE},
        },
    },
}

_PAGE = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/docs": ("docs.html", "text/html; charset=utf-8"),
    "/docs.js": ("docs.js", "text/javascript; charset=utf-8"),
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


def handle_errors(app: FastAPI) -> None:
    """Answer refusals, unknown paths and unreadable forms in one shape."""

    @app.exception_handler(Refusal)
    async def refused(request: Request, error: Refusal) -> Response:
        return error.response()

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        word = HTTPStatus(error.status_code).phrase.lower().replace(" ", "-")
        response = Refusal(error.status_code, word, str(error.detail)).response()
        response.headers.update(error.headers or {})
        return response


def add_routes(app: FastAPI, predictor: Predictor, batcher: Batcher, load: Load, limits: Limits) -> None:
    """The programs' side of an app."""

    @app.post("/v1/predict", summary="Classify images", responses=ERRORS, openapi_extra=_REQUEST)
    async def predict(request: Request) -> PredictAnswer:
        """Send one or many images as files of a form, or one image as the body.

        Images of one request may be of different tasks. Without a task, it is guessed for each image.
        """
        batcher.check_room()  # before the body, which a full server need not take
        images, fields = await _read(request, limits)
        await asyncio.to_thread(predictor.renew)
        began = time.perf_counter()
        tasks, wanted = _tasks_of(fields, len(images), predictor), _top_of(fields)
        answers = batcher.submit(images, tasks, wanted)
        names = [name for name, _ in images]
        del images  # decoders have them
        found = await _wait(request, answers, limits.request_seconds)
        return PredictAnswer(
            predictions=[
                ImagePrediction(image=name, unknown=one.task is None, version=one.version, **one.told(wanted))
                for name, one in zip(names, found, strict=True)
            ],
            milliseconds=round(1000 * (time.perf_counter() - began), 2),
        )

    @app.get("/v1/tasks", summary="The tasks the model has learned")
    async def tasks() -> TasksAnswer:
        await asyncio.to_thread(predictor.renew)
        return TasksAnswer(
            name=predictor.name,
            version=predictor.version,
            tasks=[
                LearnedTask(name=name, **{**vars(record), "accuracy": record.newest_accuracy})
                for name, record in predictor.tasks.items()
            ],
            limits={name: getattr(limits, name) for name in ("body_bytes", "image_bytes", "images")},
        )

    @app.get("/healthz", summary="Whether images are being answered, and how many wait", responses=ERRORS)
    async def healthz() -> dict[str, str | int | list[str]]:
        if not batcher.healthy:
            raise Refusal(503, "failing", "images are not being answered; the server's log says why")
        return {
            "status": "outdated" if predictor.outdated else "ok",  # what is on disk by now is damaged
            "version": predictor.version,
            "unreadable_tasks": sorted(predictor.unreadable),
            "queue_images": batcher.waiting,
            "body_bytes": load.body_bytes,
        }


def add_page(app: FastAPI) -> None:
    """The people's side of an app. Paths are looked up, never opened: there is nothing to climb out of."""
    for path, (name, kind) in _PAGE.items():
        content = files("confitune.deploy.server").joinpath("page", name).read_bytes()
        answer = Response(content, headers=_PAGE_HEADERS | {"Content-Type": kind})
        app.router.routes.append(Route(path, answer, methods=["GET"]))


async def _read(request: Request, limits: Limits) -> tuple[list[tuple[str, bytes]], ImmutableMultiDict[str, Any]]:
    """The images of a request, (name, file) each, and what it says besides: in a form's fields or in the query."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    fields: ImmutableMultiDict[str, Any]
    if kind.startswith("image/"):
        fields, images = request.query_params, [("image", await request.body())]
    elif kind == "multipart/form-data":
        most = {"max_files": limits.images, "max_fields": limits.images + 1, "max_part_size": _LONGEST_FIELD}
        async with request.form(**most) as fields:
            files = [file for file in fields.getlist("images") if isinstance(file, UploadFile)]
            images = [((file.filename or "image")[:_LONGEST_NAME], await file.read()) for file in files]
        if images and not request.scope["body_end"].rstrip(b"\r\n").endswith(b"--"):  # the task may be missing
            raise Refusal(400, "bad-request", "the form is cut off: its last line is missing")
    else:
        raise Refusal(415, "unsupported-type", f"cannot read {kind[:100] or 'an unnamed type'}: {_HOW}")
    if not images:
        raise Refusal(422, "no-images", "the form has no images: put them into the field 'images'")
    for name, data in images:
        if not data:
            raise Refusal(422, "unreadable-image", f"the image {name} is empty", image=name)
        if len(data) > limits.image_bytes:
            detail = f"the image {name} has more than {limits.image_bytes / 1e6:g} MB: send a smaller one"
            raise Refusal(413, "image-too-large", detail, image=name)
    return images, fields


def _tasks_of(fields: ImmutableMultiDict[str, Any], images: int, predictor: Predictor) -> list[str | None]:
    """One task for each image, None to guess it."""
    tasks = [str(task) for task in fields.getlist("task")] or [""]
    if len(tasks) not in (1, images):
        raise Refusal(422, "bad-field", f"{len(tasks)} tasks for {images} images: give one for all, or one for each")
    for name in tasks:
        if name and name not in predictor.tasks:
            raise unknown_task(name)
    return [name or None for name in (tasks * images if len(tasks) == 1 else tasks)]


def _top_of(fields: ImmutableMultiDict[str, Any]) -> int:
    text = str(fields.get("top", _TOP)).strip()
    if not (text.isascii() and text.isdecimal() and len(text) <= 4 and 1 <= int(text) <= _MOST):
        raise Refusal(422, "bad-field", f"top: a whole number from 1 to {_MOST}, not {text[:20]!r}")
    return int(text)


async def _wait(request: Request, answers: Sequence[Future[Prediction]], seconds: float) -> list[Prediction]:
    """All answers; if one fails, takes too long or the client leaves, the others cost no more work."""
    found = asyncio.gather(*map(asyncio.wrap_future, answers))
    left: asyncio.Future[Any] = asyncio.ensure_future(_client_leaves(request))
    try:
        done, _ = await asyncio.wait({found, left}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if found in done:
            return found.result()
        if left in done:
            raise ClientDisconnect
        detail = f"there was no answer within {seconds:g} seconds: try again later"
        raise Refusal(504, "timeout", detail, retry_after=1)
    finally:
        found.cancel()
        left.cancel()
        for answer in answers:
            answer.cancel()


async def _client_leaves(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
