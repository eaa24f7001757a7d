"""Optimizers whose state stays where it is from task to task, so that captured steps serve later tasks, too."""

from collections.abc import Mapping
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
        self._lrs: dict[float, Tensor] = {}  # on a GPU, by factor: captured steps read them

    def make(self, groups: Mapping[float, list[nn.Parameter]]) -> torch.optim.Optimizer:
        """For parameters, by the factor of their learning rate, with its state at zero."""
        settings, on_gpu = self._settings, self._device.type == "cuda"
        options: dict[str, Any] = {"weight_decay": settings.weight_decay, **({"fused": True} if on_gpu else {})}
        with_factors = [{"params": parameters, "factor": factor} for factor, parameters in groups.items()]
        optimizer: torch.optim.Optimizer
        if settings.optimizer == "sgd":
            fields = ["momentum_buffer"] if settings.momentum else []
            optimizer = torch.optim.SGD(with_factors, settings.lr, settings.momentum, **options)
        else:
            fields = ["exp_avg", "exp_avg_sq", "step"]
            adam = torch.optim.Adam if settings.optimizer == "adam" else torch.optim.AdamW
            optimizer = adam(with_factors, settings.lr, capturable=on_gpu, **options)
        # All at once, though stages train some later: fused kernels take all or none.
        everything = [parameter for parameters in groups.values() for parameter in parameters]
        for parameter in everything:
            if parameter not in self._states:
                count = torch.zeros((), device=self._device)
                zeros = {field: count if field == "step" else torch.zeros_like(parameter) for field in fields}
                self._states[parameter] = zeros
            optimizer.state[parameter] = self._states[parameter]
        if fields:
            torch._foreach_zero_([self._states[parameter][field] for parameter in everything for field in fields])
        return optimizer

    def set_lr(self, optimizer: torch.optim.Optimizer, lr: float) -> None:
        """The learning rate of the steps to come, captured ones included."""
        for group in optimizer.param_groups:
            factor = group["factor"]
            if self._device.type != "cuda":
                group["lr"] = lr * factor
                continue
            if factor not in self._lrs:
                self._lrs[factor] = torch.zeros((), device=self._device)
            group["lr"] = self._lrs[factor].fill_(lr * factor)

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
