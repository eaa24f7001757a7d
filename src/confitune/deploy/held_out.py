"""The few held-out images that a bundle keeps of every task, to see later whether it still knows it."""

from __future__ import annotations

import io
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from confitune.deploy.bundle import Bundle
from confitune.deploy.format import BundleError
from confitune.deploy.predictor import Predictor
from confitune.engine.seeds import derived_generator
from confitune.nn import ContinualNet
from confitune.tasks import CROP, Images, Preprocess, Progress, UnreadableImageError, open_rgb

_log = logging.getLogger(__name__)
_BATCH = 64  # images decoded and tested at once
_PIXELS = CROP * CROP  # of one image: it was cut when it was kept


def keep_some(images: Images, most: int, seed: int = 0) -> dict[str, Tensor]:
    """Up to `most` images, classes in turn, as PNG: they come back bit for bit."""
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    labels = images.labels.cpu()[order]
    place = torch.zeros(len(order), dtype=torch.int64)  # of an image within its class
    for label in labels.unique():
        mine = labels == label
        place[mine] = torch.arange(int(mine.sum()))
    chosen = order[torch.argsort(place, stable=True)[:most]].sort().values
    files: list[bytes] = []
    for position in chosen:
        pixels, _ = images.batch(position[None])
        out = io.BytesIO()
        Image.fromarray(pixels[0].cpu().permute(1, 2, 0).contiguous().numpy()).save(out, "PNG", optimize=True)
        files.append(out.getvalue())
    return {
        "png": torch.from_numpy(np.frombuffer(b"".join(files), np.uint8).copy()),
        "ends": torch.tensor(np.cumsum([len(file) for file in files])),
        "labels": images.labels.cpu()[chosen].clone(),
    }


def joined(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What was kept twice, as one."""
    ends = torch.cat([first["ends"], second["ends"] + len(first["png"])])
    return {
        "png": torch.cat([first["png"], second["png"]]),
        "ends": ends,
        "labels": torch.cat([first["labels"], second["labels"]]),
    }


def of_classes(kept: Mapping[str, Tensor], labels: Mapping[int, int]) -> dict[str, Tensor]:
    """What was kept of some classes; `labels` gives their new labels by the old ones."""
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), kept["ends"][:-1]])
    mine = [n for n, label in enumerate(kept["labels"].tolist()) if label in labels]
    files = [kept["png"][int(starts[n]) : int(kept["ends"][n])] for n in mine]
    return {
        "png": torch.cat([torch.empty(0, dtype=torch.uint8), *files]),
        "ends": torch.tensor([len(file) for file in files], dtype=torch.int64).cumsum(0),
        "labels": torch.tensor([labels[int(kept["labels"][n])] for n in mine], dtype=torch.int64),
    }


@torch.no_grad()
def accuracy_on(net: ContinualNet, task: str, kept: Mapping[str, Tensor], preprocess: Preprocess) -> float:
    """Accuracy in percent of a task on what `keep_some` kept of it."""
    images, right = decode_kept(kept, task), 0
    labels = kept["labels"]
    device, was_training = next(net.parameters()).device, net.training
    net.eval()
    for first in range(0, len(labels), _BATCH):
        pixels = torch.stack(images[first : first + _BATCH])
        logits = net(preprocess(pixels.to(device)), task)
        right += int((logits.argmax(1).cpu() == labels[first : first + _BATCH]).sum())
    net.train(was_training)
    return 100.0 * right / max(len(labels), 1)


def decode_kept(kept: Mapping[str, Tensor], task: str) -> list[Tensor]:
    """The pixels of what was kept of a task."""
    try:
        files = kept["png"].numpy().tobytes()
        ends = kept["ends"].tolist()
        if len(ends) != len(kept["labels"]):
            raise BundleError(f"{len(ends)} images and {len(kept['labels'])} labels")
        found = [files[start:end] for start, end in zip([0, *ends], ends, strict=False)]
        images = [open_rgb(io.BytesIO(file), most_pixels=_PIXELS) for file in found]
        if any(image.size != images[0].size for image in images):
            raise BundleError("they are not all of one size")
    except (KeyError, TypeError, UnreadableImageError, BundleError) as error:
        raise BundleError(f"the held-out images of task {task!r} are damaged: {error}") from error
    return [torch.from_numpy(np.array(image)).permute(2, 0, 1) for image in images]


@dataclass(frozen=True)
class Checks:
    """In percent of the images kept.

    Attributes:
        accuracy: by task, the task known.
        guessed: how many were given to the right task where it is not; None where nothing was kept.
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
    guesses: list[tuple[str, str | None]] = []  # the task of each image, and the one that it is taken for
    for number, (task, record) in enumerate(bundle.tasks.items(), 1):
        if progress is not None:
            progress("testing tasks", number, len(bundle.tasks))
        kept = bundle.held_out(task)
        if kept is None:
            continue
        accuracy[task] = accuracy_on(predictor.network_for(task), task, kept, predictor.preprocess)
        if record.features is not None:
            guesses += [(task, found) for found, _ in predictor.guess(torch.stack(decode_kept(kept, task)))]
    if not guesses:
        return Checks(accuracy, None, 0.0)
    right, unknown = sum(task == found for task, found in guesses), sum(found is None for _, found in guesses)
    return Checks(accuracy, 100.0 * right / len(guesses), 100.0 * unknown / len(guesses))


@dataclass(frozen=True)
class Change:
    """An earlier task's accuracy on its held-out images, in percent."""

    task: str
    before: float | None  # when it was last tested
    after: float
    images: int


def check_earlier(
    bundle: Bundle, net: ContinualNet, tasks: Sequence[str], preprocess: Preprocess, progress: Progress | None
) -> tuple[Change, ...]:
    """What tasks lost or gained by a new one; their states are in the network one at a time.

    A task whose files are damaged is left out.
    """
    changes = []
    for number, task in enumerate(tasks, 1):
        loaded = task not in net.tasks
        try:
            if loaded:
                bundle.load_task(net, task)
            kept = bundle.held_out(task) or {}
            after = accuracy_on(net, task, kept, preprocess)
            changes.append(Change(task, bundle.accuracy.get(task), after, len(kept["labels"])))
        except BundleError as error:
            _log.warning("%s. Task %r is not tested again", error, task)
        if loaded and task in net.tasks:
            net.drop_task(task)
        if progress is not None:
            progress("testing earlier tasks", number, len(tasks))
    return tuple(changes)


def some_of(tasks: Sequence[str], most: int, seed: int, number: int) -> list[str]:
    """All of the tasks, or `most` at random, others for every number; in their order.

    >>> some_of(["birds", "trees"], 2, 0, 7), len(some_of([str(n) for n in range(100)], 5, 0, 7))
    (['birds', 'trees'], 5)
    """
    if len(tasks) <= most:
        return list(tasks)
    order = torch.randperm(len(tasks), generator=derived_generator(seed, "check", number))
    return [tasks[place] for place in order[:most].sort().values.tolist()]
