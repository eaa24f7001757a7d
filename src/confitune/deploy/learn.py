"""Teach a bundle one more task from a folder of labelled images, and see what the earlier ones lost or gained."""

import copy
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from pydantic import Field
from torch import nn
from torch.nn.functional import one_hot
from typing_extensions import TypedDict, Unpack

from confitune.deploy.bundle import Bundle, BundleChange, BundleError, Network, TaskRecord, changing
from confitune.deploy.bundle.format import MethodOptions, check_name, readable
from confitune.deploy.checks import Change, check_earlier
from confitune.deploy.folding import example_images
from confitune.deploy.label_space import TaskFeatures
from confitune.engine import DivergedError, Executor, Listener, TaskFit, epochs_of, evaluate, place_task
from confitune.engine.evaluation import right_answers
from confitune.methods import METHODS, Method
from confitune.nn import ContinualNet, create_backbone, two_scales
from confitune.settings import NetworkSettings, TrainSettings
from confitune.tasks import Images, Progress, Task, load_folder_task
from confitune.tasks.decode import CROP

_log = logging.getLogger(__name__)
_TRIED = 256  # training images that show whether anything was learned


class LearnSettings(NetworkSettings, TrainSettings):
    """How a task is learned, and for a new bundle with what network and method."""

    size: int = Field(CROP, ge=32, le=CROP, description="of a new bundle: pixels of the network's input")
    method: str = Field("best", description="of a new bundle: any method that needs nothing of earlier tasks")
    options: dict[str, MethodOptions] = Field(
        default_factory=dict, description="of a new bundle's method, by its name: {'best': {'rank': 2}}"
    )
    skip_broken: bool = Field(False, description="learn without images that cannot be read, and say which these are")
    keep: int = Field(0, ge=0, description="held-out images to keep with the bundle, to test the task again later")
    check: int = Field(20, ge=0, description="earlier tasks to test again, at random where there are more; 0: none")


@dataclass(frozen=True)
class LearnReport:
    """What learning a task did."""

    task: str
    record: TaskRecord
    accuracy: float  # on all test images of the folder
    test_images: int
    changes: Sequence[Change]  # of the earlier tasks that were tested
    earlier: int  # tasks with held-out images: those that could be tested
    numbers: int  # that the task adds, head excluded
    seconds: float


class RunOptions(TypedDict, total=False):
    """Options of `learn` and `grow` that do not change what is learned."""

    cache_dir: Path | None  # for decoded images, see `load_tasks`
    listener: Listener  # is told how it goes
    progress: Progress | None  # called as progress(what, done, total) while images are decoded and tasks are tested


def learn(
    folder: Path, task: str, bundle: Path, settings: LearnSettings | None = None, **options: Unpack[RunOptions]
) -> LearnReport:
    """Learn the images below `folder` as one more task of the bundle, which is created if there is none.

    The bundle changes only when the task is learned and everything is written: a process that is killed leaves it as
    it was.

    Args:
        folder: one folder of images for each class, a fifth of which is held out for testing; or train/ and test/.
    """
    began = time.monotonic()
    settings = settings or LearnSettings()
    listener = options.get("listener") or Listener()
    check_name(task)
    new: tuple[ContinualNet, nn.Module] | None = None
    if Bundle.exists(bundle):
        opened = Bundle.open(bundle)
        _require_same_network(opened, settings)
    else:
        opened, new = _new_bundle(bundle, settings)
    with changing(opened) as change:
        change.require_new(task)
        if new is None or Bundle.exists(bundle):  # it may have been created meanwhile
            net, pretrained = opened.load_network(), opened.load_pretrained()
            _load_start(opened, net)
        else:
            net, pretrained = new
            change.store_pretrained(pretrained)
        method = opened.network.learner()
        images = load_photos(folder, task, opened.network, settings, options)
        training = train_settings(settings, method)
        listener.run_started(method.name, [task], epochs_of(images, training), 0)
        listener.task_started(0, task, 0)
        listener.busy_with("looking at the photos with the pre-trained network")
        executor = Executor(net, training, listener)
        with executor.session():
            placed = place_task(images, executor.device, training.pixels)
            TaskFit(executor, placed, method, len(opened.tasks)).fit()
        listener.busy_with("testing what was learned")
        _require_learned(net, images, training)
        only_head = net.tasks[task].only_head
        accuracy = evaluate(net, images, training)
        changes = check_earlier(opened, net, settings.check, settings.seed, options.get("progress"))
        earlier = sum(record.held_out is not None for record in opened.tasks.values())
        listener.busy_with("keeping features of the photos")
        features = TaskFeatures.of(net, pretrained, placed, training)
        record = TaskRecord(
            **written(change, net, task, features, keep_some(images.test, settings.keep, settings.seed)),
            accuracy=accuracy,
            images=len(images.train),
            only_head=only_head,
            choice=method.choices.get(task, {}),
            epochs=0 if only_head else epochs_of(images, training),
        )
        checked = {earlier_task.task: earlier_task.after for earlier_task in changes}
        change.add_task(task, record, net.shared_state_dict(), checked)
    numbers = net.storage()[task].beside_head
    return LearnReport(
        task, record, accuracy, len(images.test), changes, earlier, numbers, seconds=time.monotonic() - began
    )


