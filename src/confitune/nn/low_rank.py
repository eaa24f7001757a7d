"""Window means in fewer numbers.

The K*K window means of a channel differ only by what lies along an image's border, and borders look alike in many
channels: a table [C, K*K] is nearly a product of two thin ones. Of rank 2 it takes 2 numbers a channel instead of K*K.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def is_shorter(shape: tuple[int, ...], rank: int | None) -> bool:
    """Whether a product of this rank has fewer numbers than the table [C, K, K] itself."""
    channels, windows = shape[0], shape[1] * shape[2]
    return rank is not None and rank * (channels + windows) < channels * windows


def factored(tables: Sequence[Tensor], rank: int) -> list[Tensor]:
    """Of each table [C, K, K] the best product of this rank as one tensor [C + K*K, rank]: left factors, then right.

    A singular value decomposition by way of the small matrix [K*K, K*K] of products of columns, in float64: squared,
    float32 tables still fit. That matrix alone is decomposed on the CPU, all in one copy there and one back, because a
    GPU needs longer for it and is waited for each time. Signs are fixed, since libraries choose them.
    """
    flat = [table.detach().flatten(1).double() for table in tables]
    squares = [x.T @ x for x in flat]
    if not squares:
        return []
    found = [_directions(square, rank) for square in _moved(squares, torch.device("cpu"))]
    rights = _moved([right for right, _ in found], flat[0].device)
    roots = _moved([root for _, root in found], flat[0].device)
    lefts = [x @ right / root.where(root > 0, 1) for x, right, root in zip(flat, rights, roots, strict=True)]
    return [
        torch.cat([left, right * root]).to(table)
        for table, left, right, root in zip(tables, lefts, rights, roots, strict=True)
    ]


def _directions(square: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The leading right singular vectors [K*K, rank] of a table, and the roots of its singular values [rank]."""
    values, vectors = torch.linalg.eigh(square)
    right, root = vectors[:, -rank:].flip(1), values[-rank:].flip(0).clamp_min(0) ** 0.25
    largest = right.abs().argmax(0)
    return right * right.gather(0, largest[None]).sign(), root


def _moved(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """To a device, as one."""
    together = torch.cat([tensor.flatten() for tensor in tensors]).to(device)
    parts = together.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def product(factors: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The table [C, K, K] that `factored` approximated."""
    left, right = factors[: shape[0]], factors[shape[0] :]
    return (left @ right.T).reshape(shape)
