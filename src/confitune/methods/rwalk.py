"""Riemannian walk (Chaudhry et al.: Riemannian walk for incremental learning, ECCV 2018).

Eq. 6: L = L_k + lambda * sum of (F + s)(theta - theta*)^2, with F a running Fisher (Eq. 7) and s a score of how much of
the loss's fall a weight brought about per distance in the space of distributions (Eq. 8).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from pydantic import Field
from torch import Tensor

from confitune.methods.penalty import PartOptions, TaskContext
from confitune.methods.quadratic import PathPenalty, Tensors, copy_into


class RwalkOptions(PartOptions):
    """Choices of RWalk."""

    strength: float = Field(10.0, ge=0, description="lambda")
    new_share: float = Field(
        0.9, gt=0, le=1, description="of a step's squared gradient in F (CPR code: 0.9; Chaudhry et al.: 0.1)"
    )
    damping: float = Field(0.01, gt=0, description="epsilon in the score")


class RWalk(PathPenalty):
    """Within a task the pull uses F and s as they were at the end of the last one."""

    name = "rwalk"
    summary = "pull by a running Fisher and a path score"
    reference = "Chaudhry et al., ECCV 2018"
    Options = RwalkOptions
    kept = ("anchor", "weight", "fisher", "score")
    fisher: Tensors
    score: Tensors

    @property
    def slope(self) -> float:
        """lambda * (F + s)(theta - theta*)^2 has no half in front."""
        return 2 * float(self.options.strength)

    def take_in(self, names: list[str], moved: Iterable[Tensor], gradients: list[Tensor]) -> None:
        """Eq. 7 and 8, one step."""
        share, epsilon, moved = self.options.new_share, self.options.damping, list(moved)
        fisher = [self.fisher[name] for name in names]
        torch._foreach_mul_(fisher, 1 - share)
        torch._foreach_addcmul_(fisher, gradients, gradients, share)
        distance = torch._foreach_mul(moved, moved)  # 0.5 * F * delta^2 + epsilon
        torch._foreach_mul_(distance, fisher)
        torch._foreach_mul_(distance, 0.5)
        torch._foreach_add_(distance, epsilon)
        gain = torch._foreach_mul(gradients, moved)
        torch._foreach_div_(gain, distance)
        torch._foreach_neg_(gain)
        torch._foreach_clamp_min_(gain, 0.0)
        torch._foreach_add_([self.score[name] for name in names], gain)

    @torch.no_grad()
    def end_task(self, context: TaskContext) -> None:
        scores = list(self.score.values())
        torch._foreach_mul_(scores, 0.5)
        copy_into(self.weight, self.fisher)
        torch._foreach_add_(list(self.weight.values()), scores)
        self.anchor_here(context)
