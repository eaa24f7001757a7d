"""Where the taps of a convolution land on its input, axis by axis.

Padding, stride and dilation act on rows and columns separately, so "which input rows does tap i read, and how often"
is a small matrix per axis. Everything Xconv BN needs (window means, phase means, and the way from one to the other) is
a product of such matrices, for every padding mode alike and without slicing the input K*K times.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Means = Literal["window", "phase"]
PaddingMode = Literal["zeros", "reflect", "replicate", "circular"]
Pair = tuple[int, int]
Size = tuple[int, int]


@dataclass(frozen=True)
class ConvGeometry:
    """Kernel, stride, dilation and padding of a 2-D convolution; entry 0 is rows, entry 1 columns.

    `padding` holds (before, after) per axis, or None for TensorFlow's 'same', whose amount depends on the input's size.
    """

    kernel: Pair = (1, 1)
    stride: Pair = (1, 1)
    dilation: Pair = (1, 1)
    padding: tuple[Pair, Pair] | None = ((0, 0), (0, 0))
    mode: PaddingMode = "zeros"

    def axis_padding(self, axis: int, size: int) -> Pair:
        """Pixels added before and after an axis of `size` pixels.

        >>> ConvGeometry(kernel=(3, 3), stride=(2, 2), padding=None).axis_padding(0, 8)
        (0, 1)
        """
        if self.padding is not None:
            return self.padding[axis]
        outputs = -(-size // self.stride[axis])
        extent = (outputs - 1) * self.stride[axis] + self.dilation[axis] * (self.kernel[axis] - 1) + 1
        total = max(extent - size, 0)
        return total // 2, total - total // 2

    def taps(self, axis: int, size: int) -> Tensor:
        """T[i, h]: the share of output positions at which tap i reads input index h (float64, [K, size]).

        A row sums to 1 unless the tap falls on zero padding somewhere.

        >>> ConvGeometry(kernel=(3, 3), padding=((1, 1), (1, 1))).taps(0, 2)
        tensor([[0.5000, 0.0000],
                [0.5000, 0.5000],
                [0.0000, 0.5000]], dtype=torch.float64)
        """
        before, after = self.axis_padding(axis, size)
        kernel, stride, dilation = self.kernel[axis], self.stride[axis], self.dilation[axis]
        outputs = (size + before + after - dilation * (kernel - 1) - 1) // stride + 1
        if outputs < 1:
            raise ValueError(f"an input of {size} pixels is too small for {self}")
        index = stride * torch.arange(outputs) + dilation * torch.arange(kernel)[:, None] - before
        source, inside = _source_index(index, size, self.mode)
        shares = torch.zeros(kernel, size, dtype=torch.float64)
        return shares.scatter_add_(1, source, inside.double() / outputs)

    def window_from_phases(self, axis: int, size: int) -> Tensor:
        """W[i, a]: how much phase a weighs in what tap i reads, on a map that repeats its phases ([K, stride])."""
        return self.taps(axis, size) @ _phase_membership(size, self.stride[axis])

    def phases(self, axis: int, size: int) -> Tensor:
        """P[a, h] averages the input indices a, a + s, a + 2s, ... ([stride, size]; a phase without pixels is 0)."""
        member = _phase_membership(size, self.stride[axis]).T
        return member / member.sum(1, keepdim=True).clamp(min=1)

    def contains(self, other: ConvGeometry, means: Means) -> tuple[slice, slice] | None:
        """Where `other`'s means stand inside this one's, or None.

        Phase means do where strides agree. Window means do where both have the same output positions and each tap of
        `other` coincides with one of ours: a 1x1 stride-2 shortcut reads exactly what tap (1, 1) of a 3x3 stride-2
        convolution with padding 1 reads.

        >>> big = ConvGeometry(kernel=(3, 3), stride=(2, 2), padding=((1, 1), (1, 1)))
        >>> big.contains(ConvGeometry(kernel=(1, 1), stride=(2, 2)), "window")
        (slice(1, 2, 1), slice(1, 2, 1))
        """
        if self == other or (means == "phase" and self.stride == other.stride):
            return slice(None), slice(None)
        if means == "phase" or self.padding is None or other.padding is None or not self.mode == other.mode == "zeros":
            return None
        rows, columns = (_axis_place(self, other, axis) for axis in (0, 1))
        return (rows, columns) if rows and columns else None


def _axis_place(big: ConvGeometry, small: ConvGeometry, axis: int) -> slice | None:
    (ours, *big_outputs), (theirs, *small_outputs) = (_reads(geometry, axis) for geometry in (big, small))
    found = [ours.index(pixel) for pixel in theirs if pixel in ours]
    if big_outputs != small_outputs or len(found) != len(theirs):
        return None
    return slice(found[0], found[-1] + 1, found[1] - found[0] if len(found) > 1 else 1)


def _reads(geometry: ConvGeometry, axis: int) -> tuple[list[int], int, int]:
    """The pixel that each tap reads at the first output; the stride and the slack, which make the number of outputs."""
    assert geometry.padding is not None
    before, after = geometry.padding[axis]
    pixels = [tap * geometry.dilation[axis] - before for tap in range(geometry.kernel[axis])]
    return pixels, geometry.stride[axis], after - pixels[-1]


def _phase_membership(size: int, stride: int) -> Tensor:
    return (torch.arange(size)[:, None] % stride == torch.arange(stride)).double()


def _source_index(index: Tensor, size: int, mode: PaddingMode) -> tuple[Tensor, Tensor]:
    """The input index behind each padded index, and whether it is one (zero padding has none)."""
    if mode == "zeros":
        inside = (index >= 0) & (index < size)
        return index.clamp(0, size - 1), inside
    if mode == "circular":
        index = index % size
    elif mode == "reflect":
        index = (size - 1) - (index.abs() - (size - 1)).abs()
    return index.clamp(0, size - 1), torch.ones_like(index, dtype=torch.bool)
