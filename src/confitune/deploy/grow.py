"""Give a task more classes, more photos of classes it has, or fewer classes, without the photos it was learned from.

What a task owns of the network stays as it is. Its head is fitted anew, to the features that were kept of its old
photos and to those of the new ones: it is the head that all photos at once would have given.
"""

import time
from pathlib import Path

import torch
from torch import Tensor
from typing_extensions import Unpack

from confitune.deploy.bundle import Bundle, BundleChange, BundleError, TaskRecord, changing
from confitune.deploy.checks import Change
from confitune.deploy.label_space import TaskFeatures
from confitune.deploy.learn import (
    LearnReport,
    LearnSettings,
    RunOptions,
    keep_some,
    load_photos,
    train_settings,
    written,
)
from confitune.engine import evaluate, place_task
from confitune.methods.linear import fit_linear, folds_of
from confitune.nn import ContinualNet
from confitune.tasks import Images


def grow(
    folder: Path, task: str, bundle: Path, settings: LearnSettings | None = None, **options: Unpack[RunOptions]
) -> LearnReport:
    """Add the photos below `folder` to a task of the bundle: of new classes, or of classes that it has.

    As with `learn`, a process that is killed leaves the bundle as it was.

    Args:
        folder: one folder of images for each class, or images of one class, which is called like the folder.
        settings: only seed, device, batch_size, keep and skip_broken matter.
    """
    began = time.monotonic()
    settings = settings or LearnSettings()
    opened = Bundle.open(bundle)
    with changing(opened) as change:
        record = opened.record(task)
        net, old = opened.load_network([task]), _kept_features(opened, task)
        images = load_photos(folder, task, opened.network, settings, options, known=record.classes)
        classes, training = images.classes, train_settings(settings, opened.network.learner())
        placed = place_task(images, training.torch_device(), training.pixels)
        net.to(training.torch_device())
        features = old.joined(TaskFeatures.of(net, opened.load_pretrained(), placed, training)).as_kept(len(classes))
        kept = opened.held_out(task)
        before = None if kept is None else evaluate(net, kept, training)
        fitted = features.train if features.own is None else features.own
        head = fit_linear(fitted, features.labels, len(classes), folds_of(features.labels, settings.seed))
        if not all(bool(part.isfinite().all()) for part in (features.train, features.held_out, head.weight, head.bias)):
            raise BundleError(f"task {task!r} is left as it was: features of these photos, or its head, are not finite")
        _put_head(net, task, head.weight, head.bias, classes)
        changes, held_out = [], keep_some(images.test, settings.keep, settings.seed)
        if kept is not None:
            changes = [Change(f"{task}, earlier photos", before, evaluate(net, kept, training), len(kept.test))]
            held_out = _joined(kept.test, held_out)
        accuracy = evaluate(net, images, training)
        record = _replace(change, net, task, features, held_out, len(images.train) + record.images)
    numbers = net.storage()[task].beside_head
    return LearnReport(
        task, record, accuracy, len(images.test), changes, len(changes), numbers, seconds=time.monotonic() - began
    )


def remove_class(change: BundleChange, task: str, name: str) -> None:
    """Forget a class of a task; the others answer as before, among themselves."""
    bundle = change.bundle
    record = bundle.record(task)
    if name not in record.classes:
        raise BundleError(f"task {task!r} has no class {name!r}; it has {', '.join(record.classes)}")
    if len(record.classes) == 2:
        raise BundleError(f"a task needs at least two classes: remove the task {task!r} instead")
    features, net = _kept_features(bundle, task), bundle.load_network([task])
    gone = record.classes.index(name)
    rows = torch.tensor([row for row in range(len(record.classes)) if row != gone])
    classes = tuple(record.classes[row] for row in rows)
    state = net.task_state_dict(task)
    _put_head(net, task, state["head.weight"][rows], state["head.bias"][rows], classes)
    kept, others = bundle.held_out(task), features.without(gone)
    images = None if kept is None else _without_class(kept.test, gone)
    _replace(change, net, task, others, images, record.images - len(features.labels) + len(others.labels))


def _joined(kept: Images, more: Images) -> Images:
    """What was kept before, and more."""
    (pixels, labels), (new, new_labels) = (part.batch(torch.arange(len(part))) for part in (kept, more))
    return Images(torch.cat([pixels, new]), torch.arange(len(kept) + len(more)), torch.cat([labels, new_labels]))


def _without_class(images: Images, gone: int) -> Images:
    """Those of the other classes, whose labels close the gap."""
    others = images.only((images.labels != gone).nonzero().flatten())
    return Images(others.pixels, others.rows, others.labels - (others.labels > gone).long())


def _kept_features(bundle: Bundle, task: str) -> TaskFeatures:
    """Of a task that can be changed: its own features are still what its network gives."""
    method, features = bundle.network.learner(), bundle.features(task)
    owned = {part.name for part in method.parts()}
    if features is None or any(stage.trains - owned for stage in method.stages(10, 0)):
        raise BundleError(
            f"task {task!r} cannot be changed: {method.name} moves what tasks share, so the features that were kept of "
            "its photos are not what the network gives now. Learn it anew, or into a bundle of `best`"
        )
    return features


def _put_head(net: ContinualNet, task: str, weight: Tensor, bias: Tensor, classes: tuple[str, ...]) -> None:
    state = {**net.task_state_dict(task), "head.weight": weight, "head.bias": bias}
    net.load_task_state_dict(task, state, classes)


def _replace(
    change: BundleChange, net: ContinualNet, task: str, features: TaskFeatures, held_out: Images | None, images: int
) -> TaskRecord:
    """Write what the task is now and commit it; its accuracy is that on photos that were kept, where some were."""
    changed = {**written(change, net, task, features, held_out), "images": images}
    if changed["checked"] is not None:
        changed["accuracy"] = changed["checked"]
    record = change.bundle.record(task).model_copy(update=changed)
    change.commit({**change.bundle.tasks, task: record})
    return record
