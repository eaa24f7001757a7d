"""An opened bundle: a network and what it has learned so far; see `format.py` for its files.

It changes one process at a time and all at once, and what it was before its last change is kept.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from functools import cache
from itertools import islice
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor, nn

from confitune.deploy.bundle.format import (
    BACKBONES,
    BEFORE,
    FEATURES,
    HELD_OUT,
    MANIFEST,
    TASKS,
    BundleError,
    Manifest,
    Network,
    StoredFile,
    TaskRecord,
    check_name,
)
from confitune.deploy.bundle.store import Store, check_declared, is_bundle, require_room
from confitune.deploy.label_space import (
    TaskFeatures,
    calibrate,
    chosen_from_state,
    space_state,
    sums_from_state,
    updated,
)
from confitune.engine import versions
from confitune.errors import ConfituneError
from confitune.methods.gaussian import Gaussians
from confitune.nn import ContinualNet, build_model, headless
from confitune.tasks import Images, Task

_log = logging.getLogger(__name__)
_versions = cache(versions)


class Bundle:
    """An opened bundle: what it was when it was opened, and what this process has changed since.

    Args:
        path: of the folder.

    Attributes:
        damage: what is damaged where this is what the bundle was before its last change; None where it is the newest.

    >>> Bundle.open("no-such-folder")
    Traceback (most recent call last):
    confitune.deploy.bundle.format.BundleError: no-such-folder is not a bundle: create one with `confitune learn`
    """

    def __init__(self, path: Path, network: Network) -> None:
        self.path = path
        self.network = network
        self.damage: str | None = None
        self._files = Store(path)
        self._manifest: Manifest | None = None  # of a bundle without tasks
        self._pretrained: StoredFile | None = None  # of one that is to get its first

    @classmethod
    def open(cls, path: Path | str) -> Bundle:
        """The bundle in a folder, its manifest and backbone checked; task files are checked when they are first read.

        Where manifest or backbone are damaged, it is opened as it was before its last change: a warning is logged,
        `damage` says what it is, and it cannot be changed.
        """
        path, files = Path(path), Store(Path(path))
        manifest, damage = files.newest()
        bundle = cls(path, manifest.network)
        bundle._files, bundle._manifest, bundle.damage = files, manifest, damage
        if damage is not None:
            _log.warning("%s. %s is used as it was before its last change, on %s", damage, path, bundle.written)
        return bundle

    exists = staticmethod(is_bundle)

    # ---- what it holds ---------------------------------------------------------------------------------------------

    @property
    def tasks(self) -> Mapping[str, TaskRecord]:
        """By name, in the order in which they were added; one that is renamed keeps its place."""
        return MappingProxyType({} if self._manifest is None else self._manifest.tasks)

    @property
    def lineage(self) -> str:
        """Tells backbones apart: equal only where every step of learning was the same."""
        return self._newest.lineage

    @property
    def version(self) -> str:
        """Tells states of the bundle apart: each change makes another one."""
        return self._newest.version

    @property
    def written(self) -> str:
        """When it was changed last."""
        return self._newest.written

    @property
    def _newest(self) -> Manifest:
        if self._manifest is None:
            raise BundleError(f"{self.path} has no tasks yet")
        return self._manifest

    def stamp(self) -> tuple[int, int] | None:
        """Of the manifest on disk: another one after every change; None where there is none."""
        try:
            status = (self.path / MANIFEST).lstat()
        except OSError:
            return None
        return status.st_ino, status.st_mtime_ns

    def has_backbone_of(self, other: Bundle) -> bool:
        """Whether both are one network with the same weights, so that tasks of one fit the other."""
        return self.lineage == other.lineage and self.network == other.network

    def record(self, task: str) -> TaskRecord:
        """The record of a task, or an error that names the tasks there are."""
        if task not in self.tasks:
            known = ", ".join(map(repr, islice(self.tasks, 10))) + (", ..." if len(self.tasks) > 10 else "")
            raise BundleError(f"{self.path} has no task {task!r}; it has {known or 'none yet'}")
        return self.tasks[task]

    def task_state(self, task: str) -> dict[str, Tensor]:
        """Everything that is a task's own, by layer."""
        return self._files.read(self.record(task).file)

    def held_out(self, task: str) -> Task | None:
        """The images that were kept of a task, to test it with; None where none were."""
        record = self.record(task)
        if record.held_out is None:
            return None
        with self._naming(record.held_out):
            state = self._files.read(record.held_out)
            try:
                images = Images(state["pixels"], torch.arange(len(state["pixels"])), state["labels"])
                return Task(task, record.classes, images, images, self.network.preprocess())
            except (KeyError, TypeError, ConfituneError) as error:
                raise BundleError(f"the held-out images of task {task!r} are damaged: {error}") from error

    def features(self, task: str) -> TaskFeatures | None:
        """What is kept of the features of a task's images; None where nothing is."""
        record = self.record(task)
        return None if record.features is None else self._features(record)

    def _features(self, record: TaskRecord) -> TaskFeatures:
        assert record.features is not None
        with self._naming(record.features):
            return TaskFeatures.from_state(self._files.read(record.features), len(record.classes))

    def label_space(self) -> Gaussians:
        """The classifier over all classes of all tasks."""
        stored, records = self._newest.sums, _by_features(self.tasks)
        if stored is None:
            raise BundleError(f"{self.path} keeps no features of its tasks: name the task")
        with self._naming(stored):
            state = self._files.read(stored)
            sums = sums_from_state(state, {key: len(record.classes) for key, (_, record) in records.items()})
            return chosen_from_state(sums, state, {key: name for key, (name, _) in records.items()})

    def load_pretrained(self) -> nn.Module:
        """The network before its first task, in evaluation mode: images to features."""
        stored = self._newest.pretrained
        if stored is None:
            raise BundleError(f"{self.path} keeps no pre-trained network: name the task")
        with self._naming(stored):
            require_room(self.network.model, stored.bytes)
            net, state = headless(build_model(self.network.model)), self._files.read(stored)
            own = _pretrained_state(net)
            if own.keys() != state.keys() or any(tensor.shape != state[key].shape for key, tensor in own.items()):
                raise BundleError(f"these are not the weights of {self.network.model}")
            net.load_state_dict(state, strict=False)
        return net.eval()

    def load_network(self, tasks: Sequence[str] = ()) -> ContinualNet:
        """The network with the state of `tasks`; the last of them is current."""
        stored = self._newest.backbone
        with self._naming(stored):
            require_room(self.network.model, stored.bytes)
            net = self.network.around(build_model(self.network.model))
            net.load_shared_state_dict(self._files.read(stored))
        for task in tasks:
            self.load_task(net, task)
        return net

    def load_task(self, net: ContinualNet, task: str) -> None:
        """Put a task's state into the network and make it current.

        A state with other tensors than the network keeps is refused before any is copied.
        """
        record, state = self.record(task), self.task_state(task)
        with self._naming(record.file):
            check_declared(state, self.network.size)
            net.load_task_state_dict(task, state, record.classes)

    @contextmanager
    def _naming(self, stored: StoredFile) -> Iterator[None]:
        """Errors within name the file that they are about."""
        path = str(self.path / stored.name)
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
        if not is_bundle(self.path) and (foreign := self._files.foreign()):
            raise BundleError(f"{self.path} is not a bundle and has {', '.join(foreign[:3])}: choose an empty folder")
        with self._files.alone():
            if is_bundle(self.path):
                self._renew()
            elif len([*(self.path / TASKS).glob("*")]) > 1:  # a first task that broke off leaves no more
                raise BundleError(f"{self.path} holds tasks but no {MANIFEST}: restore it from a copy")
            self.sweep()
            try:
                yield
            except BaseException:
                if made and not is_bundle(self.path):  # a first task that failed leaves nothing
                    shutil.rmtree(self.path, ignore_errors=True)
                raise

    def require_new(self, task: str) -> None:
        """Refuse a name that a task has already, or that no task may have."""
        if task in self.tasks:
            raise BundleError(f"{self.path} has a task {task!r} already; choose another name, or remove it first")
        check_name(task)

    def store_task(self, state: Mapping[str, Tensor], classes: Sequence[str]) -> StoredFile:
        """Put a task's state on disk; it counts once it is added."""
        return self._files.store(TASKS, state, classes=list(classes), **self.network.model_dump(mode="json"))

    def store_held_out(self, images: Images) -> StoredFile:
        """Put held-out images of a task on disk; they count once it is added."""
        pixels, labels = images.batch(torch.arange(len(images)))
        return self._files.store(HELD_OUT, {"pixels": pixels, "labels": labels})

    def store_features(self, features: TaskFeatures) -> StoredFile:
        """Put the features of a task's images on disk; they count once it is added."""
        return self._files.store(FEATURES, features.state())

    def store_pretrained(self, net: nn.Module) -> None:
        """Put the network of a new bundle on disk, before its first task."""
        self._pretrained = self._files.store(BACKBONES, _pretrained_state(net))

    def add_task(
        self,
        task: str,
        record: TaskRecord,
        shared: Mapping[str, Tensor] | None = None,
        checked: Mapping[str, float] | None = None,
    ) -> None:
        """Commit a task whose files are stored.

        Args:
            shared: the backbone, where learning the task may have moved it.
            checked: accuracy of earlier tasks that were tested again.
        """
        self.require_new(task)
        tasks = {**self.tasks, task: record}
        for name, accuracy in (checked or {}).items():
            tasks[name] = tasks[name].model_copy(update={"checked": accuracy})
        self._commit(tasks, shared)

    def replace_task(self, task: str, record: TaskRecord) -> None:
        """Commit another record of a task, whose files are stored."""
        self.record(task)
        self._commit({**self.tasks, task: record})

    def rename_task(self, task: str, to: str) -> None:
        """Give a task another name."""
        self.record(task)
        self.require_new(to)
        self._commit({to if name == task else name: record for name, record in self.tasks.items()})

    def remove_task(self, task: str) -> None:
        """Forget a task, whose files go with the next change; the backbone stays as it is."""
        self.record(task)
        if len(self.tasks) == 1:  # a new task starts from the last one's batch norm
            raise BundleError(f"{task!r} is the only task of {self.path}: delete the folder instead")
        self._commit({name: record for name, record in self.tasks.items() if name != task})

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
            "held_out": None if kept is None else self.store_held_out(kept.test),
            "features": None if features is None else self.store_features(features),
        }
        self.add_task(to or task, record.model_copy(update=files))

    def _renew(self) -> None:
        """Become what is on disk now, unless it is damaged: a change would make the loss of its newest part final."""
        manifest, damage = self._files.newest()
        if manifest.network != self.network:
            raise BundleError(f"{self.path} was replaced by another bundle meanwhile; start again")
        if damage is not None:
            raise BundleError(
                f"{damage}. Nothing is changed while it is damaged; without a copy, `confitune doctor {self.path} "
                f"--repair` goes back to what it was before its last change, on {manifest.written}"
            )
        self._manifest, self.damage = manifest, None

    def _commit(self, tasks: Mapping[str, TaskRecord], shared: Mapping[str, Tensor] | None = None) -> None:
        """Have these tasks, on disk as well; `shared` is the backbone where it may have moved."""
        old = self._manifest
        backbone = self._newest.backbone if shared is None else self._files.store(BACKBONES, shared)
        lineage = self.network.weights_sha256 if old is None else old.lineage
        if old is None or backbone != old.backbone:
            lineage = hashlib.sha256(f"{lineage} {backbone.sha256}".encode()).hexdigest()
        new = Manifest(
            network=self.network,
            backbone=backbone,
            pretrained=self._pretrained if old is None else old.pretrained,
            sums=self._sums_of(tasks),
            lineage=lineage,
            tasks=dict(tasks),
            versions=_versions(),
            written=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        )
        if old is not None:
            self._files.write_manifest(BEFORE, old)
        self._files.write_manifest(MANIFEST, new)
        self._manifest = new
        if old is None:  # a second copy, where there is no state before
            self._files.write_manifest(BEFORE, new)
        self.sweep()

    def _sums_of(self, tasks: Mapping[str, TaskRecord]) -> StoredFile | None:
        """The sums of features of these tasks: of those that come they are added, of others taken back."""
        stored = None if self._manifest is None else self._manifest.sums
        old, new = _by_features(self.tasks), _by_features(tasks)
        if old.keys() == new.keys():
            return stored
        known = {key: record for key, (_, record) in (old | new).items()}
        read = cache(lambda key: self._features(known[key]))
        sums = None
        if stored is not None:
            sums = sums_from_state(self._files.read(stored), {key: len(known[key].classes) for key in old})
        sums = updated(sums, {key: len(known[key].classes) for key in new}, read) if new else None
        return None if sums is None else self._files.store(FEATURES, space_state(sums, calibrate(sums, read)))

    # ---- mending it ------------------------------------------------------------------------------------------------

    def leftovers(self) -> list[Path]:
        """Files of a change that did not come to its commit; the next change deletes them."""
        return self._files.leftovers(self._manifest)

    def sweep(self) -> None:
        """Delete leftovers; for use within `changing`."""
        for path in self.leftovers():
            path.unlink()

    def go_back(self) -> None:
        """Make what it was before its last change what it is, for good; what was made since is deleted."""
        with self._files.alone():
            before = self._files.before()
            self._files.write_manifest(MANIFEST, before)
            self._manifest, self.damage = before, None
            self.sweep()


def _by_features(tasks: Mapping[str, TaskRecord]) -> dict[str, tuple[str, TaskRecord]]:
    """Tasks with features by the hash of these: it stays when a task is renamed, and is one for a task and its copy."""
    found: dict[str, tuple[str, TaskRecord]] = {}
    for name, record in tasks.items():
        if record.features is not None:
            found.setdefault(record.features.sha256, (name, record))
    return found


def _pretrained_state(net: nn.Module) -> dict[str, Tensor]:
    return {key: tensor for key, tensor in net.state_dict().items() if not key.endswith("num_batches_tracked")}
