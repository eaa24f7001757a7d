"""One run of an experiment: what it computes, in which folder, and how this process does it.

Several seeds of a method can be done side by side: they share the network that they start from, the images and the
device.
"""

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from confitune import engine
from confitune.engine import Listener
from confitune.engine.result import RunResult, add_result
from confitune.errors import ConfituneError
from confitune.experiments.runs.identity import RUNS, WORK, file_name, finished_runs, run_key
from confitune.experiments.runs.recipe import Recipe
from confitune.files import exclusive, remove_partial
from confitune.nn import Backbone, ContinualNet, create_backbone
from confitune.settings import DataSettings, TrainSettings
from confitune.tasks import Progress, TaskSequence

LOCK = ".lock"  # in a run's folder

# From a network, its tasks, its settings and its folder to a listener that measures something on the way; when the run
# is over, its `measured()` says what, by name.
Watch = Callable[[ContinualNet, TaskSequence, TrainSettings, Path], Any]


@dataclass(frozen=True)
class Job:
    """One method of a recipe with one seed; it can be sent to another machine."""

    recipe: Recipe
    out: Path  # the folder of the experiment
    method: str
    seed: int
    weights_sha256: str  # of the network that it starts from
    command: str  # how the run was asked for, for its result
    checkpoint_seconds: float = 30.0  # a run that is killed loses at most this much work and an epoch's
    watch: Watch | None = None  # a class or function of a module, so that other machines find it
    note: str = ""  # which of many runs of the method this is

    @property
    def folder(self) -> Path:
        """Where its checkpoints and logs go; runs of other configurations have others."""
        names = file_name(self.recipe.dataset), file_name(self.method), f"seed-{self.seed}-{self.key[:8]}"
        return self.out.joinpath(WORK, *names)

    @property
    def label(self) -> str:
        """What a person reads beside its progress."""
        seed = f" seed {self.seed}" if self.recipe.seeds > 1 else ""
        note = f" ({self.note})" if self.note else ""
        return f"{self.recipe.dataset} {self.method}{seed}{note}"

    @cached_property
    def config(self) -> dict[str, Any]:
        """What determines its result."""
        return self.recipe.identity(self.method, self.seed, self.weights_sha256)

    @cached_property
    def key(self) -> str:
        """The run's among all finished runs."""
        return run_key(self.config)


class TrainingError(ConfituneError):
    """Runs whose numbers became infinite; `results` are those of the others."""

    def __init__(self, message: str, results: Sequence[RunResult] = ()) -> None:
        super().__init__(message)
        self.results = results


def groups_of(jobs: Sequence[Job], size: int) -> list[list[Job]]:
    """Runs of one method of one recipe, at most so many together: what one process does side by side."""
    groups = []
    for _, alike in groupby(jobs, lambda job: (job.method, job.out, job.recipe)):
        same = list(alike)
        groups += [same[start : start + size] for start in range(0, len(same), size)]
    return groups


