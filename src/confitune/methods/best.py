"""Nothing forgotten: the backbone stays as pre-trained, and a task owns no more of it than it needs.

Candidates for a task, from simple to rich: a head on pre-trained features; norms and low-rank changes of all weights,
trained with the moments of pre-training (what wins with few photos); the same with the task's own moments (what wins
where images are far from those of pre-training). A head fitted to the features that a start gives says where training
starts best. Then a fifth of the images is held out for the larger part of the epochs; the head stays unless the trained
task is better on them by more than a standard error. Else the rest of the epochs learns them, too.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from confitune.methods.linear import FOLDS, LinearFit, fit_linear, folds_of, gain
from confitune.methods.method import Method, Options, TaskContext
from confitune.methods.stages import Stage
from confitune.nn import ContinualNet, Deltas, Head, Moments, Norms, Part

TRAINED = frozenset({"head", "norms", "deltas"})


class BestOptions(Options):
    """Choices of best."""

    rank: int = Field(1, ge=1, description="of the changes of weights")
    batches: int = Field(16, ge=1, description="whose gradients say where the changes start")
    held: float = Field(
        0.7, ge=0, lt=1, description="share of the epochs that go without held-out images; 0: no choice"
    )


class Best(Method):
    """A head, and where that is not enough norms and low-rank changes of the task's own."""

    name = "best"
    summary = "pre-trained backbone frozen; heads, and where it helps norms and low-rank changes; forgets nothing"
    cost = "linear classifiers and gradients of a few batches before a task is trained"
    settings = MappingProxyType({"lr": 0.03})
    lr_factors = MappingProxyType({"deltas": 3.0})
    Options = BestOptions

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._own = True  # moments, of the current task
        self._fit: tuple[int, LinearFit] | None = None  # of the head on pre-trained features, with the task's index

    def parts(self) -> list[Part]:
        norms = Norms(moments="pretrained", keep_pretrained=True)
        return [norms, Moments(), Deltas(self.options.rank, "previous"), Head()]

    def stages(self, epochs: int, index: int) -> tuple[Stage, ...]:
        return (Stage("all", epochs, TRAINED),)

    def settle(self, context: TaskContext) -> bool:
        if context.epoch == 0:
            return self._begin(context)
        if context.epoch == self._decides_after(context):
            return self._decide(context)
        return False

    def _begin(self, context: TaskContext) -> bool:
        """Choose where training starts, or see that nothing is to be gained."""
        net, head = context.net, self._head(context)
        wrong = int((~head.right).sum())
        few = context.images < FOLDS * len(net.tasks[net.current_task].classes)
        if self.options.held and (wrong <= 1 or few):
            return self._settle(context, head, "too few images to train on" if few else "nothing left to gain")
        # A start is whose norms and changes, and whether with the moments of the task's own batches.
        starts = {("pre-training", False): head}
        with net.as_pretrained(), net.at_batch_moments():
            starts["pre-training", True] = self._linear(context)
        if any("deltas" in entry.owns for entry in net.tasks.values() if entry.finished):
            with net.at_batch_moments():
                starts["the task before", True] = self._linear(context)
            with net.as_pretrained(["moments"]):
                starts["the task before", False] = self._linear(context)
        source, own = min(starts, key=lambda start: starts[start].loss)
        if source == "pre-training" or not own:
            net.start_pretrained(None if source == "pre-training" else ["moments"])
        self._use_moments(net, own)
        chosen = starts[source, own]
        self.choices[net.current_task] = {
            "starts": {
                f"{name}, {'own' if moments else 'pre-trained'} moments": fit.loss
                for (name, moments), fit in starts.items()
            },
            "start": source,
            "own_moments": own,
        }
        net.head.put(*(chosen.without if self._decides_after(context) else (chosen.weight, chosen.bias)))
        return False

    def _decide(self, context: TaskContext) -> bool:
        """Compare what was trained with the head on images that neither has seen; finish the task if the head wins."""
        net, head = context.net, self._head(context)
        held = (self._folds(context) == 0).nonzero().flatten()
        labels, before = (values[held.to(values.device)] for values in (context.labels, head.right))
        with net.evaluating():
            right = net.head(context.features(held)).argmax(1) == labels
        more, error = gain(right, before)
        trained, alone = (100 * float(answers.double().mean()) for answers in (right, before))
        words = f"held-out {trained:.1f}%; head alone {alone:.1f}%"
        choice = self.choices.setdefault(net.current_task, {})
        choice |= {"held_out": len(held), "trained": trained, "head": alone, "gain": more, "standard_error": error}
        if more <= error:
            return self._settle(context, head, words)
        norms = "own batch norms" if self._own else "own scales and shifts of norms"
        start = f", from {choice['start']}" if choice.get("start", "pre-training") != "pre-training" else ""
        context.note(f"{norms} and rank-{self.options.rank} changes{start} ({words})")
        return False

    def _settle(self, context: TaskContext, head: LinearFit, why: str) -> bool:
        net = context.net
        net.start_pretrained()
        self._use_moments(net, False)
        net.head.put(head.weight, head.bias)
        net.finish_task(owns=["head"])
        self.choices.setdefault(net.current_task, {})["only_head"] = why
        context.note(f"a head on pre-trained features ({why})")
        return True

    def begin_task(self, context: TaskContext) -> None:
        deltas = context.net.parts["deltas"]
        assert isinstance(deltas, Deltas)
        if not bool(torch.stack(torch._foreach_norm(list(deltas.b))).any()):
            self._start_changes(context, deltas)

    def begin_epoch(self, context: TaskContext, epoch: int) -> None:
        self._use_moments(context.net, self._own)
        used = torch.arange(context.images)
        if epoch < self._decides_after(context):
            used = (self._folds(context) != 0).nonzero().flatten()
        context.train_on(used)

    def end_task(self, context: TaskContext) -> None:
        self._fit = None

    def finish(self, context: TaskContext) -> None:
        context.net.finish_task(owns=None if self._own else ["norms", "deltas", "head"])

    def captured_kind(self, index: int) -> Hashable:
        return self._own

    def _decides_after(self, context: TaskContext) -> int:
        """How many epochs go without the held-out images."""
        share: float = self.options.held
        return min(math.ceil(share * context.epochs), context.epochs - 1)

    def _start_changes(self, context: TaskContext, deltas: Deltas) -> None:
        weights = [layer.get_parameter("weight") for layer in deltas.layers.values()]
        gradients = context.gradients(weights, self.options.batches)
        # Gradients of a network that diverged have no directions; training says so once a GPU's numbers are read.
        found = [gradient.nan_to_num(0.0, 0.0, 0.0) for gradient in gradients]
        deltas.start_along(dict(zip(deltas.layers, found, strict=True)))

    def _head(self, context: TaskContext) -> LinearFit:
        """Fitted to pre-trained features of all images."""
        if self._fit is None or self._fit[0] != context.index:
            with context.net.as_pretrained():
                self._fit = context.index, self._linear(context)
        return self._fit[1]

    def _linear(self, context: TaskContext) -> LinearFit:
        net, every = context.net, torch.arange(context.images)
        classes = len(net.tasks[net.current_task].classes)
        return fit_linear(context.features(every), context.labels, classes, self._folds(context))

    def _folds(self, context: TaskContext) -> Tensor:
        return folds_of(context.labels.cpu(), context.seed)

    def _use_moments(self, net: ContinualNet, own: bool) -> None:
        moments = net.parts["moments"]
        assert isinstance(moments, Moments)
        self._own = moments.own = own

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "own": self._own}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._own = state["own"]
