"""Augmentation of training batches; the paper uses none."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad


def augment(x: Tensor, kind: str, generator: torch.Generator) -> Tensor:
    """Flip each image with probability 1/2 ('flip'), and shift it by up to an eighth of its side ('flip-shift')."""
    if kind == "none":
        return x
    flipped = torch.rand(len(x), generator=generator) < 0.5
    x = torch.where(flipped.to(x.device)[:, None, None, None], x.flip(-1), x)
    if kind == "flip":
        return x
    height, width = x.shape[-2:]
    most = max(1, min(height, width) // 8)
    padded = pad(x, (most,) * 4, mode="reflect")
    offsets = torch.randint(0, 2 * most + 1, (2, len(x)), generator=generator).to(x.device)
    rows = offsets[0][:, None] + torch.arange(height, device=x.device)
    columns = offsets[1][:, None] + torch.arange(width, device=x.device)
    images = torch.arange(len(x), device=x.device)[:, None, None]
    return padded[images, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)
