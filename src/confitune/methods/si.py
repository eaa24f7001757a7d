"""Synaptic intelligence (Zenke, Poole, Ganguli: Continual learning through synaptic intelligence, ICML 2017).

Eq. 3: w = - integral of g(t) theta'(t) dt, how much of the loss's fall each weight brought about;
Eq. 4: L = L_mu + c * sum of Omega (theta - theta*)^2;
Eq. 5: Omega = sum over tasks of w / (Delta^2 + xi), Delta the way the weight went in the task.
"""

from typing import Literal

import torch
from pydantic import Field

from confitune.methods.method import Method, Options, TaskContext
from confitune.methods.pull import CLIPPED, Pull, Tensors, copy_into, gradients_of, moved, of, shared_values
from confitune.nn import ContinualNet


class SiOptions(Options):
    """Choices of SI."""

    strength: float = Field(10.0, ge=0, description="penalty strength c")
    damping: float = Field(0.1, gt=0, description="damping xi (Zenke et al.: 0.1; CPR code: 0.01)")
    positive: bool = Field(True, description="clip negative importances to 0 (CPR code: False)")
    gradient: Literal["loss", "total"] = Field(
        "loss", description="gradient of the loss alone (Zenke et al.), or including the penalty (CPR code)"
    )


class SI(Method):
    """The path integral, taken step by step."""

    name = "si"
    summary = "quadratic penalty weighted by each weight's contribution to the loss reduction"
    cost = "the penalty and the path integral in every step"
    reference = "Zenke et al., ICML 2017"
    settings = CLIPPED
    in_place = True
    Options = SiOptions
    kept = ("anchor", "omega")
    running = ("previous", "gradient", "start", "path")
    anchor: Tensors
    omega: Tensors
    previous: Tensors
    gradient: Tensors
    start: Tensors
    path: Tensors

    def begin_task(self, context: TaskContext) -> None:
        copy_into(self.previous, shared_values(context.net))
        copy_into(self.start, shared_values(context.net))
        torch._foreach_zero_(list(self.path.values()))

    def read_gradients(self, net: ContinualNet) -> None:
        copy_into(self.gradient, gradients_of(net.shared_parameters()))

    def pull(self) -> Pull | None:
        """c * Omega * (...)^2 has no half in front."""
        return Pull(self.anchor, self.omega, 2 * self.options.strength) if self.index else None

    def after_step(self, net: ContinualNet) -> None:
        """Eq. 3, one step: w -= g * (theta_after - theta_before)."""
        if self.options.gradient == "total":
            copy_into(self.gradient, gradients_of(net.shared_parameters()))
        steps = moved(net, self.previous)
        if steps:
            torch._foreach_addcmul_(of(self.path, steps), of(self.gradient, steps), list(steps.values()), -1.0)

    def end_task(self, context: TaskContext) -> None:
        for name, now in shared_values(context.net).items():  # Eq. 5
            importance = self.path[name] / ((now - self.start[name]).square() + self.options.damping)
            self.omega[name] += importance.relu() if self.options.positive else importance
        copy_into(self.anchor, shared_values(context.net))
