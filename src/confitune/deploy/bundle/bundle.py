"""An opened bundle, to be read: a network and what it has learned so far. `change.py` changes it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor, nn

from confitune.deploy.bundle.format import MANIFEST, BundleError, Manifest, Network, TaskRecord
from confitune.deploy.bundle.store import Store, check_declared, is_bundle, require_room
from confitune.deploy.label_space import TaskFeatures, chosen_from_state, sums_from_state
from confitune.methods.gaussian import Gaussians
from confitune.nn import ContinualNet, build_model, headless, two_scales
from confitune.tasks import Images, Task

_log = logging.getLogger(__name__)


class Bundle:
    """A bundle as it was when it was opened, and as this process has changed it since.

    Args:
        network: of a new bundle; `Bundle.open` reads that of an existing one.

    Attributes:
        damage: if the newest state is damaged, what is wrong with it; the bundle is then as before its last change.

    >>> Bundle.open("no-such-folder")
    Traceback (most recent call last):
    confitune.deploy.bundle.format.BundleError: no-such-folder is not a bundle: create one with `confitune learn`
    """

    def __init__(self, path: Path, network: Network) -> None:
        self.path = path
        self.network = network
        self.damage: str | None = None
        self.files = Store(path)
        self.current: Manifest | None = None  # until a new bundle has its first task

    @classmethod
    def open(cls, path: Path | str) -> Bundle:
        """Open the bundle in a folder. Manifest and backbone are checked now, task files when they are first read.

        If manifest or backbone are damaged, the bundle is opened as it was before its last change: a warning is
        logged, `damage` says what is wrong, and the bundle cannot be changed.
        """
        files = Store(Path(path))
        manifest, damage = files.newest()
        bundle = cls(files.root, manifest.network)
        bundle.files = files
        bundle.current = manifest
        bundle.damage = damage
        if damage is not None:
            _log.warning("%s. %s is used as it was before its last change, on %s", damage, path, manifest.written)
        return bundle

    exists = staticmethod(is_bundle)

    @property
    def manifest(self) -> Manifest:
        """What the bundle's file says of it; an error before the first task."""
        if self.current is None:
            raise BundleError(f"{self.path} has no tasks yet")
        return self.current

    @property
    def tasks(self) -> Mapping[str, TaskRecord]:
        """Records by name, in the order in which tasks were added; a renamed task keeps its place."""
        return MappingProxyType({} if self.current is None else self.current.tasks)

    def stamp(self) -> tuple[int, int] | None:
        """Changes with the manifest on disk; None if there is none."""
        try:
            status = (self.path / MANIFEST).lstat()
        except OSError:
            return None
        return status.st_ino, status.st_mtime_ns

    def has_backbone_of(self, other: Bundle) -> bool:
        """Whether both are one network with the same weights, so that tasks of one fit the other."""
        return self.manifest.lineage == other.manifest.lineage and self.network == other.network

    def record(self, task: str) -> TaskRecord:
        """The record of a task, or an error that names the tasks there are."""
        if task not in self.tasks:
            known = ", ".join(map(repr, islice(self.tasks, 10))) + (", ..." if len(self.tasks) > 10 else "")
            raise BundleError(f"{self.path} has no task {task!r}; it has {known or 'none yet'}")
        return self.tasks[task]

    def task_state(self, task: str) -> dict[str, Tensor]:
        """Everything that is a task's own, by layer."""
        with self.files.read(self.record(task).file) as state:
            return state

    def held_out(self, task: str) -> Task | None:
        """The images that were kept of a task to test it with; None if none were."""
        record = self.record(task)
        if record.held_out is None:
            return None
        with self.files.read(record.held_out) as state:
            images = Images(state["pixels"], torch.arange(len(state["pixels"])), state["labels"])
            return Task(task, record.classes, images, images, self.network.preprocess())

    def features(self, task: str) -> TaskFeatures | None:
        """What is kept of the features of a task's images; None if nothing is."""
        record = self.record(task)
        return None if record.features is None else self.read_features(record)

    def read_features(self, record: TaskRecord) -> TaskFeatures:
        """The features that a record names, be it of a task that is not in the bundle yet."""
        assert record.features is not None
        with self.files.read(record.features) as state:
            return TaskFeatures.from_state(state, len(record.classes))

    def label_space(self) -> Gaussians:
        """The classifier over all classes of all tasks."""
        stored, records = self.manifest.sums, by_features(self.tasks)
        if stored is None:
            raise BundleError(f"{self.path} keeps no features of its tasks: name the task")
        with self.files.read(stored) as state:
            sums = sums_from_state(state, {key: len(record.classes) for key, (_, record) in records.items()})
            return chosen_from_state(sums, state, {key: name for key, (name, _) in records.items()})

    def load_pretrained(self) -> nn.Module:
        """The network before its first task, in evaluation mode: images to features."""
        stored = self.manifest.pretrained
        if stored is None:
            raise BundleError(f"{self.path} keeps no pre-trained network: name the task")
        with self.files.read(stored) as state:
            require_room(self.network.model, stored.bytes)
            net = two_scales(headless(build_model(self.network.model)))
            own = pretrained_state(net)
            if own.keys() != state.keys() or any(tensor.shape != state[key].shape for key, tensor in own.items()):
                raise BundleError(f"these are not the weights of {self.network.model}")
            net.load_state_dict(state, strict=False)
        return net.eval()

    @property
    def keeps_pretrained(self) -> bool:
        """Whether the network, apart from what tasks own, is the pre-trained one, and gives the same features."""
        return self.manifest.backbone == self.manifest.pretrained and self.network.learner().two_scales

    def load_network(self, tasks: Sequence[str] = ()) -> ContinualNet:
        """The network with the state of `tasks`; the last of them is current."""
        stored = self.manifest.backbone
        with self.files.read(stored) as state:
            require_room(self.network.model, stored.bytes)
            net = self.network.around(build_model(self.network.model))
            net.load_shared_state_dict(state)
        for task in tasks:
            self.load_task(net, task)
        return net

    def load_task(self, net: ContinualNet, task: str) -> None:
        """Put a task's state into the network and make it current.

        A state with other tensors than the network keeps is refused before any is copied.
        """
        record = self.record(task)
        with self.files.read(record.file) as state:
            check_declared(state, self.network.size)
            net.load_task_state_dict(task, state, record.classes)

    def leftovers(self) -> list[Path]:
        """Files of a change that broke off; the next change deletes them."""
        return sorted(self.path / name for name in self.files.leftovers(self.current, self.files.read_before()))


def by_features(tasks: Mapping[str, TaskRecord]) -> dict[str, tuple[str, TaskRecord]]:
    """Tasks with features by the hash of those, which a renamed task keeps and one of the same photos shares."""
    found: dict[str, tuple[str, TaskRecord]] = {}
    for name, record in tasks.items():
        if record.features is not None:
            found.setdefault(record.features.sha256, (name, record))
    return found


def pretrained_state(net: nn.Module) -> dict[str, Tensor]:
    """What is stored of a pre-trained network."""
    return {key: tensor for key, tensor in net.state_dict().items() if not key.endswith("num_batches_tracked")}
