"""Batches of a task's images, on the device and ready for the network."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from confitune.tasks import Images, Preprocess


def resident(images: Images, device: torch.device) -> Images:
    """A GPU's own copy of the pixels, gathered once; the CPU reads the store where it lies."""
    if device.type == "cpu":
        return images
    pixels, labels = images.batch(torch.arange(len(images)))
    rows = torch.arange(len(images), device=device)
    return Images(pixels.to(device), rows, labels.to(device))


def batches(
    images: Images, preprocess: Preprocess, size: int, device: torch.device, order: Tensor | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Network inputs and labels in batches of `size`, in `order` (default: as stored), the rest included."""
    order = torch.arange(len(images)) if order is None else order
    order = order.to(images.rows.device)
    for positions in order.split(size):
        pixels, labels = images.batch(positions)
        x = preprocess(pixels.to(device)).contiguous(memory_format=torch.channels_last)
        yield x, labels.to(device)
