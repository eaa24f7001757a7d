"""Riemannian walk (Chaudhry et al.: Riemannian walk for incremental learning, ECCV 2018).

Eq. 6: L = L_k + lambda * sum of (F + s)(theta - theta*)^2, with F a running Fisher (Eq. 7) and s a score of how much of
the loss's fall a weight brought about per distance in the space of distributions (Eq. 8).
"""

from typing import Literal

import torch
from pydantic import Field

from confitune.methods.method import Method, Options, TaskContext
from confitune.methods.pull import CLIPPED, Pull, Tensors, copy_into, gradients_of, moved, of, shared_values
from confitune.nn import ContinualNet

_NEW_SHARE = 0.9  # of the newest squared gradient in the Fisher average (CPR code; Chaudhry et al.: 0.1)
_DAMPING = 0.01  # epsilon of the score


class RwalkOptions(Options):
    """Choices of RWalk."""

    strength: float = Field(10.0, ge=0, description="penalty strength lambda")
    positive: bool = Field(True, description="clip negative score contributions to 0 (CPR code: False)")
    gradient: Literal["loss", "total"] = Field(
        "loss", description="gradient of the loss alone (Chaudhry et al.), or including the penalty (CPR code)"
    )


class RWalk(Method):
    """Within a task the pull uses F and s as they were at the end of the last one."""

    name = "rwalk"
    summary = "quadratic penalty weighted by a running Fisher and a path integral"
    cost = "the penalty, the Fisher and the path integral in every step"
    reference = "Chaudhry et al., ECCV 2018"
    settings = CLIPPED
    in_place = True
    Options = RwalkOptions
    kept = ("anchor", "weight", "fisher", "score")
    running = ("previous", "gradient")
    anchor: Tensors
    weight: Tensors
    fisher: Tensors
    score: Tensors
    previous: Tensors
    gradient: Tensors

    def begin_task(self, context: TaskContext) -> None:
        copy_into(self.previous, shared_values(context.net))

    def read_gradients(self, net: ContinualNet) -> None:
        copy_into(self.gradient, gradients_of(net.shared_parameters()))

    def pull(self) -> Pull | None:
        """lambda * (F + s)(...)^2 has no half in front."""
        return Pull(self.anchor, self.weight, 2 * self.options.strength) if self.index else None

    def after_step(self, net: ContinualNet) -> None:
        """Eq. 7 and 8, one step."""
        if self.options.gradient == "total":
            copy_into(self.gradient, gradients_of(net.shared_parameters()))
        steps = moved(net, self.previous)
        if not steps:
            return
        change = list(steps.values())
        fisher, gradients = of(self.fisher, steps), of(self.gradient, steps)
        torch._foreach_mul_(fisher, 1 - _NEW_SHARE)
        torch._foreach_addcmul_(fisher, gradients, gradients, _NEW_SHARE)
        distance = torch._foreach_mul(change, change)  # 0.5 * F * delta^2 + epsilon
        torch._foreach_mul_(distance, fisher)
        torch._foreach_mul_(distance, 0.5)
        torch._foreach_add_(distance, _DAMPING)
        gain = torch._foreach_mul(gradients, change)
        torch._foreach_div_(gain, distance)
        torch._foreach_neg_(gain)
        if self.options.positive:
            torch._foreach_clamp_min_(gain, 0.0)
        torch._foreach_add_(of(self.score, steps), gain)

    def end_task(self, context: TaskContext) -> None:
        for name, score in self.score.items():
            self.weight[name].copy_(self.fisher[name] + score.mul_(0.5))
        copy_into(self.anchor, shared_values(context.net))
