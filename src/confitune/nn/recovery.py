"""The mean of a convolution's output, from means of its input (ConFiT, Eq. 11 and its exact form)."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from confitune.nn.geometry import ConvGeometry, Size


def recover_output_mean(weight: Tensor, bias: Tensor | None, window_means: Tensor, groups: int = 1) -> Tensor:
    """mu[o] = bias[o] + sum over c, i, j of W[o, c, i, j] * M[c, i, j], c running over o's group.

    Args:
        weight: [O, C / groups, K, K] (a Linear layer's [O, C] counts as K = 1).
        window_means: M, [C, K, K]: mean over batch and output positions of what tap (i, j) reads.

    Returns:
        [O]. Exact, because a convolution is linear in its input; no assumption about borders is left.
    """
    outputs = weight.shape[0]
    # Multiply and sum rather than a matrix product: that would follow the user's TF32 and autocast settings. Flattened,
    # though it copies weights in the order that convolutions like: the order of a sum must not depend on it.
    grouped = weight.reshape(groups, outputs // groups, -1).to(window_means.dtype)
    mean = (grouped * window_means.reshape(groups, 1, -1)).sum(2).reshape(outputs)
    return mean if bias is None else mean + bias.to(mean.dtype)


def window_means_from_phases(phase_means: Tensor, geometry: ConvGeometry, size: Size) -> Tensor:
    """Window means of the periodic map that phase means define at the input's real size ([C, s, s] -> [C, K, K]).

    Same number as building the map, running the convolution on it and averaging the output (Eq. 11), without the map.
    """
    along = (phase_means.device, phase_means.dtype)
    rows, columns = (on_device(geometry.window_from_phases, axis, size[axis], *along) for axis in (0, 1))
    return rows @ phase_means @ columns.T


@lru_cache(maxsize=4096)
def on_device(
    matrix: Callable[[int, int], Tensor], axis: int, size: int, device: torch.device, dtype: torch.dtype
) -> Tensor:
    """A geometry's matrix of one axis, made and copied once, since a copy would make a GPU wait."""
    return matrix(axis, size).to(device, dtype)
