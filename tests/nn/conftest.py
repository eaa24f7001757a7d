"""A small residual network, and a few steps of training for one task of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from confitune.nn import ContinualNet

Learn = Callable[..., list[Tensor]]


class Residual(nn.Module):
    """Stem, one block whose shortcut reads the tensor its first convolution reads, a norm after the addition."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.stem_bn = nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.conv, self.bn = nn.Conv2d(6, 8, 3, 2, padding=1, bias=False), nn.BatchNorm2d(8)
        self.shortcut, self.shortcut_bn = nn.Conv2d(6, 8, 1, 2, bias=False), nn.BatchNorm2d(8)
        self.last_bn = nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem_bn(self.stem(x)).relu()
        x = self.bn(self.conv(x)) + self.shortcut_bn(self.shortcut(x))
        return self.last_bn(x).relu().mean((2, 3))


@pytest.fixture
def backbone() -> Callable[[], nn.Module]:
    """Makes the network; the same one for the same global seed."""
    return Residual


@pytest.fixture
def learn() -> Learn:
    """Adds a task (unless it is there), trains everything for a few steps, and finishes it; returns its batches."""

    def learn(
        net: ContinualNet,
        task: str,
        classes: int = 2,
        *,
        seed: int = 0,
        steps: int = 3,
        finish: bool = True,
        size: int = 8,
    ) -> list[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        # Tasks differ in scale and offset, so that one task's moments are wrong for another.
        shape, shift = (6, 3, size, size), (seed % 5) / 2
        batches = [torch.randn(shape, generator=generator) * (1 + seed % 3) + shift for _ in range(steps)]
        labels = torch.arange(6) % classes
        if task not in net.tasks:
            net.add_task(task, classes, generator)
        net.set_task(task)
        net.train()
        optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], 0.2)
        for x in batches:
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x), labels).backward()
            optimizer.step()
        if finish:
            net.finish_task(batches)
        return batches

    return learn
