"""What goes over the wire."""

from __future__ import annotations

from pydantic import BaseModel, Field


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
