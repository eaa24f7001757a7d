"""What a regularisation method hooks into: its own file says what it adds, the loop stays as it is."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from confitune.nn import ContinualNet


@dataclass(frozen=True)
class TaskContext:
    """What a penalty may use of the task at hand."""

    net: ContinualNet
    index: int  # of the task, from 0
    images: int  # in its training set
    batches: Callable[[int], Iterable[tuple[Tensor, Tensor]]]  # batch size -> inputs and labels, in stored order
    train: Callable[[ContinualNet], None]  # train another network on this task alone, without penalties


class Penalty:
    """Base of the regularisation methods; every hook does nothing unless overridden.

    The order in one step: forward, `output_loss`, backward, `read_gradients`, `add_gradients`, step, `after_step`.

    On a GPU these five run inside a captured graph, so they work on tensors only: they wait for nothing (no `.item()`,
    no `if` on a value), and what they keep from step to step is changed in place.
    """

    def begin_task(self, context: TaskContext) -> None:
        """Before the first step of a task."""

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

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put back what `state_dict` gave."""

    def storage(self) -> int:
        """How many numbers are kept between tasks."""
        return 0


def shared_parameters(net: ContinualNet) -> dict[str, nn.Parameter]:
    """The parameters that penalties act on: the backbone's, heads excluded."""
    return dict(net.backbone.named_parameters())
