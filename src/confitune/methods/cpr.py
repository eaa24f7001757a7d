"""Classifier-projection regularisation (Cha et al.: CPR: Classifier-Projection Regularization for Continual Learning,
ICLR 2021): wide local minima through outputs of high entropy. A plug-in for any other method.

Eq. 3: loss + beta * D_KL(f(x) || uniform), which up to a constant is loss - beta * mean entropy of the softmax output.
"""

from pydantic import Field
from torch import Tensor
from torch.nn.functional import log_softmax

from confitune.methods.method import Method, Options, Step


class CprOptions(Options):
    """Choices of CPR."""

    beta: float = Field(0.05, ge=0, description="weight of the entropy term")


class CPR(Method):
    """In every task, the first included."""

    name = "cpr"
    summary = "plug-in: rewards outputs of high entropy"
    cost = "the entropy term in every step"
    reference = "Cha et al., ICLR 2021"
    Options = CprOptions
    in_place = True

    def loss(self, step: Step) -> Tensor:
        """-beta * mean entropy of the softmax."""
        log_p = log_softmax(step.logits.float(), 1)
        return float(self.options.beta) * (log_p.exp() * log_p).sum(1).mean()
