"""The simple methods around ConFiT: what it must beat, and what bounds it."""

from pydantic import Field

from confitune.methods.linear import finish_with_head
from confitune.methods.method import Method, Options, TaskContext
from confitune.methods.stages import Stage, head_only, head_then_norms, hierarchical
from confitune.nn import ContinualNet, Deltas, Head, Norms, Part


class Finetune(Method):
    """Everything is trained, and nothing is done against forgetting."""

    name = "finetune"
    summary = "fine-tunes all weights on one task after another, shared BN"


class LinearProbe(Method):
    """The backbone stays as pre-trained, batch norm in evaluation mode."""

    name = "linear-probe"
    summary = "frozen backbone, trains heads only; forgets nothing"
    cost = "nothing; no gradients below the head"

    def parts(self) -> list[Part]:
        return [Norms(affine=False, moments="pretrained"), Head()]

    def stages(self, epochs: int, index: int) -> tuple[Stage, ...]:
        return head_only(epochs)


class Lda(Method):
    """Nothing is trained: the classes of all tasks are normal distributions of pre-trained features.

    The network gets heads, too, fitted at once: the sums answer where all classes compete.
    """

    name = "lda"
    summary = "frozen backbone, linear discriminant analysis over all tasks' classes; forgets nothing"
    cost = "one pass over the images of a task; no training"
    reference = "Hayes and Kanan, CVPR Workshops 2020"
    sums_only = True
    two_scales = True
    parts = LinearProbe.parts
    stages = LinearProbe.stages

    def attach(self, net: ContinualNet, index: int) -> None:
        super().attach(net, index)
        self._features = net.head.features

    def settle(self, context: TaskContext) -> bool:
        finish_with_head(context)
        return True

    def storage(self) -> int:
        """The second moments; means of classes take what a head does."""
        return self._features**2


class SingleTask(Method):
    """A network for each task."""

    name = "single-task"
    summary = "a fresh copy of the pre-trained network per task; forgets nothing"
    separate = True


class Joint(Method):
    """All data at once, which continual learning does not have."""

    name = "joint"
    summary = "trains on the data of all tasks at once"
    cost = "nothing; needs the images of all tasks at once"
    joint = True


class BnOnly(Method):
    """Stages 1 and 2 of hierarchical fine-tuning with norms of each task's own."""

    name = "bn-only"
    summary = "frozen convolutions, trains heads and task-specific norms; forgets nothing"
    cost = "nothing; no gradients for convolutions"

    def parts(self) -> list[Part]:
        return [Norms(), Head()]

    def stages(self, epochs: int, index: int) -> tuple[Stage, ...]:
        return head_then_norms(epochs)


class FirstSession(Method):
    """The backbone adapts once, to the first task."""

    name = "first-session"
    summary = "trains all weights in the first task, then only heads and norms; forgets nothing"
    cost = "nothing; no gradients for convolutions after the first task"
    reference = "Panos et al., ICCV 2023"
    parts = BnOnly.parts

    def stages(self, epochs: int, index: int) -> tuple[Stage, ...]:
        return head_then_norms(epochs) if index else hierarchical(epochs)


class LoraOptions(Options):
    """Choices of LoRA."""

    rank: int = Field(4, ge=1, description="rank of the weight changes")


class Lora(Method):
    """Changes start anew for every task, in random directions, and norms stay as pre-trained."""

    name = "lora"
    summary = "frozen backbone, low-rank adapters per task; forgets nothing"
    cost = "low-rank products in every step"
    reference = "Hu et al., ICLR 2022"
    Options = LoraOptions

    def parts(self) -> list[Part]:
        frozen = Norms(affine=False, moments="pretrained")
        return [frozen, Deltas(self.options.rank, "random", products=False), Head()]

    def stages(self, epochs: int, index: int) -> tuple[Stage, ...]:
        return (Stage("all", epochs, frozenset({"head", "deltas"})),)


class TaskBn(Method):
    """Moved convolutions leave the stored means of earlier tasks behind."""

    name = "task-bn"
    summary = "fine-tuning with task-specific BN, without recovered means"
    parts = BnOnly.parts
