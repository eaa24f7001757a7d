"""What one training step computes: the same lines whether they run directly, compiled or captured.

So nothing here may depend on a tensor's value, wait for the device, or copy to it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, pad
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import clip_grad_norm_

from confitune.methods import Method, Step
from confitune.nn import ContinualNet
from confitune.settings import TrainSettings
from confitune.tasks import Task

Groups = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class TrainStep:
    """From stored pixels to moved weights, on the current task of `net`.

    Args:
        hooks: methods that add to the step.
        features: runs the backbone.
    """

    net: ContinualNet
    task: Task
    hooks: Sequence[Method]
    optimizer: torch.optim.Optimizer
    settings: TrainSettings
    device: torch.device
    features: Callable[[Tensor], Tensor]

    def train(self, pixels: Tensor, labels: Tensor, noise: Tensor | None) -> Tensor:
        """One step of the optimizer; the batch's loss and how many images it got right, as one tensor."""
        net, hooks = self.net, self.hooks
        x = augment(self.task.inputs(pixels), self.settings.augmentation, noise)
        x = x.contiguous(memory_format=torch.channels_last)
        with self._autocast(), counted_at_once(net):
            features = self.features(x)
            logits = net.head(features)
        loss = classification_loss(logits, labels, self.task.groups)
        step = Step(x, features, logits, labels, net)
        objective = sum((term for hook in hooks if (term := hook.loss(step)) is not None), loss)
        right = count_right(logits.detach(), labels, self.task.groups).sum()
        outcome = torch.stack([loss.detach(), right.to(loss.dtype)])
        self.optimizer.zero_grad(set_to_none=True)
        objective.backward()  # type: ignore[no-untyped-call]
        for hook in hooks:
            hook.read_gradients(net)
        for hook in hooks:
            hook.add_gradients(net)
        if self.settings.clip_norm is not None:
            moved = [p for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]
            clip_grad_norm_(moved, self.settings.clip_norm)
        self.optimizer.step()
        for hook in hooks:
            hook.after_step(net)
        return outcome

    @torch.no_grad()
    def measure(self, dtype: torch.dtype, pixels: Tensor) -> None:
        """Take a batch of pixels through the network for its statistics alone, as it is taken in training."""
        with self._autocast(dtype), counted_at_once(self.net):
            self.features(self.task.inputs(pixels))

    def kind(self, trains: frozenset[str], tracking: bool, index: int) -> Hashable:
        """Steps of one kind differ only in what tensors hold: one captured graph serves them all.

        Args:
            trains: the groups of parameters that are trained.
            tracking: whether input statistics are taken.
            index: of the task; a method whose tensors move between tasks makes each its own kind.
        """
        stateless = type(self.optimizer) is torch.optim.SGD and not self.settings.momentum
        of_hooks = tuple(hook.captured_kind(index) for hook in self.hooks)
        task = (len(self.task.classes), self.task.groups, self.task.preprocess)
        return (trains, tracking, task, of_hooks, None if stateless else index)

    def _autocast(self, dtype: torch.dtype = torch.bfloat16) -> torch.autocast:
        # Without its cache of cast weights, which would outlive the step that it was captured in.
        bf16 = self.settings.bf16(self.device)
        return torch.autocast(self.device.type, dtype, enabled=bf16, cache_enabled=False)


@contextmanager
def counted_at_once(net: ContinualNet) -> Iterator[None]:
    """Batch norms count their batches one kernel each, and use it only without a momentum: count in one instead."""
    norms = [m for m in net.backbone.modules() if isinstance(m, _BatchNorm) and m.training and m.momentum is not None]
    counted = [(norm, norm.num_batches_tracked) for norm in norms if norm.num_batches_tracked is not None]
    for norm, _ in counted:
        norm.num_batches_tracked = None
    try:
        yield
    finally:
        for norm, counter in counted:
            norm.num_batches_tracked = counter
    if counted:
        torch._foreach_add_([counter for _, counter in counted], 1)


def classification_loss(logits: Tensor, labels: Tensor, groups: Groups = ()) -> Tensor:
    """Mean cross-entropy in float32; with groups (joint training), over the classes of the image's own task only."""
    return cross_entropy(within_own_task(logits.float(), labels, groups), labels)


def count_right(logits: Tensor, labels: Tensor, groups: Groups = ()) -> Tensor:
    """Whether each image's largest logit, among the classes of its own task, is its label's."""
    return within_own_task(logits, labels, groups).argmax(1) == labels


def within_own_task(logits: Tensor, labels: Tensor, groups: Groups) -> Tensor:
    """Logits of other tasks' classes set to -inf: one wide head with this mask is exactly a head per task."""
    if not groups:
        return logits
    group_of_class = _group_of_class(groups, logits.device)
    foreign = group_of_class[None, :] != group_of_class[labels][:, None]
    return logits.masked_fill(foreign, float("-inf"))


@lru_cache(maxsize=16)  # a copy to the device in every step would make it wait, and cannot be captured
def _group_of_class(groups: Groups, device: torch.device) -> Tensor:
    return torch.cat([torch.full((stop - first,), g) for g, (first, stop) in enumerate(groups)]).to(device)


def draw_noise(kind: str, steps: int, batch: int, generator: torch.Generator) -> Tensor | None:
    """What an epoch's augmentation needs of chance, drawn at once: [steps, 3, batch] uniform numbers, or None."""
    return None if kind == "none" else torch.rand(steps, 3, batch, generator=generator)


def augment(x: Tensor, kind: str, noise: Tensor | None) -> Tensor:
    """Flip each image with probability 1/2 ('flip'), and shift it by up to an eighth of its side ('flip-shift').

    Args:
        x: images [N, 3, H, W].
        kind: of augmentation.
        noise: one step's part of `draw_noise`, on the images' device; None leaves the images as they are.
    """
    if noise is None:
        return x
    x = torch.where((noise[0] < 0.5)[:, None, None, None], x.flip(-1), x)
    if kind == "flip":
        return x
    height, width = x.shape[-2:]
    most = max(1, min(height, width) // 8)
    padded = pad(x, (most,) * 4, mode="reflect")
    offsets = (noise[1:] * (2 * most + 1)).long().clamp_(max=2 * most)
    rows = offsets[0][:, None] + torch.arange(height, device=x.device)
    columns = offsets[1][:, None] + torch.arange(width, device=x.device)
    images = torch.arange(len(x), device=x.device)[:, None, None]
    return padded[images, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)
