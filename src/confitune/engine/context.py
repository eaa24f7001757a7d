"""A task and the network that learns it: what methods may use of both (`TaskContext`)."""

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import islice

import torch
from torch import Tensor

from confitune.engine.capture import Executor
from confitune.engine.feed import batches, to_device
from confitune.engine.seeds import derived_seed
from confitune.engine.step import autocast, classification_loss
from confitune.methods import TaskContext
from confitune.nn import ContinualNet
from confitune.settings import TrainSettings
from confitune.tasks import Task

_AT_ONCE = 256  # images whose features are taken
_ROUND = 16  # sizes of their batches are multiples of it: for each new one a GPU's libraries choose algorithms anew


def epochs_of(task: Task, settings: TrainSettings) -> int:
    """How many epochs the task is trained for: more where it has few images and a number of steps is asked for."""
    return max(settings.epochs, math.ceil(settings.min_steps / _steps_an_epoch(task, settings)))


def steps_of(task: Task, settings: TrainSettings) -> int:
    """How many training steps the task takes."""
    return epochs_of(task, settings) * _steps_an_epoch(task, settings)


def _steps_an_epoch(task: Task, settings: TrainSettings) -> int:
    """What is left over is dropped."""
    return len(task.train) // min(settings.batch_size, len(task.train))


class Learning(TaskContext):
    """The task with this index (from 0), learned by the executor's network."""

    def __init__(self, executor: Executor, task: Task, index: int) -> None:
        self.executor = executor
        self.net = executor.net
        self.device = executor.device
        self.listener = executor.listener
        self.task = task
        self.index = index
        self.epochs = epochs_of(task, executor.settings)
        self.epoch = 0
        self.settings = executor.settings.model_copy(update={"epochs": self.epochs})
        self.images = len(task.train)
        self.labels = task.train.labels.to(self.device)
        self.batch_size = min(self.settings.batch_size, self.images)
        self.steps_an_epoch = _steps_an_epoch(task, self.settings)
        self.seed = self._seed("penalty")

    def batches(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        # In random order, because files are sorted by class.
        for pixels, labels in batches(self.task.train, size, self.device, self._order("importance")):
            yield self.task.inputs(pixels), labels

    def features(self) -> Tensor:
        # In random batches of one size, whatever the settings are.
        order = self._order("features")
        count = math.ceil(self.images / _AT_ONCE)
        size = _ROUND * math.ceil(self.images / count / _ROUND)
        filled = order.repeat(math.ceil(count * size / len(order)))[: count * size]  # the last batch from the start
        found = []
        for pixels, _ in batches(self.task.train, size, self.device, filled):
            with autocast(self.settings, self.device):
                found.append(self.net.features(self.task.inputs(pixels)).float())
        return torch.cat(found)[to_device(order.argsort(), self.device)]

    def gradients(self, parameters: Sequence[Tensor], batches: int) -> list[Tensor]:
        sums = [torch.zeros_like(parameter) for parameter in parameters]
        self.net.train()
        for parameter in parameters:
            parameter.requires_grad_(True)
        with self.net.observer.untracked():
            for pixels, labels in islice(self._batches("gradients", 0), batches):
                with autocast(self.settings, self.device):
                    logits = self.net(self.task.inputs(pixels))
                loss = classification_loss(logits, labels, self.settings, self.task.groups)
                torch._foreach_add_(sums, torch.autograd.grad(loss, list(parameters)))
        for parameter in parameters:
            parameter.requires_grad_(False)
        return sums

    def captured(self, net: ContinualNet, kind: Hashable, function: Callable[..., None], *tensors: Tensor) -> None:
        executor = self.executor if net is self.net else self.executor.of(net)
        executor(kind, function, *tensors, trains=False)

    def note(self, message: str) -> None:
        self.listener.note(f"task {self.task.name!r}: {message}")

    def _batches(self, purpose: str, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Pixels and labels of as many images as an epoch takes, in random order."""
        order = self._order(purpose, epoch)[: self.steps_an_epoch * self.batch_size]
        return batches(self.task.train, self.batch_size, self.device, order)

    def _order(self, purpose: str, *number: int) -> Tensor:
        """Positions of the training images, in random order."""
        generator = torch.Generator().manual_seed(self._seed(purpose, *number))
        return torch.randperm(self.images, generator=generator)

    def _seed(self, purpose: str, *number: int) -> int:
        return derived_seed(self.settings.seed, purpose, self.index, *number)