def written(
    change: BundleChange, net: ContinualNet, task: str, features: TaskFeatures, kept: Images | None
) -> dict[str, Any]:
    """Store what a task is now, with the held-out images to keep of it; returns these fields of its record."""
    classes = net.tasks[task].classes
    tested = None
    if kept is not None and len(kept):
        tested = Task(task, classes, kept, kept, change.bundle.network.preprocess())
    return {
        "classes": classes,
        "file": change.store_task(net.task_state_dict(task), classes),
        "held_out": None if tested is None else change.store_held_out(tested.test),
        "features": change.store_features(features),
        "checked": None if tested is None else evaluate(net, tested),
        "learned": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def keep_some(images: Images, most: int, seed: int = 0) -> Images:
    """Up to `most` images, classes in turn."""
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    labels = images.labels.cpu()[order]
    place = one_hot(labels).cumsum(0)[torch.arange(len(labels)), labels]  # of an image within its class
    return images.only(order[torch.argsort(place, stable=True)[:most]].sort().values)


def load_photos(
    folder: Path, task: str, network: Network, settings: LearnSettings, options: RunOptions, known: Sequence[str] = ()
) -> Task:
    """The images below a folder for a network; `known` are the classes that the task has already."""
    images = load_folder_task(
        folder,
        task,
        mean=network.mean,
        std=network.std,
        size=network.size,
        known=known,
        skip_broken=settings.skip_broken,
        cache_dir=options.get("cache_dir"),
        progress=options.get("progress"),
        note=(options.get("listener") or Listener()).note,
    )
    for name in images.classes:
        try:
            readable(name)
        except ValueError:
            raise BundleError(f"the class folder {name!r} in {folder} has an unreadable name; rename it") from None
    return images


def _load_start(bundle: Bundle, net: ContinualNet) -> None:
    """What a new task starts from: the last one that owns more than a head, or the last; damaged ones are passed by."""
    whole = [name for name, record in bundle.tasks.items() if not record.only_head]
    for task in reversed(whole or list(bundle.tasks)):
        try:
            bundle.load_task(net, task)
            return
        except BundleError as error:
            _log.warning("%s. The new task starts from the one before %r", error, task)
    raise BundleError(f"{bundle.path} has no task that a new one could start from; learn it into a new bundle")


def _require_learned(net: ContinualNet, task: Task, settings: TrainSettings) -> None:
    """Refuse what no prediction can be made with: numbers that are not finite, and no more right than by chance.

    Every class counts the same, so an answer that is always the same is chance, however often it is right.
    """
    tensors = [*net.task_state_dict(task.name).values(), *net.shared_state_dict().values()]
    order = torch.randperm(len(task.train), generator=torch.Generator().manual_seed(settings.seed))[:_TRIED]
    tried = task.train.only(order)
    right, labels = right_answers(net, task, settings, tried).cpu().double(), tried.labels.cpu()
    share = float(torch.stack([right[labels == label].mean() for label in labels.unique()]).mean())
    finite = all(bool(tensor.isfinite().all()) for tensor in tensors)
    if not finite or share <= 1 / len(task.classes):
        why = f"{100 * share:.0f}% of its training photos are right" if finite else "its numbers are not finite"
        raise DivergedError(
            f"task {task.name!r} was not learned: {why}; chance level is {100 / len(task.classes):.0f}%. Nothing is "
            f"kept of it; try a learning rate below {settings.lr:g}, or more epochs"
        )


def _new_bundle(path: Path, settings: LearnSettings) -> tuple[Bundle, tuple[ContinualNet, nn.Module]]:
    """A bundle without tasks, its network, and the pre-trained backbone."""
    _require_usable(settings.method)
    _require_of(settings.method, settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)  # of a random start, weights 'none'
        backbone = create_backbone(settings.model, settings.weights)
    if example_images(backbone.module.eval(), (settings.size, settings.size)) is None:
        raise BundleError(
            f"{settings.model} does not accept images of {settings.size} pixels: choose another --size or model"
        )
    network = Network(
        model=backbone.name,
        method=settings.method,
        options=settings.options.get(settings.method, {}),
        means=settings.means,
        statistics=settings.statistics,
        mean=backbone.mean,  # type: ignore[arg-type]
        std=backbone.std,  # type: ignore[arg-type]
        size=settings.size,
        weights=backbone.weights,
        weights_sha256=backbone.weights_sha256,
    )
    pretrained = two_scales(copy.deepcopy(backbone.module))
    return Bundle(path, network), (network.around(backbone.module), pretrained)


def _require_usable(method: str) -> None:
    """Refuse a method that a bundle cannot name, or that needs more of earlier tasks than a bundle keeps."""
    usable = [name for name, kind in METHODS.items() if not (kind.separate or kind.joint or kind.kept or kind.running)]
    if method not in usable:
        why = "needs more of earlier tasks than a bundle keeps" if method in METHODS else "is no method for a bundle"
        raise BundleError(f"{method!r} {why}; choose one of {', '.join(usable)}")


def _require_of(method: str, settings: LearnSettings) -> None:
    for other in settings.options.keys() - {method}:
        raise BundleError(f"options of {other} have no effect in a bundle that learns with {method}")


def _require_same_network(bundle: Bundle, settings: LearnSettings) -> None:
    network = bundle.network
    for option in sorted(settings.model_fields_set & {"model", "means", "statistics", "size", "method"}):
        value, there = getattr(settings, option), getattr(network, option)
        if value != there:
            raise BundleError(f"{bundle.path} has {option} {there!r}, which cannot be changed to {value!r}")
    _require_of(network.method, settings)
    given = {**network.options, **settings.options.get(network.method, {})}
    there = network.learner().options
    if network.model_copy(update={"options": given}).learner().options != there:
        raise BundleError(f"{bundle.path} learns with {network.method} ({there}), which cannot be changed")
    if settings.weights is not None:
        raise BundleError(f"{bundle.path} has its weights already; leave --weights out")


def train_settings(settings: LearnSettings, method: Method) -> TrainSettings:
    """What is given, else what the method trains with on photos."""
    given = settings.model_fields_set & set(TrainSettings.model_fields)
    return TrainSettings(**method.training(True, settings.model_dump(include=given)))
