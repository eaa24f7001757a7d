"""How much a network's output depends on each shared weight, measured on a task's training data.

Nothing of the network changes: batch norm is in evaluation mode, or its statistics are put back afterwards. Images come
in a random order: a batch of one class alone has a larger gradient than one of all.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Literal

import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap
from torch.nn.functional import cross_entropy

from confitune.errors import ConfituneError
from confitune.methods.method import TaskContext
from confitune.methods.pull import Tensors, shared_values
from confitune.nn import ContinualNet

BATCH = 20  # of the CPR code, on which the paper built; its strengths have a meaning only with it

FisherEstimator = Literal["batch", "exact", "sampled", "empirical"]
Mode = Literal["eval", "train"]
Targets = Sequence[tuple[Tensor, Tensor | None]]  # labels, each with its share of every image (None: the whole)


def fisher(
    context: TaskContext, estimator: FisherEstimator, mode: Mode, into: Tensors, net: ContinualNet | None = None
) -> None:
    """The diagonal of the Fisher information of the shared weights, averaged over the task's training images.

    Args:
        estimator: see `EwcOptions`; all but 'batch' square the gradient of each image by itself.
        net: of which; default: the context's.
    """
    net = net or context.net
    chance = torch.Generator().manual_seed(context.seed)

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(logits.float(), labels)

    def targets(x: Tensor, labels: Tensor) -> Targets:
        if estimator == "empirical":
            return [(labels, None)]
        shares = net(x).float().softmax(1)
        if estimator == "sampled":
            return [(torch.multinomial(shares.cpu(), 1, generator=chance)[:, 0].to(x.device), None)]
        return [(torch.full_like(labels, c), shares[:, c]) for c in range(shares.shape[1])]

    average(context, net, mode, loss, Tensor.square, into, None if estimator == "batch" else targets)


@torch.no_grad()
def average(
    context: TaskContext,
    net: ContinualNet,
    mode: Mode,
    loss: Callable[[Tensor, Tensor], Tensor],
    of_gradient: Callable[[Tensor], Tensor],
    into: Tensors,
    targets: Callable[[Tensor, Tensor], Targets] | None = None,
) -> None:
    """Average `of_gradient` of the gradients of a loss of logits and labels over the task's training images.

    Args:
        mode: of batch norm; 'train' normalises by the moments of each batch (the CPR code).
        into: where it goes; the same tensors each time, so that a captured pass serves every task.
        targets: for the gradient of each image by itself, summed over the labels that this gives for a batch; without,
            gradients are of means over 20 images, and count 20 times.
    """
    if targets is not None and mode == "train":
        raise ConfituneError("per-sample gradients need batch norm in evaluation mode: with mode='train' use 'batch'")
    found, sums = net.shared_parameters(), list(into.values())
    parameters = [found[name] for name in into]

    def add(x: Tensor, labels: Tensor) -> None:
        with torch.enable_grad():
            logits = net(x) if mode == "eval" else net.head(net.backbone(x))  # its task may be finished already
            gradients = torch.autograd.grad(loss(logits, labels), parameters)
        torch._foreach_add_(sums, [of_gradient(g).mul_(BATCH) for g in gradients])

    def loss_of_one(weights: Tensors, x: Tensor, label: Tensor) -> Tensor:
        return loss(net.head(functional_call(net.backbone, weights, (x[None],))), label[None])

    def add_each(x: Tensor, targets: Targets) -> None:
        for labels, shares in targets:
            for name, gradients in gradients_of_each(shared_values(net), x, labels).items():
                values = of_gradient(gradients)
                if shares is not None:
                    values = shares.view(-1, *(1,) * (values.dim() - 1)) * values
                into[name] += values.sum(0)

    gradients_of_each = vmap(grad(loss_of_one), in_dims=(None, 0, 0))
    torch._foreach_zero_(sums)
    with net.evaluating(), net.observer.untracked() if mode == "train" else nullcontext():
        net.train(mode == "train")
        for x, labels in context.batches(BATCH):
            if targets is not None:
                add_each(x, targets(x, labels))
            elif mode == "eval" or len(x) > 1:  # one image alone has no batch moments
                context.captured(net, ("importance", mode, id(into), len(net.head.linear.bias)), add, x, labels)
    torch._foreach_div_(sums, context.images)
