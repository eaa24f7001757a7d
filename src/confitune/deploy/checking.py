"""What a bundle's tasks are worth today, on the held-out images that it keeps."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from confitune.deploy.bundle import Bundle
from confitune.deploy.held_out import accuracy_on, decode_kept
from confitune.deploy.predictor import Predictor
from confitune.tasks import Progress

MOST_GUESSED = 100  # tasks with which guesses are measured: a hundred times a hundred passes of held-out images


@dataclass(frozen=True)
class Checks:
    """In percent of the images kept.

    Attributes:
        accuracy: by task, the task known.
        guessed: how many were given to the right task where it is not; None where nothing was kept, or of more than
            `MOST_GUESSED` tasks.
        unknown: how many were given to none.
    """

    accuracy: dict[str, float]
    guessed: float | None
    unknown: float


def check_tasks(bundle: Bundle, device: str = "auto", progress: Progress | None = None) -> Checks:
    """Test every task that kept images: its classes, and the guess of the task.

    Args:
        progress: called as progress(what, done, total).
    """
    predictor = Predictor(bundle, device=device)
    accuracy: dict[str, float] = {}
    right = unknown = images = 0
    for number, task in enumerate(bundle.tasks, 1):
        if progress is not None:
            progress("testing tasks", number, len(bundle.tasks))
        kept = bundle.held_out(task)
        if kept is None:
            continue
        accuracy[task] = accuracy_on(predictor.network_for(task), task, kept, predictor.preprocess)
        if len(bundle.tasks) > MOST_GUESSED:
            continue
        guessed = [found for found, _ in predictor.guess(torch.stack(decode_kept(kept, task)))]
        right, unknown, images = right + guessed.count(task), unknown + guessed.count(None), images + len(guessed)
    if not images:
        return Checks(accuracy, None, 0.0)
    return Checks(accuracy, 100.0 * right / images, 100.0 * unknown / images)
