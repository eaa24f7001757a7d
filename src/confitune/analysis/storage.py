"""Numbers stored in addition to the pre-trained network as tasks grow (ConFiT, Fig. 'additional parameters').

Counted from what is really there, not from a formula: the network's own saved state and its tasks' rows, the tensors
that methods hold. Two counts, both without heads, which every method has and which are counted beside them:

- kept: what must be there between tasks, to test the tasks so far and to go on.
- peak: the most that is held at once while the last of them is trained: the tensors a method runs on, AFEC's copy,
  the live statistics of Xconv BN (whole planes, so they depend on the image size). Gradients, the optimiser and
  activations are not in it: they are every method's.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor, nn

from confitune.analysis.saved import SavedResult
from confitune.methods import Method, create_method, method_classes
from confitune.nn import ContinualNet, headless, without_memory
from confitune.nn.geometry import Means


class StorageRow(BaseModel):
    """One method after so many tasks."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    method: str
    tasks: int
    kept: int
    peak: int
    heads: int


class StorageResult(SavedResult):
    """A row for each method and each number of tasks."""

    model: str
    pretrained: int  # numbers of the network without its head, running moments included
    classes_per_task: int
    image_size: int
    means: Means
    rows: list[StorageRow]

    def of(self, method: str) -> list[StorageRow]:
        """One method's rows, from one task on."""
        return [row for row in self.rows if row.method == method]


def measure_storage(
    model: str | Callable[[], nn.Module],
    methods: Sequence[str | Method],
    *,
    classes_per_task: int,
    tasks: int,
    image_size: int = 224,
    means: Means = "window",
) -> StorageResult:
    """Take a network without weights through `tasks` tasks by each method, learning nothing, and count what it holds.

    Args:
        model: a name, or what makes a backbone. A network by name is made on the meta device where that works: shapes
            are there, nothing is computed.
        methods: names, or methods with options of their own.
        image_size: of the one batch that every task sees; live statistics of Xconv BN depend on it.
        means: what Xconv BN keeps.

    >>> found = measure_storage("resnet18", ["confit"], classes_per_task=10, tasks=2, means="phase", image_size=64)
    >>> [row.kept for row in found.of("confit")]
    [19148, 38296]
    """
    make = partial(without_memory, model) if isinstance(model, str) else model
    rows = []
    for method in methods:
        if isinstance(method, str):
            kinds = [kind for kind in method_classes(method) if "means" in kind.Options.model_fields]
            method = create_method(method, {kind.name: {"means": means} for kind in kinds})
        rows += [*_grow(copy.deepcopy(method), make, classes_per_task, tasks, image_size)]
    return StorageResult(
        model=model if isinstance(model, str) else type(make()).__name__,
        pretrained=_numbers(headless(make()).state_dict()),
        classes_per_task=classes_per_task,
        image_size=image_size,
        means=means,
        rows=rows,
    )


def kept_once(net: ContinualNet, method: Method) -> int:
    """Numbers that are kept however many tasks there are: what parts keep of pre-training, and what methods hold."""
    of_parts = sum(_numbers(list(part.buffers(recurse=False))) for part in net.parts.values())
    return of_parts + sum(hook.storage() for hook in method.hooks)


def _grow(method: Method, make: Callable[[], nn.Module], classes: int, tasks: int, size: int) -> Iterator[StorageRow]:
    backbone = headless(make())
    pretrained = _numbers(backbone.state_dict())
    net = method.network(backbone)
    like = next(backbone.parameters())
    images = torch.zeros(2, 3, size, size, device=like.device, dtype=like.dtype).uniform_()
    empty = net
    for count in range(1, tasks + 1):
        if method.joint:  # all tasks so far at once
            net = copy.deepcopy(empty)
        of_one = pretrained if method.separate else 0
        peak = _learn(net, method, f"task{count}", classes * (count if method.joint else 1), images) - pretrained
        storage = net.storage().values()
        yield StorageRow(
            method=method.name,
            tasks=count,
            kept=kept_once(net, method) + sum(task.beside_head for task in storage) + count * of_one,
            peak=peak + count * of_one,  # the copy in training is the last of them
            heads=sum(task.head for task in storage),
        )


class _Motions:
    """The motions of learning a task, as the engine makes them: a `TaskContext` in which nothing is computed."""

    def __init__(self, net: ContinualNet, name: str, classes: int, images: Tensor) -> None:
        self.net, self.index, self.seed = net, len(net.tasks), 0
        self.batch_size, self.epochs, self.epoch = len(images), 1, 0
        self.images, self.labels = len(images), torch.zeros(len(images), dtype=torch.long)
        self._name, self._classes, self._pixels = name, classes, images

    def batches(self, size: int) -> Iterable[tuple[Tensor, Tensor]]:
        return ()

    def train(self, other: ContinualNet, only_epoch: int | None = None) -> None:
        if self._name not in other.tasks:
            other.add_task(self._name, self._classes)
        other.set_task(self._name)
        with torch.no_grad():
            other.train()(self._pixels)
        if only_epoch is None:
            other.measure([self._pixels])
            other.finish_task()

    def train_on(self, positions: Tensor) -> None:
        """All of them anyway."""

    def features(self, positions: Tensor) -> Tensor:
        return self.net.features(self._pixels[positions])

    def gradients(self, parameters: Sequence[Tensor], batches: int) -> list[Tensor]:
        return [torch.zeros_like(parameter) for parameter in parameters]

    def captured(self, *args: Any) -> None:
        """Nothing."""

    def note(self, message: str) -> None:
        """Nobody is told."""


def _learn(net: ContinualNet, method: Method, name: str, classes: int, images: Tensor) -> int:
    """The most numbers that were held while a task was learned."""
    context = _Motions(net, name, classes, images)

    def held() -> int:
        return _held(net) + sum(_held(vars(hook)) for hook in method.hooks)

    net.add_task(name, classes)
    for hook in method.hooks:
        hook.attach(net, context.index)
    for hook in method.hooks:
        hook.begin_task(context)
    for hook in method.hooks:
        hook.begin_epoch(context, 0)
    with torch.no_grad():
        net.train()(images)
    most = held()
    for hook in method.hooks:
        hook.end_task(context)
    most = max(most, held())
    net.measure([images])
    net.finish_task()
    return most


def _held(value: Any) -> int:
    """Numbers in whatever a method or a network holds; heads, live and in rows, left out."""
    if isinstance(value, ContinualNet):
        state = {key: part for key, part in value.state_dict().items() if not key.startswith("parts.head.")}
        return _numbers(state) - sum(task.head for task in value.storage().values())
    if isinstance(value, Mapping):
        return sum(map(_held, value.values()))
    return _numbers(value)


def _numbers(value: Any) -> int:
    """Floating-point numbers in nested state; counters are no numbers of a network."""
    if isinstance(value, Tensor):
        return value.numel() if value.is_floating_point() else 0
    if isinstance(value, Mapping):
        return sum(map(_numbers, value.values()))
    if isinstance(value, (list, tuple)):
        return sum(map(_numbers, value))
    return 0
