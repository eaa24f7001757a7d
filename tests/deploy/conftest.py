"""Networks with two finished tasks whose convolutions have moved since, so that every mean has to be recovered; and
bundles that have learned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from confitune.nn import ContinualNet, Head, Part, XconvNorms, build_model
from deploy.taught import backbone, decoded, new_bundle, photos, pictures, real, taught, taught_once, teach
from program import confitune

__all__ = [
    "backbone",
    "confitune",
    "decoded",
    "new_bundle",
    "photos",
    "pictures",
    "real",
    "taught",
    "taught_once",
    "teach",
]


Trained = Callable[..., ContinualNet]


@pytest.fixture
def images() -> Callable[..., Tensor]:
    """Makes a batch; the same one for the same seed."""

    def images(count: int = 10, size: int = 64, *, seed: int = 7, channels: int = 3) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        colour = torch.randn(count, channels, 1, 1, generator=generator)  # pure noise looks alike to a deep network
        return colour + torch.randn(count, channels, size, size, generator=generator)

    return images


@pytest.fixture
def trained(images: Callable[..., Tensor]) -> Trained:
    """Makes a network of a name or a module, with the tasks 'pets' (3 classes) and 'birds' (4), in training mode.

    Its tasks own a head and `parts`; without any, Xconv norms.
    """

    def trained(
        model: str | nn.Module,
        parts: Sequence[Part] | None = None,
        *,
        size: int = 64,
        channels: int = 3,
        **options: Any,
    ) -> ContinualNet:
        torch.manual_seed(0)
        options.setdefault("momentum", 1.0)  # the last batch counts: the variance of 1 from the start is far too large
        own = [*([XconvNorms()] if parts is None else parts), Head()]
        net = ContinualNet(build_model(model) if isinstance(model, str) else model, own, **options)
        with torch.no_grad():
            for parameter in net.groups()["norms"]:
                parameter.add_(0.2 * torch.randn_like(parameter))
            for seed, (task, classes) in enumerate({"pets": ["cat", "dog", "hare"], "birds": 4}.items()):
                net.add_task(task, classes)
                net.train()
                for parameter in net.groups().get("deltas", ()):
                    parameter.add_(0.1 * torch.randn_like(parameter))
                for step in range(3):
                    # Tasks differ in scale and offset, so that one task's moments are wrong for another.
                    net((1 + seed) * images(4, size, seed=10 * seed + step, channels=channels) + seed)
                net.finish_task()
                for parameter in net.groups()["weights"]:
                    parameter.mul_(1 + 0.1 * torch.randn_like(parameter))
        return net

    return trained
