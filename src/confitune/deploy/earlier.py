"""What a bundle's earlier tasks lost or gained by a new one, on the held-out images that it keeps of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from confitune.deploy.bundle import Bundle
from confitune.deploy.held_out import accuracy_on
from confitune.engine.seeds import derived_generator
from confitune.nn import ContinualNet
from confitune.tasks import Preprocess, Progress


@dataclass(frozen=True)
class Change:
    """An earlier task's accuracy on its held-out images, in percent."""

    task: str
    before: float | None  # when it was last tested
    after: float
    images: int


def some_of(tasks: Sequence[str], most: int, seed: int, number: int) -> list[str]:
    """All of the tasks, or `most` at random, others for every number; in their order.

    >>> some_of(["birds", "trees"], 2, 0, 7), len(some_of([str(n) for n in range(100)], 5, 0, 7))
    (['birds', 'trees'], 5)
    """
    if len(tasks) <= most:
        return list(tasks)
    order = torch.randperm(len(tasks), generator=derived_generator(seed, "check", number))
    return [tasks[place] for place in order[:most].sort().values.tolist()]


def check_earlier(
    bundle: Bundle, net: ContinualNet, tasks: Sequence[str], preprocess: Preprocess, progress: Progress | None
) -> tuple[Change, ...]:
    """Test tasks on their held-out images; their states are in the network one at a time."""
    changes = []
    for number, task in enumerate(tasks, 1):
        kept, loaded = bundle.held_out(task), task not in net.tasks
        assert kept is not None
        if loaded:
            bundle.load_task(net, task)
        after = accuracy_on(net, task, kept, preprocess)
        changes.append(Change(task, bundle.accuracy.get(task), after, len(kept["labels"])))
        if loaded:
            net.drop_task(task)
        if progress is not None:
            progress("testing earlier tasks", number, len(tasks))
    return tuple(changes)
