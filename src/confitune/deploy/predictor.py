"""Answers from a bundle: which class, and where nobody says which task, which task."""

from __future__ import annotations

import glob
import io
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from confitune.deploy.bundle import Bundle, BundleError, TaskRecord
from confitune.deploy.ready_tasks import ReadyTasks
from confitune.engine import TrainSettings
from confitune.errors import ConfituneError, DataError, DataMissingError, UnreadableImageError
from confitune.methods.gaussian import Answers, Gaussians
from confitune.nn import ContinualNet
from confitune.tasks.datasets.folder import images_below
from confitune.tasks.decode import Pipeline, open_rgb

_log = logging.getLogger(__name__)
MOST_PIXELS = 50_000_000  # of an image to predict: 7,000 pixels square
_BATCH = 32  # files


@dataclass(frozen=True)
class Prediction:
    """The answer for one image."""

    task: str | None  # None: it looks like nothing that was learned
    task_confidence: float | None  # of a guessed task, 0 to 1; None where the task was given
    classes: tuple[tuple[str, float], ...]  # of the task, best first; of a guessed one they add up to its confidence
    version: str = ""  # of the bundle that answered
    others: tuple[tuple[str, str, float], ...] = ()  # where the task was not given: classes of other tasks, best first

    def told(self, top: int) -> dict[str, Any]:
        """As JSON holds it, with so many classes."""
        return {
            "task": self.task,
            "task_confidence": self.task_confidence,
            "classes": [{"name": name, "probability": share} for name, share in self.classes[:top]],
            "others": [{"task": task, "name": name, "probability": share} for task, name, share in self.others[:top]],
        }


