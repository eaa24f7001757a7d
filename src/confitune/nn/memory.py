"""What is kept of every task: one packed row of numbers each.

The network has one live slot (the batch norms' own parameters and buffers, the input statistics, a head) at addresses
that never change. A row is that slot, flattened. Switching tasks copies rows in and out of the slot; nothing is ever
swapped, so captured graphs, memory-mapped rows and distributed wrappers stay valid.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from confitune.errors import ConfituneError
from confitune.nn.geometry import Size
from confitune.nn.input_means import InputMeans
from confitune.nn.low_rank import factored, is_shorter, product
from confitune.nn.pretrained import PretrainedState
from confitune.nn.variance import VarianceDrift
from confitune.nn.xconv import TaskNorm, XconvNorm

# What a row holds of the live slot: of an unfinished task everything, as it is; of a finished one no output means that
# can be recovered, variances in terms of pre-training's time, tables of input means perhaps as products; of the
# pre-trained state everything, variances likewise.
Layout = Literal["unfinished", "finished", "pretrained"]


@dataclass
class TaskEntry:
    """One task: its classes and its packed row (batch-norm state, input statistics, then the head)."""

    classes: tuple[str, ...]
    row: Tensor
    finished: bool = False
    pretrained: bool = False  # it is normalised by the state of pre-training, and its row is a head alone
    image_size: Size | None = None  # of the images its statistics were measured on
    sizes: tuple[Size | None, ...] = ()  # of the tensors the statistics belong to
    batches: tuple[int, ...] = ()  # how many batches the statistics have seen

    @property
    def layout(self) -> Layout:
        """Of its row, where that is more than a head."""
        return "finished" if self.finished else "unfinished"


@dataclass(frozen=True)
class _Slot:
    """One live tensor: an attribute of a module, found anew each time because moving a network replaces buffers."""

    key: str
    module: nn.Module
    attribute: str
    norm: str = ""  # the layer that recovers its mean, if it is of one
    table: tuple[str, int] | None = None  # whose input means it is, and which table of theirs

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
    pretrained: PretrainedState | None = None  # what tasks may share instead of a state of their own
    _slots_of: dict[Layout, list[_Slot]] = field(default_factory=dict)

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

    @property
    def recovering(self) -> dict[str, XconvNorm]:
        """The layers that recover their mean, by name."""
        return {name: norm for name, norm in self.norms.items() if isinstance(norm, XconvNorm)}

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
        entry.finished, entry.pretrained = finished, False
        entry.row = torch.cat([*self._packed(entry.layout), _packed_head(head)])
        entry.sizes = tuple(statistics.size for statistics in self.statistics.values())
        entry.batches = tuple(statistics.batches for statistics in self.statistics.values())

    def store_head(self, entry: TaskEntry, head: nn.Linear) -> None:
        """Finish `entry` with nothing of its own but a head."""
        entry.finished = entry.pretrained = True
        entry.row, entry.sizes, entry.batches = _packed_head(head), (), ()

    @torch.no_grad()
    def load(self, entry: TaskEntry, head: nn.Linear) -> None:
        """Copy a task's row into the live slot; layers that recover their mean keep a stale one until prepared."""
        of_head = [head.weight.detach(), head.bias.detach()]
        numbers = sum(part.numel() for part in of_head)
        if entry.pretrained:
            self._pretrained().load()
        else:
            self.unpack(entry.row[:-numbers], entry.layout)
            for statistics, size, batches in zip(self.statistics.values(), entry.sizes, entry.batches, strict=True):
                statistics.restore(size, batches)
        torch._foreach_copy_(of_head, _split(entry.row[-numbers:], [tuple(part.shape) for part in of_head]))

    def packed(self, layout: Layout) -> Tensor:
        """The live slot without its head as one row."""
        return torch.cat(self._packed(layout))

    def _packed(self, layout: Layout) -> list[Tensor]:
        slots = self._slots(layout)
        values = [slot.tensor for slot in slots]
        if self.drift is not None and layout != "unfinished":
            _replace(slots, values, self.drift.relative, self.drift.relative_means)
        if self.rank is not None:
            thin = [place for place, slot in enumerate(slots) if self._is_thin(slot, layout)]
            for place, factors in zip(thin, factored([values[p] for p in thin], self.rank), strict=True):
                values[place] = factors
        return [value.reshape(-1) for value in values]

    @torch.no_grad()
    def unpack(self, row: Tensor, layout: Layout) -> None:
        """Copy such a row into the live slot."""
        slots = self._slots(layout)
        kept = _split(row, [self._kept_shape(slot, layout) for slot in slots])
        if slots:
            torch._foreach_copy_([slot.tensor for slot in slots], self._live(slots, kept, layout))

    def unpacked(self, row: Tensor, layout: Layout) -> dict[str, Tensor]:
        """Such a row as named views: keys name layers, never the task, so a saved task can be renamed or moved."""
        shapes = self._shapes(layout)
        return dict(zip(shapes, _split(row, list(shapes.values())), strict=True))

    def _shapes(self, layout: Layout) -> dict[str, tuple[int, ...]]:
        return {slot.key: self._kept_shape(slot, layout) for slot in self._slots(layout)}

    def named_parts(self, entry: TaskEntry) -> dict[str, Tensor]:
        """A task's whole row as named views."""
        own = 0 if entry.pretrained else self.norm_numbers(entry.layout)
        classes, of_head = len(entry.classes), entry.row[own:]
        weight, bias = of_head[:-classes].view(classes, -1), of_head[-classes:]
        norm = self.unpacked(entry.row[:own], entry.layout) if own else {}
        return {**norm, "head.weight": weight, "head.bias": bias}

    def shapes(self, layout: Layout | None, classes: int, features: int) -> dict[str, tuple[int, ...]]:
        """Names and shapes of a row's parts, in their order; of a head alone where there is no layout."""
        norm = {} if layout is None else self._shapes(layout)
        return {**norm, "head.weight": (classes, features), "head.bias": (classes,)}

    def stored_tables(self, task: str, statistics: InputMeans) -> tuple[list[Tensor], Size | None]:
        """A task's stored tables of one tensor's statistics, and the size they were measured at."""
        entry = self.entry(task)
        place = next(i for i, known in enumerate(self.statistics.values()) if known is statistics)
        name = list(self.statistics)[place]
        if not entry.finished:  # what is stored of it may be older than what is live
            raise ConfituneError(f"task {task!r} is not finished, so its input statistics still move: finish it first")
        keys = [self.table_key(name, table) for table in range(len(statistics.tables))]
        layout: Layout = "pretrained" if entry.pretrained else "finished"
        parts = self._pretrained().parts() if entry.pretrained else self.named_parts(entry)
        slots = {slot.key: slot for slot in self._slots(layout)}
        size = self._pretrained().sizes[place] if entry.pretrained else entry.sizes[place]
        return self._live([slots[key] for key in keys], [parts[key] for key in keys], layout), size

    def offset(self, task: str, norm: XconvNorm) -> Tensor | None:
        """What a task's output mean is beyond what its stored tables recover; None: nothing."""
        return self._pretrained().offset(norm) if self.entry(task).pretrained else None

    def norm_numbers(self, layout: Layout) -> int:
        """How many numbers of a row are not the head's."""
        return sum(map(math.prod, self._shapes(layout).values()))

    def _pretrained(self) -> PretrainedState:
        if self.pretrained is None:
            raise ConfituneError(
                "a task that shares the pre-trained state needs a network that keeps it: ContinualNet(..., "
                "keep_pretrained=True)"
            )
        return self.pretrained

    def _live(self, slots: Sequence[_Slot], kept: Sequence[Tensor], layout: Layout) -> list[Tensor]:
        """What live tensors are to be for what was kept of them."""
        values = [
            product(part, tuple(slot.tensor.shape)) if self._is_thin(slot, layout) else part
            for slot, part in zip(slots, kept, strict=True)
        ]
        if self.drift is not None and layout != "unfinished":
            _replace(slots, values, self.drift.today, self.drift.means_today)
        return values

    def _kept_shape(self, slot: _Slot, layout: Layout) -> tuple[int, ...]:
        shape = tuple(slot.tensor.shape)
        if self.rank is None or not self._is_thin(slot, layout):
            return shape
        return shape[0] + shape[1] * shape[2], self.rank

    def _is_thin(self, slot: _Slot, layout: Layout) -> bool:
        """Whether it is kept as a product of two thin tables."""
        return layout == "finished" and slot.table is not None and is_shorter(tuple(slot.tensor.shape), self.rank)

    def _slots(self, layout: Layout) -> list[_Slot]:
        if layout not in self._slots_of:
            self._slots_of[layout] = self._found_slots(layout)
        return self._slots_of[layout]

    def _found_slots(self, layout: Layout) -> list[_Slot]:
        slots = []
        for name, norm in self.norms.items():
            recovers = isinstance(norm, XconvNorm)
            fields = ["weight", "bias", "running_var"]
            fields += [] if recovers and layout == "finished" else ["running_mean"]
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
                _Slot(self.table_key(name, table), statistics, f"table{table}", table=(name, table))
                for table in range(len(statistics.tables))
            ]
        return slots

    @staticmethod
    def table_key(conv: str, table: int) -> str:
        """The name of one table of input means in a row."""
        return f"{conv}.input_means" + (f".{table}" if table else "")


def _replace(
    slots: Sequence[_Slot],
    values: list[Tensor],
    variances: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]],
    means: Callable[[str, int, Tensor], Tensor],
) -> None:
    """Put in place of variances and input means, among the values of slots, what these make of them."""
    places = {slot.norm: place for place, slot in enumerate(slots) if slot.drifts}
    if places:
        for name, value in variances({name: values[place] for name, place in places.items()}).items():
            values[places[name]] = value
    for place, slot in enumerate(slots):
        if slot.table is not None:
            values[place] = means(*slot.table, values[place])


def _packed_head(head: nn.Linear) -> Tensor:
    return torch.cat([head.weight.detach().reshape(-1), head.bias.detach()])


def _split(row: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    sizes = [math.prod(shape) for shape in shapes]
    if sum(sizes) != row.numel():
        raise ConfituneError(f"a task's row has {row.numel()} numbers, this network keeps {sum(sizes)}")
    return [part.view(shape) for part, shape in zip(row.split(sizes), shapes, strict=True)]
