"""Held-out images that a bundle was asked to keep of its tasks, to see later whether it still knows them."""

from __future__ import annotations

import logging
import random
from dataclasses import dataclass

import torch

from confitune.deploy.bundle import Bundle, BundleError
from confitune.deploy.predictor import Predictor
from confitune.engine import evaluate
from confitune.nn import ContinualNet
from confitune.tasks import Images, Progress

_log = logging.getLogger(__name__)


def keep_some(images: Images, most: int, seed: int = 0) -> Images:
    """Up to `most` images, classes in turn."""
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    labels = images.labels.cpu()[order]
    place = torch.zeros(len(order), dtype=torch.int64)  # of an image within its class
    for label in labels.unique():
        mine = labels == label
        place[mine] = torch.arange(int(mine.sum()))
    return images.only(order[torch.argsort(place, stable=True)[:most]].sort().values)


def joined(kept: Images, more: Images) -> Images:
    """What was kept before, and more."""
    (pixels, labels), (new, new_labels) = (part.batch(torch.arange(len(part))) for part in (kept, more))
    return Images(torch.cat([pixels, new]), torch.arange(len(kept) + len(more)), torch.cat([labels, new_labels]))


def without_class(images: Images, gone: int) -> Images:
    """Those of the other classes, whose labels close the gap."""
    others = images.only((images.labels != gone).nonzero().flatten())
    return Images(others.pixels, others.rows, others.labels - (others.labels > gone).long())


@dataclass(frozen=True)
class Checks:
    """Shares of the held-out images, in percent."""

    accuracy: dict[str, float]  # by task, with the task given
    guessed: float | None  # whose task is guessed right; None if nothing was kept
    unknown: float  # that are called unknown


def check_tasks(bundle: Bundle, device: str = "auto", progress: Progress | None = None) -> Checks:
    """Test every task that kept images: with the task given, and with the task guessed."""
    predictor = Predictor(bundle, device=device)
    accuracy: dict[str, float] = {}
    guesses: list[tuple[str, str | None]] = []  # the task of each image, and the one that it is taken for
    for number, (task, record) in enumerate(bundle.tasks.items(), 1):
        if progress is not None:
            progress("testing tasks", number, len(bundle.tasks))
        kept = bundle.held_out(task)
        if kept is None:
            continue
        accuracy[task] = evaluate(predictor.network_for(task), kept)
        if record.features is not None:
            answers = predictor.predict(kept.test.pixels, [None] * len(kept.test), top=1)
            guesses += [(task, answer.task) for answer in answers]
    if not guesses:
        return Checks(accuracy, None, 0.0)
    right = sum(task == found for task, found in guesses)
    unknown = sum(found is None for _, found in guesses)
    return Checks(accuracy, 100.0 * right / len(guesses), 100.0 * unknown / len(guesses))


@dataclass(frozen=True)
class Change:
    """An earlier task's accuracy on its held-out images, in percent."""

    task: str
    before: float | None  # when it was last tested
    after: float
    images: int


def check_earlier(
    bundle: Bundle, net: ContinualNet, most: int, seed: int, progress: Progress | None = None
) -> tuple[Change, ...]:
    """What tasks that kept images lost or gained by a new one: all of them, or `most` at random.

    They are loaded one at a time. A task whose files are damaged is left out.
    """
    tasks = [name for name, record in bundle.tasks.items() if record.held_out is not None]
    if len(tasks) > most:
        tasks = sorted(random.Random(f"{seed} {len(bundle.tasks)}").sample(tasks, most), key=tasks.index)
    changes = []
    for number, task in enumerate(tasks, 1):
        loaded = task not in net.tasks
        try:
            if loaded:
                bundle.load_task(net, task)
            if (kept := bundle.held_out(task)) is not None:
                changes.append(Change(task, bundle.record(task).checked, evaluate(net, kept), len(kept.test)))
        except BundleError as error:
            _log.warning("%s. Task %r is not tested again", error, task)
        if loaded and task in net.tasks:
            net.drop_task(task)
        if progress is not None:
            progress("testing earlier tasks", number, len(tasks))
    return tuple(changes)
