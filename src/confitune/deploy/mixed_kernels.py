"""What mixed batches need beside the convolutions that all images share, for GPUs.

A changed convolution is W x + B (window * (A x)), with A, B and windows of each image's own, and a batch norm after it
a scale and a shift of each image's. In torch's own operators that would read and write the convolution's output twice
more, which takes longer than the change itself. Here `inner` reads x once for window * (A x), which has only as many
channels as the change has ranks, and `finished` reads and writes the output once for all the rest, a ReLU included.

Images are channels last. What is each image's own is a part of rows that lie equally far apart.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from confitune.nn.geometry import ConvGeometry

_NUMBERS = 4096  # of images that a program reads at once
_CHANNELS = 64  # of the output, in a program
_PIXELS = 128  # of one rank, in a program


def inner(x: Tensor, a: Tensor, windows: Tensor, geometry: ConvGeometry, sides: Sequence[int]) -> Tensor:
    """window * (A x): [N, r, *sides] of images [N, C, H, W], a [N, r, C] and windows [N, r, K * K]."""
    (images, channels, height, width), rank = x.shape, a.shape[1]
    block = triton.next_power_of_2(channels)
    pixels = max(_NUMBERS // block, 1)
    z, found = x.new_empty(images, rank, height, width), x.new_empty(images, rank, *sides)
    project: Any = _project[(triton.cdiv(height * width, pixels), images)]
    top, left = (geometry.axis_padding(axis, size)[0] for axis, size in enumerate((height, width)))
    window: Any = _window[(triton.cdiv(sides[0] * sides[1], _PIXELS), images * rank)]
    where = *geometry.stride, *geometry.dilation, top, left
    with torch.cuda.device_of(x):  # Triton launches on the current GPU, wherever the tensors are
        project(x, a, z, height * width, channels, a.stride(0), rank, pixels, block)
        window(z, windows, found, *sides, height, width, a.stride(0), *where, *geometry.kernel, rank, _PIXELS)
    return found


def finished(
    found: Tensor, b: Tensor, y: Tensor, scale: Tensor | None = None, shift: Tensor | None = None, rectify: bool = False
) -> Tensor:
    """(y + B found) * scale + shift, in place, perhaps without its negative values; `found` is from `inner`.

    Args:
        b: [N, C, r].
        y: what the convolution gave, [N, C, H, W].
        scale: [N, C], as shift.
    """
    images, channels, height, width = y.shape
    pixels = _NUMBERS // _CHANNELS
    finish: Any = _finish[(triton.cdiv(height * width, pixels), images, triton.cdiv(channels, _CHANNELS))]
    norm = [b, b] if scale is None else [scale, shift]
    row, rank = b.stride(0), b.shape[2]
    with torch.cuda.device_of(y):
        finish(y, found, b, *norm, height * width, channels, row, rank, scale is not None, rectify, pixels, _CHANNELS)
    return y


@triton.jit  # type: ignore[untyped-decorator]
def _project(  # type: ignore[no-untyped-def]
    x, a, z, pixels, channels, row, RANK: tl.constexpr, PIXELS: tl.constexpr, CHANNELS: tl.constexpr
):
    image = tl.program_id(1).to(tl.int64)
    pixel, channel = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS), tl.arange(0, CHANNELS)
    here, within = pixel < pixels, channel < channels
    places = x + image * pixels * channels + (pixel[:, None] * channels + channel)
    read = tl.load(places, here[:, None] & within, 0.0)
    for rank in tl.static_range(RANK):
        of_channel = tl.load(a + image * row + (rank * channels + channel), within, 0.0)
        tl.store(z + (image * RANK + rank) * pixels + pixel, tl.sum(read * of_channel, 1), here)


@triton.jit  # type: ignore[untyped-decorator]
def _window(  # type: ignore[no-untyped-def]
    z, windows, found, height, width, in_height, in_width, row, down, across, apart_down, apart_across, top, left,
    HIGH: tl.constexpr, WIDE: tl.constexpr, RANK: tl.constexpr, PIXELS: tl.constexpr,
):  # fmt: skip
    both = tl.program_id(1).to(tl.int64)
    image, rank = both // RANK, both % RANK
    pixel = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    here = pixel < height * width
    total = tl.zeros([PIXELS], tl.float32)
    for i in tl.static_range(HIGH):
        line = (pixel // width) * down - top + i * apart_down
        for j in tl.static_range(WIDE):
            column = (pixel % width) * across - left + j * apart_across
            inside = here & (line >= 0) & (line < in_height) & (column >= 0) & (column < in_width)
            read = tl.load(z + both * in_height * in_width + (line * in_width + column), inside, 0.0)
            total += read * tl.load(windows + image * row + (rank * HIGH * WIDE + i * WIDE + j))
    tl.store(found + both * height * width + pixel, total, here)


@triton.jit  # type: ignore[untyped-decorator]
def _finish(  # type: ignore[no-untyped-def]
    y, found, b, scale, shift, pixels, channels, row,
    RANK: tl.constexpr, NORM: tl.constexpr, RECTIFY: tl.constexpr, PIXELS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    image = tl.program_id(1).to(tl.int64)
    pixel = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    channel = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)
    here, within = pixel < pixels, channel < channels
    places = y + image * pixels * channels + (pixel[:, None] * channels + channel)
    value = tl.load(places, here[:, None] & within)
    for rank in tl.static_range(RANK):
        of_pixel = tl.load(found + (image * RANK + rank) * pixels + pixel, here)
        value += of_pixel[:, None] * tl.load(b + image * row + (channel * RANK + rank), within)
    if NORM:
        value = value * tl.load(scale + image * row + channel, within) + tl.load(shift + image * row + channel, within)
    if RECTIFY:
        value = tl.maximum(value, 0.0)
    tl.store(places, value, here[:, None] & within)
