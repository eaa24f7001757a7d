"""ConFiT: hierarchical fine-tuning with Xconv BN (Jie, Deng, Li: Alleviating Representational Shift for Continual
Fine-tuning, CVPR Workshops 2022), and its two halves.

Hierarchical fine-tuning (sec. 3.3) keeps convolutions from moving much; Xconv BN (sec. 3.2) recovers, for every earlier
task, the means that the moved convolutions now produce.
"""

from typing import Literal

from pydantic import Field

from confitune.methods.method import Method, Options
from confitune.methods.stages import Stage, hierarchical
from confitune.nn import Head, Part, XconvNorms

_PAPER = "Jie et al., CVPR Workshops 2022"


class XconvOptions(Options):
    """Choices of Xconv BN."""

    means: Literal["window", "phase"] = Field(
        "window", description="of what a convolution reads: exact ones, or the paper's (phase), which are fewer"
    )
    statistics: Literal["running", "pass"] = Field(
        "running", description="when they are taken: while training (paper), or in a pass with the final weights"
    )


class ConFiT(Method):
    """Both halves."""

    name = "confit"
    summary = "ConFiT: hierarchical fine-tuning with Xconv BN"
    cost = "input means in the last steps of a task, recovery before testing; convolutions frozen in the first half"
    reference = _PAPER
    Options = XconvOptions

    def parts(self) -> list[Part]:
        return [XconvNorms(self.options.means, self.options.statistics), Head()]

    def stages(self, epochs: int, index: int) -> tuple[Stage, ...]:
        return hierarchical(epochs)


class Hierarchical(Method):
    """The first half."""

    name = "hierarchical"
    summary = "ablation of ConFiT: hierarchical fine-tuning with shared BN"
    cost = "nothing; convolutions frozen in the first half of the epochs"
    reference = _PAPER
    stages = ConFiT.stages


class FinetuneXconv(Method):
    """The second half."""

    name = "finetune-xconv"
    summary = "ablation of ConFiT: plain fine-tuning with Xconv BN"
    cost = "input means in the last steps of a task, recovery before testing"
    reference = _PAPER
    Options = XconvOptions
    parts = ConFiT.parts
