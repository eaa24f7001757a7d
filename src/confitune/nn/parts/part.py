"""The interface of a part: something in a network of which each task has its own version.

A part is attached to a backbone once. Its live tensors are the parameters and buffers of the layers themselves:
`ContinualNet` copies a task's values in when the task is used, and out when it is finished. So a part only says what
its live tensors are, what a new task starts from, and what to do before a finished task is used.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from confitune.nn.pairing import Flow
from confitune.nn.parts.input_means import InputMeans, Statistics

Facts = Mapping[str, tuple[int, ...]]


class Part(nn.Module):
    """Base of all parts. What a part does not override does nothing.

    Tasks of a part with input means, which the network's `Observer` takes in training, work with one image size only.
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
        """The live tensors to keep for a task, by name; a finished task may need fewer."""
        return {}

    def shapes(self, finished: bool, classes: int) -> dict[str, torch.Size]:
        """Shapes of what is kept for a task with this number of classes, by name."""
        return {key: tensor.shape for key, tensor in self.live(finished).items()}

    def facts(self) -> Facts:
        """Integers that belong to the live tensors, by name."""
        return {}

    def restore(self, facts: Facts) -> None:
        """Called when another task goes live, with its facts: empty if it is new, reopened or without this part."""

    def start(self, generator: torch.Generator | None) -> None:
        """Set the live tensors, which hold the last task's values, to what a new task starts from."""

    def offered(self) -> list[nn.Parameter]:
        """Parameters of the current task that can be trained."""
        return []

    def prepare(self) -> None:
        """Make the live, finished task ready for use with the current shared weights."""

    @torch.no_grad()
    def start_pretrained(self) -> None:
        """Set the live tensors to the pre-trained values, where these are kept."""
        self.restore({})
        if pretrained := self.pretrained():
            torch._foreach_copy_(list(self.live(False).values()), list(pretrained.values()))

    def pretrained(self) -> dict[str, Tensor]:
        """The pre-trained values of the live tensors, if a part keeps them, packed, for tasks that do not own it."""
        row = self._buffers.get("row")
        return {} if row is None else unpack(row, self.shapes(False, 0))


def pack(tensors: Iterable[Tensor]) -> Tensor:
    """All tensors flattened into one row."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors] or [torch.empty(0)])


def unpack(row: Tensor, shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    """Views into a packed row, by name.

    >>> {key: view.tolist() for key, view in unpack(torch.arange(4), {"a": (1, 2), "b": (2,)}).items()}
    {'a': [[0, 1]], 'b': [2, 3]}
    """
    views = row.split([torch.Size(shape).numel() for shape in shapes.values()])
    return {key: view.view(shape) for (key, shape), view in zip(shapes.items(), views, strict=True)}
