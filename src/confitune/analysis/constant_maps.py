"""Proposition 1: the mean of a convolution's output depends on its input through the input's mean alone.

For stride 1 and padding K - 1:  AvgPool(f(a)) = AvgPool(f(AvgPool_DP(a))),  AvgPool_DP(a) the map that is constant at
each channel's mean. For stride m the convolution is a sum of m * m convolutions of stride 1, one for each phase of the
padded input and of the kernel, and the equation holds for each with its own phase's mean (appendix A.1). With less
padding, pixels at the border are read by fewer taps than others, and the equation is off by what they differ.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import conv2d, pad

TOLERANCE = 1e-12  # of means around 1, in float64
_BORDER_SIZES = (4, 8, 16, 32, 64)
_BORDER_KERNEL = 3


@dataclass(frozen=True)
class BorderError:
    """||AvgPool(f(a)) - AvgPool(f(AvgPool_DP(a)))|| / ||AvgPool(f(a))||, averaged over images whose rim is darker."""

    padding: int  # of a 3 x 3 kernel: the proposition asks for 2, networks have 1
    size: int
    error: float


@dataclass(frozen=True)
class Proposition1:
    """What `check_proposition1` found."""

    holds: bool
    worst_violation: float  # largest difference of the two means over all cases and channels
    worst_decomposition: float  # largest difference between a strided convolution and its sum over phases
    cases: int
    borders: list[BorderError]


def check_proposition1(seed: int = 0, cases: int = 60, missing: int = 0) -> Proposition1:
    """Compare both sides for random sizes, kernels (1 to 5), strides (1 to 3), channels and dilation 1, in float64.

    Args:
        missing: rows and columns of padding left out of the K - 1 that the proposition asks for; above 0 it must fail.
    """
    chance = torch.Generator().manual_seed(seed)
    worst = decomposition = 0.0
    for _ in range(cases):
        kernel, stride = _draw(1 + missing, 5, chance), _draw(1, 3, chance)
        height, width = _draw(kernel, 12, chance), _draw(kernel, 12, chance)
        inputs, outputs = _draw(1, 4, chance), _draw(1, 4, chance)
        a = 1 + torch.randn(3, inputs, height, width, generator=chance, dtype=torch.float64)
        weight = torch.randn(outputs, inputs, kernel, kernel, generator=chance, dtype=torch.float64)
        padding = kernel - 1 - missing
        output = conv2d(a, weight, stride=stride, padding=padding)
        summed, mean = _by_phases(a, weight, stride, padding, output.shape[-2:])
        decomposition = max(decomposition, (summed - output).abs().max().item())
        worst = max(worst, (mean - output.mean((0, 2, 3))).abs().max().item())
    borders = [
        BorderError(padding=padding, size=size, error=_border_error(padding, size, chance))
        for padding in range(_BORDER_KERNEL)
        for size in _BORDER_SIZES
    ]
    return Proposition1(
        holds=max(worst, decomposition) <= TOLERANCE,
        worst_violation=worst,
        worst_decomposition=decomposition,
        cases=cases,
        borders=borders,
    )


def constant_map(a: Tensor) -> Tensor:
    """AvgPool_DP: the same shape, every channel constant at its mean over images and positions."""
    return a.mean((0, 2, 3), keepdim=True).expand_as(a)


def _by_phases(a: Tensor, weight: Tensor, stride: int, padding: int, size: torch.Size) -> tuple[Tensor, Tensor]:
    """The sum of stride-1 convolutions over phases, and the mean it has when each phase is set to its own mean."""
    summed = torch.zeros(())
    mean = torch.zeros(())
    for part, kernel, inside in _phases(a, weight, stride, padding):
        flat = _constant_inside(part, inside)
        summed = summed + conv2d(part, kernel)[..., : size[0], : size[1]]
        mean = mean + conv2d(flat, kernel)[..., : size[0], : size[1]].mean((0, 2, 3))
    return summed, mean


def _phases(a: Tensor, weight: Tensor, stride: int, padding: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Phase (p, q) of the padded input with the taps that read it: output[h] = sum over p, u of W[m u + p] a'[m (h + u)
    + p]; and which of its pixels are the input's own.
    """
    reach = [padding] * 4
    # Beyond the padding zeros are free: they are cut off again, but no phase must end early.
    padded = pad(pad(a, reach), [0, stride * weight.shape[-1]] * 2)
    own = pad(pad(torch.ones_like(a[:1, :1]), reach), [0, stride * weight.shape[-1]] * 2)
    for p in range(min(stride, weight.shape[-2])):
        for q in range(min(stride, weight.shape[-1])):
            places = (..., slice(p, None, stride), slice(q, None, stride))
            yield padded[places], weight[places], own[places]


def _constant_inside(part: Tensor, inside: Tensor) -> Tensor:
    """The phase's own pixels at their mean, padding at zero; a phase without pixels is all zero."""
    mean = part.sum((0, 2, 3), keepdim=True) / (len(part) * inside.sum()).clamp(min=1)
    return (mean * inside).expand_as(part)


def _border_error(padding: int, size: int, chance: torch.Generator, draws: int = 20) -> float:
    axis = torch.linspace(-1, 1, size, dtype=torch.float64)
    bright = 2 - axis[:, None] ** 2 - axis[None, :] ** 2  # as photographs are: brighter inside
    errors: list[float] = []
    for _ in range(draws):
        a = bright + torch.randn(4, 3, size, size, generator=chance, dtype=torch.float64)
        weight = torch.randn(8, 3, _BORDER_KERNEL, _BORDER_KERNEL, generator=chance, dtype=torch.float64)
        true, constant = (conv2d(x, weight, padding=padding).mean((0, 2, 3)) for x in (a, constant_map(a)))
        errors.append(float((true - constant).norm() / true.norm()))
    return sum(errors) / draws


def _draw(low: int, high: int, chance: torch.Generator) -> int:
    return int(torch.randint(low, high + 1, (), generator=chance))
