"""Normalisation layers of a task's own: affine parameters, and of batch norm the moments.

Plain task-specific normalisation, without any recovery: what ConFiT's `XconvNorms` is built on, and what methods use
that never move a convolution. The layers stay the stock ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import timm.layers
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from confitune.errors import ConfituneError
from confitune.nn.pairing import Flow
from confitune.nn.parts.part import Part

NORMS = (_BatchNorm, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)

# Layers that are known well enough to be done image by image. Batch norm: normalise, then drop, then act.
_CHANNELS_FIRST = (nn.GroupNorm, timm.layers.GroupNorm, timm.layers.LayerNorm2d)
_CHANNELS_LAST = (nn.LayerNorm, timm.layers.LayerNorm, nn.RMSNorm)
_KNOWN = {kind.forward for kind in (_BatchNorm, timm.layers.BatchNormAct2d, *_CHANNELS_FIRST, *_CHANNELS_LAST)}


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
        found = {}
        for name, layer in self.layers.items():
            fields = ["weight", "bias"] if self.affine else []
            if isinstance(layer, _BatchNorm) and self.moments == "own":
                fields += ["running_var", "running_mean"]
            for field in fields:
                tensor = getattr(layer, field, None)
                if isinstance(tensor, Tensor):
                    found[f"{name}.{field}"] = tensor.detach()
        return found

    @torch.no_grad()
    def start(self, generator: torch.Generator | None) -> None:
        if self.start_from == "pretrained":
            torch._foreach_copy_(list(self.live(False).values()), list(self.pretrained().values()))

    def offered(self) -> list[nn.Parameter]:
        return [p for layer in self.layers.values() for p in layer.parameters(recurse=False)] if self.affine else []

    def train(self, mode: bool = True) -> Norms:
        """As in torch; batch norms that keep the pre-trained moments stay in evaluation mode."""
        super().train(mode)
        if self.moments == "pretrained":
            for layer in self.layers.values():
                if isinstance(layer, _BatchNorm):
                    layer.eval()
        return self

    # ---- image by image --------------------------------------------------------------------------------------------

    def mixed_row(self) -> Tensor:
        rows: list[Tensor] = []
        for name, layer in self.layers.items():
            if type(layer).forward not in _KNOWN:
                raise ConfituneError(f"{name} is a {type(layer).__name__}, whose forward cannot be done per image")
            rows += scale_and_shift(layer)
        return torch.cat([row.reshape(-1) for row in rows])

    @contextmanager
    def mixing(self, rows: Sequence[Tensor], place: Tensor) -> Iterator[None]:
        shapes = [shape for layer in self.layers.values() for shape in (_shape(layer), _shape(layer))]
        chosen = torch.stack(list(rows))[place].split([shape.numel() for shape in shapes], dim=1)
        parts = iter([part.reshape(-1, *shape) for part, shape in zip(chosen, shapes, strict=True)])
        try:
            for layer in self.layers.values():
                # Shadows the class's own forward for this batch.
                layer.forward = partial(_forward_mixed, layer, next(parts), next(parts))  # type: ignore[method-assign]
            yield
        finally:
            for layer in self.layers.values():
                vars(layer).pop("forward", None)


def _shape(layer: Any) -> torch.Size:
    """Of a layer's scale and of its shift."""
    if isinstance(layer, _BatchNorm):
        return torch.Size([layer.num_features])
    return torch.Size([layer.num_channels] if isinstance(layer, nn.GroupNorm) else layer.normalized_shape)


def scale_and_shift(layer: Any) -> tuple[Tensor, Tensor]:
    """What a layer multiplies by and adds: batch norm in evaluation mode to its input, others to what is normalised.

    Batch norm's is worked out in float64, so that it is rounded once.
    """
    weight, bias = getattr(layer, "weight", None), getattr(layer, "bias", None)
    if isinstance(layer, _BatchNorm):
        mean, var = layer.get_buffer("running_mean"), layer.get_buffer("running_var")
        scale = (var.double() + layer.eps).rsqrt()
        scale = scale if weight is None else scale * weight.detach().double()
        shift = -mean.double() * scale
        shift = shift if bias is None else shift + bias.detach().double()
        return scale.to(var.dtype), shift.to(var.dtype)
    like = weight if weight is not None else torch.ones(_shape(layer))
    return like.detach(), torch.zeros_like(like) if bias is None else bias.detach()


def _forward_mixed(layer: Any, scale: Tensor, shift: Tensor, x: Tensor) -> Tensor:
    """A layer's forward with a scale and a shift [N, C] of each image's own."""
    if isinstance(layer, _BatchNorm):
        scale, shift = (rows.reshape(*rows.shape, *(1,) * (x.dim() - 2)) for rows in (scale, shift))
        y = torch.addcmul(shift, x.to(shift.dtype), scale).to(x.dtype)
        for name in ("drop", "act"):  # timm's
            y = getattr(layer, name)(y) if hasattr(layer, name) else y
        return y
    own = layer._parameters
    layer._parameters = dict.fromkeys(own)  # without a scale and a shift it only normalises
    try:
        normalised: Tensor = type(layer).forward(layer, x)
    finally:
        layer._parameters = own
    ones = (1,) * (x.dim() - scale.dim())
    place = (*scale.shape, *ones) if isinstance(layer, _CHANNELS_FIRST) else (len(scale), *ones, *scale.shape[1:])
    return normalised * scale.reshape(place) + shift.reshape(place)