class Predictor:
    """A bundle ready to answer. Threads may share one: they decode in parallel and are answered one after the other.

    Args:
        bundle: later changes on disk are seen after `renew`.
        device: 'auto', 'cpu', 'cuda', ...
        ready: how many tasks are kept in memory; others are read when they are asked for.
        unknown: call images unknown that look like nothing that was learned (and one in twenty that does not); if
            False, the most probable class is always named.

    Attributes:
        outdated: whether the bundle on disk has changed and cannot be used.
    """

    def __init__(self, bundle: Bundle, *, device: str = "auto", ready: int = 256, unknown: bool = True) -> None:
        if ready < 1:
            raise BundleError(f"at least one task must be kept ready, got {ready}")
        self.name = bundle.path.name
        self.unknown = unknown
        self.device = TrainSettings(device=device).torch_device()
        self.outdated = False
        self._pipeline = Pipeline()
        self._lock = threading.RLock()
        self._seen = bundle.stamp()
        self._tasks = ReadyTasks(bundle, self.device, ready)
        self._take(bundle)

    @classmethod
    def from_bundle(cls, path: Path | str, **options: Any) -> Predictor:
        """The predictor of the bundle in a folder; options are those of the class."""
        return cls(Bundle.open(path), **options)

    def _take(self, bundle: Bundle) -> None:
        self.bundle = bundle
        self.version = bundle.manifest.version
        self.preprocess = bundle.network.preprocess()
        self._space: Gaussians | None = None  # once a task is to be guessed
        self._classes: list[tuple[str, str]] = []  # task and name of its classes

    @property
    def unreadable(self) -> set[str]:
        """Tasks whose files are damaged or gone. A guess asks the pre-trained network alone for them."""
        return self._tasks.unreadable

    @property
    def tasks(self) -> Mapping[str, TaskRecord]:
        """What is known of the tasks, by name."""
        return self.bundle.tasks

    def renew(self) -> bool:
        """Follow the bundle on disk, unless it is damaged or gone. Returns whether it has changed."""
        if self.bundle.stamp() == self._seen:
            return False
        with self._lock:
            seen = self.bundle.stamp()
            try:
                bundle = Bundle.open(self.bundle.path)
                if bundle.damage is not None:
                    raise BundleError(bundle.damage)
                self._tasks.follow(bundle)
            except ConfituneError as error:
                _log.warning("%s; answers are those of %s as it was opened", error, self.bundle.path)
                self.outdated = True
                return False
            self._take(bundle)
            self._seen, self.outdated = seen, False
            return True

    def decode(self, source: bytes | Path, name: str = "image") -> Tensor:
        """An image's pixels [3, 224, 224] as bytes; one that cannot be read raises `UnreadableImageError`."""
        name = str(source) if isinstance(source, Path) else name
        file = source if isinstance(source, Path) else io.BytesIO(source)
        image = open_rgb(file, name=name, most_pixels=MOST_PIXELS)
        try:
            return torch.from_numpy(self._pipeline(image))
        except Exception as error:  # e.g. too thin
            raise UnreadableImageError(f"cannot resize and crop the image {name}: {error}") from error

    def predict(self, pixels: Tensor, tasks: Sequence[str | None], top: int = 5) -> list[Prediction]:
        """The answer for each image, all of one version of the bundle.

        Args:
            pixels: from `decode`, stacked.
            tasks: of each image; None guesses it.
            top: so many classes, best first.
        """

        def answers(x: Tensor, of: Sequence[Any]) -> list[Prediction]:
            best = max(top, 1)
            return self._guessed(x, best) if of[0] is None else self._of_tasks(x, of, best)

        with self._lock:
            while True:
                try:
                    return self._together(pixels, tasks, answers)
                except BundleError:  # two changes of the bundle may have deleted a task's files before they were read
                    if not self.renew():
                        raise

    def logits(self, pixels: Tensor, tasks: Sequence[str]) -> list[Tensor]:
        """Logits of image n under `tasks[n]`."""
        with self._lock:
            rows = self._together(pixels, tasks, self._tasks.logits)
            return [row[: len(self.tasks[task].classes)] for row, task in zip(rows, tasks, strict=True)]

    @torch.no_grad()
    def _together(self, pixels: Tensor, tasks: Sequence[Any], answer: Callable[..., Iterable[Any]]) -> list[Any]:
        """What `answer(inputs, tasks)` gives for each image. It is called once for all images of a task; once for those
        of all tasks that are given, where they can go through the network together."""
        if len(pixels) != len(tasks):
            raise DataError(f"{len(pixels)} images and {len(tasks)} tasks: give one task for each image, or None")
        groups: dict[Any, list[int]] = {}
        for n, task in enumerate(tasks):
            groups.setdefault(task if self._tasks.mixed is None else task is None, []).append(n)
        found: dict[int, Any] = {}
        for mine in groups.values():
            x = self.preprocess(pixels[mine].to(self.device))
            found.update(zip(mine, answer(x, [tasks[n] for n in mine]), strict=True))
        return [found[n] for n in range(len(tasks))]

    def _of_tasks(self, x: Tensor, tasks: Sequence[str], top: int) -> list[Prediction]:
        """Answers where the tasks are given."""
        logits = self._tasks.logits(x, tasks)
        places = logits.topk(min(top, logits.shape[1])).indices
        shares = logits.softmax(1).gather(1, places)
        found = []
        for task, best, of_image in zip(tasks, places.tolist(), shares.tolist(), strict=True):
            names = self.tasks[task].classes
            named = tuple(
                (names[place], share) for place, share in zip(best, of_image, strict=True) if place < len(names)
            )
            found.append(Prediction(task, None, named, self.version))
        return found

    def _guessed(self, x: Tensor, top: int) -> list[Prediction]:
        """Answers where the task is not given, in two passes however many tasks there are.

        The first goes through the pre-trained network and gives probabilities of all classes of all tasks. In the
        second the networks of the leading tasks share out what their tasks have. A task that owns only a head needs no
        second pass.
        """
        if self._space is None:
            self._space = self.bundle.label_space()
            self._classes = [(task, label) for task in self._space.tasks for label in self.tasks[task].classes]
        space, features = self._space, self._tasks.features(x)
        if features.shape[1] != space.means.shape[1]:
            raise BundleError(f"{self.bundle.path} keeps features of another network: name the task")
        known = features.float().cpu()
        ask = partial(self._second_pass, space.tasks, x, features)
        probabilities = space.shared_out(space.probabilities(known), ask)
        if not probabilities.isfinite().all():
            raise BundleError(f"{self.bundle.path} keeps sums of features that give no probabilities: name the task")
        unknown = (space.unusual(known) > space.threshold).tolist() if self.unknown else [False] * len(x)
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

    def _second_pass(self, names: Sequence[str], x: Tensor, features: Tensor, leading: Tensor) -> Answers:
        """What the networks of tasks say of the images that they lead in; a mixed batch asks all of them at once."""
        at_once: dict[int, Tensor] = {}
        whole = leading & ~torch.tensor([self.tasks[name].only_head for name in names])[:, None]
        if self._tasks.mixed is not None and whole.any():
            tasks, images = whole.nonzero(as_tuple=True)
            with suppress(BundleError):  # one is damaged: each is asked alone
                mixed = self._tasks.logits(x[images], [names[task] for task in tasks])
                at_once = {task: mixed[tasks == task] for task in tasks.unique().tolist()}
        for task in leading.any(1).nonzero().flatten().tolist():
            name, mine = names[task], leading[task]
            try:
                rows = at_once.get(task)
                if rows is None:
                    rows = self._tasks.logits(x[mine], [name] * int(mine.sum()), features[mine])
            except BundleError as error:
                if self.bundle.stamp() != self._seen:
                    raise  # the file may be gone because there is a newer version
                _log.warning("%s. Its pre-trained features answer for task %r", error, name)
            else:
                yield task, rows[:, : len(self.tasks[name].classes)].double().softmax(1)

    def _best_of(self, shares: Tensor, mine: Tensor, top: int) -> tuple[tuple[str, str, float], ...]:
        """Task, name and probability of the likeliest of some classes of the label space."""
        places = mine.nonzero().flatten()
        values, order = shares[places].topk(min(top, len(places)))
        best = zip(places[order].tolist(), values.tolist(), strict=True)
        return tuple((*self._classes[place], share) for place, share in best)

    def network_for(self, task: str) -> ContinualNet:
        """The network, with this task in it and current; whoever uses it must be the only one."""
        with self._lock:
            return self._tasks.network_for(task)


def image_files(given: Sequence[str]) -> list[Path]:
    """Every file once, in the order given; folders with everything below them, patterns such as 'new/*.jpg' as well."""
    found: list[Path] = []
    for text in given:
        path = Path(text)
        if path.is_dir():
            inside = images_below(path)
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
    predictor: Predictor, files: Sequence[Path], task: str | None, top: int
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
            answers = iter(predictor.predict(torch.stack(good), [task] * len(good), top) if good else ())
            for file, image in zip(batch, pixels, strict=True):
                yield file, next(answers) if isinstance(image, Tensor) else image
