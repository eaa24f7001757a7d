"""Active forgetting with synaptic expansion-convergence (Wang et al.: AFEC: Active Forgetting of Negative Transfer in
Continual Learning, NeurIPS 2021). A plug-in for any other method.

Eq. 6 adds to the other method's loss lambda_e / 2 * sum of F_e (theta - theta_e)^2: a pull towards theta_e, the weights
that a network free of any penalty finds for the task at hand, by its Fisher information F_e there.
"""

import copy
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from confitune.methods.importance import Mode, fisher
from confitune.methods.method import Method, Options, TaskContext
from confitune.methods.pull import Pull, Tensors, copy_into, shared_values
from confitune.nn import ContinualNet


class AfecOptions(Options):
    """Choices of AFEC."""

    strength: float = Field(10.0, ge=0, description="penalty strength lambda_e")
    form: Literal["first", "alternating"] = Field(
        "first",
        description="first: a copy of the network learns the whole task beforehand (algorithm 1 of the paper); "
        "alternating: a copy that is never reset learns an epoch before each epoch (the released code)",
    )
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
        self._saved: dict[str, Any] | None = None  # what it goes on from, after a checkpoint

    def begin_task(self, context: TaskContext) -> None:
        if self.options.form == "first" and context.index:
            self._learn_freely(context)

    def begin_epoch(self, context: TaskContext, epoch: int) -> None:
        if self.options.form == "alternating":
            self._learn_freely(context, epoch)

    def _learn_freely(self, context: TaskContext, only_epoch: int | None = None) -> None:
        if not self.options.strength:
            return
        if self._free is None:
            self._free = copy.deepcopy(context.net)
        elif only_epoch is None:  # in place: steps that were captured for it serve again
            self._saved = context.net.state_dict()
        if self._saved is not None:
            self._free.load_state_dict(self._saved)
            self._saved = None
        context.train(self._free, only_epoch)
        if context.index:
            fisher(context, self.options.mode, self.weight, self._free)
            copy_into(self.anchor, shared_values(self._free))

    def pull(self) -> Pull | None:
        return Pull(self.anchor, self.weight, self.options.strength) if self.index and self.options.strength else None

    def state_dict(self) -> dict[str, Any]:
        free = self._saved
        if self._free is not None and self.options.form == "alternating":
            free = self._free.state_dict()
        return {**super().state_dict(), "free": free}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._free, self._saved = None, state["free"]

    def storage(self) -> int:
        """Between tasks nothing but, in the alternating form, the copy."""
        free = self.state_dict()["free"] or {}
        return sum(tensor.numel() for key, tensor in free.items() if key.startswith("backbone."))
