"""The live slot of a network and the rows of its tasks: switching, storing, saving."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from confitune.errors import ConfituneError
from confitune.nn.geometry import Size
from confitune.nn.memory import TaskEntry, TaskMemory
from confitune.nn.mixing import MixedRows
from confitune.nn.task_state import memory_from_state, memory_to_state, task_from_state, task_to_state


@dataclass(frozen=True)
class TaskStorage:
    """What a task adds to the network."""

    norm_numbers: int  # batch-norm state and input statistics
    head_numbers: int
    bytes: int

    @property
    def numbers(self) -> int:
        """All of it."""
        return self.norm_numbers + self.head_numbers


class TaskSlots(nn.Module):
    """A converted backbone, live heads, and every task's packed row; `ContinualNet` is this plus how it is used."""

    kind: tuple[str, ...]  # what a saved state must agree with

    def __init__(self, backbone: nn.Module, features: int) -> None:
        super().__init__()
        self.backbone = backbone
        self.features = features
        self.heads = nn.ModuleDict()  # live heads by number of classes: tasks of one shape share one address
        self._memory = TaskMemory.of(backbone)
        self._mixed = MixedRows(self._memory)
        self._current: str | None = None
        self._image_size: Size | None = None
        self._recovered_at: tuple[str, int] | None = None  # task and weights for which the slot's means were recovered

    @property
    def tasks(self) -> Mapping[str, TaskEntry]:
        """Name -> entry, in the order in which they were added; a task's index is its place here."""
        return MappingProxyType(self._memory.tasks)

    @property
    def current_task(self) -> str:
        """The task whose state is in the live slot."""
        if self._current is None:
            raise ConfituneError("no task yet: add_task(name, classes) first")
        return self._current

    @property
    def last_task(self) -> str:
        """The task that was added last."""
        if not self.tasks:
            raise ConfituneError("no task yet: add_task(name, classes) first")
        return list(self.tasks)[-1]

    @property
    def head(self) -> nn.Linear:
        """The live head of the current task."""
        return self._head(len(self.tasks[self.current_task].classes))

    def set_task(self, name: str) -> None:
        """Copy a task's state into the live slot; an unfinished task that leaves the slot is stored first."""
        entry = self._memory.entry(name)
        if name == self._current:
            return
        self._store_current()
        self._memory.load(entry, self._head(len(entry.classes)))
        self._current = name
        self._image_size = entry.image_size
        self._recovered_at = None

    @property
    def numbers_per_task(self) -> int:
        """Batch-norm state and input statistics of a finished task, without its head."""
        return self._memory.norm_numbers("finished")

    def storage(self) -> dict[str, TaskStorage]:
        """What each task takes, measured from what is stored."""
        sizes = {}
        for name, entry in self.tasks.items():
            norm = 0 if entry.pretrained else self._memory.norm_numbers(entry.layout)
            sizes[name] = TaskStorage(norm, entry.row.numel() - norm, entry.row.numel() * entry.row.element_size())
        return sizes

    def task_state_dict(self, name: str) -> dict[str, Tensor]:
        """Everything that is the task's own, by layer; the task's name is not part of the keys."""
        entry = self._memory.entry(name)
        if name == self._current:
            self._store_current()
        return task_to_state(self._memory, entry)

    def load_task_state_dict(
        self, name: str, state: Mapping[str, Tensor], classes: Sequence[str] | None = None
    ) -> None:
        """Put a task's state back, as a new task or over an existing one of that name, and make it current."""
        if "head.weight" not in state:
            raise ConfituneError(f"the state for task {name!r} has no head.weight: it is not a task's state")
        if state["head.weight"].dim() != 2:
            shape = tuple(state["head.weight"].shape)
            raise ConfituneError(f"task {name!r}: head.weight must have shape (classes, features) and has {shape}")
        count = state["head.weight"].shape[0]
        old = self.tasks.get(name)
        names = tuple(classes or (old.classes if old else map(str, range(count))))
        if len(names) != count or len(set(names)) != count:
            raise ConfituneError(f"task {name!r}: {len(set(names))} class names for a head of {count} classes")
        entry = task_from_state(self._memory, name, state, names, self.features, next(self.backbone.parameters()))
        if name == self._current:
            self._current = None  # what was live is replaced, not stored
        self._memory.tasks[name] = entry
        self._mixed.forget(name)
        self.set_task(name)

    def drop_task(self, name: str) -> None:
        """Forget a task; the others stay as they are."""
        classes = len(self._memory.entry(name).classes)
        if name == self._current:
            self._current = None
            self._recovered_at = None
        del self._memory.tasks[name]
        self._mixed.forget(name)
        if all(len(entry.classes) != classes for entry in self.tasks.values()):
            del self.heads[str(classes)]

    def shared_state_dict(self) -> dict[str, Tensor]:
        """What all tasks share: the backbone without its batch norms' state."""
        own = tuple(f"{name}." for name in self._memory.norms)
        state = self.backbone.state_dict()
        return {key: tensor.detach() for key, tensor in state.items() if not key.startswith(own)}

    def load_shared_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Put back what `shared_state_dict` gave."""
        wanted = self.shared_state_dict()
        wrong = [key for key in wanted if key not in state or state[key].shape != wanted[key].shape]
        if wrong or len(state) != len(wanted):
            extra = sorted(set(state) - set(wanted))
            raise ConfituneError(
                f"the shared weights are those of another network: {len(wrong)} tensors are missing or of another "
                f"shape, {len(extra)} are unknown ({', '.join([*wrong, *extra][:3])})"
            )
        self.backbone.load_state_dict(dict(state), strict=False)
        self._forget_recovered()

    def get_extra_state(self) -> dict[str, Any]:
        """Tasks, rows and live statistics, so that `state_dict` holds all there is."""
        return {"kind": list(self.kind), **memory_to_state(self._memory, self._current, self._image_size)}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """See `get_extra_state`."""
        if state["kind"] != list(self.kind):
            raise ConfituneError(f"the state is of a network with {state['kind']}, this one has {list(self.kind)}")
        memory_from_state(self._memory, state, next(self.backbone.parameters()))
        for entry in self.tasks.values():
            self._head(len(entry.classes))
        for unused in set(self.heads) - {str(len(entry.classes)) for entry in self.tasks.values()}:
            del self.heads[unused]  # the state is from before its task
        self._current, self._image_size = state["current"], state["image_size"]
        self._forget_recovered()

    def _apply(self, fn: Any, recurse: bool = True) -> TaskSlots:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for entry in self._memory.tasks.values():
            entry.row = fn(entry.row)
        self._forget_recovered()
        return self

    def _forget_recovered(self) -> None:
        self._recovered_at = None
        self._mixed.forget()

    def _store_current(self) -> None:
        """An unfinished task's row follows the slot; a finished one's never changes."""
        if self._current is not None and not self.tasks[self._current].finished:
            self._memory.store(self.tasks[self._current], self.head, finished=False)
            self.tasks[self._current].image_size = self._image_size

    def _head(self, classes: int) -> nn.Linear:
        key = str(classes)
        if key not in self.heads:
            like = next(self.backbone.parameters())
            self.heads[key] = nn.Linear(self.features, classes, device=like.device, dtype=like.dtype)
            self.heads[key].train(self.training)
        head = self.heads[key]
        assert isinstance(head, nn.Linear)
        return head


def initialise_head(head: nn.Linear, generator: torch.Generator | None) -> None:
    """torch's own initialisation of a Linear layer, drawn on the CPU so that a seed means the same on every device."""
    bound = head.in_features**-0.5
    with torch.no_grad():
        for parameter in (head.weight, head.bias):
            parameter.copy_(torch.empty(parameter.shape).uniform_(-bound, bound, generator=generator))
