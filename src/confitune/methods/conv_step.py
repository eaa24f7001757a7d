"""A smaller step for what all tasks share."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from pydantic import Field

from confitune.methods.penalty import PartOptions, Penalty
from confitune.nn import ContinualNet


class ConvStepOptions(PartOptions):
    """Choices of the convolutions' step."""

    factor: float = Field(0.3, gt=0, le=1, description="of the learning rate; exactly that with SGD")


class ConvStep(Penalty):
    """Gradients of convolutions are scaled down: they serve every task, heads and batch norms only this one."""

    name = "conv-step"
    summary = "a smaller step for convolutions than for heads and batch norms"
    Options = ConvStepOptions

    def add_gradients(self, net: ContinualNet) -> None:
        gradients = [p.grad for p in net.conv_parameters() if p.grad is not None]
        if gradients and self.options.factor != 1:
            torch._foreach_mul_(gradients, self.options.factor)

    def captured_kind(self, index: int) -> Hashable:
        return self.name
