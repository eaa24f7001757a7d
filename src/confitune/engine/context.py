"""What methods may use of the task that is learned (`TaskContext`), beside training steps: its images above all."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator

import torch
from torch import Tensor

from confitune.engine.capture import Executor
from confitune.engine.feed import batches, to_device
from confitune.engine.seeds import derived_generator, derived_seed
from confitune.nn import ContinualNet
from confitune.tasks import Task

_AT_ONCE = 256  # images whose features are taken
_ROUND = 16  # sizes of their batches are multiples of it: for each new one a GPU's libraries choose algorithms anew


class TaskImages:
    """The task with this index (from 0), learned by the executor's network for so many epochs."""

    def __init__(self, executor: Executor, task: Task, index: int, epochs: int) -> None:
        self.executor, self.task, self.index = executor, task, index
        self.net, self.listener, self.device = executor.net, executor.listener, executor.device
        self.settings = executor.settings.model_copy(update={"epochs": epochs})
        self.seed = derived_seed(self.settings.seed, "penalty", index)
        self.batch_size = min(self.settings.batch_size, len(task.train))
        self._used = torch.arange(len(task.train))  # positions of the images that are trained on

    @property
    def epochs(self) -> int:
        """That the task is trained for."""
        return self.settings.epochs

    @property
    def images(self) -> int:
        """In the training set."""
        return len(self.task.train)

    @property
    def labels(self) -> Tensor:
        """Of the training images, on the device."""
        return self.task.train.labels.to(self.device)

    def batches(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Inputs and labels in a random order of the task's own: files are sorted by class."""
        for pixels, labels in batches(self.task.train, size, self.device, self._order("importance")):
            yield self.task.inputs(pixels), labels

    def train_on(self, positions: Tensor) -> None:
        """Use only the training images at these positions from now on."""
        self._used = positions

    def features(self, positions: Tensor) -> Tensor:
        """Of the training images at these positions, in random batches of one size, whatever the settings are."""
        order = torch.randperm(len(positions), generator=derived_generator(self.settings.seed, "features", self.index))
        count = math.ceil(len(positions) / _AT_ONCE)
        size = _ROUND * math.ceil(len(positions) / count / _ROUND)
        filled = order.repeat(math.ceil(count * size / len(order)))[: count * size]  # the last batch from the start
        found = []
        for pixels, _ in batches(self.task.train, size, self.device, positions[filled]):
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.settings.bf16(self.device)):
                found.append(self.net.features(self.task.inputs(pixels)).float())
        return torch.cat(found)[to_device(order.argsort(), self.device)]

    def _order(self, purpose: str, *number: int) -> Tensor:
        """Positions of the images that are trained on, in random order."""
        generator = derived_generator(self.settings.seed, purpose, self.index, *number)
        return self._used[torch.randperm(len(self._used), generator=generator)]

    def captured(self, net: ContinualNet, kind: Hashable, function: Callable[..., None], *tensors: Tensor) -> None:
        """Run it, on a GPU as a captured graph."""
        executor = self.executor if net is self.net else self.executor.of(net)
        executor(kind, function, *tensors, trains=False)

    def note(self, message: str) -> None:
        """Tell a person."""
        self.listener.note(f"task {self.task.name!r}: {message}")
