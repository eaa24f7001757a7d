"""What is kept of every task: one packed row of numbers each.

The live tensors of a network's parts stay at addresses that never change. A row is what a task owns of them, flattened.
Switching tasks copies rows in and out; nothing is ever swapped, so captured graphs and memory-mapped rows stay valid.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from confitune.errors import ConfituneError
from confitune.nn.geometry import Size
from confitune.nn.observer import Observer
from confitune.nn.parts.head import Head
from confitune.nn.parts.part import Part, pack, unpack

State = Mapping[str, Tensor]


@dataclass
class TaskEntry:
    """One task: its classes, and what it owns as one packed row."""

    classes: tuple[str, ...]
    row: Tensor
    owns: tuple[str, ...] = ()  # names of parts, in the order of the row
    finished: bool = False
    image_size: Size | None = None  # of the images that it was trained on
    facts: dict[str, tuple[int, ...]] = field(default_factory=dict)  # see `Part.facts`

    @property
    def only_head(self) -> bool:
        """Whether it owns nothing of the backbone."""
        return self.owns == (Head.name,)


@dataclass(frozen=True)
class TaskStorage:
    """How many numbers a task adds to the network."""

    parts: Mapping[str, int]

    @property
    def beside_head(self) -> int:
        """Of all parts but its head."""
        return sum(self.parts.values()) - self.parts.get(Head.name, 0)


class TaskBank:
    """The rows of all tasks of a network with these parts, of which one is the head, and which task is live."""

    def __init__(self, parts: Sequence[Part], head: Head, observer: Observer) -> None:
        self._parts, self._head, self._observer = {part.name: part for part in parts}, head, observer
        self.tasks: dict[str, TaskEntry] = {}
        self.current: str | None = None  # the task that is live
        self.prepared: int | None = None  # the version of the weights for which its parts are prepared

    def entry(self, task: str) -> TaskEntry:
        """The entry of a task, or an error that names the tasks there are."""
        if task not in self.tasks:
            known = ", ".join(map(repr, self.tasks)) or "none yet"
            raise ConfituneError(f"no task {task!r}; tasks: {known}. Add it with add_task({task!r}, classes)")
        return self.tasks[task]

    def _shapes(self, entry: TaskEntry) -> dict[str, dict[str, torch.Size]]:
        """Of what is kept of a task, by part and name, in the order of its row."""
        return {part: self._parts[part].shapes(entry.finished, len(entry.classes)) for part in entry.owns}

    def storage(self, entry: TaskEntry) -> TaskStorage:
        """What a task takes."""
        shapes = self._shapes(entry).items()
        return TaskStorage({part: sum(shape.numel() for shape in of.values()) for part, of in shapes})

    def store(self, finished: bool = False, owns: Sequence[str] | None = None) -> None:
        """Pack what is live, or only some parts, into the current task's row; a finished one's never changes."""
        if self.current is None or (entry := self.tasks[self.current]).finished:
            return
        self._observer.fold()
        entry.owns = tuple(name for name in self._parts if owns is None or name in owns)
        entry.finished = finished
        entry.image_size = self._observer.image_size
        parts = [self._parts[name] for name in entry.owns]
        entry.row = pack(tensor for part in parts for tensor in part.live(finished).values())
        entry.facts = {key: fact for part in parts for key, fact in part.facts().items()}

    @torch.no_grad()
    def load(self) -> None:
        """Copy the current task's row into what is live; parts that it does not own become those of pre-training."""
        self.prepared = None
        if self.current is None:
            return
        entry = self.tasks[self.current]
        self._head.select(len(entry.classes))
        kept = self._named(entry)
        for name, part in self._parts.items():
            owned = name in entry.owns
            live, values = part.live(entry.finished and owned), kept if owned else part.pretrained()
            if live:
                torch._foreach_copy_(list(live.values()), [values[key] for key in live])
            part.restore(entry.facts)

    def _named(self, entry: TaskEntry) -> dict[str, Tensor]:
        """A task's row as named views. Keys name layers, never the task, so a saved task can be renamed or moved."""
        return unpack(entry.row, {key: shape for of in self._shapes(entry).values() for key, shape in of.items()})

    # ---- one task as named tensors ---------------------------------------------------------------------------------

    def to_state(self, name: str) -> dict[str, Tensor]:
        """Everything of a task; facts come along as small tensors of whole numbers."""
        entry = self.entry(name)
        if name == self.current:
            self.store()
        state = {key: tensor.clone() for key, tensor in self._named(entry).items()}
        state |= {key: torch.tensor(fact) for key, fact in entry.facts.items()}
        state["image_size"] = torch.tensor(entry.image_size or (0, 0))
        state["finished"] = torch.tensor(entry.finished)
        return state

    def from_state(self, name: str, state: State, classes: Sequence[str] | None, like: Tensor) -> TaskEntry:
        """The entry for a task's named tensors, checked against what this network keeps."""
        head = state.get("head.weight", torch.empty(0))
        if head.dim() != 2:
            raise ConfituneError(f"task {name!r}: no head.weight of shape (classes, features): it is no task's state")
        if classes is None:
            classes = self.tasks[name].classes if name in self.tasks else tuple(map(str, range(len(head))))
        if len(classes) != len(head) or len(set(classes)) != len(head):
            raise ConfituneError(f"task {name!r}: {len(set(classes))} class names for a head of {len(head)} classes")
        entry = TaskEntry(tuple(classes), torch.empty(0), tuple(self._parts))
        entry.finished = "finished" in state and bool(state["finished"].all())
        shapes = self._shapes(entry)
        may_lack = [name for name, part in self._parts.items() if part.pretrained()]
        entry.owns = tuple(part for part in shapes if part not in may_lack or shapes[part].keys() & state.keys())
        tensors = {key: shape for part in entry.owns for key, shape in shapes[part].items()}
        facts = {key: (len(fact),) for part in entry.owns for key, fact in self._parts[part].facts().items()}
        whole = {**facts, "image_size": (2,), "finished": ()}
        for key, shape in (tensors | whole).items():
            if key not in state or state[key].shape != shape:
                got = f"of shape {tuple(state[key].shape)}" if key in state else "missing"
                what = f"task {name!r}: {key} must have shape {tuple(shape)} and is {got}"
                raise ConfituneError(f"{what}; is it the task of another network, or of one with other means?")
            number = state[key]
            if key in whole and (number.is_floating_point() or number.is_complex() or bool((number.long() < 0).any())):
                raise ConfituneError(f"task {name!r}: {key} must hold whole numbers from 0 on, not {number.tolist()}")
        entry.row = pack(state[key].to(like) for key in tensors)
        entry.facts = {key: tuple(state[key].tolist()) for key in facts}
        height, width = state["image_size"].tolist()
        entry.image_size = (height, width) if height else None
        return entry
