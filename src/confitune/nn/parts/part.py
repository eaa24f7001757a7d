"""What of a network a task may own: the protocol that all parts follow.

A part is attached to a backbone once. A task's state is a copy of its live tensors, the layers' own parameters and
buffers: `ContinualNet` copies it in when the task is used and out when the task is finished. So a part only has to say
what its live tensors are, what a new task starts from, and what has to be done before a finished task is used.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from confitune.nn.pairing import Flow
from confitune.nn.parts.input_means import InputMeans, Statistics

Facts = Mapping[str, tuple[int, ...]]


class Part(nn.Module):
    """Base of all parts. What a part does not override does nothing.

    One that takes input means while a task is trained, driven by the network's `Observer`, makes tasks hold for images
    of one size only.
    """

    name: ClassVar[str]  # in stages, in storage counts, and in `ContinualNet.parts`
    input_means: Sequence[InputMeans] = ()
    statistics: Statistics = "running"  # when input means are taken

    @property
    def kind(self) -> str:
        """What a saved state must agree with: the class and its options."""
        return type(self).__name__

    def attach(self, backbone: nn.Module, flow: Flow) -> None:
        """Find the layers in the backbone; called once, before anything else."""

    def live(self, finished: bool) -> dict[str, Tensor]:
        """The live tensors that are kept of a task, by name; a finished task may need fewer."""
        return {}

    def shapes(self, finished: bool, classes: int) -> dict[str, torch.Size]:
        """Of what is kept of a task with so many classes, by name."""
        return {key: tensor.shape for key, tensor in self.live(finished).items()}

    def facts(self) -> Facts:
        """Whole numbers that belong to the live tensors, by name."""
        return {}

    def restore(self, facts: Facts) -> None:
        """The live tensors are another task's now, with these facts: none if it is new, reopened or lacks the part."""

    def start(self, generator: torch.Generator | None) -> None:
        """Bring the live tensors, which are the last task's, to what a new task starts from."""

    def offered(self) -> list[nn.Parameter]:
        """Parameters of the current task that can be trained."""
        return []

    def prepare(self) -> None:
        """Make a finished task, which is live, ready for use under today's weights."""

    @torch.no_grad()
    def start_pretrained(self) -> None:
        """Bring the live tensors, which are an unfinished task's, to what pre-training left, where that is kept."""
        if pretrained := self.pretrained():
            torch._foreach_copy_(list(self.live(False).values()), list(pretrained.values()))

    def keep_pretrained_row(self) -> None:
        """Keep the live tensors, which are those of pre-training, for tasks that do not own this part."""
        self.register_buffer("row", pack(self.live(False).values()))

    def pretrained(self) -> dict[str, Tensor]:
        """What pre-training left of the live tensors, where that is kept for tasks that do not own this part."""
        row = self._buffers.get("row")
        return {} if row is None else unpack(row, self.shapes(False, 0))


def pack(tensors: Iterable[Tensor]) -> Tensor:
    """A copy of tensors, one after the other, as one row of numbers."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors] or [torch.empty(0)])


def unpack(row: Tensor, shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    """Views of a packed row, by name.

    >>> {key: view.tolist() for key, view in unpack(torch.arange(4), {"a": (1, 2), "b": (2,)}).items()}
    {'a': [[0, 1]], 'b': [2, 3]}
    """
    views = row.split([torch.Size(shape).numel() for shape in shapes.values()])
    return {key: view.view(shape) for (key, shape), view in zip(shapes.items(), views, strict=True)}
