"""How much a network's output depends on each shared weight, measured on a task's training data.

Nothing of the network changes: batch norm is in evaluation mode, or its statistics are put back afterwards. Images come
in a random order: a batch of one class alone has a larger gradient than one of all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Literal

import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap
from torch.nn.functional import cross_entropy, log_softmax

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
        estimator: 'batch' squares the gradient of the mean loss of batches of 20, times 20 (the CPR code); the others
            square each sample's own: 'empirical' with its label, 'sampled' with a label drawn from the network's
            prediction, 'exact' in expectation over the prediction.
        mode: of batch norm; 'train' normalises by the moments of each batch (the CPR code).
        into: where it goes; the same tensors each time, so that a captured pass serves every task.
        net: of which, if not the context's.
    """
    net = net or context.net
    torch._foreach_zero_(list(into.values()))
    if estimator == "batch":

        def loss(logits: Tensor, labels: Tensor) -> Tensor:
            return cross_entropy(logits.float(), labels)

        return _over_batches(context, net, mode, loss, lambda g: g.square().mul_(BATCH), into)
    if mode == "train":
        raise ConfituneError("per-sample gradients need batch norm in evaluation mode: with mode='train' use 'batch'")
    if estimator == "exact":
        return _exact(context, net, into)

    def nll(logits: Tensor, label: Tensor) -> Tensor:
        return cross_entropy(logits.float(), label)

    chance = torch.Generator().manual_seed(context.seed)

    def drawn(logits: Tensor) -> Tensor:
        return torch.multinomial(logits.float().softmax(1).cpu(), 1, generator=chance)[:, 0].to(logits.device)

    return _per_sample(context, net, nll, Tensor.square, drawn if estimator == "sampled" else None, into)


def output_sensitivity(context: TaskContext, squared: bool, per_sample: bool, mode: Mode, into: Tensors) -> None:
    """MAS: the mean absolute gradient of the norm of the current head's logits."""
    torch._foreach_zero_(list(into.values()))

    def norm(logits: Tensor, labels: Tensor | None = None) -> Tensor:
        logits = logits.float()
        return (logits.square().sum(1) if squared else logits.norm(dim=1)).mean()

    if not per_sample:
        return _over_batches(context, context.net, mode, norm, lambda g: g.abs().mul_(BATCH), into)
    if mode == "train":
        raise ConfituneError("per-sample gradients need batch norm in evaluation mode")
    return _per_sample(context, context.net, norm, Tensor.abs, None, into)


def _over_batches(
    context: TaskContext,
    net: ContinualNet,
    mode: Mode,
    loss: Callable[[Tensor, Tensor], Tensor],
    of_gradient: Callable[[Tensor], Tensor],
    into: Tensors,
) -> None:
    total = list(into.values())
    found = net.shared_parameters()
    parameters = [found[name] for name in into]

    def add(x: Tensor, labels: Tensor) -> None:
        logits = net(x) if mode == "eval" else net.head(net.backbone(x))  # its task may be finished already
        gradients = torch.autograd.grad(loss(logits, labels), parameters)
        with torch.no_grad():
            torch._foreach_add_(total, [of_gradient(g) for g in gradients])

    with _measured(net, mode):
        for x, labels in context.batches(BATCH):
            if mode == "eval" or len(x) > 1:  # one image alone has no batch moments
                context.captured(net, ("importance", mode, id(into), len(net.head.linear.bias)), add, x, labels)
    torch._foreach_div_(total, context.images)


def _per_sample(
    context: TaskContext,
    net: ContinualNet,
    loss: Callable[[Tensor, Tensor], Tensor],
    of_gradient: Callable[[Tensor], Tensor],
    relabel: Callable[[Tensor], Tensor] | None,
    into: Tensors,
) -> None:
    with _measured(net, "eval"), torch.no_grad():
        parameters = shared_values(net)
        gradients_of = vmap(
            grad(lambda weights, x, y: loss(_logits(net, weights, x[None]), y[None])), in_dims=(None, 0, 0)
        )
        for x, labels in context.batches(BATCH):
            targets = labels if relabel is None else relabel(net(x))
            for name, gradients in gradients_of(parameters, x, targets).items():
                into[name] += of_gradient(gradients).sum(0)
    torch._foreach_div_(list(into.values()), context.images)


def _exact(context: TaskContext, net: ContinualNet, into: Tensors) -> None:
    with _measured(net, "eval"), torch.no_grad():
        parameters = shared_values(net)
        score = vmap(
            grad(lambda weights, x, c: log_softmax(_logits(net, weights, x[None]).float(), 1)[0].gather(0, c[None])[0]),
            in_dims=(None, 0, None),
        )
        for x, _ in context.batches(BATCH):
            probabilities = net(x).float().softmax(1)
            for c in range(probabilities.shape[1]):
                label = torch.full((), c, device=x.device)
                for name, gradients in score(parameters, x, label).items():
                    weights = probabilities[:, c].view(-1, *(1,) * (gradients.dim() - 1))
                    into[name] += (weights * gradients.square()).sum(0)
    torch._foreach_div_(list(into.values()), context.images)


def _logits(net: ContinualNet, weights: Tensors, x: Tensor) -> Tensor:
    logits: Tensor = net.head(functional_call(net.backbone, weights, (x,)))
    return logits


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
