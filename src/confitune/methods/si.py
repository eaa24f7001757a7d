"""Synaptic intelligence (Zenke, Poole, Ganguli: Continual learning through synaptic intelligence, ICML 2017).

Eq. 3: w = - integral of g(t) theta'(t) dt, how much of the loss's fall each weight brought about;
Eq. 4: L = L_mu + c * sum of Omega (theta - theta*)^2;
Eq. 5: Omega = sum over tasks of w / (Delta^2 + xi), Delta the way the weight went in the task.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from confitune.methods.penalty import PartOptions, TaskContext, shared_parameters, shared_values
from confitune.methods.quadratic import PathPenalty, Tensors, copy_into


class SiOptions(PartOptions):
    """Choices of SI."""

    strength: float = Field(10.0, ge=0, description="c")
    damping: float = Field(0.1, gt=0, description="xi (Zenke et al.: 0.1; CPR code: 0.01)")
    positive: bool = Field(True, description="cut negative importances off (CPR code: does not)")
    gradient: Literal["loss", "total"] = Field(
        "loss", description="of the loss alone (Zenke et al.), or with the penalty's in it (CPR code)"
    )


class SI(PathPenalty):
    """The path integral, taken step by step."""

    name = "si"
    summary = "pull by each weight's share in the loss's fall"
    reference = "Zenke et al., ICML 2017"
    Options = SiOptions
    running = ("previous", "gradient", "start", "path")
    start: Tensors
    path: Tensors

    @property
    def slope(self) -> float:
        """c * Omega * (theta - theta*)^2 has no half in front."""
        return 2 * float(self.options.strength)

    @torch.no_grad()
    def begin_task(self, context: TaskContext) -> None:
        super().begin_task(context)
        copy_into(self.start, shared_values(context.net))
        torch._foreach_zero_(list(self.path.values()))

    def take_in(self, names: list[str], moved: Iterable[Tensor], gradients: list[Tensor]) -> None:
        """Eq. 3, one step: w -= g * (theta_after - theta_before)."""
        torch._foreach_addcmul_([self.path[name] for name in names], gradients, list(moved), -1.0)

    def _gradients(self, trained: Mapping[str, Any]) -> list[Tensor]:
        if self.options.gradient == "total":
            return [parameter.grad for parameter in trained.values()]
        return super()._gradients(trained)

    @torch.no_grad()
    def end_task(self, context: TaskContext) -> None:
        for name, parameter in shared_parameters(context.net).items():  # Eq. 5
            importance = self.path[name] / ((parameter.detach() - self.start[name]).square() + self.options.damping)
            self.weight[name] += importance.relu() if self.options.positive else importance
        self.anchor_here(context)
