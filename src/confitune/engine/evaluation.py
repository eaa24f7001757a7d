"""Accuracy of a network on a task's test images."""

from __future__ import annotations

import torch

from confitune.engine.batches import batches
from confitune.engine.loss import count_right
from confitune.engine.settings import TrainSettings
from confitune.nn import ContinualNet
from confitune.tasks import Images, Task


@torch.no_grad()
def evaluate(
    net: ContinualNet, task: Task, settings: TrainSettings | None = None, *, images: Images | None = None
) -> float:
    """Accuracy in percent on `images` (default: the task's test set), the task known."""
    return _mean_by_group(net, task, settings or TrainSettings(), images or task.test, ())[0]


@torch.no_grad()
def evaluate_groups(net: ContinualNet, task: Task, settings: TrainSettings, images: Images) -> list[float]:
    """Accuracy in percent of each task that was merged into `task` for joint training."""
    return _mean_by_group(net, task, settings, images, task.groups)


def _mean_by_group(
    net: ContinualNet, task: Task, settings: TrainSettings, images: Images, groups: tuple[tuple[int, int], ...]
) -> list[float]:
    was_training = net.training
    net.eval()
    net.prepare(task.name)
    device = next(net.parameters()).device
    bf16 = settings.precision == "bf16"
    right = []
    for x, labels in batches(images, task.preprocess, settings.eval_batch_size, device):
        with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            logits = net(x)
        right.append(count_right(logits, labels, task.groups))
    net.train(was_training)
    correct = torch.cat(right).cpu()
    labels = images.labels.cpu()
    ranges = groups or ((0, len(task.classes)),)
    within = [(labels >= first) & (labels < stop) for first, stop in ranges]
    return [100.0 * correct[mask].double().mean().item() for mask in within]
