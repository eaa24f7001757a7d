"""Answers from a bundle: which class, and where nobody says which task, which task."""

from __future__ import annotations

import glob
import io
import logging
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from confitune.deploy.bundle import Bundle, BundleError
from confitune.deploy.folding import folded
from confitune.deploy.runners import Runners
from confitune.engine import TrainSettings
from confitune.errors import ConfituneError
from confitune.methods.gaussian import Gaussians
from confitune.nn import ContinualNet
from confitune.tasks import (
    DataError,
    DataMissingError,
    Pipeline,
    UnreadableImageError,
    is_image_name,
    open_rgb,
)

_log = logging.getLogger(__name__)
MOST_PIXELS = 50_000_000  # of an image to predict: 7,000 pixels square
_BATCH = 32  # files


@dataclass(frozen=True)
class TaskInfo:
    """What is known of a task."""

    classes: tuple[str, ...]
    accuracy: float | None  # percent, on its held-out images when it was last checked, or when it was learned
    images: int  # that it was learned from
    learned: str  # when, ISO 8601


@dataclass(frozen=True)
class Prediction:
    """The answer for one image."""

    task: str | None  # None: it looks like nothing that was learned
    task_confidence: float | None  # of a guessed task, 0 to 1; None where the task was given
    classes: tuple[tuple[str, float], ...]  # of the task, best first; of a guessed one they add up to its confidence
    version: str = ""  # of the bundle that answered
    others: tuple[tuple[str, str, float], ...] = ()  # where the task was not given: classes of other tasks, best first


