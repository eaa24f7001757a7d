"""Memory aware synapses (Aljundi et al.: Memory Aware Synapses: learning what (not) to forget, ECCV 2018).

Eq. 3: Omega_ij = 1/N sum over k of |d ||F(x_k; theta)||_2 / d theta_ij|, summed over tasks;
Eq. 4: L(theta) = L_n(theta) + lambda / 2 * sum of Omega_ij (theta_ij - theta*_ij)^2.
Gradients are those of means over 20 images, times 20 (CPR code).
"""

import torch
from pydantic import Field
from torch import Tensor

from confitune.methods.importance import Mode, average
from confitune.methods.method import Method, Options, TaskContext
from confitune.methods.pull import CLIPPED, Pull, Tensors, copy_into, of, shared_values


class MasOptions(Options):
    """Choices of MAS."""

    strength: float = Field(30.0, ge=0, description="penalty strength lambda")
    mode: Mode = Field("eval", description="batch norm mode while importance is estimated (CPR code: train)")


class MAS(Method):
    """The sensitivity of the current head's logits, summed over tasks."""

    name = "mas"
    summary = "quadratic penalty weighted by the sensitivity of the outputs"
    cost = "the penalty in every step; one extra pass after each task"
    reference = "Aljundi et al., ECCV 2018"
    settings = CLIPPED
    in_place = True
    Options = MasOptions
    kept = ("anchor", "omega")
    scratch = ("new",)
    anchor: Tensors
    omega: Tensors
    new: Tensors

    def pull(self) -> Pull | None:
        return Pull(self.anchor, self.omega, self.options.strength) if self.index else None

    def end_task(self, context: TaskContext) -> None:
        def length(logits: Tensor, labels: Tensor) -> Tensor:
            norms: Tensor = torch.linalg.vector_norm(logits.float(), dim=1)
            return norms.mean()

        average(context, context.net, self.options.mode, length, Tensor.abs, self.new)
        torch._foreach_add_(list(self.omega.values()), of(self.new, self.omega))
        copy_into(self.anchor, shared_values(context.net))
