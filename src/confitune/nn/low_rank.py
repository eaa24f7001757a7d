"""Window means in fewer numbers.

The K*K window means of a channel differ only by what lies along an image's border, and borders look alike in many
channels: a table [C, K*K] is nearly a product of two thin ones. Of rank 2 it takes 2 numbers a channel instead of K*K.
"""

from __future__ import annotations

import torch
from torch import Tensor


def is_shorter(shape: tuple[int, ...], rank: int | None) -> bool:
    """Whether a product of this rank has fewer numbers than the table [C, K, K] itself."""
    channels, windows = shape[0], shape[1] * shape[2]
    return rank is not None and rank * (channels + windows) < channels * windows


def factored(table: Tensor, rank: int) -> Tensor:
    """The best product of this rank as one tensor [C + K*K, rank]: left factors, then right ones.

    Computed on the CPU in float64, so that all devices keep the same numbers; signs are fixed for the same reason.
    """
    flat = table.detach().reshape(table.shape[0], -1).cpu().double()
    left, weight, right = torch.linalg.svd(flat, full_matrices=False)
    left, weight, right = left[:, :rank], weight[:rank], right[:rank].T
    largest = right.abs().argmax(0)
    signs = right.gather(0, largest[None]).sign()[0]
    root = weight.sqrt() * signs
    return torch.cat([left * root, right * root]).to(table)


def product(factors: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The table [C, K, K] that `factored` approximated."""
    left, right = factors[: shape[0]], factors[shape[0] :]
    return (left @ right.T).reshape(shape)
