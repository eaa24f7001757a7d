"""Leave the network alone where that is best: a linear probe on the pre-trained state, task by task.

A network that is trained on a task is normalised by the task's own statistics. Where the task has few images, or ones
that look alike, these are worse than what pre-training left, and training has to make up for that before it gains
anything; meanwhile convolutions move, and earlier tasks lose. Two linear classifiers tell, before a step is taken: one
on the features that pre-training gives, one on those that the task's own statistics give. Each is judged by images
that it has not seen, in closed form.

Where the pre-trained features win clearly, or leave next to nothing to gain, the task gets a head fitted to them, and
nothing else: no state of its own, no step of the backbone.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import torch
from pydantic import Field

from confitune.methods.linear import fit_head, left_out_mistakes
from confitune.methods.penalty import PartOptions, Penalty, TaskContext
from confitune.nn import ContinualNet


class ProbeOptions(PartOptions):
    """When a task keeps the pre-trained state."""

    worse: float = Field(2.5, ge=1, description="if its own statistics lead to so many times the mistakes")
    enough: float = Field(0.995, ge=0, le=1, description="or if pre-trained ones get this share right")
    images: int = Field(256, ge=2, description="that both are judged on; all of a smaller task")


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

    def settles(self, context: TaskContext) -> bool:
        net, classes = context.net, context.classes
        chosen = context.sample(self.options.images)
        labels = context.labels[chosen.to(context.labels.device)]
        with net.at_pretrained(measured=len(chosen)):
            pretrained = context.features(chosen)
        with net.trying():
            context.measure(chosen)
            net.eval()
            own = context.features(chosen)
        wrong = torch.stack([left_out_mistakes(x, labels, classes).sum() for x in (pretrained, own)]).tolist()
        if not self.stays(wrong[0], wrong[1], len(chosen)):
            return False
        with net.at_pretrained():
            features = context.features(torch.arange(context.images))
        net.finish_pretrained(*fit_head(features, context.labels, classes))
        context.note(
            f"of {len(chosen)} left-out images a linear classifier gets {wrong[0]} wrong with pre-trained statistics, "
            f"{wrong[1]} with the task's own: the backbone stays as it is, a head is fitted"
        )
        return True

    def stays(self, pretrained: int, own: int, images: int) -> bool:
        """Whether so many mistakes with each kind of statistics speak for the pre-trained state.

        One is added to both: next to none and none are the same.

        >>> Probe().stays(2, 9, 240), Probe().stays(13, 17, 256), Probe().stays(1, 0, 256)
        (True, False, True)
        """
        clearly = own + 1 > self.options.worse * (pretrained + 1)
        return bool(clearly or (images - pretrained) / images >= self.options.enough)
