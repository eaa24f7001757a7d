"""Running moments of batch norms of a task's own, apart from the norms' scales and shifts.

For networks where a task may do without: it then uses the moments of pre-training, and is trained with them, batch norm
in evaluation mode. With few images, or ones that look alike, that is the better choice; own moments are where images
are far from those of pre-training.
"""

from __future__ import annotations

from torch import Tensor, nn

from confitune.nn.pairing import Flow
from confitune.nn.parts.norms import norm_layers
from confitune.nn.parts.part import Part


class Moments(Part):
    """Means and variances of all batch norms; it stands after `Norms(moments="pretrained")` in a network's parts.

    Attributes:
        own: whether the current task is trained with the moments of its batches.
    """

    name = "moments"

    def __init__(self) -> None:
        super().__init__()
        self.own = True
        self.layers: dict[str, nn.Module] = {}  # not registered: they are the backbone's

    def attach(self, backbone: nn.Module, flow: Flow) -> None:
        norms = norm_layers(backbone).items()
        self.layers = {name: norm for name, norm in norms if getattr(norm, "running_mean", None) is not None}
        self.keep_pretrained_row()

    def live(self, finished: bool) -> dict[str, Tensor]:
        return {
            f"{name}.{field}": layer.get_buffer(field)
            for name, layer in self.layers.items()
            for field in ("running_var", "running_mean")
        }

    def train(self, mode: bool = True) -> Moments:
        """As in torch; batch norms of a task without own moments stay in evaluation mode."""
        super().train(mode)
        for layer in self.layers.values():
            layer.train(mode and self.own)
        return self
