"""Teach a bundle one more task from a folder of labelled images, and see what the earlier ones lost or gained."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from confitune.deploy.bundle import Bundle
from confitune.deploy.earlier import Change, check_earlier, some_of
from confitune.deploy.fitting import Fit, logits_and_distances
from confitune.deploy.format import BundleError, Network, TaskRecord
from confitune.deploy.held_out import accuracy_on, keep_some
from confitune.deploy.layout import check_name
from confitune.engine import Executor, Listener, TaskFit, TrainSettings, batches, evaluate
from confitune.methods import METHODS, Method
from confitune.nn import ContinualNet, create_backbone
from confitune.tasks import CROP, Images, Progress, Task, load_folder_task

_FITTED = 256  # training images, and as many test images, that a task's fit is taken from


class LearnSettings(BaseModel):
    """How a task is learned, and for a new bundle with what network."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str | None = Field(None, description="of a new bundle; default tf_efficientnet_lite0")
    weights: str | None = Field(None, description="of a new bundle: a .safetensors or .pth file; default: published")
    means: Literal["window", "phase"] | None = Field(
        None, description="of a new bundle: window (exact, default) or phase (a third the size)"
    )
    size: int | None = Field(None, ge=32, le=224, description="of the network's input in pixels; default 224")
    epochs: int = Field(10, ge=1)
    batch_size: int = Field(32, ge=2)
    lr: float = Field(0.01, gt=0)
    seed: int = Field(0, ge=0)
    device: str = "auto"
    keep: int = Field(64, ge=0, description="held-out images to keep with the bundle; 0: none")
    check: int = Field(20, ge=0, description="earlier tasks to test again, at random where there are more; 0: none")


@dataclass(frozen=True)
class LearnReport:
    """What learning a task did."""

    task: str
    classes: tuple[str, ...]
    accuracy: float  # on all its test images
    test_images: int
    changes: tuple[Change, ...]  # of the earlier tasks that were tested
    earlier: int  # tasks with held-out images: those that could be tested
    numbers: int  # that the task adds, head excluded
    bytes: int  # that it adds to the bundle, held-out images apart
    held_out_bytes: int
    seconds: float


def learn(
    folder: Path,
    task: str,
    bundle: Path,
    settings: LearnSettings | None = None,
    *,
    method: Method = METHODS["confit"],
    cache_dir: Path | None = None,
    listener: Listener | None = None,
    progress: Progress | None = None,
) -> LearnReport:
    """Learn the images below `folder` as one more task of the bundle, which is made where there is none.

    Nothing of the bundle changes before the task is learned and everything is written: a process that is killed
    leaves it as it was.

    Args:
        folder: one folder of images for each class; a fifth is held out for testing, or train/ and test/ apart.
        task: its name.
        bundle: the bundle's folder.
        method: with Xconv BN; the others are there to compare with.
        cache_dir: for decoded images, see `load_tasks`.
        listener: is told how training goes.
        progress: called as progress(what, done, total) while images are decoded and earlier tasks are tested.
    """
    settings, began = settings or LearnSettings(), time.monotonic()
    check_name(task)
    if Bundle.exists(bundle):
        opened = Bundle.open(bundle)
        _require_same_network(opened, settings)
        net = None
    else:
        opened, net = _new_bundle(bundle, settings)
    with opened.changing():
        if task in opened.tasks:
            raise BundleError(f"{bundle} has a task {task!r} already; choose another name, or remove it first")
        if net is None or Bundle.exists(bundle):  # it may have been made meanwhile
            net = opened.load_network([opened.last_task])  # the new one starts from its batch norm
        network = opened.network
        images = load_folder_task(
            folder, task, mean=network.mean, std=network.std, size=network.size, cache_dir=cache_dir, progress=progress
        )
        _check_classes(images.classes, folder)
        training = _train_settings(settings)
        listener = listener or Listener()
        listener.run_started(method.name, [task], settings.epochs, 0)
        listener.task_started(0, task, 0)
        executor = Executor(net, training, listener)
        with executor.session():
            TaskFit(net, images, method, training, listener, len(opened.tasks), executor).run()
        accuracy = evaluate(net, images, training)
        earlier = [name for name, record in opened.tasks.items() if record.held_out is not None]
        chosen = some_of(earlier, settings.check, settings.seed, len(opened.tasks))
        changes = check_earlier(opened, net, chosen, images.preprocess, progress)
        state = {**net.task_state_dict(task), **measure_fit(net, images, training).state()}
        stored = opened.store_task(state, images.classes)
        kept = keep_some(images.test, settings.keep, settings.seed) if settings.keep else None
        kept_file = None if kept is None else opened.store_held_out(kept)
        record = TaskRecord(
            classes=images.classes,
            file=stored,
            held_out=kept_file,
            held_out_images=0 if kept is None else len(kept["labels"]),
            accuracy=accuracy,
            images=len(images.train),
            epochs=settings.epochs,
            learned=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        )
        checked = {change.task: change.after for change in changes}
        if kept is not None:
            checked[task] = accuracy_on(net, task, kept, images.preprocess)
        opened.add_task(task, record, net.shared_state_dict(), checked)
    return LearnReport(
        task=task,
        classes=images.classes,
        accuracy=accuracy,
        test_images=len(images.test),
        changes=changes,
        earlier=len(earlier),
        numbers=net.storage()[task].norm_numbers,
        bytes=stored.bytes,
        held_out_bytes=kept_file.bytes if kept_file else 0,
        seconds=time.monotonic() - began,
    )


