"""A folder with one network and what it has learned so far; see `format.py` for its files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import islice
from pathlib import Path
from types import MappingProxyType

from torch import Tensor

from confitune.deploy.declared import check_declared, check_shared
from confitune.deploy.format import (
    Added,
    BundleError,
    Checked,
    Event,
    Network,
    Removed,
    Renamed,
    StoredFile,
    TaskRecord,
)
from confitune.deploy.journal import Journal
from confitune.deploy.layout import check_name, is_bundle
from confitune.errors import ConfituneError
from confitune.nn import ContinualNet, build_model, without_memory


class Bundle:
    """An opened bundle: what it was when it was opened, and what this process has changed since.

    Args:
        path: of the folder.

    >>> Bundle.open("no-such-folder")
    Traceback (most recent call last):
    confitune.deploy.format.BundleError: no-such-folder holds no bundle: `confitune learn` makes one
    """

    def __init__(self, path: Path, network: Network) -> None:
        self.path = path
        self.network = network
        self._journal = Journal(path)

    @classmethod
    def open(cls, path: Path | str) -> Bundle:
        """The bundle in a folder, its index and backbone checked; task files are checked when they are first read.

        Where head, index or backbone are damaged, it is opened as it was before its last change: a warning is logged,
        `damage` says what it is, and it cannot be changed.
        """
        journal = Journal(Path(path))
        journal.read()
        bundle = cls(journal.path, journal.head.network)
        bundle._journal = journal
        return bundle

    @staticmethod
    def exists(path: Path) -> bool:
        """Whether the folder holds a bundle, be it a damaged one."""
        return is_bundle(path)

    # ---- what it holds ---------------------------------------------------------------------------------------------

    @property
    def tasks(self) -> Mapping[str, TaskRecord]:
        """By name, in the order in which they were added."""
        return self._journal.contents.tasks

    @property
    def accuracy(self) -> Mapping[str, float]:
        """Of each task on its held-out images when it was last checked, in percent."""
        return MappingProxyType(self._journal.contents.accuracy)

    @property
    def history(self) -> Sequence[Checked]:
        """Every check so far."""
        return tuple(self._journal.contents.history)

    @property
    def last_task(self) -> str:
        """The task that was added last of those there are."""
        return self._journal.contents.tasks.last

    @property
    def lineage(self) -> str:
        """Tells backbones apart: equal only where every step of learning was the same."""
        return self._journal.head.lineage

    @property
    def written(self) -> str:
        """When it was changed last."""
        return self._journal.head.written

    @property
    def damage(self) -> str | None:
        """What is damaged where this is what the bundle was before its last change; None where it is the newest."""
        return self._journal.damage

    def record(self, task: str) -> TaskRecord:
        """The record of a task, or an error that names the tasks there are."""
        if task not in self.tasks:
            known = ", ".join(map(repr, islice(self.tasks, 10))) + (", ..." if len(self.tasks) > 10 else "")
            raise BundleError(f"{self.path} has no task {task!r}; it has {known or 'none yet'}")
        return self.tasks[task]

    def task_state(self, task: str) -> dict[str, Tensor]:
        """Everything that is a task's own, by layer, mapped from its file."""
        return self._journal.tasks.read(self.record(task).file)

    def held_out(self, task: str) -> dict[str, Tensor] | None:
        """The images that were kept of a task, see `held_out.py`; None where none were."""
        stored = self.record(task).held_out
        return None if stored is None else self._journal.held_out.read(stored)

    def bytes_of(self, task: str) -> int:
        """What a task takes on disk, its held-out images apart."""
        return self.record(task).file.bytes

    def load_network(self, tasks: Sequence[str] = ()) -> ContinualNet:
        """The network with the state of `tasks`; the last of them is current."""
        stored = self._journal.head.backbone
        try:
            _require_that_large(self.network.model, stored.bytes)
            net = new_network(self.network)
            shared = self._journal.backbones.read(stored)
            check_shared(shared, self.network.size)
            net.load_shared_state_dict(shared)
        except ConfituneError as error:
            raise _about(self._journal.backbones.path(stored), error) from error
        for task in tasks:
            self.load_task(net, task)
        return net

    def load_task(self, net: ContinualNet, task: str) -> Mapping[str, Tensor]:
        """Put a task's state into the network and make it current; gives that state.

        A file that declares other tensors than the network keeps is refused before any is copied.
        """
        record, state = self.record(task), self.task_state(task)
        try:
            check_declared(state, self.network.size)
            net.load_task_state_dict(task, state, record.classes)
        except ConfituneError as error:
            raise _about(self._journal.tasks.path(record.file), error) from error
        return state

    # ---- changing it -----------------------------------------------------------------------------------------------

    def changing(self) -> AbstractContextManager[None]:
        """Within, no other process changes it; what others changed before is seen, what a killed one left is gone."""
        return self._journal.changing(self.network)

    def add_task(
        self,
        task: str,
        record: TaskRecord,
        shared: Mapping[str, Tensor] | None = None,
        checked: Mapping[str, float] | None = None,
    ) -> None:
        """Commit a task whose files are stored; `shared` is the backbone where learning it has moved that."""
        if task in self.tasks:
            raise BundleError(f"{self.path} has a task {task!r} already; choose another name, or remove it first")
        events: list[Event] = [Added(task=check_name(task), record=record)]
        if checked:
            events.append(Checked(after=task, accuracy=dict(checked)))
        self._journal.commit(self.network, events, shared)

    def store_task(self, state: Mapping[str, Tensor], classes: Sequence[str]) -> StoredFile:
        """Put a task's state on disk; it counts once it is added."""
        about = {"format": "confitune task 1", "classes": list(classes), **self.network.model_dump(mode="json")}
        self._journal.begin()
        return self._journal.tasks.store(state, about)

    def store_held_out(self, kept: Mapping[str, Tensor]) -> StoredFile:
        """Put a task's held-out images on disk; they count once it is added."""
        self._journal.begin()
        return self._journal.held_out.store(kept, {"format": "confitune held-out images 1"})

    def rename_task(self, task: str, to: str) -> None:
        """Give a task another name."""
        self.record(task)
        if to in self.tasks:
            raise BundleError(f"{self.path} has a task {to!r} already")
        self._journal.commit(self.network, [Renamed(task=task, to=check_name(to))])

    def remove_task(self, task: str) -> None:
        """Forget a task, whose files go with the next change; the backbone stays as it is."""
        self.record(task)
        if len(self.tasks) == 1:  # a new task starts from the last one's batch norm
            raise BundleError(f"{task!r} is the only task of {self.path}: delete the folder instead")
        self._journal.commit(self.network, [Removed(task=task)])

    def copy_task(self, source: Bundle, task: str, to: str | None = None) -> None:
        """Take a task over from another bundle, whose backbone must be this one's."""
        record = source.record(task)
        if source.lineage != self.lineage or source.network != self.network:
            raise BundleError(
                f"{task!r} cannot be copied: the backbones of {source.path} and {self.path} are not the same. Every "
                "task that is learned moves the backbone, so only a bundle that has learned the very same tasks can "
                "take it; learn the task here instead"
            )
        kept = source.held_out(task)
        files = {
            "file": self.store_task(source.task_state(task), record.classes),
            "held_out": None if kept is None else self.store_held_out(kept),
        }
        self.add_task(to or task, record.model_copy(update=files))

    # ---- mending it ------------------------------------------------------------------------------------------------

    def leftovers(self) -> list[Path]:
        """Files of a change that did not come to its commit; `sweep` deletes them, and so does the next change."""
        return self._journal.leftovers()

    def damage_before(self) -> str | None:
        """What is damaged of that which is kept only to go back; the bundle itself does not need it."""
        return self._journal.damage_before()

    def sweep(self) -> None:
        """Delete leftovers, and what is kept to go back if it is damaged; for use within `changing`."""
        self._journal.sweep()

    def go_back(self) -> None:
        """Make what it was before its last change what it is, for good, if it is damaged."""
        self._journal.go_back()


def new_network(network: Network) -> ContinualNet:
    """The network that a bundle describes, with random weights and without tasks."""
    return ContinualNet(build_model(network.model), **network.options)


def _require_that_large(model: str, available: int) -> None:
    """Refuse a network that the file cannot hold, before memory is taken for it."""
    needed = sum(p.numel() * p.element_size() for p in without_memory(model).parameters() if p.dim() == 4)
    if needed > available:
        raise BundleError(f"{available} bytes cannot be the weights of {model}: its convolutions take {needed}")


def _about(path: Path, error: ConfituneError) -> ConfituneError:
    """The error with the file that it is about."""
    return error if str(path) in str(error) else BundleError(f"{path}: {error}")
