"""A training forward pass and what is measured on the way: batch moments, input statistics, counters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import islice

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from confitune.errors import ConfituneError
from confitune.nn.geometry import Size
from confitune.nn.lanes import Lane, forked, moments_of
from confitune.nn.slots import TaskSlots
from confitune.nn.whole_batch import WholeBatchNorm
from confitune.nn.xconv import TaskNorm
from confitune.ranks import Ranks


class InfiniteError(ConfituneError):
    """What was measured is not finite."""


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
        self._lanes: list[Lane] = []  # likewise
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
        if self._memory.drift is not None:
            self._memory.drift.ranks = ranks

    @torch.no_grad()
    def measure(
        self, batches: Iterable[Tensor], forward: Callable[..., object] | None = None, at_once: int = 1
    ) -> None:
        """Statistics of the current task with the current weights: a cumulative average over `batches`.

        In training mode, because batch moments are part of what was trained.

        Args:
            batches: inputs, or whatever `forward` takes.
            forward: takes batches through this network, preprocessed or captured: one by calling it, up to `at_once` by
                `take_in`; default: the network.
            at_once: how many it is given; the result is the same, bit for bit.

        Raises:
            InfiniteError: some statistic is not finite; all are then as if nothing had been measured.
        """
        self._require_finite(self._measure(batches, forward, at_once))

    def _measure(self, batches: Iterable[Tensor], forward: Callable[..., object] | None, at_once: int) -> Tensor | None:
        """The same without waiting for the device: whether all is finite, as a tensor (None: there is nothing)."""
        was_training, norms = self.training, self._measured_norms()
        statistics = list(self._memory.statistics.values())
        momenta = [norm.momentum for norm in norms]
        moments = [moment for norm in norms for moment in moments_of(norm)]
        if [(s.device, s.dtype) for s in self._sums] != [(m.device, m.dtype) for m in moments]:
            self._sums, self._lanes = [torch.empty_like(moment) for moment in moments], []
        self._image_size = None
        batches_seen = 0
        try:
            self.train()
            for norm in norms:
                norm.momentum = 1.0  # running moments become the batch's own, to be added up here
            if self._sums:
                torch._foreach_zero_(self._sums)
            with ExitStack() as stack:
                for s in statistics:
                    stack.enter_context(s.averaging())
                for group in _groups(batches, at_once):
                    (forward or self)(*group)
                    self._add_up(len(group))
                    batches_seen += len(group)
            if batches_seen and self._sums:
                torch._foreach_div_(self._sums, batches_seen)
                torch._foreach_copy_(moments, self._sums)
        finally:
            for norm, momentum in zip(norms, momenta, strict=True):
                norm.momentum = momentum
            self.train(was_training)
        measured = [*moments, *(table for s in statistics for table in s.tables)]
        return torch.stack(torch._foreach_norm(measured, float("inf"))).isfinite().all() if measured else None

    @torch.no_grad()
    def _require_finite(self, finite: Tensor | None) -> None:
        """Wait for what `_measure` said; where it is bad, forget all of it and raise."""
        if finite is None or bool(finite):
            return
        for norm in self._measured_norms():
            mean, var = moments_of(norm)
            mean.zero_()
            var.fill_(1)
        for moment in (moment for lane in self._lanes for moment in lane.moments):
            moment.zero_()  # what a new batch replaces counts 0 times, which is NaN for what is not finite
        self._reset_statistics()
        raise InfiniteError(
            f"the statistics of task {self.current_task!r} are not finite: its weights have outgrown what batch norm "
            "can follow, try a smaller learning rate"
        )

    def take_in(self, *inputs: Callable[[], Tensor]) -> None:
        """Within `measure`: batches through the backbone for their statistics alone, captured ones at the same time.

        Args:
            inputs: each makes the inputs of one batch.
        """
        norms, statistics = self._measured_norms(), list(self._memory.statistics.values())
        while len(self._lanes) < len(inputs) - 1:
            self._lanes.append(Lane(len(self._lanes) + 1, norms, statistics))
        with self._counters_aside(len(inputs)), forked(len(inputs)) as streams:
            for number, (make, stream) in enumerate(zip(inputs, streams, strict=True)):
                with torch.cuda.stream(stream), self._lanes[number - 1].used() if number else nullcontext():
                    x = make()
                    self._image_size = plane_of(x)
                    self._run_backbone(x)

    def _add_up(self, batches: int) -> None:
        """Take in what the last so many batches left in the network's own buffers and in lanes."""
        if self._sums:
            torch._foreach_add_(self._sums, [m for norm in self._measured_norms() for m in moments_of(norm)])
        for lane in self._lanes[: batches - 1]:
            if self._sums:
                torch._foreach_add_(self._sums, lane.moments)
            if planes := lane.planes():
                torch._foreach_add_(lane.planes(0), planes)
            self._count_batch()

    def _measured_norms(self) -> list[TaskNorm]:
        return [norm for norm in self._memory.norms.values() if norm.track_running_stats]

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
        with self._counters_aside(1):
            return self._run_backbone(x)

    def _run_backbone(self, x: Tensor) -> Tensor:
        with self._whole_batch(x):
            if self.compiled is None:
                features: Tensor = self.backbone(x)
                return features
            features = self.compiled(x)
            self._count_batch()
            return features

    @contextmanager
    def _whole_batch(self, x: Tensor) -> Iterator[None]:
        """Within, what is measured on the way is the whole batch's, of which other processes have the rest."""
        if not (self.ranks.several and self._measures()):
            yield
            return
        self.part = self.ranks.share(len(x), x.device)
        for statistics in self._memory.statistics.values():
            statistics.part = self.part
        with WholeBatchNorm(self.ranks):
            yield

    def _measures(self) -> bool:
        """Whether a pass leaves something behind, or uses moments of its batch."""
        parts = (*self._memory.statistics.values(), *self._batch_norms())
        return self.training or any(part.training for part in parts)

    @contextmanager
    def _counters_aside(self, batches: int) -> Iterator[None]:
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
            torch._foreach_add_([counter for _, counter in counted], batches)

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


def plane_of(x: Tensor) -> Size | None:
    """The size of images; features without a plane have none."""
    return (x.shape[-2], x.shape[-1]) if x.dim() == 4 else None


def _groups(batches: Iterable[Tensor], size: int) -> Iterator[list[Tensor]]:
    left = iter(batches)
    while group := list(islice(left, size)):
        yield group
