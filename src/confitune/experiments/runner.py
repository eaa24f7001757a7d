"""From a recipe to results: every (method, seed) a run in a folder of its own."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from confitune.engine import (
    CHECKPOINT,
    Checkpoint,
    CsvLog,
    LiveProgress,
    RunResult,
    SequenceRun,
    TensorBoardLog,
    require_same_config,
)
from confitune.errors import ConfituneError
from confitune.experiments.recipe import Recipe
from confitune.experiments.summary import write_summary
from confitune.methods import create_method
from confitune.nn import Backbone, ContinualNet, create_backbone, require_batch_norm
from confitune.tasks import TaskSequence, load_tasks

RESULT = "result.json"


def run_recipe(recipe: Recipe, out: Path, *, resume: bool = False, console: Console | None = None) -> list[RunResult]:
    """Run what the recipe asks for and is not done yet; results, logs, summary and pictures go below `out`.

    Args:
        resume: take finished runs as they are and go on with broken-off ones; without it, an `out` that holds any of
            them is refused, so nothing is overwritten.
    """
    console = console or Console(quiet=True)
    plan = [(method, seed) for method in recipe.methods for seed in range(recipe.seeds)]
    folders = {run: run_folder(out, recipe.dataset, *run) for run in plan}
    if not resume:
        _refuse_existing(folders.values())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # a random start (weights 'none') is the same one in every run and after a resume
        backbone = create_backbone(recipe.model, recipe.weights)
    if any(create_method(name).norm != "shared" for name in recipe.methods):
        require_batch_norm(backbone.module)  # now, not after the methods that do without have been trained
    done = {run: _finished(folder, recipe, run, backbone) for run, folder in folders.items()}
    if any(done.values()):
        write_summary(out)  # a run that was killed right after its result may have left an older one
    results = []
    sequence: TaskSequence | None = None
    for run, folder in folders.items():
        result = done[run]
        if result is None:
            sequence = sequence or load_sequence(recipe, backbone, console)
            result = _run_one(recipe, run, folder, backbone, sequence, console)
            write_summary(out)
        results.append(result)
    return results


def run_folder(out: Path, dataset: str, method: str, seed: int) -> Path:
    """`out/<dataset>/<method>/seed-<k>`; a dataset's path becomes a plain name."""
    return out / re.sub(r"[^A-Za-z0-9._+-]+", "-", dataset).strip("-.") / method / f"seed-{seed}"


def load_sequence(recipe: Recipe, backbone: Backbone, console: Console) -> TaskSequence:
    """The recipe's tasks, with a progress bar while images are decoded."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        lines: dict[str, int] = {}

        def show(what: str, done: int, total: int) -> None:
            if what not in lines:
                lines[what] = bar.add_task(what, total=total)
            bar.update(lines[what], completed=done)  # type: ignore[arg-type]

        return load_tasks(
            recipe.dataset,
            mean=backbone.mean,
            std=backbone.std,
            data_dir=recipe.data_dir,
            cache_dir=recipe.cache_dir,
            pipeline=recipe.pipeline,
            order_seed=recipe.order_seed,
            tasks=recipe.tasks,
            classes_per_task=recipe.classes_per_task,
            progress=show,
        )


def _run_one(
    recipe: Recipe, run: tuple[str, int], folder: Path, backbone: Backbone, sequence: TaskSequence, console: Console
) -> RunResult:
    method, seed = create_method(run[0]), run[1]
    net = ContinualNet(
        copy.deepcopy(backbone.module), norm=method.norm, means=recipe.means, statistics=recipe.statistics
    )
    folder.mkdir(parents=True, exist_ok=True)
    progress = LiveProgress(console, f"{recipe.dataset} {method.name}" + (f" seed {seed}" if recipe.seeds > 1 else ""))
    sequence_run = SequenceRun(
        net,
        sequence,
        method,
        recipe.train_settings(seed),
        folder=folder,
        config=recipe.identity(run[0], seed, backbone.weights_sha256),
        listeners=(progress, CsvLog(folder), TensorBoardLog(folder)),
        weights=backbone.weights,
    )
    sequence_run.resume()
    try:
        result = sequence_run.run()
    finally:
        progress.close()
    result.save(folder / RESULT)
    return result


def _finished(folder: Path, recipe: Recipe, run: tuple[str, int], backbone: Backbone) -> RunResult | None:
    config = recipe.identity(*run, backbone.weights_sha256)
    if (folder / RESULT).exists():
        result = RunResult.load(folder / RESULT)
        require_same_config(result.config, config, folder / RESULT)
        return result
    Checkpoint.check(folder, config)  # one of another configuration is refused before any work is done
    return None


def _refuse_existing(folders) -> None:  # type: ignore[no-untyped-def]
    for folder in folders:
        for name, what in ((RESULT, "a finished run"), (CHECKPOINT, "a broken-off run")):
            if (folder / name).exists():
                raise ConfituneError(
                    f"{folder} holds {what}: add --resume to take it as it is and go on, or choose another --out folder"
                )
