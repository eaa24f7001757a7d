"""Choose among a task's epochs by images that are left out of its training, as the CPR code does.

After every epoch the whole loss, penalties included, is taken on these images, with batch norm as in a test. A task
ends with the weights of the epoch where it is lowest; where it has not fallen for some epochs, the learning rate is
divided by 3.
"""

import copy
import math
from collections.abc import Sequence
from typing import Any

import torch

from confitune.engine.feed import batches
from confitune.engine.step import autocast, classification_loss
from confitune.methods import Method, Step
from confitune.nn import ContinualNet
from confitune.settings import TrainSettings
from confitune.tasks import Task, TaskSequence


class Validation:
    """Of one task while it is trained."""

    def __init__(self, task: Task, settings: TrainSettings, seed: int) -> None:
        # Its training images are those that are left, its test images those that were left out.
        self.task = TaskSequence(task.name, "own", (task,)).validating(settings.validation, seed)[0]
        self.settings = settings
        self.lr_factor = 1.0  # what the learning rate has come to
        self._lowest, self._waited = math.inf, 0  # the loss, and epochs since then
        self._best: dict[str, Any] | None = None  # the network of then

    def look(self, net: ContinualNet, hooks: Sequence[Method]) -> None:
        """An epoch is over."""
        loss = self.loss(net, hooks)
        if loss < self._lowest:
            self._lowest, self._waited, self._best = loss, 0, copy.deepcopy(net.state_dict())
            return
        self._waited += 1
        if self._waited == self.settings.lr_patience:
            self.lr_factor, self._waited = self.lr_factor / 3, 0

    def loss(self, net: ContinualNet, hooks: Sequence[Method]) -> float:
        """Mean over the images that were left out, with what methods add to it."""
        images, device = self.task.test, next(net.parameters()).device
        total = torch.zeros((), device=device)
        with net.evaluating():
            for pixels, labels in batches(images, self.settings.eval_batch_size, device):
                x = self.task.inputs(pixels)
                with autocast(self.settings, device):
                    features = net.features(x)
                    logits = net.head(features)
                step = Step(x, features, logits, labels, net)
                terms = [classification_loss(logits, labels, self.task.groups)]
                terms += [term for hook in hooks if (term := hook.loss(step)) is not None]
                total += len(labels) * torch.stack(terms).sum()
        penalties = [pull.value(net) for hook in hooks if (pull := hook.pull()) is not None]
        return float(total / len(images) + sum(penalties))

    def restore(self, net: ContinualNet) -> None:
        """The task's epochs are over: take the network back to the best of them."""
        if self._best is not None:  # else no loss was a number
            net.load_state_dict(self._best)

    def state_dict(self) -> dict[str, Any]:
        """What is needed to go on after an epoch."""
        return {"lowest": self._lowest, "waited": self._waited, "lr_factor": self.lr_factor, "best": self._best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        self._lowest, self._waited, self.lr_factor = state["lowest"], state["waited"], state["lr_factor"]
        self._best = state["best"]
