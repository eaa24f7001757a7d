"""Whether a bundle is whole, and whether it still knows its tasks."""

import logging
import random
from dataclasses import dataclass, field
from pathlib import Path

from confitune.deploy.bundle import Bundle, BundleError, changing, go_back
from confitune.deploy.bundle.format import BEFORE, DamagedError
from confitune.deploy.predictor import Predictor
from confitune.engine import evaluate
from confitune.errors import ConfituneError
from confitune.nn import ContinualNet
from confitune.tasks import Progress

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Finding:
    """Something that is not as it should be."""

    problem: str  # with the file's name
    remedy: str | None = None  # what `repair` does about it, or has done; None: nothing can be done here


@dataclass
class Examination:
    """What was found in a bundle."""

    contents: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)


def examine(folder: Path, repair: bool = False) -> Examination:
    """Read every file of a bundle and compare it with its checksum; with `repair`, do what the remedies say.

    Nothing that is whole is removed, except what belongs to a change that broke off or is undone because of damage.
    """
    found = Examination()
    try:
        bundle = Bundle.open(folder)
    except DamagedError as error:
        found.findings.append(Finding(str(error)))
        return found
    if bundle.damage is not None:
        back = f"gone back to what it was before its last change, on {bundle.manifest.written}"
        found.findings.append(Finding(bundle.damage, f"{back}; what was made since is deleted"))
        if repair:
            go_back(bundle)
    network = bundle.network
    found.contents.append(f"{network.model}, {network.size} pixels, last changed {bundle.manifest.written}")
    try:
        bundle.load_network()
        if any(record.features for record in bundle.tasks.values()):
            bundle.load_pretrained()
            bundle.label_space()
    except ConfituneError as error:
        found.findings.append(Finding(str(error)))
    for task, record in bundle.tasks.items():
        found.contents.append(f"task {task!r}: {len(record.classes)} classes, {record.file.bytes:,} bytes")
        try:
            bundle.task_state(task)
            bundle.features(task)
            bundle.held_out(task)
        except ConfituneError as error:
            found.findings.append(Finding(f"task {task!r}: {error}"))
    if bundle.damage is not None:  # what is left over shows when it is mended
        return found
    if bundle.files.read_before() is None:
        lost = "the last change cannot be undone; the next one writes it anew"
        found.findings.append(Finding(f"{folder / BEFORE} is damaged or gone: {lost}"))
    for path in bundle.leftovers():
        found.findings.append(Finding(f"{path} is left from a change that broke off", "deleted"))
    if repair and found.findings:
        with changing(bundle):  # deletes them
            pass
    return found


@dataclass(frozen=True)
class Checks:
    """Shares of the held-out images, in percent."""

    accuracy: dict[str, float]  # by task, with the task given
    guessed: float | None  # whose task is guessed right; None if nothing was kept
    unknown: float  # that are called unknown


def check_tasks(bundle: Bundle, device: str = "auto", progress: Progress | None = None) -> Checks:
    """Test every task that kept images: with the task given, and with the task guessed."""
    predictor = Predictor(bundle, device=device)
    accuracy: dict[str, float] = {}
    guesses: list[tuple[str, str | None]] = []  # the task of each image, and the one that it is taken for
    for number, (task, record) in enumerate(bundle.tasks.items(), 1):
        if progress is not None:
            progress("testing tasks", number, len(bundle.tasks))
        kept = bundle.held_out(task)
        if kept is None:
            continue
        accuracy[task] = evaluate(predictor.network_for(task), kept)
        if record.features is not None:
            answers = predictor.predict(kept.test.pixels, [None] * len(kept.test), top=1)
            guesses += [(task, answer.task) for answer in answers]
    if not guesses:
        return Checks(accuracy, None, 0.0)
    right = sum(task == found for task, found in guesses)
    unknown = sum(found is None for _, found in guesses)
    return Checks(accuracy, 100.0 * right / len(guesses), 100.0 * unknown / len(guesses))


@dataclass(frozen=True)
class Change:
    """An earlier task's accuracy on its held-out images, in percent."""

    task: str
    before: float | None  # when it was last tested
    after: float
    images: int


def check_earlier(
    bundle: Bundle, net: ContinualNet, most: int, seed: int, progress: Progress | None = None
) -> tuple[Change, ...]:
    """What tasks that kept images lost or gained by a new one: all of them, or `most` at random.

    They are loaded one at a time. A task whose files are damaged is left out.
    """
    tasks = [name for name, record in bundle.tasks.items() if record.held_out is not None]
    if len(tasks) > most:
        tasks = sorted(random.Random(f"{seed} {len(bundle.tasks)}").sample(tasks, most), key=tasks.index)
    changes = []
    for number, task in enumerate(tasks, 1):
        loaded = task not in net.tasks
        try:
            if loaded:
                bundle.load_task(net, task)
            if (kept := bundle.held_out(task)) is not None:
                changes.append(Change(task, bundle.record(task).checked, evaluate(net, kept), len(kept.test)))
        except BundleError as error:
            _log.warning("%s. Task %r is not tested again", error, task)
        if loaded and task in net.tasks:
            net.drop_task(task)
        if progress is not None:
            progress("testing earlier tasks", number, len(tasks))
    return tuple(changes)
