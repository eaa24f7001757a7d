"""A training forward pass and what is measured on the way: batch moments, input statistics, counters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from confitune.nn.geometry import Size
from confitune.nn.slots import TaskSlots
from confitune.nn.whole_batch import WholeBatchNorm
from confitune.ranks import Ranks


class MeasuredSlots(TaskSlots):
    """Slots whose training passes keep statistics: run as they are, compiled, or replayed from a captured graph.

    Attributes:
        part: which share of the last training batch this process had; set where several processes share it.
    """

    part: Tensor

    def __init__(self, backbone: nn.Module, features: int) -> None:
        super().__init__(backbone, features)
        self.compiled: Callable[[Tensor], Tensor] | None = None  # runs the backbone in training where it is set
        self._moves = 0  # counts what tensor versions do not see: graph replays
        self._sums: list[Tensor] = []  # of batch moments, while measuring; then kept for the next time
        self._measuring = False
        self._ranks = Ranks()

    @property
    def ranks(self) -> Ranks:
        """The processes that train this network together, each with its part of every batch; default: one alone.

        Batch moments and input statistics are then those of whole batches. All processes do the same to their copies
        of the network, in the same order; saving its state is part of that.
        """
        return self._ranks

    @ranks.setter
    def ranks(self, ranks: Ranks) -> None:
        self._ranks = ranks
        for statistics in self._memory.statistics.values():
            statistics.ranks = ranks

    @torch.no_grad()
    def measure(self, batches: Iterable[Tensor], forward: Callable[[Tensor], object] | None = None) -> None:
        """Statistics of the current task with the current weights: a cumulative average over `batches`.

        In training mode, because batch moments are part of what was trained.

        Args:
            batches: inputs, or whatever `forward` takes.
            forward: takes a batch through this network, preprocessed, compiled or captured; default: the network.
        """
        was_training, norms = self.training, [m for m in self._memory.norms.values() if m.track_running_stats]
        statistics = list(self._memory.statistics.values())
        momenta, tracked = [norm.momentum for norm in norms], [s.tracking for s in statistics]
        moments = [moment for norm in norms for moment in moments_of(norm)]
        if [(s.device, s.dtype) for s in self._sums] != [(m.device, m.dtype) for m in moments]:
            self._sums = [torch.empty_like(moment) for moment in moments]
        self.track(True)
        self._reset_statistics()
        self.train()
        batches_seen = 0
        try:
            for s in statistics:
                s.cumulative = True
            for norm in norms:
                norm.momentum = 1.0  # running moments become the batch's own; `forward` adds them up
            if self._sums:
                torch._foreach_zero_(self._sums)
            self._measuring = True
            for batch in batches:
                (forward or self)(batch)
                batches_seen += 1
            if batches_seen:
                torch._foreach_div_(self._sums, batches_seen)
                torch._foreach_copy_(moments, self._sums)
        finally:
            for s in statistics:
                s.fold()  # while it is still known to be a sum
            self._measuring = False
            for norm, momentum in zip(norms, momenta, strict=True):
                norm.momentum = momentum
            for s, tracking in zip(statistics, tracked, strict=True):
                s.cumulative = s.momentum is None
                s.tracking = tracking
            self.train(was_training)

    def track(self, on: bool) -> None:
        """Switch the input statistics on or off; an exponential average needs only a task's last steps."""
        for statistics in self._memory.statistics.values():
            statistics.tracking = on

    @contextmanager
    def untracked(self) -> Iterator[None]:
        """Within, training passes leave the input statistics and the batch norms' running moments as they are."""
        statistics = list(self._memory.statistics.values())
        tracked, buffers = [s.tracking for s in statistics], list(self.backbone.buffers())
        before = [buffer.clone() for buffer in buffers]
        self.track(False)
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, value in zip(buffers, before, strict=True):
                    buffer.copy_(value)
            for s, tracking in zip(statistics, tracked, strict=True):
                s.tracking = tracking

    @property
    def sizes_known(self) -> bool:
        """Whether every input statistic that is tracked has seen its tensor's size."""
        return all(s.size is not None for s in self._memory.statistics.values() if s.tracking)

    def remembered(self) -> tuple[Size | None, list[Size | None]]:
        """What Python remembers of a training step besides tensors: the sizes it saw."""
        return self._image_size, [statistics.size for statistics in self._memory.statistics.values()]

    def replayed(self, remembered: tuple[Size | None, list[Size | None]]) -> None:
        """Say that a training step ran as a captured graph, unseen by Python: weights and statistics moved.

        Args:
            remembered: from right after the capture.
        """
        self._moves += 1
        self._image_size, sizes = remembered
        for statistics, size in zip(self._memory.statistics.values(), sizes, strict=True):
            if statistics.tracking and statistics.size is None and size is not None:
                statistics.resize(size)
        self._count_batch()

    def batch_counts(self) -> list[tuple[int, int]]:
        """What Python counts in a training step, for `set_batch_counts` to undo."""
        return [statistics.counts for statistics in self._memory.statistics.values()]

    def set_batch_counts(self, counts: list[tuple[int, int]]) -> None:
        """As they were."""
        for statistics, before in zip(self._memory.statistics.values(), counts, strict=True):
            statistics.counts = before

    def _count_batch(self) -> None:
        for statistics in self._memory.statistics.values():
            if statistics.tracking:
                statistics.count()

    def _reset_statistics(self) -> None:
        for statistics in self._memory.statistics.values():
            statistics.reset()
        self._image_size = None

    def _train_backbone(self, x: Tensor) -> Tensor:
        with self._counters_aside(), self._whole_batch(x):
            if self.compiled is not None:
                features = self.compiled(x)
                self._count_batch()
            else:
                features = self.backbone(x)
        if self._measuring:
            norms = [norm for norm in self._memory.norms.values() if norm.track_running_stats]
            torch._foreach_add_(self._sums, [moment for norm in norms for moment in moments_of(norm)])
        return features

    @contextmanager
    def _whole_batch(self, x: Tensor) -> Iterator[None]:
        """Within, what is measured on the way is the whole batch's, of which other processes have the rest."""
        if not self.ranks.several:
            yield
            return
        self.part = self.ranks.share(len(x), x.device)
        for statistics in self._memory.statistics.values():
            statistics.part = self.part
        with WholeBatchNorm(self.ranks):
            yield

    @contextmanager
    def _counters_aside(self) -> Iterator[None]:
        """Batch norms count their batches one kernel each, and use it only without a momentum: count in one instead."""
        norms = [m for m in self._batch_norms() if m.training and m.momentum is not None]
        counted = [(norm, norm.num_batches_tracked) for norm in norms if norm.num_batches_tracked is not None]
        for norm, _ in counted:
            norm.num_batches_tracked = None
        try:
            yield
        finally:
            for norm, counter in counted:
                norm.num_batches_tracked = counter
        if counted:
            torch._foreach_add_([counter for _, counter in counted], 1)

    def _batch_norms(self) -> list[_BatchNorm]:
        return [module for module in self.backbone.modules() if isinstance(module, _BatchNorm)]

    def norm_parameters(self) -> list[nn.Parameter]:
        """Affine parameters of all batch norms."""
        return [p for norm in self._batch_norms() for p in norm.parameters(recurse=False)]

    def conv_parameters(self) -> list[nn.Parameter]:
        """Everything else in the backbone: convolutions, and Linear layers if there are any."""
        other = set(map(id, [*self.norm_parameters(), *self.calibration_parameters()]))
        return [p for p in self.backbone.parameters() if id(p) not in other]

    def calibration_parameters(self) -> list[nn.Parameter]:
        """The small convolutions of a 'calibrated' network."""
        found = [norm.calibrated_by for norm in self._memory.norms.values()]
        return [p for calibration in found if calibration is not None for p in calibration.parameters()]


def moments_of(norm: _BatchNorm) -> tuple[Tensor, Tensor]:
    """The running mean and variance of a batch norm that keeps them."""
    assert norm.running_mean is not None
    assert norm.running_var is not None
    return norm.running_mean, norm.running_var
