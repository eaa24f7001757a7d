"""Changing a bundle: one process at a time and all at once. What it was before its last change is kept.

with changing(bundle) as change:
    change.rename_task("birds", "birds of Samoa")
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cache

import torch
from torch import Tensor, nn

from confitune.deploy.bundle.bundle import Bundle, by_features, pretrained_state
from confitune.deploy.bundle.format import (
    BACKBONES,
    BEFORE,
    FEATURES,
    HELD_OUT,
    MANIFEST,
    TASKS,
    BundleError,
    DamagedError,
    Manifest,
    StoredFile,
    TaskRecord,
    check_name,
)
from confitune.deploy.label_space import TaskFeatures, calibrate, space_state, sums_from_state, updated
from confitune.engine.result import versions
from confitune.methods.gaussian import FeatureSums
from confitune.tasks import Images

_versions = cache(versions)


@contextmanager
def changing(bundle: Bundle) -> Iterator[BundleChange]:
    """Lock a bundle, bring it up to date with the disk, and delete what a process that was killed has left."""
    path, files = bundle.path, bundle.files
    made = not path.exists()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BundleError(f"{path} cannot be made: {error}; choose another folder") from error
    if not Bundle.exists(path) and (foreign := files.foreign()):
        raise BundleError(f"{path} is not a bundle and has {', '.join(foreign[:3])}: choose an empty folder")
    with files.alone():
        if Bundle.exists(path):
            _renew(bundle)
        elif len([*(path / TASKS).glob("*")]) > 1:  # a first task that broke off leaves no more
            raise BundleError(f"{path} holds tasks but no {MANIFEST}: restore it from a copy")
        files.delete(files.leftovers(bundle.current, files.read_before()))
        try:
            yield BundleChange(bundle)
        except BaseException:
            if made and not Bundle.exists(path):  # a first task that failed leaves nothing
                shutil.rmtree(path, ignore_errors=True)
            raise


def _renew(bundle: Bundle) -> None:
    """Read the bundle again. A damaged one is not changed: the loss of its newest part would be final."""
    manifest, damage = bundle.files.newest()
    if manifest.network != bundle.network:
        raise BundleError(f"{bundle.path} was replaced by another bundle meanwhile; start again")
    if damage is not None:
        raise BundleError(
            f"{damage}. Nothing is changed while it is damaged; without a copy, `confitune doctor {bundle.path} "
            f"--repair` goes back to what it was before its last change, on {manifest.written}"
        )
    bundle.current = manifest
    bundle.damage = None


def go_back(bundle: Bundle) -> None:
    """Undo the last change for good; what was made since is deleted."""
    files = bundle.files
    with files.alone():
        before = files.read_manifest(BEFORE)
        with suppress(DamagedError):
            if before == files.read_manifest(MANIFEST):  # as after the first task, and after going back
                raise BundleError(
                    f"nothing of {bundle.path} can be undone: only its last change, once, not its first task"
                )
        files.check_shared(before)
        files.write_manifest(MANIFEST, before)
        bundle.current = before
        bundle.damage = None
        files.delete(files.leftovers(before))


@dataclass
class BundleChange:
    """A change of a bundle under way, see `changing`. Files that are stored count once their task is added."""

    bundle: Bundle
    pretrained: StoredFile | None = None  # of a new bundle

    def store_task(self, state: Mapping[str, Tensor], classes: Sequence[str]) -> StoredFile:
        """Write a task's state."""
        network = self.bundle.network.model_dump(mode="json")
        return self.bundle.files.store(TASKS, state, classes=list(classes), **network)

    def store_held_out(self, images: Images) -> StoredFile:
        """Write held-out images of a task."""
        pixels, labels = images.batch(torch.arange(len(images)))
        return self.bundle.files.store(HELD_OUT, {"pixels": pixels, "labels": labels})

    def store_features(self, features: TaskFeatures) -> StoredFile:
        """Write the features of a task's images."""
        return self.bundle.files.store(FEATURES, features.state())

    def store_pretrained(self, net: nn.Module) -> None:
        """Write the network that a new bundle starts from, before its first task."""
        self.pretrained = self.bundle.files.store(BACKBONES, pretrained_state(net))

    def require_new(self, task: str) -> None:
        """Refuse a name that a task has already, or that no task may have."""
        if task in self.bundle.tasks:
            raise BundleError(
                f"{self.bundle.path} has a task {task!r} already; choose another name, or remove it first"
            )
        check_name(task)

    def add_task(
        self,
        task: str,
        record: TaskRecord,
        shared: Mapping[str, Tensor] | None = None,
        checked: Mapping[str, float] | None = None,
    ) -> None:
        """Commit a task whose files are stored.

        Args:
            shared: the backbone, if learning the task may have moved it.
            checked: accuracy of earlier tasks that were tested again.
        """
        self.require_new(task)
        tasks = {**self.bundle.tasks, task: record}
        for name, accuracy in (checked or {}).items():
            tasks[name] = tasks[name].model_copy(update={"checked": accuracy})
        self.commit(tasks, shared)

    def rename_task(self, task: str, to: str) -> None:
        """Give a task another name."""
        self.bundle.record(task)
        self.require_new(to)
        self.commit({to if name == task else name: record for name, record in self.bundle.tasks.items()})

    def remove_task(self, task: str) -> None:
        """Forget a task, whose files go with the next change; the backbone stays as it is."""
        self.bundle.record(task)
        if len(self.bundle.tasks) == 1:  # a new task starts from the last one's batch norm
            raise BundleError(f"{task!r} is the only task of {self.bundle.path}: delete the folder instead")
        self.commit({name: record for name, record in self.bundle.tasks.items() if name != task})

    def commit(self, tasks: Mapping[str, TaskRecord], shared: Mapping[str, Tensor] | None = None) -> None:
        """Make these the bundle's tasks, on disk as well; `shared` is the backbone, if it may have moved."""
        bundle = self.bundle
        files, old = bundle.files, bundle.current
        backbone = bundle.manifest.backbone if shared is None else files.store(BACKBONES, shared)
        lineage = bundle.network.weights_sha256 if old is None else old.lineage
        if old is None or backbone != old.backbone:
            lineage = hashlib.sha256(f"{lineage} {backbone.sha256}".encode()).hexdigest()
        new = Manifest(
            network=bundle.network,
            backbone=backbone,
            pretrained=self.pretrained if old is None else old.pretrained,
            sums=self._sums_of(tasks),
            lineage=lineage,
            tasks=dict(tasks),
            versions=_versions(),
            written=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        )
        before = files.read_before()
        if old is not None:
            files.write_manifest(BEFORE, old)
        files.write_manifest(MANIFEST, new)
        bundle.current = new
        if old is None:  # a second copy, as there is no state before
            files.write_manifest(BEFORE, new)
        elif before is not None:
            files.delete(before.files() - old.files() - new.files())

    def _sums_of(self, tasks: Mapping[str, TaskRecord]) -> StoredFile | None:
        """The sums of features of these tasks: those of new tasks are added, those of gone ones subtracted."""
        files = self.bundle.files
        stored = None if self.bundle.current is None else self.bundle.current.sums
        old, new = by_features(self.bundle.tasks), by_features(tasks)
        if not new:
            return None
        if old.keys() == new.keys():
            return stored
        known = {key: record for key, (_, record) in (old | new).items()}
        read = cache(lambda key: self.bundle.read_features(known[key]))
        classes = {key: len(record.classes) for key, record in known.items()}
        sums = FeatureSums()
        if stored is not None:
            with files.read(stored) as state:
                sums = sums_from_state(state, classes)
        sums = updated(sums, {key: classes[key] for key in new}, read)
        return files.store(FEATURES, space_state(sums, calibrate(sums, read))) if sums.counts else None
