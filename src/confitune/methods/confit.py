"""ConFiT: hierarchical fine-tuning with Xconv BN (Jie, Deng, Li: Alleviating Representational Shift for Continual
Fine-tuning, CVPR Workshops 2022), and its two halves.

Hierarchical fine-tuning (sec. 3.3) keeps convolutions from moving much; Xconv BN (sec. 3.2) recovers, for every earlier
task, the means that the moved convolutions now produce.
"""

from confitune.methods.method import Method
from confitune.methods.schedule import hierarchical, plain

_PAPER = "Jie et al., CVPR Workshops 2022"

CONFIT = Method("confit", hierarchical, "xconv", "ConFiT: hierarchical fine-tuning with Xconv BN", reference=_PAPER)
HIERARCHICAL = Method(
    "hierarchical",
    hierarchical,
    "shared",
    "the first half alone: hierarchical fine-tuning, shared BN",
    reference=_PAPER,
)
FINETUNE_XCONV = Method(
    "finetune-xconv", plain, "xconv", "the second half alone: plain fine-tuning with Xconv BN", reference=_PAPER
)
