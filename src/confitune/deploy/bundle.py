"""A folder with one network and what it has learned so far; see `format.py` for its files."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from types import MappingProxyType

from torch import Tensor

from confitune.deploy.files import path_of, read_tensors, store_tensors
from confitune.deploy.format import (
    BACKBONES,
    EMPTY,
    HEAD,
    HELD_OUT,
    INDEX,
    LOCK,
    TASKS,
    Added,
    BundleError,
    Checked,
    Event,
    Head,
    Network,
    Removed,
    Renamed,
    StoredFile,
    TaskRecord,
    chained,
    event_from_line,
    event_to_line,
    head_from_bytes,
    head_to_bytes,
)
from confitune.deploy.layout import append_at, check_name, foreign_files, own_files
from confitune.engine import versions
from confitune.errors import ConfituneError
from confitune.files import write_whole
from confitune.nn import ContinualNet, build_model
from confitune.tasks import exclusive


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
        self._head: Head | None = None
        self._tasks: dict[str, TaskRecord] = {}
        self._accuracy: dict[str, float] = {}
        self._history: list[Checked] = []

    @classmethod
    def open(cls, path: Path | str) -> Bundle:
        """The bundle in a folder, its index checked; task files are checked when they are read."""
        path = Path(path)
        head = _read_head(path)
        bundle = cls(path, head.network)
        bundle._take(head)
        return bundle

    @staticmethod
    def exists(path: Path) -> bool:
        """Whether the folder holds a bundle."""
        return (path / HEAD).is_file()

    # ---- what it holds ---------------------------------------------------------------------------------------------

    @property
    def tasks(self) -> Mapping[str, TaskRecord]:
        """By name, in the order in which they were added."""
        return MappingProxyType(self._tasks)

    @property
    def accuracy(self) -> Mapping[str, float]:
        """Of each task on its held-out images when it was last checked, in percent."""
        return MappingProxyType(self._accuracy)

    @property
    def history(self) -> Sequence[Checked]:
        """Every check so far."""
        return tuple(self._history)

    @property
    def lineage(self) -> str:
        """Tells backbones apart: equal only where every step of learning was the same."""
        return self._committed.lineage

    @property
    def written(self) -> str:
        """When it was changed last."""
        return self._committed.written

    def record(self, task: str) -> TaskRecord:
        """The record of a task, or an error that names the tasks there are."""
        if task not in self._tasks:
            known = ", ".join(map(repr, list(self._tasks)[:10])) + (", ..." if len(self._tasks) > 10 else "")
            raise BundleError(f"{self.path} has no task {task!r}; it has {known or 'none yet'}")
        return self._tasks[task]

    def task_state(self, task: str) -> dict[str, Tensor]:
        """Everything that is a task's own, by layer."""
        return read_tensors(self.path / TASKS, self.record(task).file)

    def held_out(self, task: str) -> dict[str, Tensor] | None:
        """The images that were kept of a task, see `held_out.py`; None where none were."""
        stored = self.record(task).held_out
        return None if stored is None else read_tensors(self.path / HELD_OUT, stored)

    def bytes_of(self, task: str) -> int:
        """What a task takes on disk, its held-out images apart."""
        return self.record(task).file.bytes

    def load_network(self, tasks: Sequence[str] = ()) -> ContinualNet:
        """The network with the state of `tasks`; the last of them is current."""
        net = new_network(self.network)
        net.load_shared_state_dict(read_tensors(self.path / BACKBONES, self._committed.backbone))
        for task in tasks:
            net.load_task_state_dict(task, self.task_state(task), self.record(task).classes)
        return net

    # ---- changing it -----------------------------------------------------------------------------------------------

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Within, no other process changes it; what others changed before is seen, what a killed one left is gone."""

        def busy() -> None:
            raise BundleError(f"another process is changing {self.path}; try again when it is done")

        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BundleError(f"{self.path} cannot be made: {error}; choose another folder") from error
        if not Bundle.exists(self.path) and (foreign := foreign_files(self.path)):
            raise BundleError(f"{self.path} is no bundle but holds {', '.join(foreign[:3])}: choose an empty folder")
        with exclusive(self.path / LOCK, busy):
            if Bundle.exists(self.path):
                self._take(_read_head(self.path))
            elif len(list((self.path / TASKS).glob("*.safetensors"))) > 1:  # a first task that broke off leaves one
                raise BundleError(f"{self.path} holds tasks but no {HEAD}: restore it from a copy")
            self._sweep()
            yield

    def add_task(
        self,
        task: str,
        record: TaskRecord,
        shared: Mapping[str, Tensor] | None = None,
        checked: Mapping[str, float] | None = None,
    ) -> None:
        """Commit a task whose files are stored; `shared` is the backbone where learning it has moved that."""
        if task in self._tasks:
            raise BundleError(f"{self.path} has a task {task!r} already; choose another name, or remove it first")
        events: list[Event] = [Added(task=check_name(task), record=record)]
        if checked:
            events.append(Checked(after=task, accuracy=dict(checked)))
        self._commit(events, shared)

    def store_task(self, state: Mapping[str, Tensor], classes: Sequence[str]) -> StoredFile:
        """Put a task's state on disk; it counts once it is added."""
        about = {"format": "confitune task 1", "classes": list(classes), **self.network.model_dump(mode="json")}
        return store_tensors(self.path / TASKS, state, about)

    def store_held_out(self, kept: Mapping[str, Tensor]) -> StoredFile:
        """Put a task's held-out images on disk; they count once it is added."""
        return store_tensors(self.path / HELD_OUT, kept, {"format": "confitune held-out images 1"})

    def rename_task(self, task: str, to: str) -> None:
        """Give a task another name."""
        self.record(task)
        if to in self._tasks:
            raise BundleError(f"{self.path} has a task {to!r} already")
        self._commit([Renamed(task=task, to=check_name(to))])

    def remove_task(self, task: str) -> None:
        """Forget a task and delete its files; the backbone stays as it is."""
        record = self.record(task)
        if len(self._tasks) == 1:  # a new task starts from the last one's batch norm
            raise BundleError(f"{task!r} is the only task of {self.path}: delete the folder instead")
        self._commit([Removed(task=task)])
        still = {file for other in self._tasks.values() for file in (other.file, other.held_out)}
        for folder, file in ((TASKS, record.file), (HELD_OUT, record.held_out)):
            if file is not None and file not in still:
                path_of(self.path / folder, file).unlink(missing_ok=True)

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

    # ---- inside ----------------------------------------------------------------------------------------------------

    @property
    def _committed(self) -> Head:
        if self._head is None:
            raise BundleError(f"{self.path} has learned nothing yet")
        return self._head

    def _take(self, head: Head) -> None:
        """Become what the head says."""
        if self._head == head:
            return
        if head.network != self.network:
            raise BundleError(f"{self.path} was replaced by another bundle meanwhile; start again")
        path = self.path / INDEX
        try:
            with path.open("rb") as handle:
                data = handle.read(head.index_bytes)
        except OSError as error:
            raise BundleError(f"{path} cannot be read: {error}; restore it from a copy") from error
        lines = data.splitlines(keepends=True)
        if len(data) != head.index_bytes or chained(EMPTY, lines) != head.index_chain:
            raise BundleError(f"{path} is damaged: it is not what {HEAD} says; restore it from a copy")
        self._tasks, self._accuracy, self._history = {}, {}, []
        for number, line in enumerate(lines, 1):
            self._happened(event_from_line(line, f"{path}, line {number},"))
        self._head = head

    def _happened(self, event: Event) -> None:
        if isinstance(event, Added):
            self._tasks[event.task] = event.record
        elif isinstance(event, Removed):
            del self._tasks[event.task]
            self._accuracy.pop(event.task, None)
        elif isinstance(event, Renamed):
            self._tasks = {event.to if name == event.task else name: r for name, r in self._tasks.items()}
            if event.task in self._accuracy:
                self._accuracy[event.to] = self._accuracy.pop(event.task)
        else:
            self._history.append(event)
            self._accuracy |= event.accuracy

    def _commit(self, events: Sequence[Event], shared: Mapping[str, Tensor] | None = None) -> None:
        head, lines = self._head, [event_to_line(event) for event in events]
        if shared is not None:
            backbone = store_tensors(self.path / BACKBONES, shared, {"format": "confitune backbone 1"})
            before = self.network.weights_sha256 if head is None else head.lineage
            lineage = hashlib.sha256(f"{before} {backbone.sha256}".encode()).hexdigest()
        else:
            backbone, lineage = self._committed.backbone, self._committed.lineage
        start, chain = (0, EMPTY) if head is None else (head.index_bytes, head.index_chain)
        append_at(self.path / INDEX, start, b"".join(lines))
        new = Head(
            network=self.network,
            backbone=backbone,
            lineage=lineage,
            index_bytes=start + sum(map(len, lines)),
            index_chain=chained(chain, lines),
            versions=versions(),
            written=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        )
        write_whole(self.path / HEAD, lambda out: out.write(head_to_bytes(new)))
        self._head = new
        for event in events:
            self._happened(event)
        if head is not None and head.backbone != backbone:
            path_of(self.path / BACKBONES, head.backbone).unlink(missing_ok=True)

    def leftovers(self) -> list[Path]:
        """Files of a change that did not come to its commit; the next change deletes them."""
        keep = set() if self._head is None else {path_of(self.path / BACKBONES, self._head.backbone)}
        for record in self._tasks.values():
            keep.add(path_of(self.path / TASKS, record.file))
            if record.held_out is not None:
                keep.add(path_of(self.path / HELD_OUT, record.held_out))
        return [path for path in own_files(self.path) if path not in keep]

    def _sweep(self) -> None:
        for path in self.leftovers():
            path.unlink()


def new_network(network: Network) -> ContinualNet:
    """The network that a bundle describes, with random weights and without tasks."""
    return ContinualNet(build_model(network.model), means=network.means)


def _read_head(path: Path) -> Head:
    try:
        return head_from_bytes((path / HEAD).read_bytes(), str(path / HEAD))
    except FileNotFoundError:
        raise BundleError(f"{path} holds no bundle: `confitune learn` makes one") from None
    except OSError as error:
        raise ConfituneError(f"{path / HEAD} cannot be read: {error}") from error
