"""Accuracy with the true moments of the test set: is correcting the running variance worth it? (ConFiT, sec. 4.2.3)

Every batch norm normalises with a mean and a variance, and each of the two may be the running one (recovered, stored or
shared, as the network's kind has it) or the true one. True moments are those of the tensor that the layer REALLY gets
when the task's whole test set is tested with the same choice in all layers before it:

    mean[c] = 1 / (N H W) * sum of x[n, c, h, w],   variance[c] = 1 / (N H W) * sum of (x[n, c, h, w] - mean[c])^2

The other definition, moments of the tensors that running moments produce, would hand a layer moments of a tensor that
it no longer sees once the layers before it use true ones. With both true this one is exactly a batch norm in training
mode whose batch is the whole test set (the biased variance is BN's own); the paper says only 'true moments'.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import suppress
from itertools import product
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from confitune.analysis.moments import Moments
from confitune.engine import TrainSettings
from confitune.engine.feed import batches
from confitune.engine.step import count_right
from confitune.nn import ContinualNet
from confitune.tasks import Task

Source = Literal["running", "true"]


@torch.no_grad()
def transductive_accuracy(net: ContinualNet, tasks: Sequence[Task], settings: TrainSettings) -> dict[str, Any]:
    """Accuracy on each task's test set with {running, true} means x {running, true} variances.

    A test set that fits in one batch (`settings.eval_batch_size`) takes one forward pass a combination. A larger one
    takes a sweep for every batch norm, up to that layer, and a last one: measured in chunks, the same moments. Raise
    `eval_batch_size` where memory allows. The network stays as it is, to the bit: a copy is measured.

    Returns:
        `tasks`: their names; `accuracies`: for each combination its `mean` and `variance` ('running' or 'true'), `acc`
        (the average over tasks, in percent) and `per_task`.
    """
    twin = copy.deepcopy(net).eval()
    sources: tuple[Source, Source] = ("running", "true")
    accuracies = []
    for mean, variance in product(sources, sources):
        per_task = [_accuracy(twin, task, settings, mean, variance) for task in tasks]
        acc = sum(per_task) / len(per_task)
        accuracies.append({"mean": mean, "variance": variance, "acc": acc, "per_task": per_task})
    return {"tasks": [task.name for task in tasks], "accuracies": accuracies}


class _FarEnough(Exception):
    """The layers beyond have nothing to do in this sweep."""


def _accuracy(net: ContinualNet, task: Task, settings: TrainSettings, mean: Source, variance: Source) -> float:
    """Sweeps over the test set, each of which finds one more layer's moments, until none is left to be found.

    The chosen moments are put into every batch norm just before it normalises. Layers are told apart by the order of
    their calls, which also serves a layer that is called twice.
    """
    net.prepare(task.name)
    device = next(net.parameters()).device
    whole = len(task.test) <= settings.eval_batch_size
    norms = [m for m in net.backbone.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]
    running = {m: (m.get_buffer("running_mean").clone(), m.get_buffer("running_var").clone()) for m in norms}
    true: list[tuple[Tensor, Tensor]] = []  # by call
    found = Moments()
    call = 0

    def before(norm: nn.Module, args: tuple[Any, ...]) -> None:
        nonlocal found, call
        if call == len(true):
            found.add(args[0])
            if not whole:
                raise _FarEnough
            true.append((found.mean, found.variance))
            found = Moments()
        chosen = (true[call] if source == "true" else running[norm] for source in (mean, variance))  # type: ignore[index]
        _put(norm, *(moments[which] for which, moments in enumerate(chosen)))
        call += 1

    hooked = [] if mean == variance == "running" else norms
    handles = [norm.register_forward_pre_hook(before) for norm in hooked]
    while True:
        right = []
        for pixels, labels in batches(task.test, settings.eval_batch_size, device):
            call = 0
            x = task.inputs(pixels)
            with suppress(_FarEnough), torch.autocast(device.type, torch.bfloat16, enabled=settings.bf16(device)):
                right.append(count_right(net.head(net.backbone(x)), labels, task.groups))
        if not found.count:
            break
        true.append((found.mean, found.variance))
        found = Moments()
    for handle in handles:
        handle.remove()
    for norm, moments in running.items():
        _put(norm, *moments)
    return 100.0 * torch.cat(right).double().mean().item()


def _put(norm: nn.Module, mean: Tensor, variance: Tensor) -> None:
    norm.get_buffer("running_mean").copy_(mean)
    norm.get_buffer("running_var").copy_(variance)
