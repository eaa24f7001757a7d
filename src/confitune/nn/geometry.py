"""Where the taps of a convolution land on its input, axis by axis.

Padding, stride and dilation act on rows and columns separately, so "which input rows does tap i read, and how often"
is a small matrix per axis. Everything Xconv BN needs (window means, phase means, and the way from one to the other) is
a product of such matrices, without slicing the input K*K times.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

Means = Literal["window", "phase"]
Pair = tuple[int, ...]  # of rows and of columns, typed as in torch
Size = tuple[int, int]


@dataclass(frozen=True)
class ConvGeometry:
    """Kernel, stride, dilation and zero padding of a 2-D convolution; entry 0 is rows, entry 1 columns.

    `padding` holds (before, after) per axis, or None for TensorFlow's 'same', whose amount depends on the input's size.
    """

    kernel: Pair = (1, 1)
    stride: Pair = (1, 1)
    dilation: Pair = (1, 1)
    padding: tuple[Pair, Pair] | None = ((0, 0), (0, 0))

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

        A row sums to 1 unless the tap falls on padding somewhere.

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
        inside = (index >= 0) & (index < size)
        shares = torch.zeros(kernel, size, dtype=torch.float64)
        return shares.scatter_add_(1, index.clamp(0, size - 1), inside.double() / outputs)

    def phases(self, axis: int, size: int) -> Tensor:
        """P[a, h] averages the input indices a, a + s, a + 2s, ... ([stride, size]; a phase without pixels is 0)."""
        members = self._phase_members(axis, size).T
        return members / members.sum(1, keepdim=True).clamp(min=1)

    def window_from_phases(self, axis: int, size: int) -> Tensor:
        """W[i, a]: how much phase a weighs in what tap i reads, on a map that repeats its phases ([K, stride])."""
        return self.taps(axis, size) @ self._phase_members(axis, size)

    def _phase_members(self, axis: int, size: int) -> Tensor:
        return (torch.arange(size)[:, None] % self.stride[axis] == torch.arange(self.stride[axis])).double()


@lru_cache(maxsize=4096)
def both_axes(of: Callable[[int, int], Tensor], size: Size, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """A geometry's matrices of rows and columns, made and copied once, since a copy would make a GPU wait."""
    return [of(axis, size[axis]).to(device, dtype) for axis in (0, 1)]
