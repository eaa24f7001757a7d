"""Memory aware synapses (Aljundi et al.: Memory Aware Synapses: learning what (not) to forget, ECCV 2018).

Eq. 3: Omega_ij = 1/N sum over k of |d ||F(x_k; theta)||_2 / d theta_ij|, summed over tasks;
Eq. 4: L(theta) = L_n(theta) + lambda / 2 * sum of Omega_ij (theta_ij - theta*_ij)^2.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field

from confitune.methods.importance import Mode, output_sensitivity
from confitune.methods.penalty import PartOptions, TaskContext
from confitune.methods.quadratic import QuadraticPenalty, Tensors


class MasOptions(PartOptions):
    """Choices of MAS."""

    strength: float = Field(30.0, ge=0, description="lambda")
    output: Literal["norm", "squared"] = Field(
        "norm", description="of the logits: their L2 norm (CPR code), or its square (Aljundi et al., sec. 4.1)"
    )
    gradients: Literal["batch", "sample"] = Field(
        "batch", description="batch: of the mean of 20 images, times 20 (CPR code); sample: each image's own (Eq. 3)"
    )
    mode: Mode = Field(
        "eval", description="of batch norm while measuring; train: its moments are each batch's (CPR code)"
    )


class MAS(QuadraticPenalty):
    """The sensitivity of the current head's logits, summed over tasks."""

    name = "mas"
    summary = "pull by the outputs' sensitivity"
    reference = "Aljundi et al., ECCV 2018"
    Options = MasOptions
    scratch = ("new",)
    new: Tensors

    @torch.no_grad()
    def end_task(self, context: TaskContext) -> None:
        chosen = self.options
        with torch.enable_grad():
            squared, per_sample = chosen.output == "squared", chosen.gradients == "sample"
            output_sensitivity(context, squared, per_sample, chosen.mode, self.new)
        torch._foreach_add_(list(self.weight.values()), [self.new[name] for name in self.weight])
        self.anchor_here(context)
