"""Leave the network alone where that is best: a linear probe on the pre-trained state, task by task.

A network that is trained on a task is normalised by the task's own statistics. Where the task has few images, or ones
that look alike, these are worse than what pre-training left, and training has to make up for that before it gains
anything; meanwhile convolutions move, and earlier tasks lose. Two linear classifiers tell, before a step is taken: one
on the features that pre-training gives, one on those that the task's own statistics give. Each is judged by images
that it has not seen, in closed form.

Where the pre-trained features win clearly the task gets a head fitted to them, and nothing else: no state of its own,
no step of the backbone.

From then on convolutions stay where they are: such a task has no state of its own that could make up for their steps. A
task that is trained still has batch norms and a head to train.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from types import MappingProxyType
from typing import Any

import torch
from pydantic import Field

from confitune.methods.linear import fit_head, unexplained
from confitune.methods.penalty import PartOptions, Penalty, TaskContext
from confitune.methods.schedule import Part
from confitune.nn import ContinualNet


class ProbeOptions(PartOptions):
    """When a task keeps the pre-trained state."""

    worse: float = Field(2.0, ge=0, description="where its own statistics leave so many times as much unexplained")
    most: float = Field(0.5, ge=0, description="but not where pre-trained ones leave more than this: much to be gained")
    hold: bool = Field(True, description="convolutions, for tasks that are trained while others use that state")
    images: int = Field(256, ge=2, description="that both are judged by; all of a smaller task")


class Probe(Penalty):
    """Before a task is trained, see whether training can be better than a linear probe on the pre-trained state."""

    name = "probe"
    summary = "tasks that pre-trained features are best for keep those: a head is fitted and nothing moves"
    Options = ProbeOptions
    network = MappingProxyType({"keep_pretrained": True})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._kept = 0

    def attach(self, net: ContinualNet) -> None:
        self._kept = 0 if net.pretrained is None else net.pretrained.row.numel()

    def storage(self) -> int:
        return self._kept

    def captured_kind(self, index: int) -> Hashable:
        """It has no part in steps."""
        return None

    def holds(self, net: ContinualNet) -> frozenset[Part]:
        return frozenset({"conv"} if self.options.hold and _resting(net) else ())

    def begin_task(self, context: TaskContext) -> None:
        if self.holds(context.net):
            named = ", ".join(map(repr, _resting(context.net)))
            context.note(f"convolutions stay as they are, for {named}; batch norms and a head are trained")

    def settles(self, context: TaskContext) -> bool:
        net, classes = context.net, context.classes
        chosen = context.sample(self.options.images)
        labels = context.labels[chosen.to(context.labels.device)]
        first = net.pretrained is not None and not net.pretrained.images
        # What convolutions read in that state: before they first move, and of the tasks that are used in it.
        with net.at_pretrained(measured=len(chosen) if first else 0):
            features = context.features(chosen)
        pretrained = unexplained(features, labels, classes)  # which waits for the device, when it has got all else
        if not self.may_stay(pretrained):
            return False
        with net.at_batch_moments():
            own = unexplained(context.features(chosen), labels, classes)
        if not self.may_stay(pretrained, own):
            return False
        with net.at_pretrained(measured=0 if first else context.images):
            features = context.features(torch.arange(context.images))
        net.finish_pretrained(*fit_head(features, context.labels, classes))
        context.note(
            f"a linear classifier leaves {pretrained:.0%} of left-out labels unexplained with pre-trained statistics, "
            f"{own:.0%} with the task's own: a head is fitted to the former, the backbone stays as it is"
        )
        return True

    def may_stay(self, pretrained: float, own: float = math.inf) -> bool:
        """Whether these shares of left-out labels, unexplained with each kind of statistics, leave it at that.

        >>> Probe().may_stay(0.07, 0.29), Probe().may_stay(0.29, 0.35), Probe().may_stay(0.6)
        (True, False, False)
        """
        return bool(pretrained <= self.options.most and own >= self.options.worse * pretrained)


def _resting(net: ContinualNet) -> list[str]:
    """Tasks besides the one at hand that are used in the pre-trained state."""
    return [name for name, entry in net.tasks.items() if entry.pretrained and name != net.current_task]
