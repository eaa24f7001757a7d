"""Proposition 1: the mean of a convolution's output depends on its input through the input's mean alone.

For stride 1 and padding K - 1:  AvgPool(f(a)) = AvgPool(f(AvgPool_DP(a))),  AvgPool_DP(a) the map that is constant at
each channel's mean. For stride m the convolution is a sum of m * m convolutions of stride 1, one for each phase of the
padded input and of the kernel, and the equation holds for each with its own phase's mean (appendix A.1). With less
padding, pixels at the border are read by fewer taps than others, and the equation is off by what they differ.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import conv2d, pad

TOLERANCE = 1e-12  # of means around 1, in float64


def check_proposition1(seed: int = 0, cases: int = 60) -> dict[str, Any]:
    """Compare both sides for random sizes, kernels (1 to 5), strides (1 to 3), channels and dilation 1, in float64.

    `worst_violation`: the largest difference of the two means, or of a strided convolution and its sum over phases.
    """
    chance = torch.Generator().manual_seed(seed)
    worst = 0.0
    for _ in range(cases):
        kernel, stride = _draw(1, 5, chance), _draw(1, 3, chance)
        height, width = _draw(kernel, 12, chance), _draw(kernel, 12, chance)
        inputs, outputs = _draw(1, 4, chance), _draw(1, 4, chance)
        a = 1 + torch.randn(3, inputs, height, width, generator=chance, dtype=torch.float64)
        weight = torch.randn(outputs, inputs, kernel, kernel, generator=chance, dtype=torch.float64)
        output = conv2d(a, weight, stride=stride, padding=kernel - 1)
        summed, mean = _by_phases(a, weight, stride, kernel - 1, output.shape[-2:])
        worst = max(worst, (summed - output).abs().max().item(), (mean - output.mean((0, 2, 3))).abs().max().item())
    return {"holds": worst <= TOLERANCE, "worst_violation": worst, "cases": cases}


def _by_phases(a: Tensor, weight: Tensor, stride: int, padding: int, size: torch.Size) -> tuple[Tensor, Tensor]:
    """The sum of stride-1 convolutions over phases, and the mean it has when each phase is set to its own mean."""
    summed = mean = torch.zeros(())
    for part, kernel, inside in _phases(a, weight, stride, padding):
        flat = constant_map(part, inside)
        summed = summed + conv2d(part, kernel)[..., : size[0], : size[1]]
        mean = mean + conv2d(flat, kernel)[..., : size[0], : size[1]].mean((0, 2, 3))
    return summed, mean


def _phases(a: Tensor, weight: Tensor, stride: int, padding: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Phase (p, q) of the padded input with the taps that read it: output[h] = sum over p, u of W[m u + p] a'[m (h + u)
    + p]; and which of its pixels are the input's own.
    """
    # Beyond the padding zeros are free: they are cut off again, but no phase must end early.
    reach = [padding, padding + stride * weight.shape[-1]] * 2
    padded, own = pad(a, reach), pad(torch.ones_like(a[:1, :1]), reach)
    for p in range(min(stride, weight.shape[-2])):
        for q in range(min(stride, weight.shape[-1])):
            places = (..., slice(p, None, stride), slice(q, None, stride))
            yield padded[places], weight[places], own[places]


def constant_map(part: Tensor, inside: Tensor) -> Tensor:
    """AvgPool_DP (Eq. 6): every channel constant at the mean of its own pixels, padding at zero."""
    mean = part.sum((0, 2, 3), keepdim=True) / (len(part) * inside.sum()).clamp(min=1)
    return (mean * inside).expand_as(part)


def _draw(low: int, high: int, chance: torch.Generator) -> int:
    return int(torch.randint(low, high + 1, (), generator=chance))
