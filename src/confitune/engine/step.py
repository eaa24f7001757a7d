"""What one training step computes: the same lines whether they run directly, compiled or captured.

So nothing here may depend on a tensor's value, wait for the device, or copy to it.
"""

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import clip_grad_norm_

from confitune.engine.capture import Executor
from confitune.errors import ConfituneError
from confitune.methods import Method, Step
from confitune.nn import ContinualNet
from confitune.settings import TrainSettings
from confitune.tasks import Task

Groups = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class TrainStep:
    """From stored pixels to moved weights, on the current task of the executor's network."""

    executor: Executor
    task: Task
    hooks: Sequence[Method]  # that add to the step
    optimizer: torch.optim.Optimizer

    def train(self, pixels: Tensor, labels: Tensor, noise: Tensor | None) -> Tensor:
        """One step of the optimizer; the batch's loss and how many images it got right, as one tensor."""
        net, settings, hooks = self.executor.net, self.executor.settings, self.hooks
        x = augment(self.task.inputs(pixels), settings.augmentation, noise)
        x = x.contiguous(memory_format=torch.channels_last)
        with autocast(settings, self.executor.device), counted_at_once(net):
            features = self.executor.features(x)
            logits = net.head(features)
        loss = classification_loss(logits, labels, settings, self.task.groups)
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
        if settings.clip_norm is not None:
            moved = [p for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]
            clip_grad_norm_(moved, settings.clip_norm)
        self.optimizer.step()
        for hook in hooks:
            hook.after_step(net)
        return outcome

    @torch.no_grad()
    def measure(self, dtype: torch.dtype, pixels: Tensor) -> None:
        """Take a batch of pixels through the network for its statistics alone, as it is taken in training."""
        with autocast(self.executor.settings, self.executor.device, dtype), counted_at_once(self.executor.net):
            self.executor.features(self.task.inputs(pixels))

    def kind(self, trains: frozenset[str], tracking: bool, index: int) -> Hashable:
        """Steps of one kind differ only in what tensors hold: one captured graph serves them all.

        A method whose tensors move between tasks makes each task (`index`) its own kind.
        """
        of_hooks = tuple((hook.captured_kind(index), hook.pull_most) for hook in self.hooks)
        task = (len(self.task.classes), self.task.groups, self.task.preprocess)
        return (trains, tracking, task, of_hooks)


def autocast(settings: TrainSettings, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> torch.autocast:
    """Lower precision, where the settings ask for it."""
    # Without its cache of cast weights, which would outlive the step that it was captured in.
    return torch.autocast(device.type, dtype, enabled=settings.bf16(device), cache_enabled=False)


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


def classification_loss(logits: Tensor, labels: Tensor, settings: TrainSettings, groups: Groups = ()) -> Tensor:
    """Mean cross-entropy in float32; with groups (joint training), over the classes of the image's own task only."""
    smoothing = settings.label_smoothing
    if groups and smoothing:
        raise ConfituneError("label_smoothing would spread labels over all tasks' classes at once: set it to 0 here")
    return cross_entropy(within_own_task(logits.float(), labels, groups), labels, label_smoothing=smoothing)


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
    """What an epoch's augmentation needs of chance, drawn at once: [steps, 5, batch] uniform numbers, or None."""
    # A flip takes the first of five. The count stays, because the flips that a seed means hang on it.
    return None if kind == "none" else torch.rand(steps, 5, batch, generator=generator)


def augment(x: Tensor, kind: str, noise: Tensor | None) -> Tensor:
    """Mirror each image [N, 3, H, W] with probability 1/2 ('flip'), or leave them as they are ('none').

    `noise` is one step's part of `draw_noise`, on the device of the images.
    """
    if kind == "none" or noise is None:
        return x
    return torch.where((noise[0] < 0.5)[:, None, None, None], x.flip(-1), x)