def load_backbone(recipe: Recipe) -> Backbone:
    """The recipe's network; a random start (weights 'none') is the same one in every run and after a resume."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return create_backbone(recipe.model, recipe.weights)


def load(job: Job, progress: Progress | None = None) -> tuple[Backbone, TaskSequence]:
    """What runs of one recipe have in common in a process: the network, and the tasks where they will be trained on.

    Refused if the network's weights are not those that the job was planned with.
    """
    recipe = job.recipe
    backbone = load_backbone(job.recipe)
    if backbone.weights_sha256 != job.weights_sha256:
        raise ConfituneError(
            f"the weights of {recipe.model} ({backbone.weights}) are not those that this run was planned with: "
            "the file has changed, or this machine has another one of that name; make them the same"
        )
    device = recipe.torch_device()
    sequence = recipe.load_tasks(backbone.mean, backbone.std, progress)
    for method in map(recipe.method, recipe.methods):  # now, not after others have been trained
        engine.require_scenario(recipe.scenario, method, sequence)
        if method.joint:
            sequence.require_joinable()
    _require_taken(backbone, sequence)
    return backbone, engine.place(sequence, device, recipe.pixels)


@torch.no_grad()
def _require_taken(backbone: Backbone, sequence: TaskSequence) -> None:
    """Refuse images of a size that the network does not take."""
    kinds = {(task.preprocess, task.train.pixels.shape[2:]): task for task in reversed(sequence)}
    for task in kinds.values():
        inputs = task.inputs(task.train.batch(torch.tensor([0]))[0])
        try:
            copy.deepcopy(backbone.module).eval()(inputs)
        except (AssertionError, RuntimeError, ValueError) as error:
            height, width = inputs.shape[2:]
            raise ConfituneError(
                f"{backbone.name} does not take images of {height} x {width} as in task {task.name!r} ({error}): "
                "choose another --model"
            ) from error


def side_by_side(
    group: Sequence[Job], backbone: Backbone, sequence: TaskSequence, listeners: Sequence[Listener], wait: bool
) -> list[RunResult]:
    """Results of runs of one method, which share the device; each is written as soon as it is there.

    Each run has a listener. Where another process works in a run's folder, it is waited for, or the run is refused.
    """
    settings = group[0].recipe.train_settings(0, group[0].method)
    turns = engine.Turns(len(group), apart=engine.steps_of(sequence[0], settings) // len(group))

    def one(job: Job, progress: Listener, turn: Listener) -> RunResult:
        with exclusive(job.folder / LOCK, lambda: None if wait else _refuse(job)) as held:
            if held:
                remove_partial(job.folder)
            # Of the process that was waited for, or that died right after it.
            finished = finished_runs(job.out)
            result = finished.get(job.key)
            if result is None:
                _note_other_images(job, sequence, finished.values(), progress)
                result = _trained(job, backbone, sequence, progress, turn)
                add_result(job.out / RUNS, result)
            return result

    # Switches are the whole process's: set here, they stay while the runs' threads come and go.
    with engine.library_switches(settings, settings.step_mode(settings.torch_device())):
        told = enumerate(zip(group, listeners, strict=True))
        runs = [partial(one, job, progress, turns.listener(turn)) for turn, (job, progress) in told]
        return turns.run(runs) if len(runs) > 1 else [runs[0]()]


def _refuse(job: Job) -> None:
    raise ConfituneError(f"another process is working in {job.folder}; wait for it, or choose another --out folder")


def _trained(job: Job, backbone: Backbone, sequence: TaskSequence, progress: Listener, turn: Listener) -> RunResult:
    folder = job.folder
    method = job.recipe.method(job.method)
    settings = job.recipe.train_settings(job.seed, job.method)
    net = method.network(copy.deepcopy(backbone.module))
    watching = [job.watch(net, sequence, settings, folder)] if job.watch else []
    run = engine.SequenceRun(
        net,
        sequence,
        method,
        settings,
        scenario=job.recipe.scenario,
        pretrained=backbone.module,
        folder=folder,
        config=job.config,
        listeners=(progress, *engine.run_logs(folder), *watching, turn),
        checkpoint_seconds=job.checkpoint_seconds,
        weights=backbone.weights,
        command=job.command,
    )
    run.resume()
    try:
        result = run.run()
        measured = watching[0].measured() if watching else {}
        return result.model_copy(update={"measured": measured, "data": sequence.checksum})
    except engine.DivergedError as error:
        raise TrainingError(str(error)) from error


def _note_other_images(job: Job, sequence: TaskSequence, finished: Iterable[RunResult], listener: Listener) -> None:
    """Say if photos were replaced since finished runs on the same tasks: they cannot be compared with this one."""
    for other in finished:
        same = all(other.config.get(name) == job.config.get(name) for name in DataSettings.model_fields)
        if same and other.data not in (0, sequence.checksum):
            listener.note(f"the images of {sequence.name} are not those of the finished runs in {job.out}")
            return
