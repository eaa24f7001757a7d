"""Numbers stored in addition to the pre-trained network as tasks grow (ConFiT, Fig. 'additional parameters').

Counted from the tensors that are really there, not from a formula: what a task's parts keep of it, and what methods
hold between tasks. Heads are not counted: every method has them.
"""

from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor

from confitune.methods import Method
from confitune.nn import ContinualNet


class Storage(NamedTuple):
    """What one method keeps of tasks, in numbers."""

    per_task: int
    once: int  # however many tasks there are

    def kept(self, tasks: int) -> int:
        """After so many tasks."""
        return self.once + tasks * self.per_task


def measure_storage(method: Method, net: ContinualNet) -> Storage:
    """What a method keeps with the network that it made, which may be on the meta device: shapes are enough.

    >>> from confitune.methods import create_method
    >>> from confitune.nn import without_memory
    >>> method = create_method("confit", {"confit": {"means": "phase"}})
    >>> measure_storage(method, method.network(without_memory("resnet18"))).kept(2)
    38296
    """
    for hook in method.hooks:
        hook.attach(net, 0)
    of_pretraining = sum(_numbers(part.buffers(recurse=False)) for part in net.parts.values())
    network = _numbers(net.backbone.state_dict().values()) if method.separate else 0
    return Storage(net.numbers_per_task + network, of_pretraining + sum(hook.storage() for hook in method.hooks))


def _numbers(tensors: Iterable[Tensor]) -> int:
    """Counters are no numbers of a network."""
    return sum(tensor.numel() for tensor in tensors if tensor.is_floating_point())
