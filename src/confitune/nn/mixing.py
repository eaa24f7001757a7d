"""Batches that mix tasks: every image is normalised by its own task's scale and shift."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn.functional import pad

from confitune.errors import ConfituneError
from confitune.nn.memory import TaskMemory

_KEPT = 256  # rows kept ready: 38 KB each for ResNet18


class MixedRows:
    """Evaluation-mode batch norms of each task as one row of scales and shifts, gathered per image."""

    def __init__(self, memory: TaskMemory) -> None:
        self._memory = memory
        self._rows: OrderedDict[str, tuple[int, Tensor]] = OrderedDict()

    def fresh(self, task: str, weights_key: int) -> bool:
        """Whether the task's row holds for these weights; an unfinished task's state may move without a trace."""
        return self._memory.tasks[task].finished and task in self._rows and self._rows[task][0] == weights_key

    def remember(self, task: str, weights_key: int) -> None:
        """Take the row from the live slot, which must be prepared for `task`."""
        parts: list[Tensor] = []
        for name, norm in self._memory.norms.items():
            if not norm.mixes():
                raise ConfituneError(f"{name} is a {type(norm).__name__}, whose forward cannot be done per image")
            parts += norm.scale_and_shift()
        dtype = next((norm.running_var.dtype for norm in self._memory.norms.values()), torch.float32)  # type: ignore
        self._rows[task] = (weights_key, torch.cat(parts).to(dtype) if parts else torch.empty(0))
        self._rows.move_to_end(task)

    def forget(self, task: str | None = None) -> None:
        """Drop a task's row, or all."""
        if task is None:
            self._rows.clear()
        else:
            self._rows.pop(task, None)

    @contextmanager
    def normalising(self, tasks: Sequence[str], place: Tensor) -> Iterator[None]:
        """Within, batch norms treat image n as one of `tasks[place[n]]`."""
        norms = list(self._memory.norms.values())
        table = torch.stack([self._rows[task][1] for task in tasks])
        parts = iter(table[place].split([n.num_features for n in norms for _ in range(2)], dim=1) if norms else ())
        try:
            for norm in norms:
                norm._mixed = (next(parts), next(parts))
            yield
        finally:
            for norm in norms:
                norm._mixed = None
            while len(self._rows) > max(_KEPT, len(tasks)):
                self._rows.popitem(last=False)


def mixed_logits(features: Tensor, heads: Sequence[tuple[Tensor, Tensor]], place: Tensor) -> Tensor:
    """Logits of image n under `heads[place[n]]`, padded with -inf to the largest number of classes."""
    most = max(len(bias) for _, bias in heads)
    weight = torch.stack([pad(w, (0, 0, 0, most - len(w))) for w, _ in heads])
    bias = torch.stack([pad(b, (0, most - len(b)), value=float("-inf")) for _, b in heads])
    return torch.baddbmm(bias[place].unsqueeze(2), weight[place], features.unsqueeze(2)).squeeze(2)
