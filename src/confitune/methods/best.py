"""Nothing forgotten: the backbone stays as pre-trained, and a task owns no more of it than it needs.

Before a task is trained, two linear classifiers are judged by images that they have not seen, in closed form: one on
the features that pre-training gives, one on those that the task's own statistics give. Where the pre-trained features
win clearly (few images, or ones that look alike), the task gets a head fitted to them and nothing else. Otherwise it
gets a head, norms and low-rank changes of all weights, trained in the stages of hierarchical fine-tuning (ConFiT,
sec. 3.3), the changes in place of the weights. They start along the leading directions of the loss's gradient.
"""

from __future__ import annotations

import math
from itertools import islice
from types import MappingProxyType

import torch
from pydantic import Field
from torch.nn.functional import cross_entropy

from confitune.methods.linear import fit_head, unexplained
from confitune.methods.method import Method, Options, TaskContext
from confitune.methods.stages import EVERYTHING, Stage, hierarchical
from confitune.nn import Deltas, Head, Norms, Part


class BestOptions(Options):
    """Choices of best."""

    rank: int = Field(1, ge=1, description="of the changes of weights")
    batches: int = Field(16, ge=1, description="whose gradients say where the changes start")
    worse: float = Field(2.0, ge=0, description="a head is enough where own statistics leave so many times more open")
    most: float = Field(0.5, ge=0, description="but not where pre-trained ones leave more than this share open")
    images: int = Field(256, ge=2, description="that both are judged by; all of a smaller task")


class Best(Method):
    """A head, and where that is not enough norms and low-rank changes of the task's own."""

    name = "best"
    summary = "pre-trained backbone frozen; heads, and where it helps norms and low-rank changes; forgets nothing"
    cost = "two linear classifiers before a task, gradients of a few batches before changes are trained"
    settings = MappingProxyType({"lr": 0.03})
    lr_factors = MappingProxyType({"deltas": 3.0})
    Options = BestOptions

    def parts(self) -> list[Part]:
        return [Norms(keep_pretrained=True), Deltas(self.options.rank), Head()]

    def stages(self, epochs: int, index: int) -> tuple[Stage, ...]:
        changes = frozenset({"head", "norms", "deltas"})
        stages = hierarchical(epochs)
        return tuple(Stage("all", s.epochs, changes) if s.trains == EVERYTHING else s for s in stages)

    def begin_epoch(self, context: TaskContext, epoch: int) -> None:
        if epoch == sum(stage.epochs for stage in self.stages(context.epochs, context.index)[:-1]):
            self._start_changes(context)

    def _start_changes(self, context: TaskContext) -> None:
        net, deltas = context.net, context.net.parts["deltas"]
        assert isinstance(deltas, Deltas)
        weights = {name: layer.get_parameter("weight") for name, layer in deltas.layers.items()}
        total = {name: torch.zeros_like(weight) for name, weight in weights.items()}
        net.train()
        with net.observer.untracked():
            for weight in weights.values():
                weight.requires_grad_(True)
            for x, labels in islice(context.batches(context.batch_size), self.options.batches):
                if len(x) == context.batch_size:
                    loss = cross_entropy(net(x).float(), labels)
                    torch._foreach_add_(list(total.values()), torch.autograd.grad(loss, list(weights.values())))
            for weight in weights.values():
                weight.requires_grad_(False)
        # Gradients of a network that diverged have no directions; training says so once a GPU's numbers are read.
        deltas.start_along({name: gradient.nan_to_num(0.0, 0.0, 0.0) for name, gradient in total.items()})

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
