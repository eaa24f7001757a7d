"""Low-rank changes of a task's own to weights that stay as they are (LoRA, Hu et al., ICLR 2022, for any layer).

The change of a weight [O, I, K, K] is B A, with B [O, r] and A [r, I*K*K]; of a grouped convolution all groups share A.
Rows of A may be products of a vector over input channels and a window (a CP decomposition): with 3 x 3 windows a number
buys four times the rank. B starts at zero, so that a task starts from the unchanged network. A starts at random, as in
LoRA, or from directions that the method gives it (`start_along`), with which a small rank learns far more.
"""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from confitune.errors import ConfituneError
from confitune.nn.pairing import Flow
from confitune.nn.parts.part import Part

Start = Literal["previous", "random"]

_MOST_NUMBERS = 36_000  # of a task's changes, unless a rank is asked for: more gained nothing
_MOST_RANK = 4


class Deltas(Part):
    """A low-rank change of every convolution and Linear layer that has more numbers than the change.

    Args:
        rank: r; default: as large as 36,000 numbers allow, from 1 to 4.
        start: a new task starts from the 'previous' task's change (the first one from zeros, which learn nothing until
            `start_along`), or from none: B is zero and A 'random'.
        products: rows of A are products of channels and windows.
    """

    name = "deltas"

    def __init__(self, rank: int | None = None, start: Start = "random", products: bool = True) -> None:
        super().__init__()
        if rank is not None and rank < 1:
            raise ConfituneError(f"a change of rank {rank} changes nothing: give 1 or more")
        self.asked_rank = rank
        self.start_from = start
        self.products = products
        self.rank = 0  # until attached
        self.layers: dict[str, nn.Module] = {}  # not registered: they are the backbone's
        self.a = nn.ParameterList()
        self.windows = nn.ParameterList()
        self.b = nn.ParameterList()
        self._merged: list[Tensor] = []  # changed weights of the task that is prepared

    @property
    def kind(self) -> str:
        return f"Deltas({self.asked_rank or 'any rank'}{'' if self.products else ', whole'}, from {self.start_from})"

    def attach(self, backbone: nn.Module, flow: Flow) -> None:
        called = {call.module for call in flow.convs if call.direct_weight}
        sizes = {name: self._sizes(layer) for name, layer in backbone.named_modules() if name in called}
        allowed = _MOST_NUMBERS // max(sum(map(sum, sizes.values())), 1)
        self.rank = self.asked_rank or min(max(allowed, 1), _MOST_RANK)
        for name, (outputs, *ours) in sizes.items():
            layer = backbone.get_submodule(name)
            weight = layer.get_parameter("weight")
            if self.rank * (outputs + sum(ours)) < weight.numel():
                self.layers[name] = layer
                for factor, size in zip((self.a, self.windows), ours, strict=False):
                    factor.append(nn.Parameter(weight.new_zeros(self.rank, size)))
                self.b.append(nn.Parameter(weight.new_zeros(outputs, self.rank)))
                layer.forward = partial(self._forward, len(self.a) - 1, layer)  # type: ignore[method-assign]

    def _sizes(self, layer: nn.Module) -> tuple[int, ...]:
        """How many numbers the factors of a change of rank 1 have."""
        outputs, inputs, *window = layer.get_parameter("weight").shape
        return (outputs, inputs, math.prod(window)) if self.products else (outputs, inputs * math.prod(window))

    def live(self, finished: bool) -> dict[str, Tensor]:
        factors = {"a": self.a, "window": self.windows, "b": self.b}
        kept = [(place, name, key) for place, name in enumerate(self.layers) for key in factors if factors[key]]
        return {f"{name}.delta.{key}": factors[key][place].detach() for place, name, key in kept}

    def pretrained(self) -> dict[str, Tensor]:
        """No change."""
        return {key: torch.zeros_like(tensor) for key, tensor in self.live(False).items()}

    @torch.no_grad()
    def start(self, generator: torch.Generator | None) -> None:
        if self.start_from == "random":
            torch._foreach_zero_(list(self.b))
            for factor in (*self.a, *self.windows):
                factor.copy_(torch.randn(factor.shape, generator=generator) / math.sqrt(factor.shape[1]))

    def offered(self) -> list[nn.Parameter]:
        return [*self.a, *self.windows, *self.b]

    @torch.no_grad()
    def start_along(self, directions: Mapping[str, Tensor]) -> None:
        """Let changes go along what leads in these matrices, by the names of layers.

        Args:
            directions: shaped like the weights; their gradients, for instance.
        """
        for place, name in enumerate(self.layers):
            matrix = directions[name].float().flatten(1)
            channels = self.a[place].shape[1]
            found = _leading(matrix.view(len(matrix), channels, -1), self.rank)
            for factor, values in zip((self.a, self.windows), found, strict=False):
                if factor:
                    factor[place].copy_(values)

    def merged(self) -> dict[str, Tensor]:
        """The weights with the live task's changes in them, by the names of layers."""
        layers = enumerate(self.layers.items())
        return {name: self._changed(place, layer.get_parameter("weight")) for place, (name, layer) in layers}

    def _changed(self, place: int, weight: Tensor) -> Tensor:
        with torch.autocast(weight.device.type, enabled=False):  # the change is small: not in half precision
            rows = product(self.a[place], self.windows[place]) if self.windows else self.a[place]
            return cast(Tensor, weight + (self.b[place] @ rows).view_as(weight))

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
            return cast(Tensor, type(layer).forward(layer, x))
        finally:
            layer._parameters["weight"] = own


def product(a: Tensor, windows: Tensor) -> Tensor:
    """Rows [..., r, I*K*K] of channels [..., r, I] and windows [..., r, K*K]."""
    return (a[..., None] * windows[..., None, :]).flatten(-2)


def _leading(tensor: Tensor, rank: int, rounds: int = 8) -> tuple[Tensor, Tensor]:
    """Channels [r, I] and windows [r, K] of the leading products of a tensor [O, I, K], by the power method: one after
    the other, each of what the ones before leave. With a window of 1 they are right singular vectors."""
    rest, found = tensor.flatten(1), []
    for _ in range(rank):
        a, window = (torch.randn(size, device=rest.device) for size in tensor.shape[1:])
        for _ in range(rounds):
            row = (rest.T @ (rest @ product(a, window))).view(tensor.shape[1:])
            a = nn.functional.normalize(row @ window, dim=0)
            window = nn.functional.normalize(a @ row, dim=0)
        found.append((a, window))
        row = product(a, window)
        rest = torch.addr(rest, rest @ row, row, alpha=-1)
    channels, windows = zip(*found, strict=True)
    return torch.stack(channels), torch.stack(windows)
