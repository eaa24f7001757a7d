"""Calibration of a frozen convolution's output (CCLL, Singh et al., NeurIPS 2020): a few numbers per task and channel.

Spatial: y = x + GroupConv3x3(x). Channel: z = y * sigmoid(GroupConv1x1(mean of y over the plane)). A task-specific
batch norm follows, which is why a calibration lives inside one.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

Start = Literal["random", "identity"]

GROUP = 4  # channels of a group: 36 numbers a channel for the 3x3, 172,800 for ResNet18


class Calibration(nn.Module):
    """Both calibrations of one convolution.

    Args:
        channels: of the convolution's output.
        start: 'random' as layers usually start, with a gate around one half; 'identity' so that nothing changes at
            first: the 3x3 at zero, and the gate scaled to be 1 there.

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
