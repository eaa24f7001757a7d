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
from pydantic import BaseModel, ConfigDict
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from confitune.analysis.moments import Moments
from confitune.engine import TrainSettings
from confitune.engine.feed import batches
from confitune.engine.step import count_right
from confitune.nn import ContinualNet
from confitune.tasks import Task

Source = Literal["running", "true"]


class MomentsAccuracy(BaseModel):
    """One of the four combinations; accuracies in percent."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    mean: Source
    variance: Source
    acc: float  # over tasks
    per_task: list[float]


class TransductiveResult(BaseModel, frozen=True):
    """All four combinations."""

    tasks: list[str]
    accuracies: list[MomentsAccuracy]

    def of(self, mean: Source, variance: Source) -> MomentsAccuracy:
        """One combination."""
        return next(a for a in self.accuracies if (a.mean, a.variance) == (mean, variance))


@torch.no_grad()
def transductive_accuracy(
    net: ContinualNet, tasks: Sequence[Task], settings: TrainSettings | None = None
) -> TransductiveResult:
    """Accuracy on each task's test set with {running, true} means x {running, true} variances.

    A test set that fits in one batch (`settings.eval_batch_size`) takes one forward pass a combination. A larger one
    takes a sweep for every batch norm, up to that layer, and a last one: measured in chunks, the same moments. Raise
    `eval_batch_size` where memory allows. The network stays as it is, to the bit: a copy is measured.
    """
    settings = settings or TrainSettings()
    twin = copy.deepcopy(net).eval()
    sources: tuple[Source, Source] = ("running", "true")
    accuracies = []
    for mean, variance in product(sources, sources):
        per_task = [_accuracy(twin, task, settings, mean, variance) for task in tasks]
        acc = sum(per_task) / len(per_task)
        accuracies.append(MomentsAccuracy(mean=mean, variance=variance, acc=acc, per_task=per_task))
    return TransductiveResult(tasks=[task.name for task in tasks], accuracies=accuracies)


def _accuracy(net: ContinualNet, task: Task, settings: TrainSettings, mean: Source, variance: Source) -> float:
    """Sweeps over the test set, each of which finds one more layer's moments, until none is left to be found."""
    net.prepare(task.name)
    device = next(net.parameters()).device
    moments = _ChosenMoments(net.backbone, mean, variance, whole=len(task.test) <= settings.eval_batch_size)
    found_one = True
    while found_one:
        right = []
        for pixels, labels in batches(task.test, settings.eval_batch_size, device):
            moments.call, x = 0, task.inputs(pixels)
            with suppress(_FarEnough), torch.autocast(device.type, torch.bfloat16, enabled=settings.bf16(device)):
                logits = net.head(net.backbone(x))
                right.append(count_right(logits, labels, task.groups))
        found_one = moments.found_one()
    moments.restore()
    return 100.0 * torch.cat(right).double().mean().item()


class _FarEnough(Exception):
    """The layers beyond have nothing to do in this sweep."""


class _ChosenMoments:
    """Puts the chosen moments into every batch norm just before it normalises.

    Layers are told apart by the order of their calls, which also serves a layer that is called twice.
    """

    def __init__(self, backbone: nn.Module, mean: Source, variance: Source, whole: bool) -> None:
        norms = [m for m in backbone.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]
        self._running = {m: (m.get_buffer("running_mean").clone(), m.get_buffer("running_var").clone()) for m in norms}
        self._mean, self._variance, self._whole = mean, variance, whole
        self._known: list[tuple[Tensor, Tensor]] = []  # true moments by call
        self._new = Moments()
        self.call = 0
        hooked = [] if mean == variance == "running" else norms
        self._handles = [norm.register_forward_pre_hook(self._before) for norm in hooked]

    def _before(self, norm: nn.Module, args: tuple[Any, ...]) -> None:
        if self.call == len(self._known):
            self._new.add(args[0])
            if not self._whole:
                raise _FarEnough
            self.found_one()
        assert isinstance(norm, _BatchNorm)
        true, running = self._known[self.call], self._running[norm]
        self.call += 1
        _put(norm, (true if self._mean == "true" else running)[0], (true if self._variance == "true" else running)[1])

    def found_one(self) -> bool:
        """Take over what was measured, if anything was."""
        if not self._new.count:
            return False
        self._known.append((self._new.mean, self._new.variance))
        self._new = Moments()
        return True

    def restore(self) -> None:
        for handle in self._handles:
            handle.remove()
        for norm, (mean, variance) in self._running.items():
            _put(norm, mean, variance)


def _put(norm: nn.Module, mean: Tensor, variance: Tensor) -> None:
    norm.get_buffer("running_mean").copy_(mean)
    norm.get_buffer("running_var").copy_(variance)
