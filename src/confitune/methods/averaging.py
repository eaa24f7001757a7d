"""Average a task's weights over its last epochs (Izmailov et al.: Averaging Weights Leads to Wider Optima and Better
Generalization, UAI 2018).

Steps of a constant size end somewhere around a minimum; their average is nearer to it, and nearer to where the task
began. Batch moments of averaged weights are nobody's running average: measure them in a pass.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from confitune.methods.penalty import PartOptions, Penalty, TaskContext
from confitune.nn import ContinualNet


class AveragingOptions(PartOptions):
    """Choices of averaging."""

    share: float = Field(0.3, gt=0, le=1, description="of a task's epochs, the last ones, at least one")


class Averaging(Penalty):
    """The mean of all trained weights, head and batch norms included, over the steps of a task's last epochs."""

    name = "averaging"
    summary = "weights averaged over a task's last epochs"
    reference = "Izmailov et al., UAI 2018"
    Options = AveragingOptions

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._sums: dict[str, Tensor] = {}  # at addresses that captured steps rely on
        self._steps = torch.zeros(())
        self._on = False

    def attach(self, net: ContinualNet) -> None:
        device = next(net.backbone.parameters()).device
        self._steps = self._steps.to(device)
        self._sums = {name: total.to(device) for name, total in self._sums.items()}

    def begin_task(self, context: TaskContext) -> None:
        for name, parameter in _parameters(context.net).items():
            if name not in self._sums:
                self._sums[name] = torch.zeros_like(parameter)
        self._steps.zero_()
        torch._foreach_zero_(self._of(context.net))
        self._on = False

    def begin_epoch(self, context: TaskContext, epoch: int) -> None:
        self._on = epoch >= context.epochs - max(1, math.floor(self.options.share * context.epochs))

    @torch.no_grad()
    def after_step(self, net: ContinualNet) -> None:
        if self._on:
            torch._foreach_add_(self._of(net), [p.detach() for p in _parameters(net).values()])
            self._steps.add_(1)

    def captured_kind(self, index: int) -> Hashable:
        return self.name, self._on

    @torch.no_grad()
    def end_task(self, context: TaskContext) -> None:
        means = [total / self._steps for total in self._of(context.net)]
        torch._foreach_copy_([p.detach() for p in _parameters(context.net).values()], means)
        context.net.weights_moved()

    def state_dict(self) -> dict[str, Any]:
        return {"sums": dict(self._sums), "steps": self._steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._sums, self._steps = dict(state["sums"]), state["steps"]

    def _of(self, net: ContinualNet) -> list[Tensor]:
        return [self._sums[name] for name in _parameters(net)]


def _parameters(net: ContinualNet) -> dict[str, torch.nn.Parameter]:
    """Everything that the current task trains."""
    head = {f"heads.{net.head.out_features}.{name}": p for name, p in net.head.named_parameters()}
    return {**{f"backbone.{name}": p for name, p in net.backbone.named_parameters()}, **head}
