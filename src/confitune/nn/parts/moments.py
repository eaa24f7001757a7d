"""Running moments of batch norms of a task's own, apart from the norms' scales and shifts.

For networks where a task may do without: it then uses the moments of pre-training, and is trained with them, batch norm
in evaluation mode. With few images, or ones that look alike, that is the better choice; own moments are where images
are far from those of pre-training.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from confitune.nn.pairing import Flow
from confitune.nn.parts.norms import norm_layers
from confitune.nn.parts.part import Part


class Moments(Part):
    """Means and variances of all batch norms; it stands after `Norms(moments="pretrained")` in a network's parts.

    Attributes:
        own: whether the current task is trained with the moments of its batches.
    """

    name = "moments"

    def __init__(self) -> None:
        super().__init__()
        self.own = True
        self.layers: dict[str, nn.Module] = {}  # not registered: they are the backbone's

    def attach(self, backbone: nn.Module, flow: Flow) -> None:
        norms = norm_layers(backbone).items()
        self.layers = {name: norm for name, norm in norms if getattr(norm, "running_mean", None) is not None}
        self.keep_pretrained_row()

    def live(self, finished: bool) -> dict[str, Tensor]:
        return {
            f"{name}.{field}": layer.get_buffer(field)
            for name, layer in self.layers.items()
            for field in ("running_var", "running_mean")
        }

    def train(self, mode: bool = True) -> Moments:
        """As in torch; batch norms of a task without own moments stay in evaluation mode."""
        super().train(mode)
        for layer in self.layers.values():
            layer.train(mode and self.own)
        return self

    @contextmanager
    def shifts(self) -> Iterator[list[Tensor]]:
        """Within, each pass through a batch norm adds how far its input is from the running moments: the divergence
        (Kullback-Leibler) of the normal distributions with these moments, on average over channels."""
        found: list[Tensor] = []

        def measure(norm: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            axes = [axis for axis in range(inputs[0].ndim) if axis != 1]
            variance, mean = torch.var_mean(inputs[0].float(), axes, correction=0)
            allowed = norm.running_var + norm.eps
            ratio = (variance + norm.eps) / allowed
            away = (mean - norm.running_mean).square() / allowed
            found.append((ratio - 1 - ratio.log() + away).mean() / 2)

        handles = [layer.register_forward_hook(measure) for layer in self.layers.values()]
        try:
            yield found
        finally:
            for handle in handles:
                handle.remove()
