"""Accuracy of a network on a task's test images."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from confitune.engine.events import Listener
from confitune.engine.feed import batches
from confitune.engine.readings import Moment
from confitune.engine.step import count_right
from confitune.nn import ContinualNet
from confitune.settings import TrainSettings
from confitune.tasks import Images, Task


def evaluate(
    net: ContinualNet, task: Task, settings: TrainSettings | None = None, *, images: Images | None = None
) -> float:
    """Accuracy in percent on `images` (default: the task's test set), the task known."""
    settings = settings or TrainSettings()
    right = right_answers(net, task, settings, images)
    return 100.0 * right.double().mean().item()


def evaluate_groups(net: ContinualNet, task: Task, settings: TrainSettings) -> list[float]:
    """Accuracy in percent of each task that was merged into `task` for joint training."""
    right = right_answers(net, task, settings).cpu()
    labels = task.test.labels.cpu()
    within = [(labels >= first) & (labels < stop) for first, stop in task.groups]
    return [100.0 * right[mask].double().mean().item() for mask in within]


def evaluate_all(
    net: ContinualNet, tasks: Sequence[Task], settings: TrainSettings, listener: Listener | None = None
) -> list[float]:
    """Accuracy in percent on each task's test set; the device is read from once, at the end."""
    listener, right = listener or Listener(), []
    for done, task in enumerate(tasks, 1):
        right.append(right_answers(net, task, settings).double().mean())
        listener.task_tested(done, len(tasks))
    shares = torch.stack(right)
    counted = Moment(shares.device)
    counted.now()
    listener.waiting(counted.passed)
    return [100.0 * share for share in shares.tolist()]


@torch.no_grad()
def right_answers(net: ContinualNet, task: Task, settings: TrainSettings, images: Images | None = None) -> Tensor:
    """For each image (default: of the task's test set) whether it is answered rightly, on the network's device."""
    was_training = net.training
    net.eval()
    net.prepare(task.name)
    device, images = next(net.parameters()).device, images or task.test
    right = []
    for pixels, labels in batches(images, settings.eval_batch_size, device):
        x = task.inputs(pixels)  # in float32, whatever the network runs in
        with torch.autocast(device.type, torch.bfloat16, enabled=settings.bf16(device)):
            logits = net(x)
        right.append(count_right(logits, labels, task.groups))
    net.train(was_training)
    return torch.cat(right)
