"""Train a network on one task: stages, steps, statistics."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from confitune.engine.augment import draw_noise
from confitune.engine.capture import Executor
from confitune.engine.context import context_of
from confitune.engine.events import EpochEnd, Listener
from confitune.engine.feed import batches, place_task, to_device
from confitune.engine.parameters import TrainedParameters, place_network
from confitune.engine.readings import EpochReadings
from confitune.engine.seeds import derived_generator, derived_seed
from confitune.engine.step import TrainStep
from confitune.errors import ConfituneError
from confitune.methods import METHODS, Method, Stage
from confitune.nn import ContinualNet, InfiniteError
from confitune.settings import TrainSettings
from confitune.tasks import Task


def fit(
    net: ContinualNet,
    task: Task,
    method: Method = METHODS["confit"],
    settings: TrainSettings | None = None,
    listener: Listener | None = None,
) -> None:
    """Learn one more task, from `add_task` to `finish_task`.

    >>> from confitune.nn import create_backbone
    >>> from confitune.tasks import load_tasks
    >>> backbone = create_backbone("tf_efficientnet_lite0")
    >>> tasks = load_tasks("digits", mean=backbone.mean, std=backbone.std)
    >>> net = ContinualNet(backbone.module, norm=METHODS["linear-probe"].norm)
    >>> fit(net, tasks[0], METHODS["linear-probe"], TrainSettings(epochs=1))
    >>> net.tasks["task1"].finished
    True
    """
    settings, listener = settings or TrainSettings(), listener or Listener()
    executor = Executor(net, settings, listener)
    with executor.session():
        TaskFit(net, task, method, settings, listener, executor=executor).run()


class DivergedError(ConfituneError):
    """The loss or the weights became infinite."""


def steps_of(task: Task, settings: TrainSettings) -> int:
    """How many training steps the task takes."""
    return settings.epochs * (len(task.train) // min(settings.batch_size, len(task.train)))


@dataclass(frozen=True)
class _Epoch:
    """An epoch whose steps are on their way."""

    stage: Stage
    number: int
    lr: float
    readings: EpochReadings


class TaskFit:
    """One task's training, resumable after every epoch.

    Args:
        index: of the task, from 0; default: the next one of the network.
        executor: runs the steps, within its session; one that served earlier tasks has captured them already.
    """

    def __init__(
        self,
        net: ContinualNet,
        task: Task,
        method: Method,
        settings: TrainSettings,
        listener: Listener,
        index: int = -1,
        executor: Executor | None = None,
    ) -> None:
        if method.norm != net.norm:
            raise ConfituneError(
                f"method {method.name!r} needs norm={method.norm!r}, the network has {net.norm!r}: "
                f"ContinualNet(backbone, norm={method.norm!r})"
            )
        if len(task.train) < 2:
            raise ConfituneError(f"task {task.name!r} has {len(task.train)} training image; batch norm needs 2 or more")
        self.net, self.method, self.settings, self.listener = net, method, settings, listener
        self.index = len(net.tasks) if index < 0 else index
        self.executor = executor or Executor(net, settings, listener)
        self.device = self.executor.device
        self.task = place_task(task, self.device, settings.pixels)
        self.batch_size = min(settings.batch_size, len(task.train))
        self.ranks = net.ranks
        if self.batch_size < self.ranks.size:
            raise ConfituneError(
                f"batches of {self.batch_size} images (task {task.name!r}) cannot be shared by {self.ranks.size} "
                "processes, each needs at least one: use a larger batch size or fewer processes"
            )
        self.epoch = 0  # epochs done
        if self.batch_size < settings.batch_size:
            listener.note(
                f"task {task.name!r} has {len(task.train)} training images, fewer than the batch size "
                f"{settings.batch_size}: batches of {self.batch_size}"
            )
        place_network(net, self.device)
        self.is_new = task.name not in net.tasks
        if self.is_new:
            net.add_task(task.name, task.classes, derived_generator(settings.seed, "head", self.index))
        net.set_task(task.name)
        held = frozenset(part for penalty in method.penalties for part in penalty.holds(net))
        self.stages = [stage.without(held) for stage in method.stages(settings.epochs, self.index)]
        on_gpu = self.device.type == "cuda"
        self.parameters = TrainedParameters(net, self.stages, settings, self.executor.lr, on_gpu)
        self.optimizer = self.parameters.optimizer
        self.step = TrainStep(net, self.task, method.penalties, self.optimizer, settings, self.device)
        self._under_way: deque[_Epoch] = deque()

    @property
    def steps_an_epoch(self) -> int:
        return len(self.task.train) // self.batch_size

    def run(self, after_epoch: Callable[[], None] = lambda: None) -> None:
        """Train what is left of the task and finish it."""
        context = context_of(self)
        for penalty in self.method.penalties:
            penalty.attach(self.net)
        try:
            with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
                if self.epoch == 0:
                    begin = derived_seed(self.settings.seed, "begin", self.index)
                    torch.manual_seed(begin)
                    # A task that is trained on has something to lose.
                    if self.is_new and any(penalty.settles(context) for penalty in self.method.penalties):
                        self.epoch = self.settings.epochs
                        return
                    torch.manual_seed(begin)  # a part that decided against it may have drawn numbers
                    for penalty in self.method.penalties:
                        penalty.begin_task(context)
                for stage, epoch in self._remaining():
                    torch.manual_seed(derived_seed(self.settings.seed, "before epoch", self.index, epoch))
                    for penalty in self.method.penalties:
                        penalty.begin_epoch(context, epoch)
                    self._train_epoch(stage, epoch)
                    self.epoch = epoch + 1
                    after_epoch()
                self.parameters.unfreeze()
                for penalty in self.method.penalties:
                    penalty.end_task(context)
                self._finish()
        finally:
            self.parameters.unfreeze()

    def _finish(self) -> None:
        """Have the network measure what it needs, in float16 where that is fast and nothing becomes infinite."""
        fast = self.device.type == "cuda" and self.settings.bf16(self.device)
        for half in (True, False) if fast else (False,):
            try:
                self._finish_in(half)
                return
            except InfiniteError:
                if not half:
                    raise

    def _finish_in(self, half: bool) -> None:
        torch.manual_seed(derived_seed(self.settings.seed, *self.ranks.own("pass", self.index)))
        pixels = (pixels for pixels, _ in self._batches(self._order("pass", 0)))
        # What the last epochs measured is read when the device has all that comes after them.
        self.net.finish_task(pixels, partial(self._measure, half), self.executor.lanes, launched=self.report)

    def state_dict(self) -> dict[str, Any]:
        """What is needed to go on after the last whole epoch; the network's own state is not in it."""
        return {"epoch": self.epoch, "optimizer": self.optimizer.state_dict()["state"]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        self.epoch = state["epoch"]
        # Its options are this machine's: a run may go on where there is no GPU.
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": state["optimizer"]})

    def _remaining(self) -> Iterator[tuple[Stage, int]]:
        epoch = 0
        for stage in self.stages:
            announced = False
            for _ in range(stage.epochs):
                if epoch >= self.epoch:
                    if not announced:
                        self.parameters.freeze_but(stage.trains)
                        self.listener.stage_started(stage.name)
                        announced = True
                    yield stage, epoch
                epoch += 1

    def _train_epoch(self, stage: Stage, epoch: int) -> None:
        settings, steps = self.settings, self.steps_an_epoch
        lr = settings.lr * settings.lr_factor(epoch)
        self.executor.set_lr(lr)
        for group in self.optimizer.param_groups:
            group["lr"] = self.executor.lr
        # Everything random in an epoch comes from its own seeds, so an epoch can be repeated without what came before.
        torch.manual_seed(derived_seed(settings.seed, *self.ranks.own("epoch", self.index, epoch)))
        chance = derived_generator(settings.seed, "augment", self.index, epoch)
        noise = draw_noise(settings.augmentation, steps, self.batch_size, chance)
        noise = None if noise is None else to_device(self.ranks.part(noise, dim=2), self.device)
        readings = EpochReadings(steps, self.device)
        self.net.train()
        for step, (pixels, labels) in enumerate(self._batches(self._order("order", epoch))):
            tracking = self._matters(epoch * steps + step)
            self.net.track(tracking)
            outcome = self.executor(
                self.step.kind(stage.trains, tracking, self.index),
                self.step.train,
                *(pixels, labels, None if noise is None else noise[step]),
                forward=(stage.trains, tracking),
            )
            assert outcome is not None
            readings.put(step, outcome)
            self.listener.step_done(step + 1, steps)
        readings.close(self.net.parameters())
        self._under_way.append(_Epoch(stage, epoch, lr, readings))
        # A GPU's numbers are read when it is an epoch further, so that it never waits for Python.
        self.report(all_but=1 if self.device.type == "cuda" else 0)

    def report(self, all_but: int = 0) -> None:
        """Read and tell what the epochs so far measured, but for the last few; stop if the numbers went bad."""
        while len(self._under_way) > all_but:
            done = self._under_way.popleft()
            self.listener.waiting(done.readings.here)
            done.readings.wait()
            self._require_finite(done)
            seen = self.steps_an_epoch * self.batch_size
            self.listener.epoch_ended(
                EpochEnd(
                    task=self.index,
                    task_name=self.task.name,
                    stage=done.stage.name,
                    epoch=done.number,
                    epochs=self.settings.epochs,
                    loss=done.readings.loss,
                    accuracy=100.0 * done.readings.right / seen,
                    lr=done.lr,
                    seconds=done.readings.seconds,
                    images=seen,
                )
            )

    def _require_finite(self, done: _Epoch) -> None:
        bad, readings = done.readings.first_bad_step, done.readings
        if bad is None and readings.weights_finite:
            return
        ruined = "" if readings.weights_finite else ", its weights infinite"
        pulls = [p.name for p in self.method.penalties if "strength" in p.Options.model_fields]
        weaker = f", or a smaller strength of {' or '.join(pulls)}" if pulls else ""
        at = "" if bad is None else f" from step {bad + 1} of {self.steps_an_epoch} on"
        raise DivergedError(
            f"the loss of task {self.task.name!r} became {readings.loss}{ruined} in epoch {done.number + 1}{at} (stage "
            f"{done.stage.name!r}); try a learning rate below {done.lr:g}{weaker}"
        )

    def _measure(self, half: bool, *batches: Tensor) -> None:
        drift = self.net.drift
        comparing = drift is not None and drift.active
        if comparing and drift is not None and not drift.captured:
            self.step.measure(False, *batches)
            return
        kind = ("measure", comparing, half, self.task.preprocess)
        self.executor(kind, partial(self.step.measure, half), *batches)

    def _matters(self, step: int) -> bool:
        """Whether a step weighs anything in the final average of the input statistics."""
        if self.net.statistics == "pass":
            return False
        left = self.settings.epochs * self.steps_an_epoch - step
        momentum = self.net.momentum
        return momentum is None or left <= self.settings.tracked_steps(momentum)

    def _order(self, purpose: str, epoch: int) -> Tensor:
        return self.drawn(self.steps_an_epoch * self.batch_size, purpose, epoch)

    def drawn(self, images: int, *purpose: object) -> Tensor:
        """Positions of so many training images, in random order."""
        generator = derived_generator(self.settings.seed, purpose[0], self.index, *purpose[1:])
        return torch.randperm(len(self.task.train), generator=generator)[:images]

    def _batches(self, order: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        return batches(self.task.train, self.batch_size, self.device, order, self.ranks)

    def train_one(self, epoch: int) -> None:
        """One epoch out of order: nothing is begun or finished."""
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            self.epoch = epoch
            stage, _ = next(self._remaining())
            self._train_epoch(stage, epoch)
            self.report()
            self.parameters.unfreeze()
