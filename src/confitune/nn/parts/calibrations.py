"""Calibrations of frozen convolutions' outputs (CCLL, Singh et al., NeurIPS 2020): a few numbers per channel and task.

Spatial (sec. 3.2): y = x + GroupConv3x3(x). Channel (sec. 3.3): z = y * sigmoid(GroupConv1x1(mean of y over the
plane)). A task-specific batch norm follows.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from confitune.nn.pairing import Flow
from confitune.nn.parts.part import Part

Start = Literal["random", "identity"]

GROUP = 4  # channels of a group: 36 numbers a channel for the 3x3, 172,800 for ResNet18


class Calibrations(Part):
    """A calibration before every batch norm that follows a convolution.

    Args:
        start: of a task: 'random' as layers usually start, with a gate around one half; 'identity' so that nothing
            changes at first: the 3x3 at zero, and the gate scaled to be 1 there.
    """

    name = "calibrations"

    def __init__(self, start: Start = "random") -> None:
        super().__init__()
        self.start_from: Start = start
        self.layers = nn.ModuleList()
        self.names: list[str] = []  # of the batch norms that they stand before

    @property
    def kind(self) -> str:
        return f"Calibrations({self.start_from})"

    def attach(self, backbone: nn.Module, flow: Flow) -> None:
        like = next(backbone.parameters())
        for name, norm in backbone.named_modules():
            if isinstance(norm, nn.BatchNorm2d) and flow.conv_before(name)[0]:
                layer = Calibration(norm.num_features, self.start_from).to(like)
                self.names.append(name)
                self.layers.append(layer)
                norm.register_forward_pre_hook(layer.calibrate_input)

    def live(self, finished: bool) -> dict[str, Tensor]:
        layers = zip(self.names, self.layers, strict=True)
        found = ((name, key, p) for name, layer in layers for key, p in layer.named_parameters())
        return {f"{name}.calibration.{key}": parameter.detach() for name, key, parameter in found}

    def start(self, generator: torch.Generator | None) -> None:
        for layer in self.layers:
            assert isinstance(layer, Calibration)
            layer.reset(generator)

    def offered(self) -> list[nn.Parameter]:
        return list(self.parameters())


class Calibration(nn.Module):
    """Both calibrations of one convolution.

    >>> x = torch.rand(2, 8, 5, 5)
    >>> torch.equal(Calibration(8, "identity")(x), x)
    True
    """

    def __init__(self, channels: int, start: Start) -> None:
        super().__init__()
        self.group = next(size for size in range(GROUP, 0, -1) if channels % size == 0)
        groups = channels // self.group
        self.start: Start = start
        self.spatial = nn.Conv2d(channels, channels, 3, padding=1, groups=groups, bias=False)
        self.gate = nn.Conv2d(channels, channels, 1, groups=groups)
        self.reset(None)

    @torch.no_grad()
    def reset(self, generator: torch.Generator | None) -> None:
        """Start anew; random numbers are drawn on the CPU so that a seed means the same on every device."""
        of_gate = [(parameter, self.group) for parameter in self.gate.parameters()]
        for parameter, inputs in [(self.spatial.weight, 9 * self.group), *of_gate]:
            if self.start == "identity":
                parameter.zero_()
            else:  # as torch initialises convolutions
                bound = inputs**-0.5
                parameter.copy_(torch.empty(parameter.shape).uniform_(-bound, bound, generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        """Calibrate the output of the convolution."""
        y: Tensor = x + self.spatial(x)
        gate = torch.sigmoid(self.gate(y.mean((2, 3), keepdim=True)))
        return y * (2 * gate if self.start == "identity" else gate)

    def calibrate_input(self, norm: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Forward pre-hook of the batch norm that follows."""
        return (self(args[0]), *args[1:])
