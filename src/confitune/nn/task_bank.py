"""What is kept of every task: one packed row of numbers each.

The live tensors of a network's parts stay at addresses that never change. A row is what a task owns of them, flattened.
Switching tasks copies rows in and out; nothing is ever swapped, so captured graphs and memory-mapped rows stay valid.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from confitune.errors import ConfituneError
from confitune.nn.geometry import Size
from confitune.nn.parts.head import Head
from confitune.nn.parts.part import Part, split_row


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
    def head(self) -> int:
        """Of its head."""
        return self.parts.get(Head.name, 0)

    @property
    def beside_head(self) -> int:
        """Of all other parts."""
        return sum(self.parts.values()) - self.head


class TaskBank:
    """The rows of all tasks of a network with these parts."""

    def __init__(self, parts: Iterable[Part]) -> None:
        self._parts = {part.name: part for part in parts}
        self.tasks: dict[str, TaskEntry] = {}

    def entry(self, task: str) -> TaskEntry:
        """The entry of a task, or an error that names the tasks there are."""
        if task not in self.tasks:
            known = ", ".join(map(repr, self.tasks)) or "none yet"
            raise ConfituneError(f"no task {task!r}; tasks: {known}. Add it with add_task({task!r}, classes)")
        return self.tasks[task]

    def store(self, entry: TaskEntry, finished: bool, owns: Sequence[str] | None = None) -> None:
        """Pack what is live into `entry`; of a task that owns only some parts, those."""
        entry.owns = tuple(name for name in self._parts if owns is None or name in owns)
        entry.finished = finished
        parts = [self._parts[name] for name in entry.owns]
        entry.row = torch.cat([tensor.reshape(-1) for part in parts for tensor in part.live(finished).values()])
        entry.facts = {key: fact for part in parts for key, fact in part.facts().items()}

    def require_size(self, task: str, size: Size | None) -> None:
        """Raise where a finished task holds for images of another size."""
        entry = self.tasks[task]
        sized = entry.finished and any(self._parts[name].sized for name in entry.owns)
        if sized and entry.image_size is not None and entry.image_size != size:
            trained, given = ("x".join(map(str, plane or ("?",))) for plane in (entry.image_size, size))
            raise ConfituneError(
                f"task {task!r} was trained on {trained} images, these are {given}; its recovered means hold for the "
                "size it was trained on: resize the images"
            )

    @torch.no_grad()
    def load(self, entry: TaskEntry) -> None:
        """Copy a task's row into the live tensors; parts that it does not own become those of pre-training."""
        for part in self._parts.values():
            part.select(len(entry.classes))
        kept = self.named(entry)
        for name, part in self._parts.items():
            owned = name in entry.owns
            live, values = part.live(entry.finished and owned), kept if owned else part.pretrained()
            if live:
                torch._foreach_copy_(list(live.values()), [values[key] for key in live])
            part.restore(entry.facts)

    def named(self, entry: TaskEntry) -> dict[str, Tensor]:
        """A task's row as named views. Keys name layers, never the task, so a saved task can be renamed or moved."""
        shapes = self._shapes(entry.owns, entry.finished, len(entry.classes))
        return dict(zip(shapes, split_row(entry.row, list(shapes.values())), strict=True))

    def storage(self, entry: TaskEntry) -> TaskStorage:
        """What a task takes."""
        shapes = {name: self._shapes((name,), entry.finished, len(entry.classes)) for name in entry.owns}
        return TaskStorage({name: sum(shape.numel() for shape in of.values()) for name, of in shapes.items()})

    def _shapes(self, owns: Sequence[str], finished: bool, classes: int) -> dict[str, torch.Size]:
        return {k: shape for name in owns for k, shape in self._parts[name].shapes(finished, classes).items()}

    # ---- one task as named tensors ---------------------------------------------------------------------------------

    def to_state(self, entry: TaskEntry) -> dict[str, Tensor]:
        """Everything of a task; facts come along as small tensors of whole numbers."""
        state = {key: part.clone() for key, part in self.named(entry).items()}
        state |= {key: torch.tensor(fact) for key, fact in entry.facts.items()}
        state["image_size"] = torch.tensor(entry.image_size or (0, 0))
        state["finished"] = torch.tensor(entry.finished)
        return state

    def from_state(
        self, name: str, state: Mapping[str, Tensor], classes: Sequence[str] | None, like: Tensor
    ) -> TaskEntry:
        """The entry for a task's named tensors, checked against what this network keeps."""
        head = state.get("head.weight", torch.empty(0))
        if head.dim() != 2:
            raise ConfituneError(f"task {name!r}: no head.weight of shape (classes, features): it is no task's state")
        if classes is None:
            classes = self.tasks[name].classes if name in self.tasks else tuple(map(str, range(len(head))))
        if len(classes) != len(head) or len(set(classes)) != len(head):
            raise ConfituneError(f"task {name!r}: {len(set(classes))} class names for a head of {len(head)} classes")
        finished = "finished" in state and bool(state["finished"].all())
        owns = tuple(
            part.name
            for part in self._parts.values()
            if not part.pretrained() or any(key in state for key in part.shapes(finished, len(classes)))
        )
        tensors = self._shapes(owns, finished, len(classes))
        facts = {key: (len(fact),) for part in owns for key, fact in self._parts[part].facts().items()}
        whole = facts | {"image_size": (2,), "finished": ()}
        for key, shape in (tensors | whole).items():
            if key not in state or tuple(state[key].shape) != tuple(shape):
                got = f"of shape {tuple(state[key].shape)}" if key in state else "missing"
                raise ConfituneError(
                    f"task {name!r}: {key} must have shape {tuple(shape)} and is {got}; is it the task of another "
                    "network, or of one with other means?"
                )
        for key, values in ((key, state[key]) for key in whole):
            if values.is_floating_point() or values.is_complex() or not bool((values.long() >= 0).all()):
                raise ConfituneError(f"task {name!r}: {key} must hold whole numbers from 0 on, not {values.tolist()}")
        height, width = state["image_size"].tolist()
        return TaskEntry(
            classes=tuple(classes),
            row=torch.cat([state[key].reshape(-1).to(like) for key in tensors]),
            owns=owns,
            finished=finished,
            image_size=(height, width) if height else None,
            facts={key: tuple(state[key].tolist()) for key in facts},
        )
