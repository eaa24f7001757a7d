"""What a task trains: which parameters, by what optimizer, and which of them in a stage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from confitune.methods import Part, Stage
from confitune.nn import ContinualNet
from confitune.settings import TrainSettings


class TrainedParameters:
    """The parameters of a network's current task, and their optimizer.

    Args:
        stages: of the task; what none of them trains, the optimizer does not know.
        lr: at an address of its own where steps are captured.
    """

    def __init__(
        self, net: ContinualNet, stages: Sequence[Stage], settings: TrainSettings, lr: float | Tensor, on_gpu: bool
    ) -> None:
        self._parts: dict[Part, list[nn.Parameter]] = {
            "head": [*net.head.parameters()],
            "norm": net.norm_parameters(),
            "conv": net.conv_parameters(),
            "calibration": net.calibration_parameters(),
        }
        trained = [
            parameter
            for part, parameters in self._parts.items()
            if any(part in stage.trains for stage in stages)
            for parameter in parameters
        ]
        self.optimizer = _optimizer(trained, settings, lr, on_gpu)

    def freeze_but(self, trains: frozenset[Part]) -> None:
        """Only `trains` gets gradients: backward then stops where nothing below is trained."""
        self.optimizer.zero_grad(set_to_none=True)
        for part, parameters in self._parts.items():
            for parameter in parameters:
                parameter.requires_grad_(part in trains)

    def unfreeze(self) -> None:
        """All may get gradients."""
        self.freeze_but(frozenset(self._parts))


def _optimizer(
    trained: list[nn.Parameter], settings: TrainSettings, lr: float | Tensor, on_gpu: bool
) -> torch.optim.Optimizer:
    options: dict[str, Any] = {"fused": True} if on_gpu else {}
    if settings.optimizer == "sgd":
        sgd = torch.optim.SGD(trained, lr, settings.momentum, weight_decay=settings.weight_decay, **options)
        if settings.momentum:  # all at once, though stages train some later: fused kernels take all or none
            for parameter in trained:
                sgd.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        return sgd
    if on_gpu:
        options["capturable"] = True
    adam = torch.optim.Adam if settings.optimizer == "adam" else torch.optim.AdamW
    return adam(trained, lr, weight_decay=settings.weight_decay, **options)


def place_network(net: ContinualNet, device: torch.device) -> None:
    """Move it there, in the order that convolutions are faster in: on GPUs, and on CPUs depthwise ones above all.

    Not where it is so already: a network that moves has to make its tasks ready again.
    """
    there = torch.empty(0, device=device).device
    tensors = [*net.parameters(), *net.buffers()]
    if any(tensor.device != there for tensor in tensors):
        net.to(there)
    if any(t.dim() == 4 and not t.is_contiguous(memory_format=torch.channels_last) for t in net.parameters()):
        net.to(memory_format=torch.channels_last)
