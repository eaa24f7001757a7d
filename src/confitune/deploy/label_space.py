"""What a bundle keeps of the features of its tasks' images, and the classes of all tasks in one space.

Of each task: features of its training and held-out images under the pre-trained network, and of a task that owns more
than a head also under its own state; a byte a number. Once for all tasks: the sums of those (`methods/gaussian.py`).
They answer what no single task can: which of all classes is this, is it any of them, and what the head of a task would
be with more photos or other classes. Photos cannot be seen in them, but they are made of photos: keep them as private.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from confitune.deploy.bundle.format import BundleError
from confitune.engine import TrainSettings, batches
from confitune.methods.gaussian import FeatureSums, Gaussians
from confitune.nn import ContinualNet
from confitune.tasks import Images, Task

_log = logging.getLogger(__name__)
_CALIBRATED = 50  # tasks at most whose held-out images the classifier is tuned to
_NEVER = 1e300
_PARTS = ("train", "held_out", "own")


@dataclass(frozen=True)
class TaskFeatures:
    """Features [N, F] of a task's images, as they are kept."""

    train: Tensor  # of the images that it was learned from, under the pre-trained network
    labels: Tensor
    held_out: Tensor  # of other images of it
    held_out_labels: Tensor
    own: Tensor | None = None  # of the training images under the task's own state; None where it owns only a head

    @classmethod
    def of(cls, net: ContinualNet, pretrained: nn.Module, task: Task, settings: TrainSettings) -> TaskFeatures:
        """Of a task that is in the network, and before its first task."""
        plain = pretrained.to(next(net.parameters()).device).to(memory_format=torch.channels_last).eval()
        labels, held_out_labels = task.train.labels.cpu(), task.test.labels.cpu()
        net.set_task(task.name)
        with net.evaluating():
            train, held_out = (_features(plain, task, images, settings) for images in (task.train, task.test))
            alone = net.tasks[task.name].only_head
            own = None if alone else _features(net.features, task, task.train, settings)
        return cls(train, labels, held_out, held_out_labels, own)

    def state(self) -> dict[str, Tensor]:
        """As named tensors, one byte a number."""
        state = {"labels": self.labels.int(), "held_out_labels": self.held_out_labels.int()}
        for name in _PARTS:
            features = getattr(self, name)
            if features is not None:
                scale = features.abs().amax(1, keepdim=True).clamp_min(1e-12) / 127
                state |= {name: (features / scale).round().to(torch.int8), f"{name}.scale": scale}
        return state

    @classmethod
    def from_state(cls, state: Mapping[str, Tensor], classes: int) -> TaskFeatures:
        """What `state` gave, checked."""
        for name in _PARTS:  # checked first: a product of other shapes can take any amount of memory
            if name in state and (state[name].dim() != 2 or state[f"{name}.scale"].shape != (len(state[name]), 1)):
                raise BundleError(f"{name} has no scale for each image")
        found = {name: state[name].float() * state[f"{name}.scale"] for name in _PARTS if name in state}
        labels, held_out = state["labels"].long(), state["held_out_labels"].long()
        sizes = [(len(found["train"]), labels), (len(found["held_out"]), held_out)]
        fits = all(of.shape == (images,) and bool(((of >= 0) & (of < classes)).all()) for images, of in sizes)
        if not fits or found["train"].shape[1] != found["held_out"].shape[1]:
            raise BundleError("labels do not fit features")
        if "own" in found and len(found["own"]) != len(found["train"]):
            raise BundleError("not all images have features")
        return cls(found["train"], labels, found["held_out"], held_out, found.get("own"))

    def as_kept(self, classes: int) -> TaskFeatures:
        """With the numbers that come back from a file: sums of these can be taken back."""
        return TaskFeatures.from_state(self.state(), classes)

    def without(self, gone: int) -> TaskFeatures:
        """The images of the other classes, whose labels close the gap."""
        train, held_out = self.labels != gone, self.held_out_labels != gone
        labels, others = self.labels[train], self.held_out_labels[held_out]
        own = None if self.own is None else self.own[train]
        labels, others = labels - (labels > gone).long(), others - (others > gone).long()
        return TaskFeatures(self.train[train], labels, self.held_out[held_out], others, own)

    def joined(self, other: TaskFeatures) -> TaskFeatures:
        """The images of both, of tasks that own the same."""
        both = {name: (mine, getattr(other, name)) for name, mine in vars(self).items() if mine is not None}
        return TaskFeatures(**{name: torch.cat(pair) for name, pair in both.items()})