@torch.no_grad()
def measure_fit(net: ContinualNet, task: Task, settings: TrainSettings) -> Fit:
    """How well the task's own images fit its statistics."""
    was_training, device = net.training, next(net.parameters()).device

    def distances(images: Images) -> Tensor:
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(settings.seed))[:_FITTED]
        found = [
            logits_and_distances(net, task.inputs(pixels), task.name)[1]
            for pixels, _ in batches(images, settings.batch_size, device, order)
        ]
        return torch.cat(found).cpu()

    net.eval()
    fit = Fit.of(distances(task.train), distances(task.test))
    net.train(was_training)
    return fit


def _check_classes(classes: Sequence[str], folder: Path) -> None:
    for name in classes:
        try:
            name.encode()
        except UnicodeEncodeError:
            raise BundleError(f"the name of the class folder {name!r} in {folder} is no text; rename it") from None


def _new_bundle(path: Path, settings: LearnSettings) -> tuple[Bundle, ContinualNet]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)  # of a random start, weights 'none'
        backbone = create_backbone(settings.model or "tf_efficientnet_lite0", settings.weights)
    network = Network(
        model=backbone.name,
        means=settings.means or "window",
        mean=backbone.mean,  # type: ignore[arg-type]
        std=backbone.std,  # type: ignore[arg-type]
        size=settings.size or CROP,
        weights=backbone.weights,
        weights_sha256=backbone.weights_sha256,
    )
    return Bundle(path, network), ContinualNet(backbone.module, means=network.means)


def _require_same_network(bundle: Bundle, settings: LearnSettings) -> None:
    asked: Mapping[str, object] = {"model": settings.model, "means": settings.means, "size": settings.size}
    for option, value in asked.items():
        there = getattr(bundle.network, option)
        if value is not None and value != there:
            raise BundleError(f"{bundle.path} has {option} {there!r}, which cannot be changed to {value!r}")
    if settings.weights is not None:
        raise BundleError(f"{bundle.path} has its weights already; leave --weights out")


def _train_settings(settings: LearnSettings) -> TrainSettings:
    return TrainSettings(
        epochs=settings.epochs,
        batch_size=settings.batch_size,
        lr=settings.lr,
        seed=settings.seed,
        device=settings.device,
    )
