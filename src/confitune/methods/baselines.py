"""The simple methods around ConFiT: what it must beat, and what bounds it."""

from __future__ import annotations

from confitune.methods.method import Method
from confitune.methods.stages import Stage, head_only, head_then_norms
from confitune.nn import Head, Norms, Part


class Finetune(Method):
    """Everything is trained, and nothing is done against forgetting."""

    name = "finetune"
    summary = "fine-tune everything on task after task, shared BN"


class LinearProbe(Method):
    """The backbone stays as pre-trained, batch norm in evaluation mode."""

    name = "linear-probe"
    summary = "pre-trained backbone frozen, heads only; forgets nothing"
    cost = "nothing; nothing below the head gets gradients"

    def parts(self) -> list[Part]:
        return [Norms(affine=False, moments="pretrained"), Head()]

    def stages(self, epochs: int, index: int) -> tuple[Stage, ...]:
        return head_only(epochs)


class SingleTask(Method):
    """A network for each task."""

    name = "single-task"
    summary = "a fresh copy of the pre-trained network per task; forgets nothing"
    separate = True


class Joint(Method):
    """All data at once, which continual learning does not have."""

    name = "joint"
    summary = "all tasks' data at once: the upper bound"
    cost = "nothing; all tasks' images at once"
    joint = True


class BnOnly(Method):
    """Stages 1 and 2 of hierarchical fine-tuning with norms of each task's own."""

    name = "bn-only"
    summary = "heads and task-specific norms, convolutions never move; forgets nothing"
    cost = "nothing; convolutions get no gradients"

    def parts(self) -> list[Part]:
        return [Norms(), Head()]

    def stages(self, epochs: int, index: int) -> tuple[Stage, ...]:
        return head_then_norms(epochs)


class TaskBn(Method):
    """Moved convolutions leave the stored means of earlier tasks behind."""

    name = "task-bn"
    summary = "fine-tuning with plain task-specific norms, no recovery"

    def parts(self) -> list[Part]:
        return [Norms(), Head()]
