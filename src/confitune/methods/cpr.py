"""Classifier-projection regularisation (Cha et al.: CPR: Classifier-Projection Regularization for Continual Learning,
ICLR 2021): wide local minima through outputs of high entropy. A plug-in for any other method.

Eq. 3: loss + beta * D_KL(f(x) || uniform), which up to a constant is loss - beta * mean entropy of the softmax output.
"""

from __future__ import annotations

from collections.abc import Hashable

from pydantic import Field
from torch import Tensor
from torch.nn.functional import log_softmax

from confitune.methods.penalty import PartOptions, Penalty


class CprOptions(PartOptions):
    """Choices of CPR."""

    beta: float = Field(0.05, ge=0, description="of the entropy")


class CPR(Penalty):
    """In every task, the first included."""

    name = "cpr"
    summary = "plug-in: outputs of high entropy"
    reference = "Cha et al., ICLR 2021"
    Options = CprOptions

    def output_loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """-beta * mean entropy of the softmax."""
        log_p = log_softmax(logits.float(), 1)
        return float(self.options.beta) * (log_p.exp() * log_p).sum(1).mean()

    def captured_kind(self, index: int) -> Hashable:
        """The same in all tasks."""
        return None
