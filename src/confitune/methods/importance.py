"""How much a network's output depends on each shared weight, measured on a task's training data.

Nothing of the network changes: batch norm is in evaluation mode, or its statistics are put back afterwards. Images come
in a random order: a batch of one class alone has a larger gradient than one of all.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
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


def fisher(
    context: TaskContext, estimator: FisherEstimator, mode: Mode, into: Tensors, net: ContinualNet | None = None
) -> None:
    """The diagonal of the Fisher information of the shared weights, averaged over the task's training images.

    Args:
        estimator: see `EwcOptions`; all but 'batch' square the gradient of each sample by itself.
        mode: of batch norm; 'train' normalises by the moments of each batch (the CPR code).
        into: where it goes; the same tensors each time, so that a captured pass serves every task.
        net: of which; default: the context's.
    """
    net = net or context.net

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(logits.float(), labels)

    if estimator == "batch":
        return _over_batches(context, net, mode, loss, lambda g: g.square().mul_(BATCH), into)
    _require_eval(mode)
    chance = torch.Generator().manual_seed(context.seed)

    def targets(x: Tensor, labels: Tensor) -> list[tuple[Tensor, Tensor | None]]:
        if estimator == "empirical":
            return [(labels, None)]
        shares = net(x).float().softmax(1)
        if estimator == "sampled":
            return [(torch.multinomial(shares.cpu(), 1, generator=chance)[:, 0].to(x.device), None)]
        return [(torch.full_like(labels, c), shares[:, c]) for c in range(shares.shape[1])]

    return _per_sample(context, net, loss, Tensor.square, into, targets)


def output_sensitivity(context: TaskContext, squared: bool, per_sample: bool, mode: Mode, into: Tensors) -> None:
    """MAS: the mean absolute gradient of the norm of the current head's logits."""

    def norm(logits: Tensor, labels: Tensor) -> Tensor:
        logits = logits.float()
        return (logits.square().sum(1) if squared else logits.norm(dim=1)).mean()

    if not per_sample:
        return _over_batches(context, context.net, mode, norm, lambda g: g.abs().mul_(BATCH), into)
    _require_eval(mode)
    return _per_sample(context, context.net, norm, Tensor.abs, into, lambda x, labels: [(labels, None)])


def _require_eval(mode: Mode) -> None:
    if mode == "train":
        raise ConfituneError("per-sample gradients need batch norm in evaluation mode: with mode='train' use 'batch'")


def _over_batches(
    context: TaskContext,
    net: ContinualNet,
    mode: Mode,
    loss: Callable[[Tensor, Tensor], Tensor],
    of_gradient: Callable[[Tensor], Tensor],
    into: Tensors,
) -> None:
    found = net.shared_parameters()
    parameters = [found[name] for name in into]

    def add(x: Tensor, labels: Tensor) -> None:
        logits = net(x) if mode == "eval" else net.head(net.backbone(x))  # its task may be finished already
        gradients = torch.autograd.grad(loss(logits, labels), parameters)
        with torch.no_grad():
            torch._foreach_add_(list(into.values()), [of_gradient(g) for g in gradients])

    torch._foreach_zero_(list(into.values()))
    with _measured(net, mode):
        for x, labels in context.batches(BATCH):
            if mode == "eval" or len(x) > 1:  # one image alone has no batch moments
                context.captured(net, ("importance", mode, id(into), len(net.head.linear.bias)), add, x, labels)
    torch._foreach_div_(list(into.values()), context.images)


def _per_sample(
    context: TaskContext,
    net: ContinualNet,
    loss: Callable[[Tensor, Tensor], Tensor],
    of_gradient: Callable[[Tensor], Tensor],
    into: Tensors,
    targets: Callable[[Tensor, Tensor], list[tuple[Tensor, Tensor | None]]],
) -> None:
    """Sum over the labels that `targets` gives for a batch, each with its share of every image (None: the whole)."""

    def loss_of_one(weights: Tensors, x: Tensor, label: Tensor) -> Tensor:
        return loss(net.head(functional_call(net.backbone, weights, (x[None],))), label[None])

    gradients_of = vmap(grad(loss_of_one), in_dims=(None, 0, 0))
    torch._foreach_zero_(list(into.values()))
    with net.evaluating():
        for x, labels in context.batches(BATCH):
            for target, shares in targets(x, labels):
                for name, gradients in gradients_of(shared_values(net), x, target).items():
                    values = of_gradient(gradients)
                    if shares is not None:
                        values = shares.view(-1, *(1,) * (values.dim() - 1)) * values
                    into[name] += values.sum(0)
    torch._foreach_div_(list(into.values()), context.images)


@contextmanager
def _measured(net: ContinualNet, mode: Mode) -> Iterator[None]:
    """Within, batch norm is in `mode`; afterwards the network is as it was, its statistics included."""
    was_training = net.training
    net.train(mode == "train")
    try:
        with net.observer.untracked() if mode == "train" else nullcontext():
            yield
    finally:
        net.train(was_training)
