"""Low-rank changes of a task's own to weights that stay as they are (LoRA, Hu et al., ICLR 2022, for any layer).

The change of a weight [O, I, K, K] is B A, with B [O, r] and A [r, I*K*K]; of a grouped convolution all groups share A.
B starts at zero, so that a task starts from the unchanged network. A starts from directions that the method gives it:
with random ones a small rank hardly learns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d, pad

from confitune.errors import ConfituneError
from confitune.nn.pairing import Flow, conv_geometry
from confitune.nn.parts.part import Part, split_row


class Deltas(Part):
    """A low-rank change of every convolution and Linear layer that has more numbers than the change.

    Args:
        rank: r.
    """

    name = "deltas"

    def __init__(self, rank: int = 1) -> None:
        super().__init__()
        if rank < 1:
            raise ConfituneError(f"a change of rank {rank} changes nothing: give 1 or more")
        self.rank = rank
        self.layers: dict[str, nn.Module] = {}  # not registered: they are the backbone's
        self.a, self.b = nn.ParameterList(), nn.ParameterList()
        self._merged: list[Tensor] = []  # changed weights of the task that is prepared

    @property
    def kind(self) -> str:
        return f"Deltas({self.rank})"

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
        self._merged = []
        torch._foreach_zero_(list(self.live(False).values()))

    def offered(self) -> list[nn.Parameter]:
        return [*self.a, *self.b]

    @torch.no_grad()
    def start_along(self, directions: Mapping[str, Tensor]) -> None:
        """Let changes go along the leading right singular vectors of these matrices, by the names of layers.

        Args:
            directions: shaped like the weights; their gradients, for instance.
        """
        for name, a in zip(self.layers, self.a, strict=True):
            matrix = directions[name].float().flatten(1)
            vectors = torch.svd_lowrank(matrix, q=min(self.rank + 4, *matrix.shape), niter=4)[2]
            a.copy_(vectors[:, : self.rank].T)

    def merged(self) -> dict[str, Tensor]:
        """The weights with the live task's changes in them, by the names of layers."""
        layers = enumerate(self.layers.items())
        return {name: self._changed(place, layer.get_parameter("weight")) for place, (name, layer) in layers}

    def _changed(self, place: int, weight: Tensor) -> Tensor:
        with torch.autocast(weight.device.type, enabled=False):  # the change is small: not in half precision
            changed: Tensor = weight + (self.b[place] @ self.a[place]).view_as(weight)
            return changed

    def weights_version(self) -> int:
        return sum(layer.get_parameter("weight")._version for layer in self.layers.values())

    def restore(self, facts: Any) -> None:
        self._merged = []

    def reopen(self) -> None:
        self._merged = []

    @torch.no_grad()
    def prepare(self) -> None:
        """Merge the changes into copies of the weights, for the task that is used now."""
        self._merged = list(self.merged().values())

    def _forward(self, place: int, layer: Any, x: Tensor) -> Tensor:
        """The layer's own forward with the changed weight."""
        own = layer._parameters["weight"]
        layer._parameters["weight"] = self._merged[place] if self._merged else self._changed(place, own)
        try:
            output: Tensor = type(layer).forward(layer, x)
        finally:
            layer._parameters["weight"] = own
        return output

    # ---- image by image --------------------------------------------------------------------------------------------

    def mixed_row(self) -> Tensor:
        return torch.cat([tensor.reshape(-1) for tensor in self.live(True).values()])

    @contextmanager
    def mixing(self, rows: Sequence[Tensor], place: Tensor) -> Iterator[None]:
        own = {name: layer.forward for name, layer in self.layers.items()}
        shapes = [tensor.shape for tensor in self.live(True).values()]
        tables = [split_row(row, shapes) for row in rows]
        chosen = iter([torch.stack(parts)[place] for parts in zip(*tables, strict=True)])
        try:
            for layer in self.layers.values():
                layer.forward = partial(_forward_mixed, layer, next(chosen), next(chosen))  # type: ignore[method-assign]
            yield
        finally:
            for name, layer in self.layers.items():
                layer.forward = own[name]  # type: ignore[method-assign]


def _forward_mixed(layer: Any, a: Tensor, b: Tensor, x: Tensor) -> Tensor:
    """A layer's forward with a change of each image's own: r filters, then a 1x1 convolution.

    Args:
        a: [N, r, I*K*K].
        b: [N, O, r].
    """
    output: Tensor = type(layer).forward(layer, x)
    images, rank = a.shape[:2]
    if isinstance(layer, nn.Linear):
        low = torch.einsum("n...i,nri->n...r", x, a.to(x.dtype))
        return output + torch.einsum("n...r,nor->n...o", low, b.to(x.dtype))
    geometry, groups = conv_geometry(layer), layer.groups
    padding = [amount for axis in (1, 0) for amount in geometry.axis_padding(axis, x.shape[2 + axis])]
    padded = pad(x, padding, mode="constant" if geometry.mode == "zeros" else geometry.mode)
    # All images as groups of one convolution, and in each its own groups, which share A.
    filters = a.view(images, 1, rank, *layer.weight.shape[1:]).expand(-1, groups, -1, -1, -1, -1)
    filters = filters.reshape(images * groups * rank, *layer.weight.shape[1:]).to(x.dtype)
    joined, groups = padded.reshape(1, -1, *padded.shape[2:]), images * groups
    low = conv2d(joined, filters, None, layer.stride, 0, layer.dilation, groups)
    return output + conv2d(low, b.reshape(-1, rank, 1, 1).to(x.dtype), groups=groups).view_as(output)
