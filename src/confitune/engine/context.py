"""What the parts of a method may use of the task that is being learned."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from confitune.engine.events import Listener
from confitune.engine.feed import batches
from confitune.engine.seeds import derived_seed
from confitune.methods import TaskContext
from confitune.nn import ContinualNet

if TYPE_CHECKING:
    from confitune.engine.training import TaskFit


_AT_ONCE = 256  # images whose features are taken


def context_of(fit: TaskFit) -> TaskContext:
    """The context of a task's training."""
    task, settings, ranks = fit.task, fit.settings, fit.ranks
    images = len(task.train)

    def train(other: ContinualNet, only_epoch: int | None = None) -> None:
        bare = replace(fit.method, penalties=())
        twin = type(fit)(other, task, bare, settings, Listener(), fit.index, fit.executor.of(other))
        if only_epoch is None:
            twin.run()
        else:
            twin.train_one(only_epoch)

    def stored_order(size: int) -> Iterator[tuple[Tensor, Tensor]]:
        whole = torch.arange(images).split(size)
        own = whole[ranks.rank :: ranks.size]  # only the last of all may be smaller
        for pixels, labels in batches(task.train, size, fit.device, torch.cat(own) if own else whole[0][:0]):
            yield task.inputs(pixels), labels

    def sample(at_most: int) -> Tensor:
        whole = max(min(images, at_most) // fit.batch_size, 1) * fit.batch_size
        return fit.drawn(whole, "sample")

    def features(order: Tensor) -> Tensor:
        found, done = torch.zeros(len(order), fit.net.features, device=fit.device), 0
        # In equal parts, whatever the settings are: what is measured on the way is an average over them.
        for positions in order.tensor_split(math.ceil(len(order) / _AT_ONCE)):
            here = ranks.part(torch.arange(done, done + len(positions)))
            for pixels, _ in batches(task.train, len(positions), fit.device, order[here]):
                with torch.autocast(fit.device.type, torch.bfloat16, enabled=settings.bf16(fit.device)):
                    found[here[0] : here[-1] + 1] = fit.net.features_of(task.inputs(pixels)).float()
            done += len(positions)
        if ranks.several:
            ranks.add_up([found])
        return found

    def run(net: ContinualNet, kind: Hashable, function: Callable[..., None], *inputs: Tensor) -> None:
        executor = fit.executor if net is fit.net else fit.executor.of(net)
        executor(kind, function, *inputs, trains=False)

    return TaskContext(
        net=fit.net,
        index=fit.index,
        epochs=settings.epochs,
        images=images,
        classes=len(task.classes),
        labels=task.train.labels.to(fit.device),
        batches=stored_order,
        train=train,
        sample=sample,
        features=features,
        note=lambda message: fit.listener.note(f"task {task.name!r}: {message}"),
        run=run,
        seed=derived_seed(settings.seed, "penalty", fit.index),
    )
