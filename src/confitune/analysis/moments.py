"""Mean and variance of a tensor that comes in pieces."""

import torch
from torch import Tensor

_SLICE = 32  # images turned into float64 at a time


class Moments:
    """Mean and biased variance per channel of tensors [N, C, ...], taken in piece by piece in float64.

    Each piece's own two-pass moments are merged (Chan, Golub, LeVeque 1983), which loses nothing where a difference of
    mean squares would.

    >>> moments = Moments()
    >>> for piece in torch.arange(6.0).reshape(3, 2).split(2):
    ...     moments.add(piece)
    >>> moments.mean.tolist(), [round(v, 4) for v in moments.variance.tolist()]
    ([2.0, 3.0], [2.6667, 2.6667])
    """

    def __init__(self) -> None:
        self.count = 0
        self.mean = torch.zeros(())
        self._squares = torch.zeros(())  # sum of squared distances from the mean

    @property
    def variance(self) -> Tensor:
        """Biased, as batch norm normalises with."""
        return self._squares / self.count

    def add(self, x: Tensor) -> None:
        """Take in one more piece."""
        for part in x.detach().split(_SLICE):
            axes = [axis for axis in range(part.dim()) if axis != 1]
            variance, mean = torch.var_mean(part.double(), axes, correction=0)
            count = part.numel() // part.shape[1]
            if not self.count:
                self.count, self.mean, self._squares = count, mean, variance * count
                continue
            total, apart = self.count + count, mean - self.mean
            self._squares = self._squares + variance * count + apart.square() * (self.count * count / total)
            self.mean = self.mean + apart * (count / total)
            self.count = total
