"""What one training step computes: the same lines whether they run directly, compiled or captured.

So nothing here may depend on a tensor's value, wait for the device, or copy to it.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from confitune.engine.augment import augment
from confitune.engine.loss import classification_loss, count_right
from confitune.engine.settings import TrainSettings
from confitune.methods import Penalty
from confitune.nn import ContinualNet
from confitune.tasks import Task


@dataclass(frozen=True)
class TrainStep:
    """From stored pixels to moved weights, on the current task of `net`."""

    net: ContinualNet
    task: Task
    penalties: tuple[Penalty, ...]
    optimizer: torch.optim.Optimizer
    settings: TrainSettings
    device: torch.device

    def train(self, pixels: Tensor, labels: Tensor, noise: Tensor | None) -> Tensor:
        """One step of the optimizer; the batch's loss and how many images it got right, as one tensor."""
        net, penalties = self.net, self.penalties
        x = augment(self.task.inputs(pixels), self.settings.augmentation, noise)
        with self._autocast():
            logits = net(x.contiguous(memory_format=torch.channels_last))
        loss = classification_loss(logits, labels, self.task.groups)
        terms = [term for p in penalties if (term := p.output_loss(logits, labels)) is not None]
        self.optimizer.zero_grad(set_to_none=True)
        (sum(terms, loss) if terms else loss).backward()  # type: ignore[no-untyped-call]
        for penalty in penalties:
            penalty.read_gradients(net)
        for penalty in penalties:
            penalty.add_gradients(net)
        if self.settings.clip_norm is not None:
            moved = [p for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]
            clip_grad_norm_(moved, self.settings.clip_norm)
        self.optimizer.step()
        for penalty in penalties:
            penalty.after_step(net)
        right = count_right(logits.detach(), labels, self.task.groups).sum()
        return torch.stack([loss.detach(), right.to(loss.dtype)])

    @torch.no_grad()
    def measure(self, *batches: Tensor) -> None:
        """Take batches of pixels through the network for their statistics alone, as they are taken in training."""
        with self._autocast():
            self.net.take_in(*(partial(self.task.inputs, pixels) for pixels in batches))

    def kind(self, trains: frozenset[str], tracking: bool, index: int) -> Hashable:
        """Steps of one kind differ only in what tensors hold: one captured graph serves them all.

        Args:
            trains: the parts of the network that are trained.
            tracking: whether input statistics are taken.
            index: of the task; a method whose tensors move between tasks makes each its own kind.
        """
        stateless = type(self.optimizer) is torch.optim.SGD and not self.settings.momentum
        penalties = tuple(penalty.captured_kind(index) for penalty in self.penalties)
        task = (len(self.task.classes), self.task.groups, self.task.preprocess)
        return (trains, tracking, task, penalties, None if stateless else index)

    def _autocast(self) -> torch.autocast:
        # Without its cache of cast weights, which would outlive the step that it was captured in.
        bf16 = self.settings.bf16(self.device)
        return torch.autocast(self.device.type, torch.bfloat16, enabled=bf16, cache_enabled=False)