class Predictor:
    """A bundle ready to answer. Threads may share one: they are answered one after the other, and decode together.

    On a CPU a task that is asked a second time gets a runner of its own, see `runners.py`: the first time a photo would
    wait longer for it than for its answer.

    Args:
        bundle: opened; what changes on disk later is seen after `renew`.
        device: 'auto', 'cpu', 'cuda', ...
        ready: how many tasks are kept in memory; others are read when they are asked for.
        unknown: whether an image that looks like nothing that was learned is said to be unknown, at the price of one
            in twenty that is not; else the likeliest class is named.

    Attributes:
        outdated: whether the bundle on disk is another one by now that cannot be used.
        unreadable: tasks whose files were found damaged or gone. A guess asks the pre-trained network alone for them.
    """

    def __init__(self, bundle: Bundle, *, device: str = "auto", ready: int = 256, unknown: bool = True) -> None:
        if ready < 1:
            raise BundleError(f"at least one task must be kept ready, got {ready}")
        self.name, self.ready, self.unknown = bundle.path.name, ready, unknown
        self.device = TrainSettings(device=device).torch_device()
        self.outdated = False
        self._pipeline, self._lock = Pipeline(), threading.RLock()
        self._loaded: OrderedDict[str, None] = OrderedDict()  # the one used last is the last
        self._seen = bundle.stamp()
        self._load(bundle)
        self._take(bundle)

    def _load(self, bundle: Bundle) -> None:
        self._net = bundle.load_network().to(self.device).to(memory_format=torch.channels_last).eval()
        self._pretrained: nn.Module | None = None  # once a task is to be guessed
        self._runners = Runners(bundle.network.size) if self.device.type == "cpu" else None
        self._loaded.clear()

    def _take(self, bundle: Bundle) -> None:
        self.bundle, self.preprocess = bundle, bundle.network.preprocess()
        self.tasks: Mapping[str, TaskInfo] = MappingProxyType(
            {
                name: TaskInfo(record.classes, record.newest_accuracy, record.images, record.learned)
                for name, record in bundle.tasks.items()
            }
        )
        self.version = bundle.version
        self.unreadable: set[str] = set()
        self._space: Gaussians | None = None  # once a task is to be guessed
        self._classes: list[tuple[str, str]] = []  # task and name of its classes

    def renew(self) -> bool:
        """Become what the bundle is on disk now, whole; where that is damaged or gone, stay what this is.

        Takes no time where nothing has changed. Says whether something has.
        """
        if self.bundle.stamp() == self._seen:
            return False
        with self._lock:
            seen = self.bundle.stamp()
            try:
                bundle = Bundle.open(self.bundle.path)
                if bundle.damage is not None:
                    raise BundleError(bundle.damage)
                if bundle.has_backbone_of(self.bundle):
                    known = self.bundle.tasks
                    for task in list(self._loaded):
                        if task not in bundle.tasks or bundle.tasks[task].file != known[task].file:
                            self._drop(task)
                else:
                    self._load(bundle)
            except ConfituneError as error:
                _log.warning("%s; answers are those of %s as it was opened", error, self.bundle.path)
                self.outdated = True
                return False
            self._take(bundle)
            self._seen, self.outdated = seen, False
            return True

    @classmethod
    def from_bundle(cls, path: Path | str, **options: Any) -> Predictor:
        """The predictor of the bundle in a folder; options are those of the class."""
        return cls(Bundle.open(path), **options)

    def decode(self, source: bytes | Path, name: str = "image") -> Tensor:
        """An image's pixels [3, 224, 224] as bytes; one that cannot be read raises `UnreadableImageError`."""
        name = str(source) if isinstance(source, Path) else name
        file = source if isinstance(source, Path) else io.BytesIO(source)
        image = open_rgb(file, name=name, most_pixels=MOST_PIXELS)
        try:
            return torch.from_numpy(self._pipeline(image))
        except Exception as error:  # e.g. too thin
            raise UnreadableImageError(f"cannot resize and crop the image {name}: {error}") from error

    @torch.no_grad()
    def logits(self, pixels: Tensor, tasks: Sequence[str]) -> list[Tensor]:
        """Logits of image n under `tasks[n]`; on a GPU images of different tasks go through the network together."""
        _require_one_each(pixels, tasks)
        with self._lock:
            return self._logits(self._inputs(pixels), tasks)

    def _inputs(self, pixels: Tensor) -> Tensor:
        """What the network takes."""
        return self.preprocess(pixels.to(self.device)) if len(pixels) else pixels

    def _logits(self, x: Tensor, tasks: Sequence[str]) -> list[Tensor]:
        wanted, found = list(dict.fromkeys(tasks)), [torch.empty(0)] * len(tasks)
        together = self.ready if self._runners is None else 1
        for first in range(0, len(wanted), together):
            part = wanted[first : first + together]
            mine = [n for n, task in enumerate(tasks) if task in part]
            for n, row in zip(mine, self._rows(x[mine], [tasks[n] for n in mine], part), strict=True):
                found[n] = row[: len(self.tasks[tasks[n]].classes)]
                if not found[n].isfinite().all():
                    raise BundleError(f"task {tasks[n]!r} gives numbers that are not finite: it was not learned well")
        return found

    def _rows(self, x: Tensor, tasks: Sequence[str], part: Sequence[str]) -> Tensor:
        """Logits of images, on the CPU; `part` are the different ones of `tasks`, no more than can be ready at once."""
        if self._runners is not None:
            (task,) = part
            run = self._runners.find(self.bundle.record(task).file.sha256, lambda: folded(self.network_for(task), task))
            if run is not None:
                return run(x)
        self._make_ready(part)
        index: str | Tensor = part[0]
        if len(part) > 1:
            place = {name: n for n, name in enumerate(self._net.tasks)}
            index = torch.tensor([place[task] for task in tasks], device=self.device)
        rows: Tensor = self._net(x, index)
        return rows.float().cpu()

    def predict(
        self, pixels: Tensor, tasks: Sequence[str | None], top: int = 5, among: Sequence[str] | None = None
    ) -> list[Prediction]:
        """The answer for each image, all of one version of the bundle.

        Files of a task are read when it is first asked for. Where two changes of the bundle have deleted them by then,
        the newest version answers.

        Args:
            pixels: from `decode`, stacked.
            tasks: of each image; None: whatever it looks like most, of all tasks.
            top: so many classes, best first.
            among: the tasks that a guess may be one of; default: all.
        """
        _require_one_each(pixels, tasks)
        with self._lock:
            while True:
                try:
                    return self._answers(pixels, tasks, top, among)
                except BundleError:
                    if not self.renew():
                        raise

    @torch.no_grad()
    def _answers(
        self, pixels: Tensor, tasks: Sequence[str | None], top: int, among: Sequence[str] | None
    ) -> list[Prediction]:
        for task in tasks:
            if task is not None:
                self.bundle.record(task)
        open_ones = [n for n, task in enumerate(tasks) if task is None]
        known = [n for n, task in enumerate(tasks) if task is not None]
        x = self._inputs(pixels)
        logits = dict(zip(known, self._logits(x[known], [str(tasks[n]) for n in known]), strict=True))
        guessed = dict(zip(open_ones, self._guessed(x[open_ones], top, among), strict=True))
        return [
            guessed[n] if task is None else Prediction(task, None, self._best(logits[n], task, top), self.version)
            for n, task in enumerate(tasks)
        ]

    @torch.no_grad()
    def _guessed(self, x: Tensor, top: int, among: Sequence[str] | None) -> list[Prediction]:
        """Answers where the task is not given, in two passes however many tasks there are.

        The first goes through the pre-trained network and gives probabilities of all classes of all tasks. In the
        second the networks of the leading tasks share out what their tasks have.
        """
        if not len(x):
            return []
        space, features = self._features(x)
        for name in among or ():
            self.bundle.record(name)
        if among is not None and not set(among) & set(space.tasks):
            raise BundleError(f"{self.bundle.path} keeps no features of any of these tasks: name one with --task")
        allowed = None if among is None else torch.tensor([name in among for name in space.tasks])
        probabilities = space.probabilities(features, allowed)
        for task, images in enumerate(space.leading(probabilities).T):
            name = space.tasks[task]
            if images.any():
                try:
                    logits = self._logits(x[images], [name] * int(images.sum()))
                except BundleError as error:
                    if self.bundle.stamp() != self._seen:
                        raise  # the file may be gone because there is a newer version
                    _log.warning("%s. Its pre-trained features answer for task %r", error, name)
                    continue
                space.refine(probabilities, task, images, torch.stack(logits).double().softmax(1))
        unknown = (space.unusual(features) > space.threshold).tolist() if self.unknown else [False] * len(x)
        of_tasks, found = space.of_tasks(probabilities), []
        for n, row in enumerate(probabilities):
            task = int(space.of_class[row.argmax()])
            own, others = (self._best_of(row, mine, top) for mine in (space.of_class == task, space.of_class != task))
            found.append(
                Prediction(
                    None if unknown[n] else space.tasks[task],
                    min(float(of_tasks[n, task]), 1.0),
                    tuple((label, share) for _, label, share in own),
                    self.version,
                    others,
                )
            )
        return found

    def _best_of(self, shares: Tensor, mine: Tensor, top: int) -> tuple[tuple[str, str, float], ...]:
        """Task, name and probability of the likeliest of some classes of the label space."""
        places = mine.nonzero().flatten()
        values, order = shares[places].topk(min(max(top, 1), len(places)))
        best = zip(places[order].tolist(), values.tolist(), strict=True)
        return tuple((*self._classes[place], share) for place, share in best)

    def guess(self, pixels: Tensor, among: Sequence[str] | None = None) -> list[tuple[str | None, float]]:
        """For each image the task that it belongs to and how surely, or None where it looks like nothing learned.

        Args:
            among: the tasks that it may be one of; default: all of the bundle.
        """
        with self._lock:
            found = self._guessed(self._inputs(pixels), 1, among)
            return [(guess.task, guess.task_confidence or 0.0) for guess in found]

    def _features(self, x: Tensor) -> tuple[Gaussians, Tensor]:
        """The label space, and the features of images under the pre-trained network."""
        if self._space is None:
            self._space = self.bundle.label_space()
            self._classes = [(task, label) for task in self._space.tasks for label in self.tasks[task].classes]
        run = None
        if self._runners is not None:
            run = self._runners.find("pretrained", lambda: nn.Sequential(self._load_pretrained(), nn.Identity()))
        if run is not None:
            self._pretrained = None  # its weights are the runner's now
        found: Tensor = (run or self._load_pretrained())(x)
        if found.shape[1] != len(self._space.centre):
            raise BundleError(f"{self.bundle.path} keeps features of another network: name the task")
        return self._space, found.float().cpu()

    def _load_pretrained(self) -> nn.Module:
        """The pre-trained network; weights that no task has moved are those of the tasks' network, held once."""
        if self._pretrained is None:
            net, shared = self.bundle.load_pretrained().to(self.device), self._net.shared_parameters()
            for name, weight in net.named_parameters():
                if name in shared and torch.equal(weight, shared[name]):
                    weight.data = shared[name].data
            self._pretrained = net.to(memory_format=torch.channels_last)
        return self._pretrained

    def network_for(self, task: str) -> ContinualNet:
        """The network, with this task in it and current; whoever uses it must be the only one."""
        with self._lock:
            self._make_ready([task])
            self._net.set_task(task)
            return self._net

    def _best(self, logits: Tensor, task: str, top: int) -> tuple[tuple[str, float], ...]:
        classes = self.tasks[task].classes
        values, places = logits.softmax(0).topk(min(max(top, 1), len(classes)))
        return tuple((classes[place], float(value)) for value, place in zip(values, places.tolist(), strict=True))

    def _make_ready(self, tasks: Sequence[str]) -> None:
        """Have these tasks in memory; those that were used longest ago make room."""
        for task in tasks:
            if task not in self._loaded:
                try:
                    self.bundle.load_task(self._net, task)
                except BundleError:
                    self.unreadable.add(task)
                    raise
                self.unreadable.discard(task)
                self._loaded[task] = None
            self._loaded.move_to_end(task)
        while len(self._loaded) > self.ready:
            self._drop(next(iter(self._loaded)))

    def _drop(self, task: str) -> None:
        del self._loaded[task]
        self._net.drop_task(task)


