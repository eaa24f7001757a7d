"""Elastic weight consolidation (Kirkpatrick et al.: Overcoming catastrophic forgetting in neural networks, PNAS 2017).

Eq. 3: L(theta) = L_B(theta) + sum over i of lambda / 2 * F_i (theta_i - theta*_i)^2, with F the diagonal of the Fisher
information after the earlier tasks.
"""

from __future__ import annotations

import torch
from pydantic import Field

from confitune.methods.importance import FisherEstimator, Mode, fisher
from confitune.methods.penalty import PartOptions, TaskContext
from confitune.methods.quadratic import QuadraticPenalty, Tensors


class EwcOptions(PartOptions):
    """Choices of EWC."""

    strength: float = Field(300.0, ge=0, description="lambda")
    fisher: FisherEstimator = Field(
        "batch",
        description="batch: squared mean gradient of 20 images, times 20 (CPR code); exact: expectation over the "
        "prediction (Kirkpatrick et al.); sampled: labels drawn from it; empirical: true labels, per sample",
    )
    mode: Mode = Field(
        "eval", description="of batch norm while measuring; train: its moments are each batch's (CPR code)"
    )


class EWC(QuadraticPenalty):
    """The Fisher of all tasks so far, averaged: (F_new + t * F_old) / (t + 1), t counted from 0 (CPR code)."""

    name = "ewc"
    summary = "pull by the Fisher information"
    reference = "Kirkpatrick et al., PNAS 2017"
    Options = EwcOptions
    scratch = ("new",)
    new: Tensors

    @torch.no_grad()
    def end_task(self, context: TaskContext) -> None:
        with torch.enable_grad():
            fisher(context, self.options.fisher, self.options.mode, self.new)
        weights, t = list(self.weight.values()), context.index
        torch._foreach_mul_(weights, t)
        torch._foreach_add_(weights, [self.new[name] for name in self.weight])
        torch._foreach_div_(weights, t + 1)
        self.anchor_here(context)
