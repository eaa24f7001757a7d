"""What is kept of every task: one packed row of numbers each.

The network has one live slot (the batch norms' own parameters and buffers, the input statistics, a head) at addresses
that never change. A row is that slot, flattened. Switching tasks copies rows in and out of the slot; nothing is ever
swapped, so captured graphs, memory-mapped rows and distributed wrappers stay valid.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from confitune.errors import ConfituneError
from confitune.nn.geometry import Size
from confitune.nn.input_means import InputMeans
from confitune.nn.low_rank import factored, is_shorter, product
from confitune.nn.variance import VarianceDrift
from confitune.nn.xconv import TaskNorm, XconvNorm


@dataclass
class TaskEntry:
    """One task: its classes and its packed row (batch-norm state, input statistics, then the head)."""

    classes: tuple[str, ...]
    row: Tensor
    finished: bool = False
    image_size: Size | None = None  # of the images its statistics were measured on
    sizes: tuple[Size | None, ...] = ()  # of the tensors the statistics belong to
    batches: tuple[int, ...] = ()  # how many batches the statistics have seen


@dataclass(frozen=True)
class _Slot:
    """One live tensor: an attribute of a module, found anew each time because moving a network replaces buffers."""

    key: str
    module: nn.Module
    attribute: str
    norm: str = ""  # the layer that recovers its mean, if it is of one
    is_table: bool = False  # of input means

    @property
    def drifts(self) -> bool:
        """Whether it is a variance that later tasks move."""
        return bool(self.norm) and self.attribute == "running_var"

    @property
    def tensor(self) -> Tensor:
        tensor = getattr(self.module, self.attribute)
        assert isinstance(tensor, Tensor)
        return tensor.detach()


@dataclass
class TaskMemory:
    """Rows of all tasks and the live slot they are copied to and from.

    A finished task's row has no output mean for layers that recover it; an unfinished task's row has everything.
    """

    norms: dict[str, TaskNorm]
    statistics: dict[str, InputMeans]  # by the name of the first convolution that reads the tensor
    tasks: dict[str, TaskEntry] = field(default_factory=dict)
    drift: VarianceDrift | None = None  # a finished task's variances are relative to it
    rank: int | None = None  # of what is kept of a finished task's tables of input means; None: all of it

    @classmethod
    def of(cls, backbone: nn.Module) -> TaskMemory:
        """The memory for a converted backbone, linked to its layers."""
        norms = {name: module for name, module in backbone.named_modules() if isinstance(module, TaskNorm)}
        conv_names = {module: name for name, module in backbone.named_modules()}
        statistics: dict[str, InputMeans] = {}
        for norm in norms.values():
            if isinstance(norm, XconvNorm) and norm.input_statistics not in statistics.values():
                statistics[conv_names[norm.conv]] = norm.input_statistics
        memory = cls(norms, statistics)
        for norm in norms.values():
            if isinstance(norm, XconvNorm):
                norm._memory = (memory,)
        return memory

    def entry(self, task: str) -> TaskEntry:
        """The entry of a task, or an error that names the tasks there are."""
        if task not in self.tasks:
            known = ", ".join(map(repr, self.tasks)) or "none yet"
            raise ConfituneError(f"no task {task!r}; tasks: {known}. Add it with add_task({task!r}, classes)")
        return self.tasks[task]

    def store(self, entry: TaskEntry, head: nn.Linear, finished: bool) -> None:
        """Pack the live slot into `entry`."""
        for statistics in self.statistics.values():
            statistics.fold()
        parts = [self._kept(slot, finished) for slot in self._slots(finished)]
        entry.row = torch.cat([part.reshape(-1) for part in (*parts, head.weight.detach(), head.bias.detach())])
        entry.finished = finished
        entry.sizes = tuple(statistics.size for statistics in self.statistics.values())
        entry.batches = tuple(statistics.batches for statistics in self.statistics.values())

    @torch.no_grad()
    def load(self, entry: TaskEntry, head: nn.Linear) -> None:
        """Copy a task's row into the live slot; layers that recover their mean keep a stale one until prepared."""
        slots, of_head = self._slots(entry.finished), [head.weight.detach(), head.bias.detach()]
        shapes = [self._kept_shape(slot, entry.finished) for slot in slots]
        *kept, weight, bias = _split(entry.row, [*shapes, *(tuple(part.shape) for part in of_head)])
        values = [self._live(slot, part, entry.finished) for slot, part in zip(slots, kept, strict=True)]
        torch._foreach_copy_([*(slot.tensor for slot in slots), *of_head], [*values, weight, bias])
        for statistics, size, batches in zip(self.statistics.values(), entry.sizes, entry.batches, strict=True):
            statistics.restore(size, batches)

    def named_parts(self, entry: TaskEntry) -> dict[str, Tensor]:
        """The row as named views: keys name layers, never the task, so a saved task can be renamed or moved."""
        features = (entry.row.numel() - self.norm_numbers(entry.finished)) // len(entry.classes) - 1
        shapes = self.shapes(entry.finished, len(entry.classes), features)
        return dict(zip(shapes, _split(entry.row, list(shapes.values())), strict=True))

    def shapes(self, finished: bool, classes: int, features: int) -> dict[str, tuple[int, ...]]:
        """Names and shapes of a row's parts, in their order."""
        norm = {slot.key: self._kept_shape(slot, finished) for slot in self._slots(finished)}
        return {**norm, "head.weight": (classes, features), "head.bias": (classes,)}

    def stored_tables(self, task: str, statistics: InputMeans) -> tuple[list[Tensor], Size | None]:
        """A task's stored tables of one tensor's statistics, and the size they were measured at."""
        entry = self.entry(task)
        place = next(i for i, known in enumerate(self.statistics.values()) if known is statistics)
        name = list(self.statistics)[place]
        if not entry.finished:  # what is stored of it may be older than what is live
            raise ConfituneError(f"task {task!r} is not finished, so its input statistics still move: finish it first")
        parts = self.named_parts(entry)
        slots = {slot.key: slot for slot in self._slots(finished=True)}
        keys = [_table_key(name, table) for table in range(len(statistics.tables))]
        return [self._live(slots[key], parts[key], finished=True) for key in keys], entry.sizes[place]

    def norm_numbers(self, finished: bool) -> int:
        """How many numbers of a row are not the head's."""
        return sum(math.prod(self._kept_shape(slot, finished)) for slot in self._slots(finished))

    def _kept(self, slot: _Slot, finished: bool) -> Tensor:
        """What is kept of a live tensor."""
        if finished and slot.drifts and self.drift is not None:
            return self.drift.relative(slot.norm, slot.tensor)
        rank = self._rank_of(slot, finished)
        return slot.tensor if rank is None else factored(slot.tensor, rank)

    def _live(self, slot: _Slot, kept: Tensor, finished: bool) -> Tensor:
        """What a live tensor is to be for what was kept of it."""
        if finished and slot.drifts and self.drift is not None:
            return self.drift.today(slot.norm, kept)
        return kept if self._rank_of(slot, finished) is None else product(kept, tuple(slot.tensor.shape))

    def _kept_shape(self, slot: _Slot, finished: bool) -> tuple[int, ...]:
        shape, rank = tuple(slot.tensor.shape), self._rank_of(slot, finished)
        return shape if rank is None else (shape[0] + shape[1] * shape[2], rank)

    def _rank_of(self, slot: _Slot, finished: bool) -> int | None:
        """Of the product that a table is kept as; None: it is kept as it is."""
        shorter = finished and slot.is_table and is_shorter(tuple(slot.tensor.shape), self.rank)
        return self.rank if shorter else None

    def _slots(self, finished: bool) -> list[_Slot]:
        slots = []
        for name, norm in self.norms.items():
            recovers = isinstance(norm, XconvNorm)
            fields = ["weight", "bias", "running_var"] + ([] if recovers and finished else ["running_mean"])
            slots += [
                _Slot(f"{name}.{f}", norm, f, norm=name if recovers else "")
                for f in fields
                if getattr(norm, f) is not None
            ]
            calibration = norm.calibrated_by
            if calibration is not None:
                spatial, gate = calibration.spatial, calibration.gate
                for part, module, field in (
                    ("spatial.weight", spatial, "weight"),
                    ("gate.weight", gate, "weight"),
                    ("gate.bias", gate, "bias"),
                ):
                    slots.append(_Slot(f"{name}.calibration.{part}", module, field))
        for name, statistics in self.statistics.items():
            slots += [
                _Slot(_table_key(name, table), statistics, f"table{table}", is_table=True)
                for table in range(len(statistics.tables))
            ]
        return slots


def _table_key(conv: str, table: int) -> str:
    return f"{conv}.input_means" + (f".{table}" if table else "")


def _split(row: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    sizes = [math.prod(shape) for shape in shapes]
    if sum(sizes) != row.numel():
        raise ConfituneError(f"a task's row has {row.numel()} numbers, this network keeps {sum(sizes)}")
    return [part.view(shape) for part, shape in zip(row.split(sizes), shapes, strict=True)]
