"""Nothing forgotten: the backbone stays as pre-trained, and a task owns no more of it than it needs.

Before a task is trained, two linear classifiers are judged by images that they have not seen, in closed form: one on
the features that pre-training gives, one on those that the task's own statistics give. Where the pre-trained features
win clearly (few images, or ones that look alike), the task gets a head fitted to them and nothing else. Otherwise it
gets norms of its own, trained along with its head.
"""

from __future__ import annotations

import math
from types import MappingProxyType

import torch
from pydantic import Field

from confitune.methods.linear import fit_head, unexplained
from confitune.methods.method import Method, Options, TaskContext
from confitune.methods.stages import Stage, head_then_norms
from confitune.nn import Head, Norms, Part


class BestOptions(Options):
    """When a head on pre-trained features is enough."""

    worse: float = Field(2.0, ge=0, description="where its own statistics leave so many times as much unexplained")
    most: float = Field(0.5, ge=0, description="but not where pre-trained ones leave more than this: much to be gained")
    images: int = Field(256, ge=2, description="that both are judged by; all of a smaller task")


class Best(Method):
    """A head, and where that is not enough norms of the task's own."""

    name = "best"
    summary = "pre-trained backbone frozen, heads and where it helps norms of a task's own; forgets nothing"
    cost = "two linear classifiers before a task; convolutions get no gradients"
    settings = MappingProxyType({"lr": 0.03})
    Options = BestOptions

    def parts(self) -> list[Part]:
        return [Norms(keep_pretrained=True), Head()]

    def stages(self, epochs: int, index: int) -> tuple[Stage, ...]:
        return head_then_norms(epochs)

    def settle(self, context: TaskContext) -> bool:
        net, chosen = context.net, context.sample(self.options.images)
        labels = context.labels[chosen.to(context.labels.device)]
        classes = len(net.tasks[net.current_task].classes)
        with net.as_pretrained():
            pretrained = unexplained(context.features(chosen), labels, classes)
        if not self.may_stay(pretrained):
            return False
        with net.at_batch_moments():
            own = unexplained(context.features(chosen), labels, classes)
        if not self.may_stay(pretrained, own):
            return False
        with net.as_pretrained():
            features = context.features(torch.arange(context.images))
        weight, bias = fit_head(features, context.labels, classes)
        with torch.no_grad():
            net.head.linear.weight.copy_(weight)
            net.head.linear.bias.copy_(bias)
        net.finish_task(owns=["head"])
        context.note(
            f"a head on pre-trained features is enough: it leaves {pretrained:.0%} of left-out labels unexplained, one "
            f"with the task's own statistics {own:.0%}"
        )
        return True

    def may_stay(self, pretrained: float, own: float = math.inf) -> bool:
        """Whether these shares of left-out labels, unexplained with each kind of statistics, leave it at a head.

        >>> Best().may_stay(0.07, 0.29), Best().may_stay(0.29, 0.35), Best().may_stay(0.6)
        (True, False, False)
        """
        return bool(pretrained <= self.options.most and own >= self.options.worse * pretrained)
