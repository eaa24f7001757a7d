"""How much a network's output depends on each shared weight, measured on a task's training data.

Nothing of the network changes: batch norm is in evaluation mode, or its statistics are put back afterwards. Images come
in a random order: a batch of one class alone has a larger gradient than one of all.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from confitune.methods.method import TaskContext
from confitune.methods.pull import Tensors
from confitune.nn import ContinualNet

BATCH = 20  # of the CPR code, on which the paper built; its strengths have a meaning only with it

Mode = Literal["eval", "train"]


def fisher(context: TaskContext, mode: Mode, into: Tensors, net: ContinualNet | None = None) -> None:
    """The diagonal of the Fisher information of the shared weights, averaged over the task's training images.

    Args:
        net: of which; default: the context's.
    """

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(logits.float(), labels)

    average(context, net or context.net, mode, loss, Tensor.square, into)


@torch.no_grad()
def average(
    context: TaskContext,
    net: ContinualNet,
    mode: Mode,
    loss: Callable[[Tensor, Tensor], Tensor],
    of_gradient: Callable[[Tensor], Tensor],
    into: Tensors,
) -> None:
    """Average `of_gradient` of the gradients of a loss of logits and labels over the task's training images.

    Gradients are of means over 20 images, and count 20 times (CPR code).

    Args:
        mode: of batch norm; 'train' normalises by the moments of each batch (the CPR code).
        into: where it goes; the same tensors each time, so that a captured pass serves every task.
    """
    found, sums = net.shared_parameters(), list(into.values())
    parameters = [found[name] for name in into]

    def add(x: Tensor, labels: Tensor) -> None:
        with torch.enable_grad():
            logits = net(x) if mode == "eval" else net.head(net.backbone(x))  # its task may be finished already
            gradients = torch.autograd.grad(loss(logits, labels), parameters)
        torch._foreach_add_(sums, [of_gradient(g).mul_(BATCH) for g in gradients])

    torch._foreach_zero_(sums)
    with net.evaluating(), net.observer.untracked() if mode == "train" else nullcontext():
        net.train(mode == "train")
        for x, labels in context.batches(BATCH):
            if mode == "eval" or len(x) > 1:  # one image alone has no batch moments
                context.captured(net, ("importance", mode, id(into), len(net.head.linear.bias)), add, x, labels)
    torch._foreach_div_(sums, context.images)
