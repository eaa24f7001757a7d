"""Running moments of batch norms of a task's own, apart from the norms' scales and shifts.

For networks where a task may do without: it then uses the moments of pre-training, and is trained with them, batch norm
in evaluation mode. With few images, or ones that look alike, that is the better choice; own moments are where images
are far from those of pre-training.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from confitune.nn.pairing import Flow
from confitune.nn.parts.norms import batch_norms
from confitune.nn.parts.part import Part, split_row


class Moments(Part):
    """Means and variances of all batch norms; it stands after `Norms(moments="pretrained")` in a network's parts.

    Attributes:
        own: whether the current task is trained with the moments of its batches.
    """

    name = "moments"

    def __init__(self) -> None:
        super().__init__()
        self.own = True
        self._layers: list[nn.Module] = []  # not registered: they are the backbone's
        self._names: dict[nn.Module, str] = {}

    def attach(self, backbone: nn.Module, flow: Flow) -> None:
        self._layers = [norm for norm in batch_norms(backbone) if norm.running_mean is not None]
        self._names = {module: name for name, module in backbone.named_modules()}
        row = [tensor.reshape(-1) for tensor in self.live(False).values()]
        self.register_buffer("row", torch.cat(row) if row else torch.empty(0))

    def live(self, finished: bool) -> dict[str, Tensor]:
        return {
            f"{self._names[layer]}.{field}": layer.get_buffer(field)
            for layer in self._layers
            for field in ("running_var", "running_mean")
        }

    def pretrained(self) -> dict[str, Tensor]:
        live = self.live(False)
        return dict(zip(live, split_row(self.get_buffer("row"), [t.shape for t in live.values()]), strict=True))

    def train(self, mode: bool = True) -> Moments:
        """As in torch; batch norms of a task without own moments stay in evaluation mode."""
        super().train(mode)
        for layer in self._layers:
            layer.train(mode and self.own)
        return self

    def mixed_row(self) -> Tensor:
        """Nothing: a norm's scale and shift have its moments in them."""
        return self.get_buffer("row")[:0]

    @contextmanager
    def mixing(self, rows: Sequence[Tensor], place: Tensor) -> Iterator[None]:
        yield
