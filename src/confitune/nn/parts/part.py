"""What of a network a task may own: the protocol that all parts follow.

A part is attached to a backbone once. Its live tensors, the layers' own parameters and buffers, stay at addresses that
never change. A task's state is a copy of them: `ContinualNet` copies it in when the task is used and out when the task
is finished. So a part only has to say what its live tensors are, what a new task starts from, and what has to be done
before a finished task is used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import ClassVar

import torch
from torch import Tensor, nn

from confitune.errors import ConfituneError
from confitune.nn.pairing import Flow
from confitune.nn.parts.input_means import InputMeans, Statistics

Facts = Mapping[str, tuple[int, ...]]


class Part(nn.Module):
    """Base of all parts. What a part does not override does nothing.

    Attributes:
        name: of the part in stages, in storage counts, and in `ContinualNet.parts`.
        input_means: statistics that it takes while a task is trained; the network's `Observer` drives them.
        statistics: when they are taken.
        sized: whether a finished task holds for images of one size only.
    """

    name: ClassVar[str]
    sized: ClassVar[bool] = False
    input_means: Sequence[InputMeans] = ()
    statistics: Statistics = "running"

    @property
    def kind(self) -> str:
        """What a saved state must agree with: the class and its options."""
        return type(self).__name__

    def attach(self, backbone: nn.Module, flow: Flow) -> None:
        """Find the layers in the backbone; called once, before anything else."""

    def select(self, classes: int) -> None:
        """The task that comes to live has so many classes."""

    def live(self, finished: bool) -> dict[str, Tensor]:
        """The live tensors that are kept of a task, by name; a finished task may need fewer."""
        return {}

    def shapes(self, finished: bool, classes: int) -> dict[str, torch.Size]:
        """Of what is kept of a task with so many classes, by name and in order."""
        return {key: tensor.shape for key, tensor in self.live(finished).items()}

    def facts(self) -> Facts:
        """Whole numbers that belong to the live tensors, by name."""
        return {}

    def restore(self, facts: Facts) -> None:
        """The live tensors have become those of another task, with these facts (no facts of a part it lacks)."""

    def keep_pretrained_row(self) -> None:
        """Keep the live tensors, which are those of pre-training, for tasks that do not own this part."""
        row = [tensor.reshape(-1) for tensor in self.live(False).values()]
        self.register_buffer("row", torch.cat(row) if row else torch.empty(0))

    def pretrained(self) -> dict[str, Tensor]:
        """What pre-training left of the live tensors, where that is kept for tasks that do not own this part."""
        row = self._buffers.get("row")
        if row is None:
            return {}
        live = self.live(False)
        return dict(zip(live, split_row(row, [tensor.shape for tensor in live.values()]), strict=True))

    def start(self, generator: torch.Generator | None) -> None:
        """Bring the live tensors, which are the last task's, to what a new task starts from."""

    def reopen(self) -> None:
        """A finished task, which is live, is going to be trained on."""

    def offered(self) -> list[nn.Parameter]:
        """Parameters of the current task that can be trained."""
        return []

    def finish(self, task: str) -> None:
        """The task is about to be stored for good; raise where something is missing."""

    def weights_version(self) -> int:
        """Grows when a weight moves that `prepare` depends on."""
        return 0

    def prepare(self) -> None:
        """Make a finished task, which is live, ready for use under today's weights."""

    def mixed_row(self) -> Tensor:
        """What `mixing` needs of the task that is live and prepared, as one row of numbers."""
        raise ConfituneError(f"{self.name} cannot be told apart image by image: give a batch of one task at a time")

    def mixing(self, rows: Sequence[Tensor], place: Tensor) -> AbstractContextManager[None]:
        """Within, image n of a batch is treated as one of the task whose row is `rows[place[n]]`."""
        raise NotImplementedError


def split_row(row: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """Views of a packed row.

    >>> [part.tolist() for part in split_row(torch.arange(4), [(1, 2), (2,)])]
    [[[0, 1]], [2, 3]]
    """
    sizes = [torch.Size(shape).numel() for shape in shapes]
    if sum(sizes) != row.numel():
        raise ConfituneError(f"a task's row has {row.numel()} numbers, this network keeps {sum(sizes)}")
    return [part.view(tuple(shape)) for part, shape in zip(row.split(sizes), shapes, strict=True)]
