"""Accuracy of a network on a task's test images."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

from confitune.engine.events import Listener
from confitune.engine.feed import batches
from confitune.engine.readings import Moment
from confitune.engine.step import autocast, count_right
from confitune.nn import ContinualNet
from confitune.settings import TrainSettings
from confitune.tasks import Images, Task


def evaluate(
    net: ContinualNet, task: Task, settings: TrainSettings | None = None, *, images: Images | None = None
) -> float:
    """Accuracy in percent on `images` (default: the task's test set), the task known."""
    return 100.0 * right_answers(net, task, settings or TrainSettings(), images).double().mean().item()


def evaluate_joined(net: ContinualNet, whole: Task, tasks: Sequence[Task], settings: TrainSettings) -> list[float]:
    """Accuracy in percent of each of the tasks that were joined in `whole`, whose test images are theirs in order."""
    right = right_answers(net, whole, settings).double().split([len(task.test) for task in tasks])
    return [100.0 * mine.mean().item() for mine in right]


def evaluate_all(net: ContinualNet, tasks: Sequence[Task], settings: TrainSettings, listener: Listener) -> list[float]:
    """Accuracy in percent on each task's test set; the device is read from once, at the end."""
    right = []
    for done, task in enumerate(tasks, 1):
        right.append(right_answers(net, task, settings).double().mean())
        listener.task_tested(done, len(tasks))
    shares = torch.stack(right)
    listener.waiting(Moment(shares.device).passed)
    return [100.0 * share for share in shares.tolist()]


def right_answers(net: ContinualNet, task: Task, settings: TrainSettings, images: Images | None = None) -> Tensor:
    """For each image (default: of the task's test set) whether it is answered rightly, on the network's device."""
    with net.evaluating():
        net.prepare(task.name)
        answers = outputs(net, task, images or task.test, settings)
        return torch.cat([count_right(logits, labels, task.groups) for logits, labels in answers])


@torch.no_grad()
def outputs(
    network: nn.Module, task: Task, images: Images, settings: TrainSettings, size: tuple[int, int] | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """What a network, as it is, makes of images that are prepared as the task's are; batch by batch, with their labels.

    They are resized where the network takes another `size`.
    """
    device = next(network.parameters()).device
    for pixels, labels in batches(images, settings.eval_batch_size, device):
        x = task.inputs(pixels)  # in float32, whatever the network runs in
        if size not in (None, (x.shape[2], x.shape[3])):
            x = interpolate(x, size=size, mode="bilinear", antialias=True)
        with autocast(settings, device):
            found = network(x)
        yield found, labels
