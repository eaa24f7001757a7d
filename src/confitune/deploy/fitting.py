"""How well an image fits a task's statistics: what the guess of a task rests on.

A task's batch norms know the mean and the variance of each channel over the task's images. Under the task's own state,
an image of the task has channel means near those; another image has not. A layer's distance is the squared difference
in units of the variance, averaged over channels; its logarithm is compared with what the task's training images had
when it was learned, the deviations are averaged over layers, and the average is compared with that of images of the
task which it was not trained on. That takes one forward pass for each task, and two numbers a layer to remember.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from confitune.nn import ContinualNet

_KEYS = ("fit.mean", "fit.std", "fit.usual", "fit.spread")
_LEAST = 1e-3  # deviation that is believed


@dataclass(frozen=True)
class Fit:
    """What a task's own images had.

    Args:
        mean: of the log distance, by layer, of training images.
        std: likewise.
        usual: what the deviations of new images are on average.
        spread: how much that varies from image to image.
    """

    mean: Tensor
    std: Tensor
    usual: Tensor
    spread: Tensor

    @classmethod
    def of(cls, trained: Tensor, new: Tensor) -> Fit:
        """From log distances [images, layers] of images that the task was trained on, and of others."""
        mean, std = trained.mean(0), _deviation(trained)
        off = ((new - mean) / std).mean(1)
        return cls(mean, std, off.mean(), _deviation(off))

    def misfit(self, distances: Tensor) -> Tensor:
        """How much worse images fit than the task's own, in units of how those differ: 0 is usual, 3 is rare."""
        return (((distances - self.mean) / self.std).mean(1) - self.usual) / self.spread

    def state(self) -> dict[str, Tensor]:
        """As named tensors, to be stored with the task's."""
        return dict(zip(_KEYS, (self.mean, self.std, self.usual, self.spread), strict=True))

    @classmethod
    def from_state(cls, state: Mapping[str, Tensor], layers: int) -> Fit | None:
        """A copy of named tensors, which may be those of a file; None where they are not those of so many layers."""
        shapes = [tuple(state[key].shape) if key in state else None for key in _KEYS]
        return cls(*(state[key].clone() for key in _KEYS)) if shapes == [(layers,), (layers,), (), ()] else None


@torch.no_grad()
def logits_and_distances(net: ContinualNet, x: Tensor, task: str) -> tuple[Tensor, Tensor]:
    """Logits under a task's state, and the log distances [images, layers] to its statistics."""
    with _looking(net) as distances:
        logits = net(x, task)
    return logits, torch.stack(distances, 1).clamp_min(1e-12).log()


def layers_of(net: ContinualNet) -> list[_BatchNorm]:
    """The batch norms that are looked at."""
    return [module for module in net.backbone.modules() if isinstance(module, _BatchNorm)]


@contextmanager
def _looking(net: ContinualNet) -> Iterator[list[Tensor]]:
    found: list[Tensor] = []

    def look(norm: _BatchNorm, inputs: tuple[Tensor, ...]) -> None:
        x = inputs[0].float()
        means = x.mean(tuple(range(2, x.dim()))) if x.dim() > 2 else x
        assert norm.running_mean is not None
        assert norm.running_var is not None
        found.append(((means - norm.running_mean).square() / (norm.running_var + norm.eps)).mean(1))

    hooks = [norm.register_forward_pre_hook(look) for norm in layers_of(net)]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def _deviation(values: Tensor) -> Tensor:
    return values.std(0).clamp_min(_LEAST) if len(values) > 1 else torch.ones_like(values[0])
