"""Nothing forgotten: the backbone stays as pre-trained, and a task owns no more of it than it needs.

Candidates for a task, from simple to rich: a head on pre-trained features; norms and low-rank changes of all weights,
trained with the moments of pre-training (what wins with few photos); the same with moments of the task's own (what wins
where images are far from those of pre-training, and so are the moments of what they give in the network). Which one it
gets is decided by heads in closed form, on images left out: leaving images out of training, too, would cost more than
the choice can win. Training starts from pre-training, or from the task before, where heads on the features tell
left-out images apart more surely. It runs in the stages of hierarchical fine-tuning (ConFiT, sec. 3.3), the changes in
place of the weights. If it fails, and knows its own training images less well than the head knew them when they were
left out, the task gets the head.
"""

from collections.abc import Hashable
from types import MappingProxyType
from typing import Any, Literal

import torch
from pydantic import Field

from confitune.methods.linear import FOLDS, LinearFit, fit_head
from confitune.methods.method import Method, Options, TaskContext
from confitune.methods.stages import Stage, hierarchical
from confitune.nn import ContinualNet, Deltas, Head, Moments, Norms, Part

_ENOUGH = 0.03  # of left-out images may be wrong where a head is all that a task needs: training gains nothing there
_BATCHES = 16  # whose gradients say along which directions changes start
_FAR = 0.1  # from the moments of pre-training, see Moments.shifts: Flowers102 has 0.05, in the published pipeline 0.4
_LOST = 1.25  # times the loss of heads is too much for own moments: they may take away what tells classes apart


class BestOptions(Options):
    """Choices of best."""

    rank: int = Field(
        0, ge=0, description="rank of the weight changes; 0: the largest from 1 to 4 that fits into 36,000 numbers"
    )
    owns: Literal["chosen", "head", "changes", "moments"] = Field(
        "chosen",
        description="what each task owns: chosen on held-out images; or, for all tasks alike, a head; a head, norms "
        "and low-rank changes; or these and batch norm moments",
    )


