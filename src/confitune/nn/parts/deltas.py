"""Low-rank changes of a task's own to weights that stay as they are (LoRA, Hu et al., ICLR 2022, for any layer).

The change of a weight [O, I, K, K] is B A, with B [O, r] and A [r, I*K*K]; of a grouped convolution all groups share A.
B starts at zero, so that a task starts from the unchanged network. A starts from directions that the method gives it:
with random ones a small rank hardly learns.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from confitune.errors import ConfituneError
from confitune.nn.pairing import Flow
from confitune.nn.parts.part import Part

Start = Literal["previous", "pretrained", "random"]


class Deltas(Part):
    """A low-rank change of every convolution and Linear layer that has more numbers than the change.

    Args:
        rank: r.
        start: a new task starts from the 'previous' task's change, or from none: B is zero, and A zero, too
            ('pretrained'), or random as in LoRA.
    """

    name = "deltas"

    def __init__(self, rank: int = 1, start: Start = "pretrained") -> None:
        super().__init__()
        if rank < 1:
            raise ConfituneError(f"a change of rank {rank} changes nothing: give 1 or more")
        self.rank, self.start_from = rank, start
        self.layers: dict[str, nn.Module] = {}  # not registered: they are the backbone's
        self.a, self.b = nn.ParameterList(), nn.ParameterList()
        self._merged: list[Tensor] = []  # changed weights of the task that is prepared

    @property
    def kind(self) -> str:
        return f"Deltas({self.rank}, from {self.start_from})"

    def attach(self, backbone: nn.Module, flow: Flow) -> None:
        called = {call.module for call in flow.convs if call.direct_weight}
        for name, layer in backbone.named_modules():
            if name in called and isinstance(layer, (nn.Conv2d, nn.Linear)):
                outputs, inputs = layer.weight.shape[0], layer.weight[0].numel()
                if self.rank * (outputs + inputs) < outputs * inputs:
                    self.layers[name] = layer
                    self.a.append(nn.Parameter(layer.weight.new_zeros(self.rank, inputs)))
                    self.b.append(nn.Parameter(layer.weight.new_zeros(outputs, self.rank)))
                    layer.forward = partial(self._forward, len(self.a) - 1, layer)  # type: ignore[method-assign]

    def live(self, finished: bool) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for name, a, b in zip(self.layers, self.a, self.b, strict=True):
            found |= {f"{name}.delta.a": a.detach(), f"{name}.delta.b": b.detach()}
        return found

    def pretrained(self) -> dict[str, Tensor]:
        """No change."""
        return {key: torch.zeros_like(tensor) for key, tensor in self.live(False).items()}

    @torch.no_grad()
    def start(self, generator: torch.Generator | None) -> None:
        if self.start_from != "previous":
            torch._foreach_zero_(list(self.live(False).values()))
        if self.start_from == "random":
            for a in self.a:
                a.copy_(torch.randn(a.shape, generator=generator) / math.sqrt(a.shape[1]))

    def offered(self) -> list[nn.Parameter]:
        return [*self.a, *self.b]

    @torch.no_grad()
    def start_along(self, directions: Mapping[str, Tensor]) -> None:
        """Let changes go along the leading right singular vectors of these matrices, by the names of layers.

        Args:
            directions: shaped like the weights; their gradients, for instance.
        """
        for name, a in zip(self.layers, self.a, strict=True):
            a.copy_(_leading(directions[name].float().flatten(1), self.rank).T)

    def merged(self) -> dict[str, Tensor]:
        """The weights with the live task's changes in them, by the names of layers."""
        layers = enumerate(self.layers.items())
        return {name: self._changed(place, layer.get_parameter("weight")) for place, (name, layer) in layers}

    def _changed(self, place: int, weight: Tensor) -> Tensor:
        with torch.autocast(weight.device.type, enabled=False):  # the change is small: not in half precision
            changed: Tensor = weight + (self.b[place] @ self.a[place]).view_as(weight)
            return changed

    def restore(self, facts: Any) -> None:
        self._merged = []

    @torch.no_grad()
    def prepare(self) -> None:
        """Merge the changes into copies of the weights, for the task that is used now."""
        self._merged = list(self.merged().values())

    def _forward(self, place: int, layer: Any, x: Tensor) -> Tensor:
        """The layer's own forward with the changed weight."""
        own = layer.weight
        layer._parameters["weight"] = self._merged[place] if self._merged else self._changed(place, own)
        try:
            output: Tensor = type(layer).forward(layer, x)
        finally:
            layer._parameters["weight"] = own
        return output


def _leading(matrix: Tensor, rank: int, rounds: int = 16) -> Tensor:
    """The leading right singular vectors of a matrix [O, I], as columns [I, r]: subspace iteration, no waiting."""
    vectors = torch.randn(matrix.shape[1], rank, device=matrix.device)
    for _ in range(rounds):
        vectors = matrix.T @ (matrix @ vectors)
        vectors = nn.functional.normalize(vectors, dim=0) if rank == 1 else torch.linalg.qr(vectors)[0]
    return vectors
