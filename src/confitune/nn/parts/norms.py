"""Task-specific normalisation layers: affine parameters and, for batch norm, running moments.

Nothing is recovered here: `XconvNorms` (ConFiT) builds on it, and methods that never move a convolution use it as it
is. The layers stay the stock ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from confitune.errors import ConfituneError
from confitune.nn.pairing import Flow
from confitune.nn.parts.part import Part, pack

MOMENTS = ("running_var", "running_mean")


def norm_layers(backbone: nn.Module) -> dict[str, nn.Module]:
    """All normalisation layers, by name."""
    kinds = (_BatchNorm, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
    return {name: module for name, module in backbone.named_modules() if isinstance(module, kinds)}


def batch_norms(backbone: nn.Module) -> list[_BatchNorm]:
    """All batch norms, in order."""
    return [module for module in backbone.modules() if isinstance(module, _BatchNorm)]


class Norms(Part):
    """Task-specific normalisation layers.

    Args:
        affine: each task has its own scales and shifts.
        moments: of batch norm: 'own' (each task's, from its training batches) or 'pretrained' (the same for all tasks:
            batch norm stays in evaluation mode).
        start: a new task starts from the 'previous' task's layers, or from the 'pretrained' ones.
        keep_pretrained: keep the pre-trained layers, once per network, for tasks that own no norms.
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
        self.affine = affine
        self.moments = moments
        self.start_from = start
        self.keep_pretrained = keep_pretrained or start == "pretrained"
        self.layers: dict[str, nn.Module] = {}  # not registered: they are the backbone's

    @property
    def kind(self) -> str:
        return f"Norms({'affine, ' if self.affine else ''}{self.moments} moments, from {self.start_from})"

    def attach(self, backbone: nn.Module, flow: Flow) -> None:
        self.layers = norm_layers(backbone)
        if not self.layers:
            what = f"{type(backbone).__name__} has no normalisation layer that a task could own"
            raise ConfituneError(f"{what}: choose another network, or a method such as finetune")
        if self.keep_pretrained:
            self.register_buffer("row", pack(self.live(False).values()))

    def live(self, finished: bool) -> dict[str, Tensor]:
        fields = (("weight", "bias") if self.affine else ()) + (MOMENTS if self.moments == "own" else ())
        return _tensors(self.layers, fields)

    def start(self, generator: torch.Generator | None) -> None:
        if self.start_from == "pretrained":
            self.start_pretrained()

    def offered(self) -> list[nn.Parameter]:
        return [p for layer in self.layers.values() for p in layer.parameters(recurse=False)] if self.affine else []

    def train(self, mode: bool = True) -> Norms:
        """As in torch; batch norms that keep the pre-trained moments stay in evaluation mode."""
        super().train(mode)
        for layer in self.layers.values():
            if self.moments == "pretrained" and isinstance(layer, _BatchNorm):
                layer.eval()
        return self


class Moments(Part):
    """Means and variances of all batch norms, as a part apart from their scales and shifts.

    Use it after `Norms(moments="pretrained")`. A task may go without it: it is then trained and used with the
    pre-trained moments, batch norm in evaluation mode. That is better with few images, or with images that look alike;
    own moments are better for images unlike those of pre-training.

    Attributes:
        own: whether the current task is trained with the moments of its batches.
    """

    name = "moments"

    def __init__(self) -> None:
        super().__init__()
        self.own = True
        self.layers: dict[str, nn.Module] = {}  # not registered: they are the backbone's

    def attach(self, backbone: nn.Module, flow: Flow) -> None:
        self.layers = {name: norm for name, norm in norm_layers(backbone).items() if isinstance(norm, _BatchNorm)}
        self.register_buffer("row", pack(self.live(False).values()))

    def live(self, finished: bool) -> dict[str, Tensor]:
        return _tensors(self.layers, MOMENTS)

    def train(self, mode: bool = True) -> Moments:
        """As in torch; batch norms of a task without own moments stay in evaluation mode."""
        super().train(mode)
        for layer in self.layers.values():
            layer.train(mode and self.own)
        return self

    @contextmanager
    def shifts(self) -> Iterator[list[Tensor]]:
        """Within, each pass through a batch norm appends how far its input is from the running moments: the
        Kullback-Leibler divergence of the normal distributions with these moments, averaged over channels."""
        found: list[Tensor] = []

        def measure(norm: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            axes = [axis for axis in range(inputs[0].ndim) if axis != 1]
            variance, mean = torch.var_mean(inputs[0].float(), axes, correction=0)
            allowed = norm.running_var + norm.eps
            ratio = (variance + norm.eps) / allowed
            away = (mean - norm.running_mean).square() / allowed
            found.append((ratio - 1 - ratio.log() + away).mean() / 2)

        with ExitStack() as hooks:
            for layer in self.layers.values():
                hooks.enter_context(layer.register_forward_hook(measure))
            yield found


def _tensors(layers: Mapping[str, nn.Module], fields: tuple[str, ...]) -> dict[str, Tensor]:
    """Of these layers; batch norms alone have moments, and not all have affine parameters."""
    found = {f"{name}.{field}": getattr(layer, field, None) for name, layer in layers.items() for field in fields}
    return {key: tensor.detach() for key, tensor in found.items() if tensor is not None}
