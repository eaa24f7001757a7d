"""Statistics of training batches: what a network takes of them, and who says when.

Batch norms keep running moments, and Xconv BN (ConFiT, sec. 3.2) means of what convolutions read. `Observer` is the one
interface to all of it: which batches count, batches that Python does not see (replayed or compiled code), and the pass
over a task's images with the final weights.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from confitune.errors import ConfituneError
from confitune.nn.geometry import Size
from confitune.nn.parts.input_means import Statistics, count, fold, take_in
from confitune.nn.parts.norms import batch_norms
from confitune.nn.parts.part import Part

Seen = tuple[Size | None, tuple[tuple[Size | None, int], ...]]


class Observer:
    """Of one network, with the parts that take means of what convolutions read; their `statistics` say when."""

    def __init__(self, backbone: nn.Module, parts: Sequence[Part]) -> None:
        self._backbone = backbone
        self._inputs = [inputs for part in parts for inputs in part.input_means]
        self.statistics: Statistics = parts[0].statistics if parts else "running"
        self.image_size: Size | None = None  # of the current task's training images
        self.recording = False  # whether passes go into a graph, and count when that runs
        self.track(self.statistics == "running")

    @property
    def tracks(self) -> bool:
        """Whether training steps have input means to take."""
        return bool(self._inputs) and self.statistics == "running"

    def track(self, on: bool) -> None:
        """Whether the next training batches count for the input means."""
        self._tracking = on
        for inputs in self._inputs:
            inputs.tracking = on

    @contextmanager
    def untracked(self) -> Iterator[None]:
        """Within, training passes leave input means and running moments as they are."""
        tracked = self._tracking
        buffers = list(self._backbone.buffers())
        before = [buffer.clone() for buffer in buffers]
        self.track(False)
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, value in zip(buffers, before, strict=True):
                    buffer.copy_(value)
            self.track(tracked)

    def fold(self) -> None:
        """Bring all input means up to date."""
        fold(self._inputs)

    def through(self, backbone: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """What `backbone` makes of a batch, whose means are taken in together when it is through, not if it raises."""
        tracked = [inputs for inputs in self._inputs if inputs.training and inputs.tracking]
        for inputs in tracked:
            inputs.held, inputs.calls = True, 0
        try:
            features = backbone(x)
        finally:
            for inputs in tracked:
                inputs.held = False
        take_in(tracked)
        if not self.recording:
            count(tracked)
        return features

    def require_batches(self, task: str) -> None:
        """Raise where a task is to be finished whose input means are of no batch."""
        if any(not inputs.batches for inputs in self._inputs):
            before = " and measure(batches) of its images" if self.statistics == "pass" else ""
            raise ConfituneError(f"task {task!r} has seen no training batch: train it{before} before finishing it")

    # ---- batches that Python does not see --------------------------------------------------------------------------

    @property
    def sizes_known(self) -> bool:
        """Whether every input that is tracked has shown its size."""
        return not self._tracking or all(inputs.size is not None for inputs in self._inputs)

    @property
    def seen(self) -> Seen:
        """What Python learned from the last tracked batch, for `replayed`."""
        return self.image_size, tuple((inputs.size, inputs.calls) for inputs in self._inputs)

    def replayed(self, seen: Seen) -> None:
        """A training batch went through a captured graph, right after whose capture `seen` was taken."""
        self.image_size, each = seen
        if self._tracking:
            for inputs, (size, calls) in zip(self._inputs, each, strict=True):
                inputs.size, inputs.calls = inputs.size or size, calls
            count(self._inputs)

    # ---- a pass with the final weights -----------------------------------------------------------------------------

    @torch.no_grad()
    def average(self, batches: Iterable[Any], forward: Callable[[Any], object]) -> Tensor:
        """Make moments and input means averages over whole batches (Eq. 3, Eq. 10); the network is in training mode.

        Returns whether all of it is finite, as a tensor that nobody has waited for.
        """
        norms = [norm for norm in batch_norms(self._backbone) if norm.training]  # others keep what they have
        moments = [m for norm in norms for m in (norm.running_mean, norm.running_var) if m is not None]
        sums = [torch.zeros_like(moment) for moment in moments]
        count = 0
        momenta = [norm.momentum for norm in norms]
        tracked = self._tracking
        try:
            for norm in norms:
                norm.momentum = 1.0  # running moments become the batch's own, to be added up
            for moment in moments:
                moment.zero_()  # what is not finite must not live on
            self.track(True)
            for inputs in self._inputs:
                inputs.restore()
                inputs.cumulative = True
            for batch in batches:
                forward(batch)
                count += 1
                if moments:
                    torch._foreach_add_(sums, moments)
            if count and moments:
                torch._foreach_div_(sums, count)
                torch._foreach_copy_(moments, sums)
        finally:
            for norm, momentum in zip(norms, momenta, strict=True):
                norm.momentum = momentum
            self.track(tracked)
            self.fold()  # while it is still known to be a sum
            for inputs in self._inputs:
                inputs.cumulative = False
        found = [*moments, *(table for inputs in self._inputs for table in inputs.tables)]
        return torch.stack(torch._foreach_norm(found, float("inf"))).isfinite().all() if found else torch.tensor(True)
