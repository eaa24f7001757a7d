"""Augmentation of training batches; the paper uses none."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad


def draw_noise(kind: str, steps: int, batch: int, generator: torch.Generator) -> Tensor | None:
    """What an epoch's augmentation needs of chance, drawn at once: [steps, 3, batch] uniform numbers, or None."""
    return None if kind == "none" else torch.rand(steps, 3, batch, generator=generator)


def augment(x: Tensor, kind: str, noise: Tensor | None) -> Tensor:
    """Flip each image with probability 1/2 ('flip'), and shift it by up to an eighth of its side ('flip-shift').

    Args:
        x: images [N, 3, H, W].
        kind: of augmentation.
        noise: one step's part of `draw_noise`, on the images' device; None leaves the images as they are.
    """
    if noise is None:
        return x
    x = torch.where((noise[0] < 0.5)[:, None, None, None], x.flip(-1), x)
    if kind == "flip":
        return x
    height, width = x.shape[-2:]
    most = max(1, min(height, width) // 8)
    padded = pad(x, (most,) * 4, mode="reflect")
    offsets = (noise[1:] * (2 * most + 1)).long().clamp_(max=2 * most)
    rows = offsets[0][:, None] + torch.arange(height, device=x.device)
    columns = offsets[1][:, None] + torch.arange(width, device=x.device)
    images = torch.arange(len(x), device=x.device)[:, None, None]
    return padded[images, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)
