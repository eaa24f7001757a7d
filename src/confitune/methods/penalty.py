"""What a regularisation method hooks into: its own file says what it adds, the loop stays as it is."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor, nn

from confitune.errors import ConfituneError
from confitune.methods.schedule import Part
from confitune.nn import ContinualNet


@dataclass(frozen=True)
class TaskContext:
    """What a penalty may use of the task at hand."""

    net: ContinualNet
    index: int  # of the task, from 0
    epochs: int  # that it is trained for
    images: int  # in its training set
    classes: int
    labels: Tensor  # of the training images
    # Batch size -> inputs and labels, in stored order; processes that train together take turns, a whole batch each.
    batches: Callable[[int], Iterable[tuple[Tensor, Tensor]]]
    train: Callable[..., None]  # train(other, only_epoch=None): train another network on this task, without penalties
    sample: Callable[[int], Tensor]  # positions of at most so many training images, drawn at random, in whole batches
    features: Callable[[Tensor], Tensor]  # of the training images at these positions [N, F], by the network as it is
    note: Callable[[str], None]  # tell a person
    run: Callable[..., None]  # run(net, kind, function, *tensors): the function, captured where that is faster
    seed: int  # for what a penalty draws in this task


class PartOptions(BaseModel):
    """Base of the options of a method's part: every choice its paper or a code base made, with a default."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def checked_options(kind: type[PartOptions], name: str, options: Mapping[str, Any]) -> Any:
    """The options of the part `name`, or an error that says which are wrong and which there are."""
    try:
        return kind(**options)
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        known = ", ".join(kind.model_fields) or "none"
        raise ConfituneError(f"options of {name}: {problems} (there are: {known})") from error


class Penalty:
    """Base of the regularisation methods; every hook does nothing unless overridden.

    The order in one step: forward, `output_loss`, backward, `read_gradients`, `add_gradients`, step, `after_step`.

    On a GPU these five run inside a captured graph, so they work on tensors only: they wait for nothing (no `.item()`,
    no `if` on a value), and what they keep from step to step is changed in place.
    """

    name: ClassVar[str] = ""
    summary: ClassVar[str] = ""
    reference: ClassVar[str] = ""
    Options: ClassVar[type[PartOptions]] = PartOptions
    network: ClassVar[Mapping[str, Any]] = MappingProxyType({})  # arguments of `ContinualNet` that it needs

    def __init__(self, **options: Any) -> None:
        self.options: Any = checked_options(self.Options, self.name, options)

    def attach(self, net: ContinualNet) -> None:
        """The network is where it will be trained: what was loaded from a checkpoint goes there, too."""

    def settles(self, context: TaskContext) -> bool:
        """Whether it has finished the task by itself: asked before anything else, and nothing is trained then."""
        return False

    def holds(self, net: ContinualNet) -> frozenset[Part]:
        """Parts of the network that are not to be trained in the task at hand."""
        return frozenset()

    def begin_task(self, context: TaskContext) -> None:
        """Before the first step of a task."""

    def begin_epoch(self, context: TaskContext, epoch: int) -> None:
        """Before the first step of an epoch (from 0)."""

    def output_loss(self, logits: Tensor, labels: Tensor) -> Tensor | None:
        """A term of the loss that depends on the outputs."""
        return None

    def read_gradients(self, net: ContinualNet) -> None:
        """Gradients of the loss are there, no penalty has been added to them yet."""

    def add_gradients(self, net: ContinualNet) -> None:
        """Add the penalty's gradient in closed form: cheaper than sending it through autograd."""

    def after_step(self, net: ContinualNet) -> None:
        """Parameters have moved."""

    def captured_kind(self, index: int) -> Hashable:
        """What a captured step depends on besides the values of tensors; a new kind is captured anew.

        By default every task (`index`, from 0) is captured for itself. A penalty whose tensors stay where they are and
        which does the same in all tasks returns a constant, and one capture serves them all.
        """
        return index

    def end_task(self, context: TaskContext) -> None:
        """After the last step of a task; the network is not finished with it yet."""

    def state_dict(self) -> dict[str, Any]:
        """Everything that is kept between steps and tasks (tensors, numbers, text, lists and dicts of them)."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put back what `state_dict` gave."""

    def storage(self) -> int:
        """How many numbers are kept between tasks."""
        return 0


def shared_parameters(net: ContinualNet) -> dict[str, nn.Parameter]:
    """What penalties act on: the parameters that tasks share. Heads never; batch norms only where they are shared."""
    own = set(map(id, net.norm_parameters())) if net.norm in ("xconv", "task") else set()
    return {name: parameter for name, parameter in net.backbone.named_parameters() if id(parameter) not in own}


def shared_values(net: ContinualNet) -> dict[str, Tensor]:
    """The same as plain tensors, not copied."""
    return {name: parameter.detach() for name, parameter in shared_parameters(net).items()}
