"""ConFiT beyond its paper: what forgot least in our own measurements, see docs/best.md.

Tasks that pre-trained features are best for get a head and nothing else (`probe.py`). In the others three things
differ. Heads and batch norms, which are a task's own, take steps three times as large as the paper's, while
convolutions keep its 0.01: a task then fits its own parameters to the shared ones sooner and pulls less at them.
Statistics are exact: window means (their best product of rank 2, so that a task takes no more numbers than in the
paper), measured in a pass after the last step. And the variances of earlier tasks follow what later tasks do to
variances.
"""

from confitune.methods.conv_step import ConvStep
from confitune.methods.method import Method
from confitune.methods.probe import Probe
from confitune.methods.schedule import hierarchical

BEST = Method(
    "best",
    hierarchical,
    "xconv",
    "ConFiT with larger steps for what is a task's own, exact statistics, and variances that follow",
    penalties=(Probe(), ConvStep(factor=1 / 3)),
    net_options={"means": "window", "rank": 2, "statistics": "pass", "variance": "ratio"},
    settings={"lr": 0.03},
)
