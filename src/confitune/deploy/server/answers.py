"""What goes over the wire; errors all have one shape."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException
from starlette.responses import Response

from confitune.deploy.server.limits import Refusal
from confitune.deploy.server.metrics import Metrics

_BY_A_LIMIT = frozenset({408, 413, 429, 503, 504})
_WORDS = {
    400: "the form cannot be read",
    404: "there is no such task; some of those that there are come with it",
    408: "the body came too slowly",
    413: "the body, an image or the number of images is over a limit",
    415: "the body is neither a form nor an image",
    422: "an image cannot be read, or a field has no such value",
    429: "too many images are waiting, or too many bytes are under way; Retry-After says for how long",
    500: "the network failed on the batch that the request was in",
    503: "the server is being stopped",
    504: "the answer took too long",
}


class ClassScore(BaseModel):
    """A class and how probable it is."""

    name: str
    probability: float = Field(description="0 to 1; a task's classes add up to 1")


class ImagePrediction(BaseModel):
    """What was found in one image."""

    image: str = Field(description="the file's name, as it was sent")
    task: str | None = Field(description="the task whose classes these are; null if no task fits")
    task_confidence: float | None = Field(description="of a guessed task, 0 to 1; null where the task was given")
    unknown: bool = Field(description="true if no task fits well enough")
    classes: list[ClassScore] = Field(description="best first; empty if no task fits")


class PredictAnswer(BaseModel):
    """Predictions in the order of the images."""

    predictions: list[ImagePrediction]
    milliseconds: float = Field(description="from the end of the request's body to the answer")


class TaskEntry(BaseModel):
    """A task the model has learned."""

    name: str
    classes: list[str]
    accuracy: float | None = Field(description="in percent, on images it was not trained on; null if not measured")
    images: int = Field(description="it was learned from")
    learned: str = Field(description="ISO date")


class RequestLimits(BaseModel):
    """What a request may hold."""

    body_bytes: int
    image_bytes: int
    images: int


class TasksAnswer(BaseModel):
    """The model and its tasks in the order they were learned."""

    name: str
    tasks: list[TaskEntry]
    limits: RequestLimits


class Health(BaseModel):
    """Whether images are being answered."""

    status: str


class ErrorAnswer(BaseModel):
    """Why there is no other answer."""

    error: str = Field(description="for programs: busy, unknown-task, unreadable-image, ...")
    detail: str = Field(description="for people: what was wrong and what to do")
    image: str | None = Field(default=None, description="the image it is about")
    tasks: list[str] | None = Field(default=None, description="with unknown-task: the first of those that there are")


def documented(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Error answers for an operation's description."""
    return {status: {"model": ErrorAnswer, "description": _WORDS[status]} for status in statuses}


def refusal_response(refusal: Refusal) -> Response:
    """A refusal as an answer."""
    values = {name: getattr(refusal, name) for name in ErrorAnswer.model_fields}
    headers = {} if refusal.retry_after is None else {"Retry-After": str(refusal.retry_after)}
    content = ErrorAnswer.model_validate(values).model_dump_json(exclude_none=True)
    return Response(content, refusal.status, headers, media_type="application/json")


def handle_errors(app: FastAPI, metrics: Metrics) -> None:
    """Answer refusals, unknown paths and bad parameters in one shape, and count what limits refused."""

    @app.exception_handler(Refusal)
    async def refused(request: Request, error: Refusal) -> Response:
        if error.status in _BY_A_LIMIT:
            metrics.rejected.labels(error.error).inc()
        return refusal_response(error)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        word = HTTPStatus(error.status_code).phrase.lower().replace(" ", "-")
        response = refusal_response(Refusal(error.status_code, word, str(error.detail)))
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(RequestValidationError)
    async def bad_parameter(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        return refusal_response(Refusal(422, "bad-field", f"{first['loc'][-1]}: {first['msg']}"))
