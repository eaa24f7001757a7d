"""Window means in fewer numbers.

The K*K window means of a channel differ only by what lies along an image's border, and borders look alike in many
channels: a table [C, K*K] is nearly a product of two thin ones. Of rank 2 it takes 2 numbers a channel instead of K*K.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence


def is_shorter(shape: tuple[int, ...], rank: int | None) -> bool:
    """Whether a product of this rank has fewer numbers than the table [C, K, K] itself."""
    channels, windows = shape[0], shape[1] * shape[2]
    return rank is not None and rank * (channels + windows) < channels * windows


def factored(tables: Sequence[Tensor], rank: int) -> list[Tensor]:
    """Of each table [C, K, K] the best product of this rank as one tensor [C + K*K, rank]: left factors, then right.

    A singular value decomposition by way of the products of a table's columns, or of its rows where these are fewer: a
    small square matrix, in float64, which has room for squares of float32. It alone is decomposed on the CPU: a GPU
    takes longer for it. Tables with matrices of one size go together.
    """
    found: dict[int, Tensor] = {}
    for size in sorted({_shorter_side(table) for table in tables}):
        alike = [place for place, table in enumerate(tables) if _shorter_side(table) == size]
        found.update(zip(alike, _factored_alike([tables[place] for place in alike], rank), strict=True))
    return [found[place] for place in range(len(tables))]


def _shorter_side(table: Tensor) -> int:
    return min(table.shape[0], table.shape[1] * table.shape[2])


def _factored_alike(tables: Sequence[Tensor], rank: int) -> list[Tensor]:
    """The same for tables with the same shorter side."""
    flat = [table.detach().flatten(1) for table in tables]
    tall = pad_sequence([x if x.shape[0] >= x.shape[1] else x.T for x in flat], batch_first=True).double()
    values, vectors = torch.linalg.eigh((tall.mT @ tall).cpu())
    short, roots = vectors[:, :, -rank:].flip(2), values[:, None, -rank:].flip(2).clamp_min(0) ** 0.25
    short = short * short.gather(1, short.abs().argmax(1, keepdim=True)).sign()  # libraries choose signs
    short, roots = torch.cat([short, roots], 1).to(tall.device).split([short.shape[1], 1], 1)
    long = (tall @ short / roots.where(roots > 0, 1)).to(tables[0])
    short = (short * roots).to(tables[0])
    factors = []
    for place, x in enumerate(flat):
        both = long[place, : max(x.shape)], short[place]
        factors.append(torch.cat(both if x.shape[0] >= x.shape[1] else both[::-1]))
    return factors


def product(factors: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The table [C, K, K] that `factored` approximated."""
    left, right = factors[: shape[0]], factors[shape[0] :]
    return (left @ right.T).reshape(shape)
