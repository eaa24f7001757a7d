"""A folder with one network and what it has learned so far; see `format.py` for its files.

It changes one process at a time and all at once, and what it was before its last change is kept.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from itertools import islice
from pathlib import Path
from types import MappingProxyType

from torch import Tensor, nn

from confitune.deploy.format import (
    BACKBONES,
    FEATURES,
    HEAD,
    HELD_OUT,
    TASKS,
    UNFINISHED,
    Added,
    BundleError,
    Checked,
    DamagedError,
    Event,
    Head,
    Network,
    Removed,
    Renamed,
    Replaced,
    StoredFile,
    TaskRecord,
    TensorFiles,
    check_name,
    file_name,
    foreign_files,
    own_files,
)
from confitune.deploy.journal import State, alone, commit, is_bundle, read_before, read_head, read_state, write_head
from confitune.deploy.label_space import (
    TaskFeatures,
    calibrate,
    chosen_from_state,
    space_state,
    sums_from_state,
    updated,
)
from confitune.deploy.loading import load_network, load_pretrained, load_task
from confitune.errors import ConfituneError
from confitune.files import sync_folder
from confitune.methods.gaussian import Gaussians
from confitune.nn import ContinualNet

_log = logging.getLogger(__name__)
_BACKBONE = {"format": "confitune backbone 1"}


class Bundle:
    """An opened bundle: what it was when it was opened, and what this process has changed since.

    Args:
        path: of the folder.

    Attributes:
        damage: what is damaged where this is what the bundle was before its last change; None where it is the newest.

    >>> Bundle.open("no-such-folder")
    Traceback (most recent call last):
    confitune.deploy.format.BundleError: no-such-folder holds no bundle: `confitune learn` makes one
    """

    def __init__(self, path: Path, network: Network) -> None:
        self.path = path
        self.network = network
        self.damage: str | None = None
        self._files = TensorFiles(path)
        self._state = State()
        self._pretrained: StoredFile | None = None  # of a bundle without tasks

    @classmethod
    def open(cls, path: Path | str) -> Bundle:
        """The bundle in a folder, its index and backbone checked; task files are checked when they are first read.

        Where head, index or backbone are damaged, it is opened as it was before its last change: a warning is logged,
        `damage` says what it is, and it cannot be changed.
        """
        path, files = Path(path), TensorFiles(Path(path))
        state, damage = read_state(path, files)
        assert state.head is not None
        bundle = cls(path, state.head.network)
        bundle._files, bundle._state, bundle.damage = files, state, damage
        if damage is not None:
            _log.warning("%s. %s is used as it was before its last change, on %s", damage, path, bundle.written)
        return bundle

    exists = staticmethod(is_bundle)

    # ---- what it holds ---------------------------------------------------------------------------------------------

    @property
    def tasks(self) -> Mapping[str, TaskRecord]:
        """By name, in the order in which they were added."""
        return MappingProxyType(self._state.tasks)

    @property
    def accuracy(self) -> Mapping[str, float]:
        """Of each task on its held-out images when it was last checked, in percent."""
        return MappingProxyType(self._state.accuracy)

    @property
    def lineage(self) -> str:
        """Tells backbones apart: equal only where every step of learning was the same."""
        return self._head.lineage

    @property
    def version(self) -> str:
        """Tells states of the bundle apart: each change makes another one."""
        return self._head.index_chain[:12]

    def stamp(self) -> tuple[int, int] | None:
        """Of the head on disk: another one after every change; None where there is none."""
        try:
            status = (self.path / HEAD).lstat()
        except OSError:
            return None
        return status.st_ino, status.st_mtime_ns

    def has_backbone_of(self, other: Bundle) -> bool:
        """Whether both are one network with the same weights, so that tasks of one fit the other."""
        return self.lineage == other.lineage and self.network == other.network

    @property
    def written(self) -> str:
        """When it was changed last."""
        return self._head.written

    @property
    def _head(self) -> Head:
        if self._state.head is None:
            raise BundleError(f"{self.path} has learned nothing yet")
        return self._state.head

    def record(self, task: str) -> TaskRecord:
        """The record of a task, or an error that names the tasks there are."""
        if task not in self.tasks:
            known = ", ".join(map(repr, islice(self.tasks, 10))) + (", ..." if len(self.tasks) > 10 else "")
            raise BundleError(f"{self.path} has no task {task!r}; it has {known or 'none yet'}")
        return self.tasks[task]

    def task_state(self, task: str) -> dict[str, Tensor]:
        """Everything that is a task's own, by layer."""
        return self._files.read(TASKS, self.record(task).file)

    def held_out(self, task: str) -> dict[str, Tensor] | None:
        """The images that were kept of a task, see `held_out.py`; None where none were."""
        stored = self.record(task).held_out
        return None if stored is None else self._files.read(HELD_OUT, stored)

    def features(self, task: str) -> TaskFeatures | None:
        """What is kept of the features of a task's images; None where nothing is."""
        record = self.record(task)
        return None if record.features is None else self._features(record)

    def _features(self, record: TaskRecord) -> TaskFeatures:
        assert record.features is not None
        with self._naming(FEATURES, record.features):
            return TaskFeatures.from_state(self._files.read(FEATURES, record.features), len(record.classes))

    def label_space(self) -> Gaussians:
        """The classifier over all classes of all tasks."""
        stored, records = self._head.sums, _by_features(self.tasks)
        if stored is None:
            raise BundleError(f"{self.path} keeps no features of its tasks: name the task")
        with self._naming(FEATURES, stored):
            state = self._files.read(FEATURES, stored)
            sums = sums_from_state(state, {key: len(record.classes) for key, (_, record) in records.items()})
            return chosen_from_state(sums, state, {key: name for key, (name, _) in records.items()})

    def load_pretrained(self) -> nn.Module:
        """The network before its first task, in evaluation mode: images to features."""
        stored = self._head.pretrained
        if stored is None:
            raise BundleError(f"{self.path} keeps no pre-trained network: name the task")
        with self._naming(BACKBONES, stored):
            return load_pretrained(self.network, self._files.read(BACKBONES, stored), stored.bytes)

    def load_network(self, tasks: Sequence[str] = ()) -> ContinualNet:
        """The network with the state of `tasks`; the last of them is current."""
        stored = self._head.backbone
        with self._naming(BACKBONES, stored):
            net = load_network(self.network, self._files.read(BACKBONES, stored), stored.bytes)
        for task in tasks:
            self.load_task(net, task)
        return net

    def load_task(self, net: ContinualNet, task: str) -> Mapping[str, Tensor]:
        """Put a task's state into the network and make it current; gives that state."""
        record, state = self.record(task), self.task_state(task)
        with self._naming(TASKS, record.file):
            load_task(net, task, state, record.classes, self.network.size)
        return state

    @contextmanager
    def _naming(self, folder: str, stored: StoredFile) -> Iterator[None]:
        """Errors within name the file that they are about."""
        path = str(self.path / file_name(folder, stored))
        try:
            yield
        except ConfituneError as error:
            if path in str(error):
                raise
            raise BundleError(f"{path}: {error}") from error

    # ---- changing it -----------------------------------------------------------------------------------------------

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Within, no other process changes it; what others changed before is seen, what a killed one left is gone."""
        made = not self.path.exists()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BundleError(f"{self.path} cannot be made: {error}; choose another folder") from error
        if not is_bundle(self.path) and (foreign := foreign_files(self.path)):
            raise BundleError(f"{self.path} is no bundle but holds {', '.join(foreign[:3])}: choose an empty folder")
        with alone(self.path):
            if is_bundle(self.path):
                self._renew()
            elif (
                any((self.path / TASKS).glob("*")) and not (self.path / UNFINISHED).exists()
            ):  # no first task broke off
                raise BundleError(f"{self.path} holds tasks but no {HEAD}: restore it from a copy")
            if (self.path / UNFINISHED).exists():
                self.sweep()
            try:
                yield
            except BaseException:
                if made and not is_bundle(self.path):  # a first task that failed leaves nothing
                    shutil.rmtree(self.path, ignore_errors=True)
                raise
            (self.path / UNFINISHED).unlink(missing_ok=True)

    def add_task(
        self,
        task: str,
        record: TaskRecord,
        shared: Mapping[str, Tensor] | None = None,
        checked: Mapping[str, float] | None = None,
    ) -> None:
        """Commit a task whose files are stored; `shared` is the backbone where learning it may have moved that."""
        self.require_new(task)
        events: list[Event] = [Added(task=task, record=record)]
        if checked:
            events.append(Checked(after=task, accuracy=dict(checked)))
        self._commit(events, shared)

    def replace_task(self, task: str, record: TaskRecord, checked: Mapping[str, float] | None = None) -> None:
        """Commit another record of a task, whose files are stored."""
        self.record(task)
        after: list[Event] = [Checked(after=task, accuracy=dict(checked))] if checked else []
        self._commit([Replaced(task=task, record=record), *after])

    def require_new(self, task: str) -> None:
        """Refuse a name that a task has already, or that no task may have."""
        if task in self.tasks:
            raise BundleError(f"{self.path} has a task {task!r} already; choose another name, or remove it first")
        check_name(task)

    def store_task(self, state: Mapping[str, Tensor], classes: Sequence[str]) -> StoredFile:
        """Put a task's state on disk; it counts once it is added."""
        about = {"format": "confitune task 1", "classes": list(classes), **self.network.model_dump(mode="json")}
        return self._store(TASKS, state, about)

    def store_held_out(self, kept: Mapping[str, Tensor]) -> StoredFile:
        """Put a task's held-out images on disk; they count once it is added."""
        return self._store(HELD_OUT, kept, {"format": "confitune held-out images 1"})

    def store_features(self, features: TaskFeatures) -> StoredFile:
        """Put the features of a task's images on disk; they count once it is added."""
        return self._store(FEATURES, features.state(), {"format": "confitune features 1"})

    def store_pretrained(self, net: nn.Module) -> None:
        """Put the network of a new bundle on disk, before its first task."""
        state = {key: tensor for key, tensor in net.state_dict().items() if not key.endswith("num_batches_tracked")}
        self._pretrained = self._store(BACKBONES, state, _BACKBONE)

    def rename_task(self, task: str, to: str) -> None:
        """Give a task another name."""
        self.record(task)
        self.require_new(to)
        self._commit([Renamed(task=task, to=to)])

    def remove_task(self, task: str) -> None:
        """Forget a task, whose files go with the next change; the backbone stays as it is."""
        self.record(task)
        if len(self.tasks) == 1:  # a new task starts from the last one's batch norm
            raise BundleError(f"{task!r} is the only task of {self.path}: delete the folder instead")
        self._commit([Removed(task=task)])

    def copy_task(self, source: Bundle, task: str, to: str | None = None) -> None:
        """Take a task over from another bundle, whose backbone must be this one's."""
        record = source.record(task)
        if not self.has_backbone_of(source):
            raise BundleError(
                f"{task!r} cannot be copied: the backbones of {source.path} and {self.path} are not the same. Where "
                "learning moves the backbone, only a bundle that has learned the very same tasks can take it; learn "
                "the task here instead"
            )
        kept, features = source.held_out(task), source.features(task)
        files = {
            "file": self.store_task(source.task_state(task), record.classes),
            "held_out": None if kept is None else self.store_held_out(kept),
            "features": None if features is None else self.store_features(features),
        }
        self.add_task(to or task, record.model_copy(update=files))

    def _renew(self) -> None:
        """Become what is on disk now, unless it is damaged: a change would make the loss of its newest part final."""
        with suppress(DamagedError):
            if self.damage is None and read_head(self.path / HEAD) == self._state.head:
                return
        state, damage = read_state(self.path, self._files)
        assert state.head is not None
        if state.head.network != self.network:
            raise BundleError(f"{self.path} was replaced by another bundle meanwhile; start again")
        if damage is not None:
            raise BundleError(
                f"{damage}. Nothing is changed while it is damaged; without a copy, `confitune doctor {self.path} "
                f"--repair` goes back to what it was before its last change, on {state.head.written}"
            )
        self._state, self.damage = state, None

    def _store(self, folder: str, tensors: Mapping[str, Tensor], about: Mapping[str, object]) -> StoredFile:
        self._begin()
        return self._files.store(folder, tensors, about)

    def _commit(self, events: Sequence[Event], shared: Mapping[str, Tensor] | None = None) -> None:
        """Make the events true; `shared` is the backbone where it may have moved."""
        self._begin()
        head = self._state.head
        backbone = self._head.backbone if shared is None else self._files.store(BACKBONES, shared, _BACKBONE)
        if head is not None and backbone == head.backbone:
            lineage = head.lineage
        else:
            before = self.network.weights_sha256 if head is None else head.lineage
            lineage = hashlib.sha256(f"{before} {backbone.sha256}".encode()).hexdigest()
        pretrained = self._pretrained if head is None else head.pretrained
        files = {"backbone": backbone, "pretrained": pretrained, "sums": self._sums_after(events)}
        commit(self.path, self._state, events, network=self.network, lineage=lineage, **files)

    def _sums_after(self, events: Sequence[Event]) -> StoredFile | None:
        """The sums of features once these events are true: of tasks that come they are added, of others taken back."""
        stored = None if self._state.head is None else self._state.head.sums
        after = State(tasks=dict(self.tasks))
        for event in events:
            after.happened(event)
        old, new = _by_features(self.tasks), _by_features(after.tasks)
        if old.keys() == new.keys():
            return stored
        if not new:
            return None
        known = {key: record for key, (_, record) in (old | new).items()}
        read = cache(lambda key: self._features(known[key]))
        sums = None
        if stored is not None:
            sums = sums_from_state(self._files.read(FEATURES, stored), {key: len(known[key].classes) for key in old})
        sums = updated(sums, {key: len(known[key].classes) for key in new}, read)
        if sums is None:
            return None
        return self._files.store(FEATURES, space_state(sums, calibrate(sums, read)), {"format": "confitune sums 1"})

    def _begin(self) -> None:
        """Say on disk that files are about to be written which count only after the commit."""
        if not (self.path / UNFINISHED).exists():
            (self.path / UNFINISHED).touch()
            sync_folder(self.path)

    # ---- mending it ------------------------------------------------------------------------------------------------

    def leftovers(self) -> list[Path]:
        """Files of a change that did not come to its commit; `sweep` deletes them, and so does the next change."""
        known = self._state.needed() | self._state.kept
        return [self.path / name for name in own_files(self.path) if name not in known]

    def sweep(self) -> None:
        """Delete leftovers; for use within `changing`."""
        for path in self.leftovers():
            path.unlink()

    def go_back(self) -> None:
        """Make what it was before its last change what it is, for good; what was made since is deleted."""
        with alone(self.path):
            self._state = read_before(self.path, TensorFiles(self.path))
            self._begin()
            write_head(self.path / HEAD, self._head)
            self.damage = None
            self.sweep()
            (self.path / UNFINISHED).unlink()


def _by_features(tasks: Mapping[str, TaskRecord]) -> dict[str, tuple[str, TaskRecord]]:
    """Tasks with features by the hash of these: it stays when a task is renamed, and is one for a task and its copy."""
    found: dict[str, tuple[str, TaskRecord]] = {}
    for name, record in tasks.items():
        if record.features is not None:
            found.setdefault(record.features.sha256, (name, record))
    return found
