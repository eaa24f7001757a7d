"""Do runs in this process: one, or several seeds of a method side by side."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial

import torch

from confitune.engine import (
    CsvLog,
    DivergedError,
    Listener,
    RunResult,
    SequenceRun,
    TensorBoardLog,
    Turns,
    library_switches,
    place,
    require_same_config,
    steps_of,
)
from confitune.errors import ConfituneError
from confitune.experiments.job import LOCK, RESULT, Job, TrainingError
from confitune.experiments.recipe import Recipe
from confitune.files import exclusive
from confitune.nn import Backbone, ContinualNet, create_backbone
from confitune.ranks import Ranks
from confitune.tasks import Progress, TaskSequence


def load_backbone(recipe: Recipe) -> Backbone:
    """The recipe's network; a random start (weights 'none') is the same one in every run and after a resume."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return create_backbone(recipe.model, recipe.weights)


def load_sequence(recipe: Recipe, backbone: Backbone, progress: Progress | None = None) -> TaskSequence:
    """The recipe's tasks; `progress` is told how many of their images are decoded."""
    sequence = recipe.load_tasks(backbone.mean, backbone.std, progress)
    return sequence.validating(recipe.held_out, recipe.order_seed) if recipe.held_out is not None else sequence


@dataclass(frozen=True)
class Loaded:
    """What runs of one recipe have in common in a process."""

    backbone: Backbone
    sequence: TaskSequence  # where it will be trained on
    ranks: Ranks = field(default_factory=Ranks)  # who does each run together; the first one writes

    @classmethod
    def of(cls, job: Job, progress: Progress | None = None, ranks: Ranks | None = None) -> Loaded:
        """The job's network and tasks; refused if the network's weights are not those it was planned with."""
        recipe, ranks = job.recipe, ranks or Ranks()
        if ranks.several and job.watch is not None:
            raise ConfituneError(
                f"measuring on the way of a run needs one process, here are {ranks.size} (no torchrun)"
            )
        backbone = load_backbone(recipe)
        if backbone.weights_sha256 != job.weights_sha256:
            raise ConfituneError(
                f"the weights of {recipe.model} ({backbone.weights}) are not those that this run was planned with: "
                "the file has changed, or this machine has another one of that name; make them the same"
            )
        device = recipe.train_settings(0).torch_device()
        ranks.require_device(device)
        with ranks.first_goes_before("data"):
            sequence = load_sequence(recipe, backbone, progress)
        if any(recipe.method(name).joint for name in recipe.methods):
            sequence.require_joinable()  # now, not after the methods that do without have been trained
        return cls(backbone, place(sequence, device, recipe.pixels), ranks)


Show = Callable[[Job], AbstractContextManager[Listener]]
Busy = Callable[[Job], None]


def side_by_side(group: Sequence[Job], loaded: Loaded, show: Show, busy: Busy) -> list[RunResult]:
    """Results of runs of one method, which share the device; each is written as soon as it is there.

    Args:
        show: within, the listener shows the progress of a run.
        busy: is called where another process works in a run's folder; unless it raises, the run waits.
    """
    settings = group[0].recipe.train_settings(0, group[0].method)
    turns = Turns(len(group), apart=steps_of(loaded.sequence[0], settings) // len(group))
    # Switches are the whole process's: set here, they stay while the runs' threads come and go.
    with library_switches(settings, settings.step_mode(settings.torch_device(), loaded.ranks.size)):
        runs = [partial(_one, job, loaded, show, busy, turns.listener(turn)) for turn, job in enumerate(group)]
        return turns.run(runs) if len(runs) > 1 else [runs[0]()]


def _one(job: Job, loaded: Loaded, show: Show, busy: Busy, turn: Listener) -> RunResult:
    first = loaded.ranks.first
    with exclusive(job.folder / LOCK, lambda: busy(job)) if first else nullcontext():
        path = job.folder / RESULT
        if loaded.ranks.decided(path.exists()):  # of the process that was waited for, or that died right after it
            result = RunResult.load(path)
            require_same_config(result.config, job.config, path)
            return result
        with show(job) as progress:
            result = _trained(job, loaded, progress, turn)
        if first:
            result.save(path)
        return result


def _trained(job: Job, loaded: Loaded, progress: Listener, turn: Listener) -> RunResult:
    recipe, folder = job.recipe, job.folder
    method, settings = recipe.method(job.method), recipe.train_settings(job.seed, job.method)
    net = ContinualNet(copy.deepcopy(loaded.backbone.module), **recipe.network(job.method))
    net.ranks = loaded.ranks
    watching = job.watch(net, loaded.sequence, settings, folder) if job.watch else ()
    writing = (progress, CsvLog(folder), TensorBoardLog(folder)) if loaded.ranks.first else ()
    run = SequenceRun(
        net,
        loaded.sequence,
        method,
        settings,
        folder=folder,
        config=job.config,
        listeners=(*writing, *watching, turn),
        checkpoint_seconds=job.checkpoint_seconds,
        weights=loaded.backbone.weights,
        command=job.command,
    )
    run.resume()
    try:
        return run.run()
    except DivergedError as error:
        raise TrainingError(str(error), job.config) from error
