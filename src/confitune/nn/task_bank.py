"""What is kept for each task: one packed row of numbers, and how it is saved and loaded.

The live tensors of a network's parts stay at addresses that never change. A row is what a task owns of them, flattened.
Switching tasks copies rows in and out; no tensor is ever swapped, so captured graphs and memory-mapped rows stay valid.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from confitune.errors import ConfituneError
from confitune.nn.geometry import Size
from confitune.nn.observer import Observer
from confitune.nn.parts.head import Head
from confitune.nn.parts.part import Part, pack, unpack

State = Mapping[str, Tensor]
AnyPart = TypeVar("AnyPart", bound=Part)


@dataclass
class TaskEntry:
    """One task: its classes, and what it owns as one packed row."""

    classes: tuple[str, ...]
    row: Tensor
    owns: tuple[str, ...] = ()  # names of parts, in the order of the row
    finished: bool = False
    image_size: Size | None = None  # of the images that it was trained on
    facts: dict[str, tuple[int, ...]] = field(default_factory=dict)  # see `Part.facts`


@dataclass(frozen=True)
class TaskStorage:
    """How many numbers a task adds to the network."""

    parts: Mapping[str, int]

    @property
    def beside_head(self) -> int:
        """Of all parts but its head."""
        return sum(self.parts.values()) - self.parts.get(Head.name, 0)


class TaskBank(nn.Module):
    """A backbone with its parts, and the rows of all tasks, one of which is live."""

    def __init__(self, backbone: nn.Module, parts: Sequence[Part]) -> None:
        super().__init__()
        self.backbone = backbone
        self.parts = nn.ModuleDict({part.name: part for part in parts})
        self.kinds = [part.kind for part in parts]  # with their options; a saved state must agree
        self.observer = Observer(backbone, [part for part in parts if part.input_means])
        self.tasks: dict[str, TaskEntry] = {}  # in the order in which they were added
        self._parts = list(parts)
        self._current: str | None = None
        self._prepared: int | None = None  # the version of the weights for which the current task's parts are prepared

    @property
    def current_task(self) -> str:
        """The task that is live."""
        if self._current is None:
            raise ConfituneError("no task is live: add_task(name, classes), or set_task(name) where there are some")
        return self._current

    @property
    def head(self) -> Head:
        """The part that classifies."""
        return self.part(Head)

    def part(self, kind: type[AnyPart]) -> AnyPart:
        """The part of this class."""
        return cast(AnyPart, self.parts[kind.name])

    @property
    def numbers_per_task(self) -> int:
        """How many numbers a finished task that owns all parts keeps, without its head."""
        return sum(tensor.numel() for part in self._beside_head() for tensor in part.live(True).values())

    def storage(self) -> dict[str, TaskStorage]:
        """How many numbers each task keeps, counted from what is stored."""
        found = {}
        for name, entry in self.tasks.items():
            shapes = self._shapes(entry).items()
            found[name] = TaskStorage({part: sum(shape.numel() for shape in of.values()) for part, of in shapes})
        return found

    # ---- rows ------------------------------------------------------------------------------------------------------

    def set_task(self, name: str) -> None:
        """Make a task live; an unfinished task that was live is stored first."""
        entry = self._entry(name)
        if name == self._current:
            return
        self._store()
        self._load(entry)
        self._current, self._prepared = name, None
        self.observer.image_size = entry.image_size

    def drop_task(self, name: str) -> None:
        """Forget a task; the others stay as they are."""
        self._entry(name)
        if name == self._current:
            self._current = None
        del self.tasks[name]
        self.head.keep_only(len(entry.classes) for entry in self.tasks.values())

    def _entry(self, task: str) -> TaskEntry:
        """The entry of a task, or an error that names the tasks there are."""
        if task not in self.tasks:
            known = ", ".join(map(repr, self.tasks)) or "none yet"
            raise ConfituneError(f"no task {task!r}; tasks: {known}. Add it with add_task({task!r}, classes)")
        return self.tasks[task]

    def _beside_head(self) -> list[Part]:
        """The parts in the backbone; the head's names may be those of its layers."""
        return [part for part in self._parts if part is not self.head]

    def _shapes(self, entry: TaskEntry) -> dict[str, dict[str, torch.Size]]:
        """Of what is kept of a task, by part and name, in the order of its row."""
        owned = [part for part in self._parts if part.name in entry.owns]
        return {part.name: part.shapes(entry.finished, len(entry.classes)) for part in owned}

    def _named(self, entry: TaskEntry) -> dict[str, Tensor]:
        """A task's row as named views. Keys name layers, never the task, so a saved task can be renamed or moved."""
        return unpack(entry.row, {key: shape for of in self._shapes(entry).values() for key, shape in of.items()})

    def _store(self, finished: bool = False, owns: Sequence[str] | None = None) -> None:
        """Pack what is live into the current task's row, unless that task is finished; of some parts, or of all."""
        if self._current is None or self.tasks[self._current].finished:
            return
        entry = self.tasks[self._current]
        self.observer.fold()
        parts = [part for part in self._parts if owns is None or part.name in owns]
        entry.owns = tuple(part.name for part in parts)
        entry.finished = finished
        entry.row = pack(tensor for part in parts for tensor in part.live(finished).values())
        entry.facts = {key: fact for part in parts for key, fact in part.facts().items()}
        entry.image_size = self.observer.image_size

    @torch.no_grad()
    def _load(self, entry: TaskEntry) -> None:
        """Copy a task's row into the live tensors; parts that it does not own become those of pre-training."""
        self.head.select(len(entry.classes))
        kept = self._named(entry)
        for part in self._parts:
            owned = part.name in entry.owns
            live = part.live(entry.finished and owned)
            values = kept if owned else part.pretrained()
            if live:
                torch._foreach_copy_(list(live.values()), [values[key] for key in live])
            part.restore(entry.facts)

    def _apply(self, fn: Any, recurse: bool = True) -> TaskBank:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for entry in self.tasks.values():
            entry.row = fn(entry.row)
        self._prepared = None
        return self

    # ---- saving and loading ----------------------------------------------------------------------------------------

    def task_state_dict(self, name: str) -> dict[str, Tensor]:
        """Everything that is the task's own, by layer; the task's name is not part of the keys."""
        entry = self._entry(name)
        if name == self._current:
            self._store()
        state = {key: tensor.clone() for key, tensor in self._named(entry).items()}
        state |= {key: torch.tensor(fact) for key, fact in entry.facts.items()}
        state["image_size"] = torch.tensor(entry.image_size or (0, 0))
        state["finished"] = torch.tensor(entry.finished)
        return state

    def load_task_state_dict(self, name: str, state: State, classes: Sequence[str] | None = None) -> None:
        """Put a task's state back, as a new task or over an existing one of that name, and make it current."""
        entry = self._read_entry(name, state, classes)
        if name == self._current:
            self._current = None  # what was live is replaced, not stored
        self.tasks[name] = entry
        self.set_task(name)

    def _read_entry(self, name: str, state: State, classes: Sequence[str] | None) -> TaskEntry:
        """The entry for a task's named tensors, checked against what this network keeps."""
        head = state.get("head.weight", torch.empty(0))
        if head.dim() != 2:
            raise ConfituneError(f"task {name!r}: no head.weight of shape (classes, features): it is no task's state")
        if classes is None:
            classes = self.tasks[name].classes if name in self.tasks else tuple(map(str, range(len(head))))
        if len(classes) != len(head) or len(set(classes)) != len(head):
            raise ConfituneError(f"task {name!r}: {len(set(classes))} class names for a head of {len(head)} classes")
        entry = TaskEntry(tuple(classes), torch.empty(0), tuple(self.parts))
        entry.finished = "finished" in state and bool(state["finished"].all())
        shapes = self._shapes(entry)
        owned = [part for part in self._parts if not part.pretrained() or shapes[part.name].keys() & state.keys()]
        entry.owns = tuple(part.name for part in owned)
        tensors = {key: shape for part in owned for key, shape in shapes[part.name].items()}
        facts = {key: (len(fact),) for part in owned for key, fact in part.facts().items()}
        whole = {**facts, "image_size": (2,), "finished": ()}
        for key, shape in (tensors | whole).items():
            if key not in state or state[key].shape != shape:
                got = f"of shape {tuple(state[key].shape)}" if key in state else "missing"
                what = f"task {name!r}: {key} must have shape {tuple(shape)} and is {got}"
                raise ConfituneError(f"{what}; is it the task of another network, or of one with other means?")
            number = state[key]
            if key in whole and (number.is_floating_point() or number.is_complex() or bool((number.long() < 0).any())):
                raise ConfituneError(f"task {name!r}: {key} must hold whole numbers from 0 on, not {number.tolist()}")
        like = next(self.backbone.parameters())
        entry.row = pack(state[key].to(like) for key in tensors)
        entry.facts = {key: tuple(state[key].tolist()) for key in facts}
        height, width = state["image_size"].tolist()
        entry.image_size = (height, width) if height else None
        return entry

    def shared_state_dict(self) -> dict[str, Tensor]:
        """What all tasks share: the backbone without what tasks own, and what is kept of pre-training."""
        own = {key for part in self._beside_head() for key in part.live(False)}
        own |= {f"{key.rpartition('.')[0]}.num_batches_tracked" for key in own}
        layers = self.backbone.state_dict()
        shared = {key: tensor for key, tensor in layers.items() if key not in own}
        kept = [part.pretrained() for part in self._beside_head()]
        return shared | {key: tensor for of in kept for key, tensor in of.items() if key in layers}

    @torch.no_grad()
    def load_shared_state_dict(self, state: State) -> None:
        """Put back what `shared_state_dict` gave."""
        own = self.shared_state_dict()
        misfits = {key for key, tensor in own.items() if key not in state or state[key].shape != tensor.shape}
        if wrong := sorted(misfits | state.keys() - own.keys()):
            some = f"{len(wrong)} tensors are missing, unknown or of another shape ({', '.join(wrong[:3])})"
            raise ConfituneError(f"the shared weights are those of another network: {some}")
        for key, tensor in own.items():
            tensor.copy_(state[key])
        self._prepared = None
        if self._current is not None and self.tasks[self._current].finished:
            self._load(self.tasks[self._current])

    def get_extra_state(self) -> dict[str, Any]:
        """Tasks and their rows, so that `state_dict` holds all there is."""
        tasks = {name: dict(vars(entry)) for name, entry in self.tasks.items()}
        size = self.observer.image_size
        return {"kinds": self.kinds, "current": self._current, "image_size": size, "tasks": tasks}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        if state["kinds"] != self.kinds:
            raise ConfituneError(f"the state is of a network with {state['kinds']}, this one has {self.kinds}")
        device = next(self.backbone.parameters()).device
        self.tasks.clear()
        for name, values in state["tasks"].items():
            self.tasks[name] = TaskEntry(**{**values, "row": values["row"].to(device, copy=True)})
        self._current, self._prepared = state["current"], None
        self.observer.image_size = state["image_size"]
        self.head.keep_only(len(entry.classes) for entry in self.tasks.values())  # it may be from before a task
        if self._current is not None:
            self.head.select(len(self.tasks[self._current].classes))
