"""Several batches through one network at the same time, each measured by itself.

The first batch writes to the network's own buffers, every further one to those of its lane. What they add up to, and in
what order, does not depend on how many there are: side by side gives the bits of one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from confitune.nn.input_means import InputMeans


class Lane:
    """Where one more batch leaves its moments and its input means."""

    def __init__(self, number: int, norms: Sequence[_BatchNorm], statistics: Sequence[InputMeans]) -> None:
        self._number, self._norms, self._statistics = number, norms, statistics
        self.moments = [torch.zeros_like(moment) for norm in norms for moment in moments_of(norm)]

    def planes(self, lane: int | None = None) -> list[Tensor]:
        """Where input statistics of a known size take a batch in: in this lane, or in another one (0: their own)."""
        lane = self._number if lane is None else lane
        return [statistics.plane_in(lane) for statistics in self._statistics if statistics.size is not None]

    @contextmanager
    def used(self) -> Iterator[None]:
        """Within, batch norms and input statistics write to this lane."""
        own = [moments_of(norm) for norm in self._norms]
        with ExitStack() as stack:
            for statistics in self._statistics:
                if statistics.size is not None:
                    stack.enter_context(statistics.beside(self._number))
            if planes := self.planes():
                torch._foreach_zero_(planes)
            for norm, mean, var in zip(self._norms, self.moments[::2], self.moments[1::2], strict=True):
                norm.running_mean, norm.running_var = mean, var
            try:
                yield
            finally:
                for norm, (mean, var) in zip(self._norms, own, strict=True):
                    norm.running_mean, norm.running_var = mean, var


@contextmanager
def forked(count: int) -> Iterator[list[torch.cuda.Stream | None]]:
    """Streams for `count` pieces of work that may go on at the same time; None: the current one.

    Only what is being captured is spread over streams: kernel by kernel, one stream is as fast as they can be launched.
    """
    if not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
        yield [None] * count
        return
    here = torch.cuda.current_stream()
    sides = [_side_stream(here.device, number) for number in range(1, count)]
    for side in sides:
        side.wait_stream(here)
    try:
        yield [None, *sides]
    finally:
        for side in sides:
            here.wait_stream(side)


@cache
def _side_stream(device: torch.device, number: int) -> torch.cuda.Stream:
    """The same for all networks: nothing ever runs on it, captured graphs are only shaped by it."""
    return torch.cuda.Stream(device)


def moments_of(norm: _BatchNorm) -> tuple[Tensor, Tensor]:
    """The running mean and variance of a batch norm that keeps them."""
    assert norm.running_mean is not None
    assert norm.running_var is not None
    return norm.running_mean, norm.running_var