def _require_one_each(pixels: Tensor, tasks: Sequence[str | None]) -> None:
    if len(pixels) != len(tasks):
        raise DataError(f"{len(pixels)} images and {len(tasks)} tasks: give one task for each image, or None")


def image_files(given: Sequence[str]) -> list[Path]:
    """Every file once, in the order given; folders with everything below them, patterns such as 'new/*.jpg' as well."""
    found: list[Path] = []
    for text in given:
        path = Path(text)
        if path.is_dir():
            inside = sorted(p for p in path.rglob("*") if is_image_name(p.name) and p.is_file())
            if not inside:
                raise DataMissingError(f"the folder {path} holds no images")
            found += inside
        elif path.exists():
            found.append(path)
        else:
            matches = sorted(match for match in map(Path, glob.glob(text, recursive=True)) if match.is_file())
            if not matches:
                raise DataMissingError(f"there is no image {text}")
            found += matches
    return list(dict.fromkeys(found))


def predict_files(
    predictor: Predictor, files: Sequence[Path], task: str | None, top: int, among: Sequence[str] | None = None
) -> Iterator[tuple[Path, Prediction | DataError]]:
    """Each file with its answer, or with what is wrong with it; decoded by all cores, a batch at a time."""

    def decoded(file: Path) -> Tensor | DataError:
        try:
            return predictor.decode(file)
        except DataError as error:
            return error

    with ThreadPoolExecutor() as pool:
        for first in range(0, len(files), _BATCH):
            batch = files[first : first + _BATCH]
            pixels = list(pool.map(decoded, batch))
            good = [image for image in pixels if isinstance(image, Tensor)]
            answers = iter(predictor.predict(torch.stack(good), [task] * len(good), top, among) if good else ())
            for file, image in zip(batch, pixels, strict=True):
                yield file, next(answers) if isinstance(image, Tensor) else image
