"""A small residual network, a few steps of training for one task of it, and mixed batches against tasks alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from confitune.nn import ContinualNet, XconvNorms, trace_flow

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
        owns: list[str] | None = None,
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
            if net.observer.statistics == "pass":
                net.measure(batches)
            net.finish_task(owns)
        return batches

    return learn


@pytest.fixture
def check_mixed() -> Callable[[ContinualNet, int], None]:
    """Twelve images of all tasks in shuffled order, against each task alone."""

    @torch.no_grad()
    def check(net: ContinualNet, size: int = 8) -> None:
        tasks = {name: len(entry.classes) for name, entry in net.tasks.items()}
        generator, most = torch.Generator().manual_seed(7), max(tasks.values())
        x = torch.randn(12, 3, size, size, generator=generator).to(next(net.parameters()))
        index = (torch.arange(12) % len(tasks))[torch.randperm(12, generator=generator)]
        mixed = net.eval()(x, index)
        assert mixed.shape == (12, most)
        alone = [net(x, task) for task in tasks]
        for place, classes in enumerate(tasks.values()):
            own = index == place
            torch.testing.assert_close(mixed[own, :classes], alone[place][own], rtol=1e-5, atol=1e-5)
            assert (mixed[own, classes:] == float("-inf")).all()
        assert torch.equal(net(x, index), mixed)
        # The tasks differ by more than the tolerance, so that a mix-up would show.
        for place, logits in enumerate(alone[1:]):
            shared = min(logits.shape[1], alone[place].shape[1])
            assert (logits[:, :shared] - alone[place][:, :shared]).abs().max() > 1e-3

    return check


@pytest.fixture
def xconv() -> Callable[..., XconvNorms]:
    """The part alone, attached to a network that need not return feature vectors."""

    def xconv(model: nn.Module, example: Tensor | None = None, **options) -> XconvNorms:
        part = XconvNorms(**options)
        part.attach(model, trace_flow(model, example))
        return part

    return xconv
