"""What the server needs of a predictor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor


class ServedTask(Protocol):
    """What is told about a task."""

    @property
    def classes(self) -> tuple[str, ...]:
        """Their names."""

    @property
    def accuracy(self) -> float | None:
        """In percent, if it was measured."""

    @property
    def images(self) -> int:
        """It was learned from so many."""

    @property
    def learned(self) -> str:
        """When, as an ISO date."""


class ServedPrediction(Protocol):
    """What a predictor says about one image."""

    @property
    def task(self) -> str | None:
        """None if no task fits well enough."""

    @property
    def task_confidence(self) -> float | None:
        """Of a guessed task, 0 to 1; None where the task was given."""

    @property
    def classes(self) -> tuple[tuple[str, float], ...]:
        """Name and probability, best first; empty if no task fits."""


class ServedPredictor(Protocol):
    """`confitune.deploy.predictor.Predictor`, or anything else that decodes and predicts."""

    @property
    def name(self) -> str:
        """Of the model."""

    @property
    def tasks(self) -> Mapping[str, ServedTask]:
        """All there are, in the order they were learned."""

    def decode(self, data: bytes, /, name: str = "image") -> Tensor:
        """An image file as uint8 [3, S, S]; called from several threads."""

    def predict(self, pixels: Tensor, tasks: Sequence[str | None], top: int = 5) -> Sequence[ServedPrediction]:
        """One prediction an image; None guesses the task. Called from one thread only."""
