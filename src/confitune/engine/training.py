"""Train a network on one task: the stages of its epochs, their steps, its statistics, and its end.

What methods may use of the task meanwhile is in `context.py`, what one step computes in `step.py`.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from confitune.engine.capture import Executor
from confitune.engine.context import Learning
from confitune.engine.events import EpochEnd, Listener
from confitune.engine.feed import place_task, to_device
from confitune.engine.readings import EpochReadings
from confitune.engine.seeds import derived_generator
from confitune.engine.step import TrainStep, draw_noise
from confitune.errors import ConfituneError
from confitune.methods import Method, Stage, create_method
from confitune.nn import ContinualNet
from confitune.settings import TrainSettings
from confitune.tasks import Task


def fit(
    net: ContinualNet,
    task: Task,
    method: Method | str = "confit",
    settings: TrainSettings | None = None,
    listener: Listener | None = None,
) -> None:
    """Learn one more task, from `add_task` to `finish_task`.

    >>> from confitune.nn import create_backbone
    >>> from confitune.tasks import load_tasks
    >>> backbone = create_backbone("tf_efficientnet_lite0")
    >>> tasks = load_tasks("digits", mean=backbone.mean, std=backbone.std)
    >>> probe = create_method("linear-probe")
    >>> net = probe.network(backbone.module)
    >>> fit(net, tasks[0], probe, TrainSettings(epochs=1))
    >>> net.tasks["task1"].finished
    True
    """
    method = create_method(method) if isinstance(method, str) else method
    executor = Executor(net, settings or TrainSettings(), listener)
    with executor.session():
        TaskFit(executor, place_task(task, executor.device, executor.settings.pixels), method).fit()


class DivergedError(ConfituneError):
    """The loss, the weights or the statistics became infinite."""


class TaskFit(Learning):
    """One task's training, resumable after every epoch. It is also the `TaskContext` that methods are given.

    Args:
        executor: of the network, within its session; one that served earlier tasks has captured steps already.
        task: its pixels where they are to lie, see `place`.
        index: of the task, from 0; default: the next one of the network.
        hooks: what takes part in steps; default: the method, and those that it is combined with.
    """

    def __init__(
        self, executor: Executor, task: Task, method: Method, index: int = -1, hooks: Sequence[Method] | None = None
    ) -> None:
        net, settings = executor.net, executor.settings
        wanted = [part.kind for part in method.parts()]
        if net.kinds != wanted:
            raise ConfituneError(
                f"method {method.name!r} needs a network with {', '.join(wanted)}, this one has "
                f"{', '.join(net.kinds)}: make it with method.network(backbone)"
            )
        if len(task.train) < 2:
            raise ConfituneError(f"task {task.name!r} has {len(task.train)} training image; batch norm needs 2 or more")
        index = len(net.tasks) if index < 0 else index
        super().__init__(executor, task, index)
        self.method = method
        self.hooks = method.hooks if hooks is None else tuple(hooks)
        if self.batch_size < settings.batch_size:
            self.listener.note(
                f"task {task.name!r} has {len(task.train)} training images, fewer than the batch size "
                f"{settings.batch_size}: batches of {self.batch_size}"
            )
        self.is_new = task.name not in net.tasks
        if self.is_new:
            net.add_task(task.name, task.classes, derived_generator(settings.seed, "head", index))
        net.set_task(task.name)
        stages = method.stages(self.epochs, index)
        self._stages = [stage for stage in stages for _ in range(stage.epochs)]  # of each epoch
        # All parameters that are ever trained in the task; those with one learning rate together.
        by_factor: dict[float, list[nn.Parameter]] = {}
        for name, parameters in net.groups().items():
            if parameters and any(name in stage.trains for stage in stages):
                by_factor.setdefault(method.lr_factors.get(name, 1.0), []).extend(parameters)
        self.optimizer = executor.optimizers.make(by_factor)
        self.step = TrainStep(executor, task, self.hooks, self.optimizer)
        self._under_way: deque[tuple[Callable[..., EpochEnd], EpochReadings]] = deque()  # epochs that are not read yet

    def fit(self, after_epoch: Callable[[], None] = lambda: None) -> None:
        """Train what is left of the task and finish it."""
        for hook in self.hooks:
            hook.attach(self.net, self.index)
        first = self.epoch
        with self._undisturbed():
            if first == 0:
                torch.manual_seed(self._seed("settle", 0))
                if self.is_new and any(hook.settle(self) for hook in self.hooks):  # an earlier task has much to lose
                    self.epoch = self.epochs
                    return
                torch.manual_seed(self._seed("begin"))
                for hook in self.hooks:
                    hook.begin_task(self)
            for epoch in range(first, self.epochs):
                stage = self._stages[epoch]
                if epoch == first or stage is not self._stages[epoch - 1]:
                    self._freeze_but(stage.trains)
                    self.listener.stage_started(stage.name)
                torch.manual_seed(self._seed("before epoch", epoch))
                for hook in self.hooks:
                    hook.begin_epoch(self, epoch)
                self._limit_pulls()
                self._train_epoch(stage, epoch)
                self.epoch = epoch + 1
                after_epoch()
            self._freeze_but(None)
            for hook in self.hooks:
                hook.end_task(self)
            self._finish()

    @contextmanager
    def _undisturbed(self) -> Iterator[None]:
        """Afterwards torch's random state is as it was, and nothing is frozen."""
        try:
            with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
                yield
        finally:
            self._freeze_but(None)

    def _freeze_but(self, trains: frozenset[str] | None) -> None:
        """Only these groups get gradients (None: all): backward then stops where nothing below is trained."""
        self.optimizer.zero_grad(set_to_none=True)
        for name, parameters in self.net.groups().items():
            for parameter in parameters:
                parameter.requires_grad_(trains is None or name in trains)

    def _limit_pulls(self) -> None:
        """A gradient step along a pull is stable only if it goes less than twice the way to where that pulls."""
        limit = self.settings.pull_limit
        if limit is None or self.settings.optimizer != "sgd":
            return
        lr = max(self.settings.lr * group["factor"] for group in self.optimizer.param_groups)
        for hook in self.hooks:
            pull = hook.pull()
            steepest = 0.0 if pull is None else pull.steepest()
            was_limited = hook.pull_most is not None
            hook.pull_most = limit / lr if steepest > limit / lr else None
            if hook.pull_most is not None and not was_limited:
                self.listener.note(
                    f"{hook.name}: lr x strength x importance reaches {lr * steepest:.3g} in task {self.task.name!r}, "
                    f"and steps are stable below 2: the pull on such weights is limited to {limit:g}"
                )

    # ---- the steps of an epoch -------------------------------------------------------------------------------------

    def _train_epoch(self, stage: Stage, epoch: int) -> None:
        settings = self.settings
        steps = self.steps_an_epoch
        lr = self._set_lr(epoch)
        # Everything random in an epoch comes from its own seeds, so an epoch can be repeated without what came before.
        torch.manual_seed(self._seed("epoch", epoch))
        chance = torch.Generator().manual_seed(self._seed("augment", epoch))
        noise = draw_noise(settings.augmentation, steps, self.batch_size, chance)
        noise = None if noise is None else to_device(noise, self.device)
        readings = EpochReadings(steps, self.device)
        self.net.train()
        for step, (pixels, labels) in enumerate(self._batches("order", epoch)):
            if settings.lr_schedule == "cosine" or settings.warmup:
                self._set_lr(epoch + step / steps)
            # Whether the step weighs anything in the final average of the input statistics.
            last = (self.epochs - epoch) * steps - step <= settings.tracked_steps(self.net.momentum)
            tracking = self.net.observer.tracks and last
            self.net.observer.track(tracking)
            outcome = self.executor(
                self.step.kind(stage.trains, tracking, self.index),
                self.step.train,
                *(pixels, labels, None if noise is None else noise[step]),
                forward=(stage.trains, tracking),
            )
            assert outcome is not None
            readings.put(step, outcome, len(labels))
            self.listener.step_done(step + 1, steps)
        readings.close(self.net.parameters())
        end_of = partial(EpochEnd, self.index, self.task.name, stage.name, epoch, self.epochs, lr=lr)
        self._under_way.append((end_of, readings))
        # A GPU's numbers are read when it is an epoch further, so that it never waits for Python.
        self.report(all_but=1 if self.device.type == "cuda" else 0)

    def _set_lr(self, epochs: float) -> float:
        lr = self.settings.lr * self.settings.lr_factor(epochs)
        self.executor.optimizers.set_lr(self.optimizer, lr)
        return lr

    def report(self, all_but: int = 0) -> None:
        """Read and tell what the epochs so far measured, but for the last few; stop if the numbers went bad."""
        while len(self._under_way) > all_but:
            end_of, readings = self._under_way.popleft()
            self.listener.waiting(readings.copied.passed)
            readings.read()
            accuracy = 100.0 * readings.right / readings.images
            end = end_of(loss=readings.loss, accuracy=accuracy, seconds=readings.seconds, images=readings.images)
            self._require_finite(end, readings)
            self.listener.epoch_ended(end)

    def _require_finite(self, end: EpochEnd, readings: EpochReadings) -> None:
        bad = readings.first_bad_step
        if bad is None and readings.weights_finite:
            return
        if self.net.tasks[self.task.name].finished:
            self.net.reopen(self.task.name)  # its end was launched already
        ruined = "" if readings.weights_finite else ", its weights infinite"
        pulls = [type(hook).name for hook in self.hooks if "strength" in hook.Options.model_fields]
        weaker = f", or a smaller strength of {' or '.join(pulls)}" if pulls else ""
        at = "" if bad is None else f" from step {bad + 1} of {self.steps_an_epoch} on"
        raise DivergedError(
            f"the loss of task {self.task.name!r} became {readings.loss}{ruined} in epoch {end.epoch + 1}{at} (stage "
            f"{end.stage!r}); try a learning rate below {end.lr:g}{weaker}"
        )

    # ---- statistics, and the end -----------------------------------------------------------------------------------

    def _finish(self) -> None:
        """Take the statistics that are still to be taken, and store the task.

        Everything is launched before the device is waited for. On a GPU the pass runs in float16, which is more exact
        than bfloat16 and, batch norm being cuDNN's then, faster; where it overflows, in bfloat16.
        """
        if self.net.observer.statistics == "running":
            if not self.net.tasks[self.task.name].finished:
                self.net.finish_task()
            self.report()
            return
        fast = self.device.type == "cuda" and self.settings.bf16(self.device)
        for dtype in (torch.float16, torch.bfloat16) if fast else (torch.bfloat16,):
            torch.manual_seed(self._seed("pass"))
            pixels = (pixels for pixels, _ in self._batches("pass", 0))
            kind = ("measure", dtype, self.task.preprocess)
            finite = self.net.measure(pixels, partial(self.executor, kind, partial(self.step.measure, dtype)))
            self.net.finish_task()
            self.report()
            if bool(finite):
                return
            self.net.reopen(self.task.name)
        raise DivergedError(
            f"the statistics of task {self.task.name!r} are not finite: its weights have outgrown what batch norm can "
            "follow, try a smaller learning rate"
        )

    # ---- what else there is ----------------------------------------------------------------------------------------

    def train(self, other: ContinualNet) -> None:
        TaskFit(self.executor.of(other), self.task, self.method, self.index, hooks=()).fit()

    def state_dict(self) -> dict[str, Any]:
        """What is needed to go on after the last whole epoch; the network's own state is not in it."""
        return {"epoch": self.epoch, "is_new": self.is_new, "optimizer": self.optimizer.state_dict()["state"]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        self.epoch, self.is_new = state["epoch"], state["is_new"]
        self.executor.optimizers.load(self.optimizer, state["optimizer"])
