"""How well an image fits a task's statistics: what the guess of a task rests on.

A task's batch norms know the mean and the variance of each channel over the task's images. Under the task's own state,
an image of the task has channel means near those; another image has not. A layer's distance is the squared difference
in units of the variance, averaged over channels; its logarithm is compared with what the task's training images had
when it was learned, the deviations are averaged over layers, and the average is compared with that of images of the
task which it was not trained on. That takes one forward pass for each task, and two numbers a layer to remember.

Tasks that own no moments share those of the backbone, which would tell none of them apart. Each remembers how far the
means of its own training images are from those, and distances are measured to there. A network without batch norm has
no such statistics: there a guess rests on how sure the heads are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from confitune.engine import TrainSettings, batches
from confitune.nn import ContinualNet
from confitune.tasks import Images, Task

_KEYS = ("fit.mean", "fit.std", "fit.usual", "fit.spread")
_REFERENCE = "fit.reference"
_LEAST = 1e-3  # deviation that is believed
_FITTED = 256  # training images, and as many test images, that a task's fit is taken from


@dataclass(frozen=True)
class Fit:
    """What a task's own images had.

    Args:
        mean: of the log distance, by layer, of training images.
        std: likewise.
        usual: what the deviations of new images are on average.
        spread: how much that varies from image to image.
        reference: of a task that owns no moments: how far the channel means of its training images are from those of
            the backbone, one layer after the other.
    """

    mean: Tensor
    std: Tensor
    usual: Tensor
    spread: Tensor
    reference: Tensor | None = None

    @classmethod
    def of(cls, trained: Tensor, new: Tensor, reference: Tensor | None = None) -> Fit:
        """From log distances [images, layers] of images that the task was trained on, and of others."""
        mean, std = trained.mean(0), _deviation(trained)
        off = ((new - mean) / std).mean(1)
        return cls(mean, std, off.mean(), _deviation(off), reference)

    def misfit(self, distances: Tensor) -> Tensor:
        """How much worse images fit than the task's own, in units of how those differ: 0 is usual, 3 is rare."""
        return (((distances - self.mean) / self.std).mean(1) - self.usual) / self.spread

    def state(self) -> dict[str, Tensor]:
        """As named tensors, to be stored with the task's."""
        own = {} if self.reference is None else {_REFERENCE: self.reference}
        return dict(zip(_KEYS, (self.mean, self.std, self.usual, self.spread), strict=True)) | own

    @classmethod
    def from_state(cls, state: Mapping[str, Tensor], channels: Sequence[int]) -> Fit | None:
        """A copy of named tensors, which may be those of a file; None where they are not those of layers with so many
        channels each.
        """
        layers, keys = len(channels), (*_KEYS, *((_REFERENCE,) if _REFERENCE in state else ()))
        expected = [(layers,), (layers,), (), (), (sum(channels),)][: len(keys)]
        shapes = [tuple(state[key].shape) if key in state else None for key in keys]
        return cls(*(state[key].float().clone() for key in keys)) if shapes == expected else None


@torch.no_grad()
def logits_and_distances(
    net: ContinualNet, x: Tensor, task: str, reference: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Logits under a task's state, and the log distances [images, layers] to its statistics.

    Args:
        reference: of the task's fit, where it has one.
    """
    logits, off = _differences(net, x, task)
    if not off:
        return logits, torch.zeros(len(x), 0)
    if reference is not None:
        parts = reference.to(x.device).split([norm.num_features for norm, _ in off])
        off = [(norm, means - part) for (norm, means), part in zip(off, parts, strict=True)]
    distances = [(means.square() / (_there(norm.running_var) + norm.eps)).mean(1) for norm, means in off]
    return logits, torch.stack(distances, 1).clamp_min(1e-12).log()


@torch.no_grad()
def measure_fit(net: ContinualNet, task: Task, settings: TrainSettings) -> Fit | None:
    """How well the task's own images fit its statistics; None for a network that has none."""
    if not layers_of(net):
        return None
    was_training, device = net.training, next(net.parameters()).device

    def some(images: Images) -> Iterator[Tensor]:
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(settings.seed))[:_FITTED]
        return (task.inputs(pixels) for pixels, _ in batches(images, settings.batch_size, device, order))

    def distances(images: Images) -> Tensor:
        return torch.cat([logits_and_distances(net, x, task.name, reference)[1] for x in some(images)]).cpu()

    net.eval()
    reference = None
    if not any(key.endswith(".running_var") for key in net.task_state_dict(task.name)):
        off = [torch.cat([means for _, means in _differences(net, x, task.name)[1]], 1) for x in some(task.train)]
        reference = torch.cat(off).mean(0).cpu()
    fit = Fit.of(distances(task.train), distances(task.test), reference)
    net.train(was_training)
    return fit


def layers_of(net: ContinualNet) -> list[_BatchNorm]:
    """The batch norms that are looked at: those that keep moments."""
    return [m for m in net.backbone.modules() if isinstance(m, _BatchNorm) and m.running_mean is not None]


def _differences(net: ContinualNet, x: Tensor, task: str) -> tuple[Tensor, list[tuple[_BatchNorm, Tensor]]]:
    """Logits under a task's state, and how far channel means [images, channels] are from the running ones, layer by
    layer as they are reached.
    """
    with _looking(net) as found:
        logits = net(x, task)
    return logits, found


@contextmanager
def _looking(net: ContinualNet) -> Iterator[list[tuple[_BatchNorm, Tensor]]]:
    found: list[tuple[_BatchNorm, Tensor]] = []

    def look(norm: _BatchNorm, inputs: tuple[Tensor, ...]) -> None:
        x = inputs[0].float()
        means = x.mean(tuple(range(2, x.dim()))) if x.dim() > 2 else x
        found.append((norm, means - _there(norm.running_mean)))

    hooks = [norm.register_forward_pre_hook(look) for norm in layers_of(net)]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def _there(moments: Tensor | None) -> Tensor:
    assert moments is not None
    return moments


def _deviation(values: Tensor) -> Tensor:
    return values.std(0).clamp_min(_LEAST) if len(values) > 1 else torch.ones_like(values[0])
