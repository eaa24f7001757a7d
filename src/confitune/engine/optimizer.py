"""Optimizers whose state stays where it is from task to task, so that captured steps serve later tasks, too."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from confitune.settings import TrainSettings

State = dict[str, Tensor]


class Optimizers:
    """Makes the optimizer of each task of a network, as the settings ask, over the same tensors of state.

    On a GPU optimizers are fused and can be captured.
    """

    def __init__(self, settings: TrainSettings, device: torch.device) -> None:
        self._settings, self._device = settings, device
        self._states: dict[nn.Parameter, State] = {}

    def make(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """For these groups of parameters, its state at zero."""
        settings, on_gpu = self._settings, self._device.type == "cuda"
        options: dict[str, Any] = {"weight_decay": settings.weight_decay, **({"fused": True} if on_gpu else {})}
        optimizer: torch.optim.Optimizer
        if settings.optimizer == "sgd":
            fields = ["momentum_buffer"] if settings.momentum else []
            optimizer = torch.optim.SGD(groups, settings.lr, settings.momentum, **options)
        else:
            fields = ["exp_avg", "exp_avg_sq", "step"]
            adam = torch.optim.Adam if settings.optimizer == "adam" else torch.optim.AdamW
            optimizer = adam(groups, settings.lr, capturable=on_gpu, **options)
        # All at once, though stages train some later: fused kernels take all or none.
        parameters = [parameter for group in groups for parameter in group["params"]]
        for parameter in parameters:
            if parameter not in self._states:
                count = torch.zeros((), device=self._device)
                zeros = {field: count if field == "step" else torch.zeros_like(parameter) for field in fields}
                self._states[parameter] = zeros
            optimizer.state[parameter] = self._states[parameter]
        if fields:
            torch._foreach_zero_([self._states[parameter][field] for parameter in parameters for field in fields])
        return optimizer

    def load(self, optimizer: torch.optim.Optimizer, state: dict[int, State]) -> None:
        """Go on where the state of one, by the numbers of parameters, was taken.

        Its options are this machine's: a run may go on where there is no GPU.
        """
        optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            kept = self._states[parameter]
            for field, values in optimizer.state[parameter].items():
                kept[field].copy_(values)
            optimizer.state[parameter] = kept
