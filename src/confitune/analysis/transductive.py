"""Accuracy with the true moments of the test set: is correcting the running variance worth it? (ConFiT, sec. 4.2.3)

Every batch norm normalises with a mean and a variance, and each of the two may be the running one (recovered, stored or
shared, as the network's kind has it) or the true one. True moments are those of the tensor that the layer REALLY gets
when the task's whole test set is tested with the same choice in all layers before it:

    mean[c] = 1 / (N H W) * sum of x[n, c, h, w],   variance[c] = 1 / (N H W) * sum of (x[n, c, h, w] - mean[c])^2

The other definition, moments of the tensors that running moments produce, would hand a layer moments of a tensor that
it no longer sees once the layers before it use true ones. With both true this one is exactly a batch norm in training
mode whose batch is the whole test set (the biased variance is BN's own); the paper says only 'true moments'.
"""

import copy
from collections.abc import Sequence
from contextlib import suppress
from itertools import product
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from confitune.analysis.moments import Moments
from confitune.engine import TrainSettings
from confitune.engine.feed import batches
from confitune.engine.step import count_right
from confitune.nn import ContinualNet
from confitune.tasks import Task


@torch.no_grad()
def transductive_accuracy(net: ContinualNet, tasks: Sequence[Task], settings: TrainSettings) -> dict[str, Any]:
    """Accuracy on each task's test set with {running, true} means x {running, true} variances.

    A test set that fits in one batch (`settings.eval_batch_size`) takes one forward pass a combination. A larger one
    takes a sweep for every batch norm, up to that layer, and a last one: measured in chunks, the same moments. Raise
    `eval_batch_size` where memory allows. The network stays as it is, to the bit: copies are measured.

    Returns:
        `tasks`: their names; `accuracies`: for each combination its `mean` and `variance` ('running' or 'true'), `acc`
        (the average over tasks, in percent) and `per_task`.
    """
    accuracies = []
    for mean, variance in product(("running", "true"), repeat=2):
        per_task = [_accuracy(net, task, settings, mean, variance) for task in tasks]
        acc = sum(per_task) / len(per_task)
        accuracies.append({"mean": mean, "variance": variance, "acc": acc, "per_task": per_task})
    return {"tasks": [task.name for task in tasks], "accuracies": accuracies}


class _FarEnough(Exception):
    """The layers beyond have nothing to do in this sweep."""


def _accuracy(net: ContinualNet, task: Task, settings: TrainSettings, mean: str, variance: str) -> float:
    """Sweeps over the test set, each of which finds one more layer's moments, until none is left to be found.

    The chosen moments are put into every batch norm just before it normalises. Layers are told apart by the order of
    their calls, which also serves a layer that is called twice.
    """
    net = copy.deepcopy(net).eval()
    net.prepare(task.name)
    device = next(net.parameters()).device
    whole = len(task.test) <= settings.eval_batch_size
    norms = [m for m in net.backbone.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]
    running = {m: (m.get_buffer("running_mean").clone(), m.get_buffer("running_var").clone()) for m in norms}
    true: list[Moments] = []  # by call
    known = call = 0  # calls whose true moments are whole; the number of the next call

    def before(norm: nn.Module, args: tuple[Any, ...]) -> None:
        nonlocal call
        if call == len(true):
            true.append(Moments())
        if call >= known:
            true[call].add(args[0])
            if not whole:
                raise _FarEnough
        stored = running[norm]  # type: ignore[index]
        norm.get_buffer("running_mean").copy_(true[call].mean if mean == "true" else stored[0])
        norm.get_buffer("running_var").copy_(true[call].variance if variance == "true" else stored[1])
        call += 1

    for norm in [] if mean == variance == "running" else norms:
        norm.register_forward_pre_hook(before)
    while True:
        right = []
        for pixels, labels in batches(task.test, settings.eval_batch_size, device):
            call = 0
            x = task.inputs(pixels)
            with suppress(_FarEnough), torch.autocast(device.type, torch.bfloat16, enabled=settings.bf16(device)):
                right.append(count_right(net.head(net.backbone(x)), labels, task.groups))
        if whole or known == len(true):
            return 100.0 * torch.cat(right).double().mean().item()
        known = len(true)
