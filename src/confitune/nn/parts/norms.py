"""Normalisation layers of a task's own: affine parameters, and of batch norm the moments.

Plain task-specific normalisation, without any recovery: what ConFiT's `XconvNorms` is built on, and what methods use
that never move a convolution. The layers stay the stock ones.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from confitune.errors import ConfituneError
from confitune.nn.pairing import Flow
from confitune.nn.parts.part import Part

NORMS = (_BatchNorm, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def norm_layers(backbone: nn.Module) -> dict[str, nn.Module]:
    """All normalisation layers, by name."""
    return {name: module for name, module in backbone.named_modules() if isinstance(module, NORMS)}


def batch_norms(backbone: nn.Module) -> list[_BatchNorm]:
    """All batch norms, in order."""
    return [module for module in backbone.modules() if isinstance(module, _BatchNorm)]


class Norms(Part):
    """Normalisation layers of a task's own.

    Args:
        affine: each task has its own scales and shifts.
        moments: of batch norm: 'own' (each task's, from its training batches) or 'pretrained' (those of pre-training
            for all tasks: batch norm is in evaluation mode throughout).
        start: a new task starts from the 'previous' task's layers, or from the 'pretrained' ones.
        keep_pretrained: keep the pre-trained layers, once for the network, for tasks that own no norms.
    """

    name = "norms"

    def __init__(
        self,
        *,
        affine: bool = True,
        moments: Literal["own", "pretrained"] = "own",
        start: Literal["previous", "pretrained"] = "previous",
        keep_pretrained: bool = False,
    ) -> None:
        super().__init__()
        self.affine, self.moments, self.start_from = affine, moments, start
        self.keep_pretrained = keep_pretrained or start == "pretrained"
        self.layers: dict[str, nn.Module] = {}  # not registered: they are the backbone's

    @property
    def kind(self) -> str:
        return f"Norms({'affine, ' if self.affine else ''}{self.moments} moments, from {self.start_from})"

    def attach(self, backbone: nn.Module, flow: Flow) -> None:
        self.layers = norm_layers(backbone)
        if not self.layers:
            raise ConfituneError(
                f"{type(backbone).__name__} has no normalisation layer that a task could own: choose another network, "
                "or a method such as finetune"
            )
        if self.keep_pretrained:
            self.keep_pretrained_row()

    def live(self, finished: bool) -> dict[str, Tensor]:
        fields = ["weight", "bias"] if self.affine else []
        if self.moments == "own":
            fields += ["running_var", "running_mean"]  # which batch norms alone have
        layers = self.layers.items()
        found = {f"{name}.{field}": getattr(layer, field, None) for name, layer in layers for field in fields}
        return {key: tensor.detach() for key, tensor in found.items() if tensor is not None}

    @torch.no_grad()
    def start(self, generator: torch.Generator | None) -> None:
        if self.start_from == "pretrained":
            torch._foreach_copy_(list(self.live(False).values()), list(self.pretrained().values()))

    def offered(self) -> list[nn.Parameter]:
        return [p for layer in self.layers.values() for p in layer.parameters(recurse=False)] if self.affine else []

    def train(self, mode: bool = True) -> Norms:
        """As in torch; batch norms that keep the pre-trained moments stay in evaluation mode."""
        super().train(mode)
        for layer in self.layers.values():
            if self.moments == "pretrained" and isinstance(layer, _BatchNorm):
                layer.eval()
        return self
