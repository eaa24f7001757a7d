"""The classifier of a task: one linear layer on the backbone's features."""

from collections.abc import Iterable
from typing import cast

import torch
from torch import Tensor, nn

from confitune.nn.pairing import Flow
from confitune.nn.parts.part import Part


class Head(Part):
    """A head for each task. Tasks with the same number of classes share one live layer."""

    name = "head"

    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.ModuleDict()  # by number of classes
        self.features = 0
        self._classes = 0

    def attach(self, backbone: nn.Module, flow: Flow) -> None:
        assert flow.features is not None
        self.features = flow.features[0]
        self._backbone = (backbone,)  # in a tuple, so that it is no module of the head

    @property
    def linear(self) -> nn.Linear:
        """The live layer of the current task."""
        return cast(nn.Linear, self.linears[str(self._classes)])

    def select(self, classes: int) -> None:
        """Make the layer for this number of classes the live one."""
        self._classes = classes
        if str(classes) not in self.linears:
            like = next(self._backbone[0].parameters())
            layer = nn.Linear(self.features, classes, device=like.device, dtype=like.dtype)
            self.linears[str(classes)] = layer.train(self.training)

    def keep_only(self, counts: Iterable[int]) -> None:
        """Keep layers for these numbers of classes, and no others."""
        current = self._classes
        needed = set(counts)
        for classes in needed:
            self.select(classes)
        for unused in set(self.linears) - set(map(str, needed)):
            del self.linears[unused]
        self._classes = current if current in needed else 0

    def live(self, finished: bool) -> dict[str, Tensor]:
        return {f"head.{key}": tensor for key, tensor in self.linear.state_dict().items()} if self._classes else {}

    def shapes(self, finished: bool, classes: int) -> dict[str, torch.Size]:
        return {"head.weight": torch.Size((classes, self.features)), "head.bias": torch.Size((classes,))}

    @torch.no_grad()
    def start(self, generator: torch.Generator | None) -> None:
        """torch's own initialisation of a Linear layer, drawn on the CPU so that a seed means the same everywhere."""
        bound = self.features**-0.5
        for parameter in (self.linear.weight, self.linear.bias):
            parameter.copy_(torch.empty(parameter.shape).uniform_(-bound, bound, generator=generator))

    @torch.no_grad()
    def put(self, weight: Tensor, bias: Tensor) -> None:
        """Replace the current task's classifier."""
        self.linear.weight.copy_(weight)
        self.linear.bias.copy_(bias)

    def offered(self) -> list[nn.Parameter]:
        return [*self.linear.parameters()] if self._classes else []

    def forward(self, features: Tensor) -> Tensor:
        return cast(Tensor, self.linear(features))  # logits
