"""Train a network on one task: stages, steps, statistics."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from confitune.engine.augment import augment
from confitune.engine.batches import batches, resident
from confitune.engine.events import EpochEnd, Listener
from confitune.engine.loss import classification_loss, count_right
from confitune.engine.settings import TrainSettings, derived_generator, derived_seed
from confitune.errors import ConfituneError
from confitune.methods import METHODS, Method, Stage, TaskContext
from confitune.nn import ContinualNet
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
    TaskFit(net, task, method, settings or TrainSettings(), listener or Listener()).run()


class TaskFit:
    """One task's training, resumable after every epoch."""

    def __init__(
        self,
        net: ContinualNet,
        task: Task,
        method: Method,
        settings: TrainSettings,
        listener: Listener,
        index: int = -1,
    ) -> None:
        if method.norm != net.norm:
            raise ConfituneError(
                f"method {method.name!r} needs norm={method.norm!r}, the network has {net.norm!r}: "
                f"ContinualNet(backbone, norm={method.norm!r})"
            )
        if len(task.train) < 2:
            raise ConfituneError(f"task {task.name!r} has {len(task.train)} training image; batch norm needs 2 or more")
        self.net, self.task, self.method, self.settings, self.listener = net, task, method, settings, listener
        self.index = len(net.tasks) if index < 0 else index
        self.device = settings.torch_device()
        self.batch_size = min(settings.batch_size, len(task.train))
        self.epoch = 0  # epochs done
        if self.batch_size < settings.batch_size:
            listener.note(
                f"task {task.name!r} has {len(task.train)} training images, fewer than the batch size "
                f"{settings.batch_size}: batches of {self.batch_size}"
            )
        net.to(self.device)
        net.to(memory_format=torch.channels_last)  # faster convolutions on GPUs, and on CPUs depthwise ones above all
        if task.name not in net.tasks:
            net.add_task(task.name, task.classes, derived_generator(settings.seed, "head", self.index))
        net.set_task(task.name)
        self.images = resident(task.train, self.device)
        self.stages = method.schedule(settings.epochs)
        self.parameters = self._trained_parameters()
        self.optimizer = self._optimizer()

    @property
    def steps_an_epoch(self) -> int:
        return len(self.task.train) // self.batch_size

    def run(self, after_epoch: Callable[[], None] = lambda: None) -> None:
        """Train what is left of the task and finish it."""
        context = self._context()
        if self.epoch == 0:
            for penalty in self.method.penalties:
                penalty.begin_task(context)
        try:
            with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
                for stage, epoch in self._remaining():
                    self._train_epoch(stage, epoch)
                    self.epoch = epoch + 1
                    after_epoch()
                self._unfreeze()
                for penalty in self.method.penalties:
                    penalty.end_task(context)
                torch.manual_seed(derived_seed(self.settings.seed, "pass", self.index))
                order = self._order("pass", 0)
                self.net.finish_task(x for x, _ in self._batches(order))
        finally:
            self._unfreeze()

    def state_dict(self) -> dict[str, Any]:
        """What is needed to go on after the last whole epoch; the network's own state is not in it."""
        return {"epoch": self.epoch, "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        self.epoch = state["epoch"]
        self.optimizer.load_state_dict(state["optimizer"])

    def _remaining(self) -> Iterator[tuple[Stage, int]]:
        epoch = 0
        for stage in self.stages:
            announced = False
            for _ in range(stage.epochs):
                if epoch >= self.epoch:
                    if not announced:
                        self._freeze(stage.trains)
                        self.listener.stage_started(stage.name)
                        announced = True
                    yield stage, epoch
                epoch += 1

    def _train_epoch(self, stage: Stage, epoch: int) -> None:
        started = time.perf_counter()
        settings, steps = self.settings, self.steps_an_epoch
        lr = settings.lr * settings.lr_factor(epoch)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        # Everything random in an epoch comes from its own seeds, so an epoch can be repeated without what came before.
        torch.manual_seed(derived_seed(settings.seed, "epoch", self.index, epoch))
        noise = derived_generator(settings.seed, "augment", self.index, epoch)
        loss_sum = torch.zeros((), device=self.device, dtype=torch.float64)
        right_sum = torch.zeros((), device=self.device, dtype=torch.int64)
        self.net.train()
        for step, (x, labels) in enumerate(self._batches(self._order("order", epoch))):
            self.net.track(self._matters(epoch * steps + step))
            loss, right = self._step(augment(x, settings.augmentation, noise), labels)
            loss_sum += loss
            right_sum += right
            self.listener.step_done(step + 1, steps)
        mean_loss = loss_sum.item() / steps
        # The loss cannot show what the last step did to the weights.
        ruined = "" if all(torch.isfinite(p).all() for p in self.net.parameters()) else ", its weights infinite"
        if ruined or not torch.isfinite(loss_sum):
            raise ConfituneError(
                f"the loss of task {self.task.name!r} became {mean_loss}{ruined} in epoch {epoch + 1} (stage "
                f"{stage.name!r}); try a learning rate below {lr:g}"
            )
        seen = steps * self.batch_size
        self.listener.epoch_ended(
            EpochEnd(
                task=self.index,
                task_name=self.task.name,
                stage=stage.name,
                epoch=epoch,
                epochs=settings.epochs,
                loss=mean_loss,
                accuracy=100.0 * right_sum.item() / seen,
                lr=lr,
                seconds=time.perf_counter() - started,
                images=seen,
            )
        )

    def _step(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        net, penalties = self.net, self.method.penalties
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.settings.precision == "bf16"):
            logits = net(x)
        loss = classification_loss(logits, labels, self.task.groups)
        terms = [term for p in penalties if (term := p.output_loss(logits, labels)) is not None]
        self.optimizer.zero_grad(set_to_none=True)
        torch.stack([loss, *terms]).sum().backward()  # type: ignore[no-untyped-call]
        for penalty in penalties:
            penalty.read_gradients(net)
        for penalty in penalties:
            penalty.add_gradients(net)
        self.optimizer.step()
        for penalty in penalties:
            penalty.after_step(net)
        return loss.detach(), count_right(logits.detach(), labels, self.task.groups).sum()

    def _matters(self, step: int) -> bool:
        """Whether a step weighs anything in the final average of the input statistics."""
        if self.net.statistics == "pass":
            return False
        left = self.settings.epochs * self.steps_an_epoch - step
        momentum = self.net.momentum
        return momentum is None or left <= self.settings.tracked_steps(momentum)

    def _order(self, purpose: str, epoch: int) -> Tensor:
        generator = derived_generator(self.settings.seed, purpose, self.index, epoch)
        order = torch.randperm(len(self.task.train), generator=generator)
        return order[: self.steps_an_epoch * self.batch_size]

    def _batches(self, order: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        return batches(self.images, self.task.preprocess, self.batch_size, self.device, order)

    def _trained_parameters(self) -> dict[str, list[nn.Parameter]]:
        net = self.net
        return {"head": [*net.head.parameters()], "norm": net.norm_parameters(), "conv": net.conv_parameters()}

    def _optimizer(self) -> torch.optim.Optimizer:
        trained = [
            parameter
            for part, parameters in self.parameters.items()
            if any(part in stage.trains for stage in self.stages)
            for parameter in parameters
        ]
        settings = self.settings
        if settings.optimizer == "sgd":
            return torch.optim.SGD(trained, settings.lr, settings.momentum, weight_decay=settings.weight_decay)
        adam = torch.optim.Adam if settings.optimizer == "adam" else torch.optim.AdamW
        return adam(trained, settings.lr, weight_decay=settings.weight_decay)

    def _freeze(self, trains: frozenset[Any]) -> None:
        """Only `trains` gets gradients: backward then stops where nothing below is trained."""
        self.optimizer.zero_grad(set_to_none=True)
        for part, parameters in self.parameters.items():
            for parameter in parameters:
                parameter.requires_grad_(part in trains)

    def _unfreeze(self) -> None:
        self._freeze(frozenset(self.parameters))

    def _context(self) -> TaskContext:
        def train(other: ContinualNet) -> None:
            bare = replace(self.method, penalties=())
            TaskFit(other, self.task, bare, self.settings, Listener(), self.index).run()

        def stored_order(size: int) -> Iterator[tuple[Tensor, Tensor]]:
            return batches(self.images, self.task.preprocess, size, self.device)

        return TaskContext(self.net, self.index, len(self.task.train), stored_order, train)
