"""Active forgetting with synaptic expansion-convergence (Wang et al.: AFEC: Active Forgetting of Negative Transfer in
Continual Learning, NeurIPS 2021). A plug-in for any other method.

Eq. 6 adds to the other method's loss lambda_e / 2 * sum of F_e (theta - theta_e)^2: a pull towards theta_e, the weights
that a network free of any penalty finds for the task at hand, by its Fisher information F_e there. As in algorithm 1,
that network is a copy which learns the whole task beforehand.
"""

import copy
from typing import Any

from pydantic import Field

from confitune.methods.importance import Mode, fisher
from confitune.methods.method import Method, Options, TaskContext
from confitune.methods.pull import Pull, Tensors, copy_into, shared_values
from confitune.nn import ContinualNet


class AfecOptions(Options):
    """Choices of AFEC."""

    strength: float = Field(10.0, ge=0, description="penalty strength lambda_e")
    mode: Mode = Field("eval", description="see ewc.mode")


class AFEC(Method):
    """From the second task on."""

    name = "afec"
    summary = "plug-in: penalty towards a copy trained on the new task alone"
    cost = "training of the copy, one extra pass, the penalty in every step"
    reference = "Wang et al., NeurIPS 2021"
    Options = AfecOptions
    in_place = True
    running = ("anchor", "weight")
    anchor: Tensors
    weight: Tensors

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._free: ContinualNet | None = None  # the copy

    def begin_task(self, context: TaskContext) -> None:
        if not (context.index and self.options.strength):
            return
        if self._free is None:
            self._free = copy.deepcopy(context.net)
        else:  # in place: steps that were captured for it serve again
            self._free.load_state_dict(context.net.state_dict())
        context.train(self._free)
        fisher(context, self.options.mode, self.weight, self._free)
        copy_into(self.anchor, shared_values(self._free))

    def pull(self) -> Pull | None:
        return Pull(self.anchor, self.weight, self.options.strength) if self.index and self.options.strength else None
