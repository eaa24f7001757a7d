"""Mixed batches: every image has a task of its own, in evaluation.

What a part needs of a task for that is one row of numbers. Rows are kept, since making one means to bring the task to
live and to prepare it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor

from confitune.errors import ConfituneError
from confitune.nn.parts.part import Part

_ROWS_KEPT = 256  # tasks whose rows are kept ready: 38 KB each for ResNet18

Rows = list[Tensor]  # of one task, by part


def tasks_of(index: Tensor, images: int, tasks: Sequence[str]) -> tuple[list[str], Tensor]:
    """The tasks that a batch has images of, and for each image the place of its task among them."""
    if index.shape != (images,) or index.is_floating_point():
        raise ConfituneError(f"a mixed batch needs one task index per image, got {tuple(index.shape)} for {images}")
    unique, place = torch.unique(index, return_inverse=True)
    if not len(unique) or not 0 <= int(unique[0]) <= int(unique[-1]) < len(tasks):
        raise ConfituneError(f"task indices run from 0 to {len(tasks) - 1}, got {unique.tolist()}")
    return [tasks[i] for i in unique.tolist()], place


class Mixing:
    """The rows of a network's tasks for mixed batches."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts = parts
        self._kept: OrderedDict[str, tuple[int, Rows]] = OrderedDict()  # by task, with the weights they hold for

    def rows(self, task: str, version: int, prepare: Callable[[str], None], keep: bool) -> Rows:
        """The rows of a task under these weights; `prepare` brings it to live. An unfinished one's are not kept."""
        if not keep or task not in self._kept or self._kept[task][0] != version:
            prepare(task)
            self._kept[task] = version, [part.mixed_row() for part in self._parts]
        self._kept.move_to_end(task)
        rows = self._kept[task][1]
        if len(self._kept) > _ROWS_KEPT:
            self._kept.popitem(last=False)
        return rows

    def forget(self, task: str | None = None) -> None:
        """What was kept of a task, or of all, holds no longer."""
        if task is None:
            self._kept.clear()
        else:
            self._kept.pop(task, None)

    @contextmanager
    def treating(self, rows: Sequence[Rows], place: Tensor) -> Iterator[None]:
        """Within, image n of a batch is treated as one of the task whose rows are `rows[place[n]]`."""
        with ExitStack() as stack:
            for part, of_part in zip(self._parts, zip(*rows, strict=True), strict=True):
                stack.enter_context(part.mixing(of_part, place))
            yield
