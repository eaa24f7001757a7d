"""Teach a bundle one more task from a folder of labelled images, and see what the earlier ones lost or gained."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field

from confitune.deploy.bundle import Bundle
from confitune.deploy.fitting import measure_fit
from confitune.deploy.format import BundleError, Network, TaskRecord, check_name
from confitune.deploy.held_out import Change, accuracy_on, check_earlier, keep_some, some_of
from confitune.deploy.loading import new_network
from confitune.engine import Executor, Listener, TaskFit, TrainSettings, evaluate
from confitune.methods import METHODS, Method
from confitune.nn import ContinualNet, create_backbone
from confitune.tasks import CROP, Progress, load_folder_task


class LearnSettings(BaseModel):
    """How a task is learned, and for a new bundle with what network."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str | None = Field(None, description="of a new bundle; default tf_efficientnet_lite0")
    weights: str | None = Field(None, description="of a new bundle: a .safetensors or .pth file; default: published")
    means: Literal["window", "phase"] | None = Field(
        None, description="of a new bundle: window (exact, default) or phase (a third the size)"
    )
    size: int | None = Field(None, ge=32, le=224, description="of the network's input in pixels; default 224")
    method: Literal["best", "confit"] | None = Field(
        None, description="of a new bundle: best (default, see docs/best.md) or confit (the paper's)"
    )
    epochs: int = Field(10, ge=1)
    batch_size: int = Field(32, ge=2)
    lr: float | None = Field(None, gt=0, description="default: the method's, 0.03 of best and 0.01 of confit")
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
    only_head: bool  # the task keeps the state of pre-training: a head was fitted, nothing was trained
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
        opened.require_new(task)
        if net is None or Bundle.exists(bundle):  # it may have been made meanwhile
            net = opened.load_network([opened.last_task])  # the new one starts from its batch norm
        network, method = opened.network, METHODS[opened.network.method]
        images = load_folder_task(
            folder, task, mean=network.mean, std=network.std, size=network.size, cache_dir=cache_dir, progress=progress
        )
        _check_classes(images.classes, folder)
        training = _train_settings(settings, method)
        listener = listener or Listener()
        listener.run_started(method.name, [task], settings.epochs, 0)
        listener.task_started(0, task, 0)
        executor = Executor(net, training, listener)
        with executor.session():
            TaskFit(net, images, method, training, listener, len(opened.tasks), executor).run()
        only_head = net.tasks[task].pretrained
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
            epochs=0 if only_head else settings.epochs,
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
        only_head=only_head,
        numbers=net.storage()[task].norm_numbers,
        bytes=stored.bytes,
        held_out_bytes=kept_file.bytes if kept_file else 0,
        seconds=time.monotonic() - began,
    )


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
    options: dict[str, Any] = {"means": "window", **METHODS[settings.method or "best"].network}
    network = Network(
        model=backbone.name,
        **options | ({} if settings.means is None else {"means": settings.means}),
        mean=backbone.mean,  # type: ignore[arg-type]
        std=backbone.std,  # type: ignore[arg-type]
        size=settings.size or CROP,
        weights=backbone.weights,
        weights_sha256=backbone.weights_sha256,
    )
    return Bundle(path, network), new_network(network, backbone.module)


def _require_same_network(bundle: Bundle, settings: LearnSettings) -> None:
    for option in ("model", "means", "size", "method"):
        value, there = getattr(settings, option), getattr(bundle.network, option)
        if value is not None and value != there:
            raise BundleError(f"{bundle.path} has {option} {there!r}, which cannot be changed to {value!r}")
    if settings.weights is not None:
        raise BundleError(f"{bundle.path} has its weights already; leave --weights out")


def _train_settings(settings: LearnSettings, method: Method) -> TrainSettings:
    given = settings.model_dump(include={"epochs", "batch_size", "lr", "seed", "device"}, exclude_none=True)
    return TrainSettings.model_validate({**method.settings, **given})
