"""What goes over the wire; errors all have one shape."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException
from starlette.responses import Response

from confitune.deploy.server.limits import Refusal


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


class TaskEntry(BaseModel):
    """A task the model has learned."""

    name: str
    classes: list[str]
    accuracy: float | None = Field(description="in percent, on images it was not trained on; null if not measured")
    images: int = Field(description="it was learned from")
    learned: str = Field(description="ISO date")


class TasksAnswer(BaseModel):
    """The model and its tasks in the order they were learned."""

    name: str
    version: str = Field(description="another one after every change of the model")
    tasks: list[TaskEntry]
    limits: dict[str, int] = Field(description="of a request: body_bytes, image_bytes and images")


class ErrorAnswer(BaseModel):
    """Why there is no other answer."""

    error: str = Field(description="for programs: busy, unknown-task, unreadable-image, ...")
    detail: str = Field(description="for people: what was wrong and what to do")
    image: str | None = Field(default=None, description="the image it is about")


ERRORS: dict[int | str, dict[str, Any]] = {"4XX": {"model": ErrorAnswer}, "5XX": {"model": ErrorAnswer}}


def refusal_response(refusal: Refusal) -> Response:
    """A refusal as an answer."""
    values = {name: getattr(refusal, name) for name in ErrorAnswer.model_fields}
    headers = {} if refusal.retry_after is None else {"Retry-After": str(refusal.retry_after)}
    content = ErrorAnswer.model_validate(values).model_dump_json(exclude_none=True)
    return Response(content, refusal.status, headers, media_type="application/json")


def handle_errors(app: FastAPI) -> None:
    """Answer refusals, unknown paths and unreadable forms in one shape."""

    @app.exception_handler(Refusal)
    async def refused(request: Request, error: Refusal) -> Response:
        return refusal_response(error)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        word = HTTPStatus(error.status_code).phrase.lower().replace(" ", "-")
        response = refusal_response(Refusal(error.status_code, word, str(error.detail)))
        response.headers.update(error.headers or {})
        return response
