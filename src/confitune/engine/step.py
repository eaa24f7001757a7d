"""What one training step computes: the same lines whether they run directly, compiled or captured.

So nothing here may depend on a tensor's value, wait for the device, or copy to it.

Where several processes share a batch, each goes forward and backward with its own part of the loss, the mean over the
whole batch; then the gradients are added up as one flat tensor, and from there on all do the same. torch's
DistributedDataParallel would do that while backward is still going on, but it fixes what has a gradient when it is
made (stages of a schedule change it), wraps the network, and hides the gradients that penalties read.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from confitune.engine.augment import augment
from confitune.engine.loss import classification_loss, count_right
from confitune.methods import Penalty
from confitune.nn import ContinualNet
from confitune.settings import TrainSettings
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
        net, penalties, ranks = self.net, self.penalties, self.net.ranks
        x = augment(self.task.inputs(pixels), self.settings.augmentation, noise)
        with self._autocast():
            logits = net(x.contiguous(memory_format=torch.channels_last))
        loss = classification_loss(logits, labels, self.task.groups)
        terms = [term for p in penalties if (term := p.output_loss(logits, labels)) is not None]
        objective = sum(terms, loss) if terms else loss
        right = count_right(logits.detach(), labels, self.task.groups).sum()
        if ranks.several:
            objective, loss = objective * net.part, loss * net.part
        outcome = torch.stack([loss.detach(), right.to(loss.dtype)])
        self.optimizer.zero_grad(set_to_none=True)
        objective.backward()  # type: ignore[no-untyped-call]
        if ranks.several:
            ranks.add_up([*(p.grad for p in self._moved() if p.grad is not None), outcome])
        for penalty in penalties:
            penalty.read_gradients(net)
        for penalty in penalties:
            penalty.add_gradients(net)
        if self.settings.clip_norm is not None:
            clip_grad_norm_(self._moved(), self.settings.clip_norm)
        self.optimizer.step()
        for penalty in penalties:
            penalty.after_step(net)
        return outcome

    def _moved(self) -> list[nn.Parameter]:
        """What the step moves: frozen parameters have no gradient."""
        return [p for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]

    @torch.no_grad()
    def measure(self, half: bool, *batches: Tensor) -> None:
        """Take batches of pixels through the network for their statistics alone, as they are taken in training.

        Args:
            half: in float16, which is more exact than bfloat16 and, batch norm being cuDNN's then, faster; too large
                values become infinite.
        """
        with self._autocast(torch.float16 if half else torch.bfloat16):
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

    def _autocast(self, dtype: torch.dtype = torch.bfloat16) -> torch.autocast:
        # Without its cache of cast weights, which would outlive the step that it was captured in.
        bf16 = self.settings.bf16(self.device)
        return torch.autocast(self.device.type, dtype, enabled=bf16, cache_enabled=False)
