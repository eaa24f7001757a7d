"""Numbers stored in addition to the pre-trained network as tasks grow (ConFiT, Fig. 'additional parameters').

Counted from what is really there, not from a formula: the network's own saved state and its tasks' rows, the tensors
that penalties hold. Two counts, both without heads, which every method has and which are counted beside them:

- kept: what must be there between tasks, to test the tasks so far and to go on.
- peak: the most that is held at once while the last of them is trained: the tensors a penalty runs on, AFEC's copy,
  the live statistics of Xconv BN (whole planes, so they depend on the image size). Gradients, the optimiser and
  activations are not in it: they are every method's.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor, nn

from confitune.analysis.saved import SavedResult
from confitune.engine import RunResult
from confitune.errors import ConfituneError
from confitune.methods import Method, TaskContext, create_method
from confitune.methods.quadratic import QuadraticPenalty
from confitune.nn import ContinualNet, build_model, headless
from confitune.nn.geometry import Means


class StorageRow(BaseModel):
    """One method after so many tasks; None where it is not known."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    method: str
    tasks: int
    kept: int | None
    peak: int | None
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
        model: a name as `build_model` takes it, or what makes a backbone. A network by name is made on the meta device
            where that works: shapes are there, nothing is computed.
        methods: names, or methods with options of their own.
        image_size: of the one batch that every task sees; live statistics of Xconv BN depend on it.
        means: what Xconv BN keeps.

    >>> found = measure_storage("resnet18", ["confit"], classes_per_task=10, tasks=2, means="phase", image_size=64)
    >>> [row.kept for row in found.of("confit")]
    [19148, 38296]
    """
    make = _maker(model) if isinstance(model, str) else model
    chosen = [create_method(method) if isinstance(method, str) else method for method in methods]
    rows = []
    for method in chosen:
        rows += [*_grow(method, make, classes_per_task, tasks, image_size, means)]
    return StorageResult(
        model=model if isinstance(model, str) else type(make()).__name__,
        pretrained=_numbers(headless(make()).state_dict()),
        classes_per_task=classes_per_task,
        image_size=image_size,
        means=means,
        rows=rows,
    )


def storage_of(result: RunResult) -> list[StorageRow]:
    """The same from a finished run, where the result has it: what a penalty keeps and the peak are not in it.

    A single-task run's result counts each copy's parameters without its running moments.
    """
    try:
        penalties = create_method(result.method).penalties
        known = not any(isinstance(penalty, QuadraticPenalty) for penalty in penalties)
    except ConfituneError:
        known = False  # a method of the user's own
    rows, kept, heads = [], 0, 0
    joint = len(result.tasks) < len(result.accuracy_matrix)  # all tasks as one
    for number, task in enumerate(result.tasks, 1):
        kept, heads = kept + task["norm_numbers"], heads + task["head_numbers"]
        tasks = len(result.accuracy_matrix) if joint else number
        rows.append(StorageRow(method=result.method, tasks=tasks, kept=kept if known else None, peak=None, heads=heads))
    return rows


def _grow(
    method: Method, make: Callable[[], nn.Module], classes: int, tasks: int, size: int, means: Means
) -> Iterator[StorageRow]:
    backbone = headless(make())
    pretrained = _numbers(backbone.state_dict())
    net = ContinualNet(backbone, norm=method.norm, **{"means": means, **method.network})
    like = next(backbone.parameters())
    images = torch.zeros(2, 3, size, size, device=like.device, dtype=like.dtype).uniform_()
    method = copy.deepcopy(method)  # penalties of a registry's method would go on from another network's tensors
    empty = net
    for count in range(1, tasks + 1):
        if method.joint:  # all tasks so far at once
            net = copy.deepcopy(empty)
        of_one = pretrained if method.separate else 0
        peak = _learn(net, method, f"task{count}", classes * (count if method.joint else 1), images) - pretrained
        storage = net.storage().values()
        kept = sum(task.norm_numbers for task in storage) + sum(p.storage() for p in method.penalties)
        yield StorageRow(
            method=method.name,
            tasks=count,
            kept=kept + count * of_one,
            peak=peak + count * of_one,  # the copy in training is the last of them
            heads=sum(task.head_numbers for task in storage),
        )


def _learn(net: ContinualNet, method: Method, name: str, classes: int, images: Tensor) -> int:
    """The motions of learning a task, as the engine makes them; the most numbers that were held on the way."""

    def train(other: ContinualNet, only_epoch: int | None = None) -> None:
        if name not in other.tasks:
            other.add_task(name, classes)
        other.set_task(name)
        other.train()(images)
        if only_epoch is None:
            other.finish_task([images])

    def held() -> int:
        return _held(net) + sum(_held(vars(penalty)) for penalty in method.penalties)

    context = TaskContext(
        net=net,
        index=len(net.tasks),
        epochs=1,
        images=len(images),
        classes=classes,
        labels=torch.zeros(len(images), dtype=torch.long),
        batches=lambda size: (),
        train=train,
        sample=lambda at_most: torch.arange(len(images)),
        features=lambda order: net.features_of(images[order]),
        note=lambda message: None,
        run=lambda *args, **kwargs: None,
        seed=0,
    )
    net.add_task(name, classes)
    for penalty in method.penalties:
        penalty.attach(net)
    for penalty in method.penalties:
        penalty.begin_task(context)
    for penalty in method.penalties:
        penalty.begin_epoch(context, 0)
    with torch.no_grad():
        net.train()(images)
    most = held()
    for penalty in method.penalties:
        penalty.end_task(context)
    most = max(most, held())
    net.finish_task([images])
    return most


def _held(value: Any) -> int:
    """Numbers in whatever a penalty or a network holds; heads, in the slot and in rows, left out."""
    if isinstance(value, ContinualNet):
        state = {key: part for key, part in value.state_dict().items() if not key.startswith("heads.")}
        return _numbers(state) - sum(task.head_numbers for task in value.storage().values())
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


def _maker(name: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        try:
            with torch.device("meta"):
                return build_model(name)
        except ConfituneError:  # some networks read their own numbers while they are built
            return build_model(name)

    return make
