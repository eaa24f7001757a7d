"""Elastic weight consolidation (Kirkpatrick et al.: Overcoming catastrophic forgetting in neural networks, PNAS 2017).

Eq. 3: L(theta) = L_B(theta) + sum over i of lambda / 2 * F_i (theta_i - theta*_i)^2, with F the diagonal of the Fisher
information after the earlier tasks, estimated by the squared mean gradient of 20 images, times 20 (CPR code).
"""

import torch
from pydantic import Field

from confitune.methods.importance import Mode, fisher
from confitune.methods.method import Method, Options, TaskContext
from confitune.methods.pull import CLIPPED, Pull, Tensors, copy_into, of, shared_values


class EwcOptions(Options):
    """Choices of EWC."""

    strength: float = Field(300.0, ge=0, description="penalty strength lambda")
    mode: Mode = Field("eval", description="batch norm mode while importance is estimated (CPR code: train)")


class EWC(Method):
    """The Fisher of all tasks so far, averaged: (F_new + t * F_old) / (t + 1), t counted from 0 (CPR code)."""

    name = "ewc"
    summary = "quadratic penalty weighted by the Fisher information"
    cost = "the penalty in every step; one extra pass after each task"
    reference = "Kirkpatrick et al., PNAS 2017"
    settings = CLIPPED
    in_place = True
    Options = EwcOptions
    kept = ("anchor", "fisher")
    scratch = ("new",)
    anchor: Tensors
    fisher: Tensors
    new: Tensors

    def pull(self) -> Pull | None:
        return Pull(self.anchor, self.fisher, self.options.strength) if self.index else None

    def end_task(self, context: TaskContext) -> None:
        fisher(context, self.options.mode, self.new)
        kept, t = list(self.fisher.values()), context.index
        torch._foreach_mul_(kept, t)
        torch._foreach_add_(kept, of(self.new, self.fisher))
        torch._foreach_div_(kept, t + 1)
        copy_into(self.anchor, shared_values(context.net))
