"""Answers from a bundle: which class, and where nobody says which task, which task."""

from __future__ import annotations

import glob
import io
import logging
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from confitune.deploy.bundle import Bundle, BundleError, TaskRecord
from confitune.deploy.folding import Runners, folded, folded_pretrained
from confitune.deploy.mixed import CannotMixError, MixedNet
from confitune.engine import TrainSettings
from confitune.errors import ConfituneError
from confitune.methods.gaussian import Answers, Gaussians
from confitune.nn import ContinualNet
from confitune.tasks import DataError, DataMissingError, Pipeline, UnreadableImageError, is_image_name, open_rgb

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

    On a CPU a task that is asked a second time gets a runner, see `folding.py`: making one takes longer than an answer.
    On a GPU images of all tasks go through the network together, see `mixed.py`.

    Args:
        bundle: later changes on disk are seen after `renew`.
        device: 'auto', 'cpu', 'cuda', ...
        ready: how many tasks are kept in memory; others are read when they are asked for.
        unknown: call images unknown that look like nothing that was learned (and one in twenty that does not); if
            False, the most probable class is always named.

    Attributes:
        outdated: whether the bundle on disk has changed and cannot be used.
        unreadable: tasks whose files are damaged or gone. A guess asks the pre-trained network alone for them.
    """

    def __init__(self, bundle: Bundle, *, device: str = "auto", ready: int = 256, unknown: bool = True) -> None:
        if ready < 1:
            raise BundleError(f"at least one task must be kept ready, got {ready}")
        self.name = bundle.path.name
        self.ready = ready
        self.unknown = unknown
        self.device = TrainSettings(device=device).torch_device()
        self.outdated = False
        self._pipeline = Pipeline()
        self._lock = threading.RLock()
        self._heads: OrderedDict[str, tuple[Tensor, Tensor]] = OrderedDict()  # of tasks in memory, used last at the end
        self._seen = bundle.stamp()
        self._load(bundle)
        self._take(bundle)

    @classmethod
    def from_bundle(cls, path: Path | str, **options: Any) -> Predictor:
        """The predictor of the bundle in a folder; options are those of the class."""
        return cls(Bundle.open(path), **options)

    def _load(self, bundle: Bundle) -> None:
        self._net = bundle.load_network().to(self.device).to(memory_format=torch.channels_last).eval()
        self._pretrained: nn.Module | None = None  # once a task is to be guessed
        self._keeps_pretrained = bundle.keeps_pretrained
        self._runners = Runners(bundle.network.size) if self.device.type == "cpu" else None
        self._heads.clear()
        self._mixed = self._mixes(bundle) if self.device.type == "cuda" else None

    def _mixes(self, bundle: Bundle) -> MixedNet | None:
        """The network for images of several tasks at once, with room for some more classes than there are."""
        image, classes = (3, bundle.network.size, bundle.network.size), 16 * math.ceil(_most_classes(bundle) / 16)
        try:
            # Two rows more: for no task, and for a task that is read before another one goes.
            return MixedNet(self._net, image, self.ready + 2, classes)
        except CannotMixError as error:
            _log.warning("%s. Images of several tasks are answered task by task, which takes longer", error)
            return None

    def _take(self, bundle: Bundle) -> None:
        self.bundle = bundle
        self.version = bundle.manifest.version
        self.preprocess = bundle.network.preprocess()
        self.unreadable: set[str] = set()
        self._space: Gaussians | None = None  # once a task is to be guessed
        self._classes: list[tuple[str, str]] = []  # task and name of its classes

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
                has_room = self._mixed is None or self._mixed.classes >= _most_classes(bundle)
                if has_room and bundle.has_backbone_of(self.bundle):
                    for task in list(self._heads):
                        if task not in bundle.tasks or bundle.tasks[task].file != self.tasks[task].file:
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

    def decode(self, source: bytes | Path, name: str = "image") -> Tensor:
        """An image's pixels [3, 224, 224] as bytes; one that cannot be read raises `UnreadableImageError`."""
        name = str(source) if isinstance(source, Path) else name
        file = source if isinstance(source, Path) else io.BytesIO(source)
        image = open_rgb(file, name=name, most_pixels=MOST_PIXELS)
        try:
            return torch.from_numpy(self._pipeline(image))
        except Exception as error:  # e.g. too thin
            raise UnreadableImageError(f"cannot resize and crop the image {name}: {error}") from error

    def predict(
        self, pixels: Tensor, tasks: Sequence[str | None], top: int = 5, among: Sequence[str] | None = None
    ) -> list[Prediction]:
        """The answer for each image, all of one version of the bundle.

        Args:
            pixels: from `decode`, stacked.
            tasks: of each image; None guesses it.
            top: so many classes, best first.
            among: the tasks that a guess may be one of; default: all.
        """

        def answers(x: Tensor, of: Sequence[Any]) -> list[Prediction]:
            best = max(top, 1)
            return self._guessed(x, best, among) if of[0] is None else self._of_tasks(x, of, best)

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
            rows = self._together(pixels, tasks, self._logits)
            return [row[: len(self.tasks[task].classes)] for row, task in zip(rows, tasks, strict=True)]

    @torch.no_grad()
    def _together(self, pixels: Tensor, tasks: Sequence[Any], answer: Callable[..., Iterable[Any]]) -> list[Any]:
        """What `answer(inputs, tasks)` gives for each image. It is called once for all images of a task; once for those
        of all tasks that are given, where they can go through the network together."""
        if len(pixels) != len(tasks):
            raise DataError(f"{len(pixels)} images and {len(tasks)} tasks: give one task for each image, or None")
        groups: dict[Any, list[int]] = {}
        for n, task in enumerate(tasks):
            groups.setdefault(task if self._mixed is None else task is None, []).append(n)
        found: dict[int, Any] = {}
        for mine in groups.values():
            x = self.preprocess(pixels[mine].to(self.device))
            found.update(zip(mine, answer(x, [tasks[n] for n in mine]), strict=True))
        return [found[n] for n in range(len(tasks))]

    def _of_tasks(self, x: Tensor, tasks: Sequence[str], top: int) -> list[Prediction]:
        """Answers where the tasks are given."""
        logits = self._logits(x, tasks)
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

    def _logits(self, x: Tensor, tasks: Sequence[str], pretrained: Tensor | None = None) -> Tensor:
        """Of images under their tasks, on the CPU, padded with -inf. The tasks are one, unless images can be mixed.

        A task that owns only a head reads their pre-trained features.
        """
        counts, task = torch.tensor([len(self.bundle.record(task).classes) for task in tasks]), tasks[0]
        self._make_ready(task)
        only_head = self._keeps_pretrained and self._net.tasks[task].only_head
        if only_head and pretrained is not None:
            rows = linear(pretrained, *self._heads[task])
        elif self._mixed is not None:
            rows = self._mixed_logits(self._mixed, x, tasks)
        else:
            rows = linear(self._features(x, None if only_head else task), *self._heads[task])
        rows = rows.float().cpu()
        wrong = (~rows.isfinite() & (torch.arange(rows.shape[1]) < counts[:, None])).any(1)
        if wrong.any():
            task = tasks[int(wrong.nonzero()[0])]
            raise BundleError(f"task {task!r} gives NaN or infinite outputs: its training diverged")
        return rows

    def _mixed_logits(self, mixed: MixedNet, x: Tensor, tasks: Sequence[str]) -> Tensor:
        """The same on the device, in pieces of no more tasks than are kept ready."""
        names = list(dict.fromkeys(tasks))
        rows = x.new_empty(len(x), mixed.classes)
        for first in range(0, len(names), self.ready):
            some = names[first : first + self.ready]
            for task in some:
                self._make_ready(task)
            mine = [n for n, task in enumerate(tasks) if task in some]
            rows[mine] = mixed(x[mine], [tasks[n] for n in mine])[1]
        return rows

    def _guessed(self, x: Tensor, top: int, among: Sequence[str] | None) -> list[Prediction]:
        """Answers where the task is not given, in two passes however many tasks there are.

        The first goes through the pre-trained network and gives probabilities of all classes of all tasks. In the
        second the networks of the leading tasks share out what their tasks have. A task that owns only a head needs no
        second pass.
        """
        if self._space is None:
            self._space = self.bundle.label_space()
            self._classes = [(task, label) for task in self._space.tasks for label in self.tasks[task].classes]
        space, features = self._space, self._features(x)
        if features.shape[1] != space.means.shape[1]:
            raise BundleError(f"{self.bundle.path} keeps features of another network: name the task")
        for name in among or ():
            self.bundle.record(name)
        if among is not None and not set(among) & set(space.tasks):
            raise BundleError(f"{self.bundle.path} keeps no features of any of these tasks: name one with --task")
        allowed = None if among is None else torch.tensor([name in among for name in space.tasks])

        known = features.float().cpu()
        ask = partial(self._second_pass, space.tasks, x, features)
        probabilities = space.shared_out(space.probabilities(known, allowed), ask)
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
        if self._mixed is not None and whole.any():
            tasks, images = whole.nonzero(as_tuple=True)
            with suppress(BundleError):  # one is damaged: each is asked alone
                mixed = self._logits(x[images], [names[task] for task in tasks])
                at_once = {task: mixed[tasks == task] for task in tasks.unique().tolist()}
        for task in leading.any(1).nonzero().flatten().tolist():
            name, mine = names[task], leading[task]
            try:
                rows = at_once.get(task)
                if rows is None:
                    rows = self._logits(x[mine], [name] * int(mine.sum()), features[mine])
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

    def _features(self, x: Tensor, task: str | None = None) -> Tensor:
        """Of images under the network of a task in memory, or (None) under the pre-trained one."""
        if self._mixed is not None and task is None and self._keeps_pretrained:
            if None not in self._mixed:
                with self._net.as_pretrained():
                    self._mixed.load(None, self._net)
            return self._mixed(x, [None] * len(x))[0]
        if self._runners is not None:
            name = "pretrained" if task is None else self.tasks[task].file.sha256
            if run := self._runners.find(name, partial(self._plain, task)):
                self._pretrained = self._pretrained if task else None  # its weights are the runner's now
                return run(x)
        if task is not None:
            self._net.set_task(task)
            return self._net.features(x)
        if not self._keeps_pretrained:
            return cast(Tensor, self._plain(None)(x))
        with self._net.as_pretrained():
            return cast(Tensor, self._net.backbone(x))

    def _plain(self, task: str | None) -> nn.Module:
        """The network of a task, or the pre-trained one, as a module of its own: images to features."""
        if task is not None:
            return folded(self._net, task)[0]
        if self._keeps_pretrained:
            return folded_pretrained(self._net)
        if self._pretrained is None:
            self._pretrained = self.bundle.load_pretrained().to(self.device).to(memory_format=torch.channels_last)
        return self._pretrained

    def network_for(self, task: str) -> ContinualNet:
        """The network, with this task in it and current; whoever uses it must be the only one."""
        with self._lock:
            self._make_ready(task)
            self._net.set_task(task)
            return self._net

    def _make_ready(self, task: str) -> None:
        """Have a task in memory; the one that was used longest ago makes room."""
        if task not in self._heads:
            try:
                self.bundle.load_task(self._net, task)
            except BundleError:
                self.unreadable.add(task)
                raise
            self.unreadable.discard(task)
            head = self._net.head.linear
            self._heads[task] = head.weight.detach().clone(), head.bias.detach().clone()
            if self._mixed is not None:
                self._net.prepare(task)
                self._mixed.load(task, self._net)
        self._heads.move_to_end(task)
        if len(self._heads) > self.ready:
            self._drop(next(iter(self._heads)))

    def _drop(self, task: str) -> None:
        del self._heads[task]
        self._net.drop_task(task)
        if self._mixed is not None:
            self._mixed.drop(task)


def _most_classes(bundle: Bundle) -> int:
    return max((len(record.classes) for record in bundle.tasks.values()), default=1)


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