class Best(Method):
    """A head, and where that is not enough norms and low-rank changes of the task's own."""

    name = "best"
    summary = "frozen backbone; each task gets a head and, where it helps, norms and low-rank adapters; forgets nothing"
    cost = "linear classifiers and the gradients of a few batches before each task"
    settings = MappingProxyType(
        {
            "optimizer": "adamw",
            "lr": 0.003,
            "lr_schedule": "cosine",
            "warmup": 0.1,
            "augmentation": "flip",
            "label_smoothing": 0.1,
            "min_steps": 150,
        }
    )
    photos = MappingProxyType({"batch_size": 16})
    two_scales = True
    Options = BestOptions

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._own = True  # moments, of the current task
        self._fit: tuple[int, LinearFit] | None = None  # of the head on pre-trained features, with the task's index
        self._shift = 0.0  # of the moments, by the task's images

    def parts(self) -> list[Part]:
        norms = Norms(moments="pretrained", keep_pretrained=True)
        return [norms, Moments(), Deltas(self.options.rank or None, "previous"), Head()]

    def stages(self, epochs: int, index: int) -> tuple[Stage, ...]:
        *first, last = hierarchical(epochs)
        return (*first, Stage(last.name, last.epochs, frozenset({"head", "norms", "deltas"})))

    # ---- what a task owns ------------------------------------------------------------------------------------------

    def settle(self, context: TaskContext) -> bool:
        """Choose where training starts, or see that nothing is to be gained by it."""
        net, head, owns = context.net, self._head(context), self.options.owns
        if owns == "head":
            return self._settle(context, head, "as asked for")
        if owns == "chosen" and context.images < FOLDS * len(net.tasks[net.current_task].classes):
            return self._settle(context, head, f"fewer than {FOLDS} images a class are too few to train on")
        if owns == "chosen" and int((~head.right).sum()) <= max(1, _ENOUGH * context.images):
            return self._settle(context, head, "it tells left-out images apart")
        losses, own = self._starts(context, own=False), False
        if owns == "moments" or (owns == "chosen" and self._shift > _FAR):
            with_own = self._starts(context, own=True)
            own = owns == "moments" or min(with_own.values()) <= _LOST * min(losses.values())
            losses = with_own if own else losses
        source = min(losses, key=losses.__getitem__)
        if source == "pre-training":
            net.start_pretrained()
        elif not own:
            net.start_pretrained(["moments"])
        self._use_moments(net, own)
        choice = {"start": source, "own_moments": own, "shift": self._shift, "left_out_losses": losses}
        self.choices[net.current_task] = choice
        return False

    def _starts(self, context: TaskContext, own: bool) -> dict[str, float]:
        """Left-out losses of heads on the features that each start gives, with own moments or those of pre-training."""
        net = context.net
        with net.as_pretrained(batch_moments=own):
            losses = {"pre-training": fit_head(context).loss if own else self._head(context).loss}
        if any("deltas" in entry.owns for entry in net.tasks.values() if entry.finished):
            with net.as_pretrained(["moments"], batch_moments=own):
                losses["the task before"] = fit_head(context).loss
        return losses

    def _settle(self, context: TaskContext, head: LinearFit, why: str) -> bool:
        net = context.net
        net.start_pretrained()
        self._use_moments(net, False)
        net.head.put(head.weight, head.bias)
        net.finish_task(owns=["head"])
        self.choices.setdefault(net.current_task, {})["only_head"] = why
        context.note(f"a head on pre-trained features ({why})")
        return True

    def end_task(self, context: TaskContext) -> None:
        net, head = context.net, self._head(context)
        with net.evaluating():
            right = net.head(context.features()).argmax(1) == context.labels
        trained, alone = (100 * float(found.double().mean()) for found in (right, head.right))
        choice = self.choices.setdefault(net.current_task, {"start": "where it was"})  # it may have been reopened
        choice |= {"trained": trained, "head": alone}
        if self.options.owns == "chosen" and trained < alone:
            self._settle(context, head, f"training failed: {trained:.1f}% of its own images are right")
            return
        net.finish_task(owns=None if self._own else ["norms", "deltas", "head"])
        norms = "own batch norms" if self._own else "own scales and shifts of norms"
        start = "" if choice["start"] == "pre-training" else f", from {choice['start']}"
        context.note(
            f"{norms} and rank-{net.part(Deltas).rank} changes{start} (a head alone: {alone:.1f}% of left-out images)"
        )

    # ---- training --------------------------------------------------------------------------------------------------

    def begin_epoch(self, context: TaskContext, epoch: int) -> None:
        choice = self.choices.get(context.net.current_task, {})
        self._use_moments(context.net, choice.get("own_moments", self._own))
        deltas = context.net.part(Deltas)
        first = sum(stage.epochs for stage in self.stages(context.epochs, context.index)[:-1])
        if epoch == first and deltas.layers and not bool(torch.stack(torch._foreach_norm(list(deltas.b))).any()):
            weights = [layer.get_parameter("weight") for layer in deltas.layers.values()]
            # Gradients of a network that diverged have no directions; training says so once a GPU's numbers are read.
            found = [gradient.nan_to_num(0.0, 0.0, 0.0) for gradient in context.gradients(weights, _BATCHES)]
            deltas.start_along(dict(zip(deltas.layers, found, strict=True)))

    def captured_kind(self, index: int) -> Hashable:
        return self._own

    def _head(self, context: TaskContext) -> LinearFit:
        """Fitted to pre-trained features of all images."""
        if self._fit is None or self._fit[0] != context.index:
            with context.net.as_pretrained(), context.net.part(Moments).shifts() as shifts:
                self._fit = context.index, fit_head(context)
            self._shift = float(torch.stack(shifts).mean()) if shifts else 0.0
        return self._fit[1]

    def _use_moments(self, net: ContinualNet, own: bool) -> None:
        self._own = net.part(Moments).own = own