def _features(network: Callable[[Tensor], Tensor], task: Task, images: Images, settings: TrainSettings) -> Tensor:
    device = settings.torch_device()
    found = [network(task.inputs(pixels)).float().cpu() for pixels, _ in batches(images, settings.batch_size, device)]
    return torch.cat(found)


# ---- the sums of all tasks, as a file --------------------------------------------------------------------------------


def space_state(sums: FeatureSums, chosen: Gaussians) -> dict[str, Tensor]:
    """Sums and what was chosen for them as named tensors; a task's are named by the key that they have there."""
    upper = torch.triu_indices(*sums.second.shape)
    state = {f"{key}.counts": counts for key, counts in sums.counts.items()}
    state |= {f"{key}.sums": of_classes for key, of_classes in sums.sums.items()}
    state["second"] = sums.second[upper[0], upper[1]]
    threshold = min(chosen.threshold, _NEVER)  # files hold finite numbers only
    state["chosen"] = torch.tensor([chosen.ridge, chosen.temperature, threshold], dtype=torch.float64)
    return state


def updated(sums: FeatureSums, classes: Mapping[str, int], features: Callable[[str], TaskFeatures]) -> FeatureSums:
    """Sums of exactly these tasks, given by their keys with their numbers of classes.

    Tasks that are gone are subtracted and new ones added. If a damaged one cannot be subtracted, all are added up anew;
    one that cannot be added is left out with a warning.
    """
    try:
        for key in sums.counts.keys() - classes.keys():
            sums = sums.minus(key, features(key).train)
    except BundleError as error:
        _log.warning("%s", error)
        sums = FeatureSums()
    for key in [key for key in classes if key not in sums.counts]:
        try:
            images = features(key)
            if sums.second.shape not in ((), (images.train.shape[1],) * 2):
                raise BundleError("its features are those of another network")
            sums = sums.plus(key, images.train, images.labels, classes[key])
        except BundleError as error:
            _log.warning("%s. Its task is not guessed", error)
    return sums


def sums_from_state(state: Mapping[str, Tensor], classes: Mapping[str, int]) -> FeatureSums:
    """The sums of tasks, given by their keys with how many classes each has; those that are not there are left out."""
    classes = {key: number for key, number in classes.items() if f"{key}.counts" in state}
    packed = state["second"].double()
    size = int((2 * packed.numel() + 0.25) ** 0.5)
    upper = torch.triu_indices(size, size)
    second = torch.zeros(size, size, dtype=torch.float64)
    second[upper[0], upper[1]] = packed
    second.T[upper[0], upper[1]] = packed
    counts = {key: state[f"{key}.counts"].double() for key in classes}
    sums = {key: state[f"{key}.sums"].double() for key in classes}
    for key, number in classes.items():
        if counts[key].shape != (number,) or sums[key].shape != (number, size):
            raise BundleError(f"{number} classes have sums {list(sums[key].shape)}")
    return FeatureSums(second, counts, sums)


def chosen_from_state(sums: FeatureSums, state: Mapping[str, Tensor], names: Mapping[str, str]) -> Gaussians:
    """The classifier over all classes, as it was calibrated; tasks are called by their names."""
    ridge, temperature, threshold = state["chosen"].tolist()
    tasks = tuple(names[key] for key in sums.counts)
    return replace(sums.gaussians(ridge), tasks=tasks, temperature=temperature, threshold=threshold)


def calibrate(sums: FeatureSums, features: Callable[[str], TaskFeatures]) -> Gaussians:
    """The classifier, tuned to held-out images of the tasks, or of some where they are many."""
    keys, first = list(sums.counts), 0
    none = torch.empty(0, len(sums.second)), torch.empty(0, dtype=torch.long)
    found, inside = [none], [none]
    some = set(random.Random(len(keys)).sample(keys, min(len(keys), _CALIBRATED)))
    for key in keys:
        with suppress(BundleError):  # a damaged task says nothing
            if key in some:
                of_task = features(key)
                found.append((of_task.held_out, first + of_task.held_out_labels))
                inside.append((of_task.train, first + of_task.labels))
        first += len(sums.counts[key])
    held_out, train = ([torch.cat(part) for part in zip(*pairs, strict=True)] for pairs in (found, inside))
    return sums.calibrated(held_out[0], held_out[1], (train[0], train[1]))
