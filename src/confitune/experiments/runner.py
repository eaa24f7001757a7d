"""From a recipe to results: every (method, seed) a run in a folder of its own."""

from __future__ import annotations

import copy
import re
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from confitune.engine import (
    CHECKPOINT,
    Checkpoint,
    CsvLog,
    Listener,
    LiveProgress,
    RunResult,
    SequenceRun,
    TensorBoardLog,
    Turns,
    library_switches,
    place,
    progress_board,
    require_same_config,
    steps_of,
)
from confitune.errors import ConfituneError
from confitune.experiments.recipe import Recipe
from confitune.experiments.summary import write_summary
from confitune.nn import Backbone, ContinualNet, create_backbone, require_batch_norm
from confitune.tasks import TaskSequence, load_tasks

RESULT = "result.json"

Run = tuple[str, int]  # method and seed


def run_recipe(
    recipe: Recipe, out: Path, *, resume: bool = False, parallel_seeds: int = 1, console: Console | None = None
) -> list[RunResult]:
    """Run what the recipe asks for and is not done yet; results, logs, summary and pictures go below `out`.

    Args:
        resume: take finished runs as they are and go on with broken-off ones; without it, an `out` that holds any of
            them is refused, so nothing is overwritten.
        parallel_seeds: how many seeds of a method run at once on the device; each gives what it gives alone.
    """
    console = console or Console(quiet=True)
    plan = [(method, seed) for method in recipe.methods for seed in range(recipe.seeds)]
    folders = {run: run_folder(out, recipe.dataset, *run) for run in plan}
    if not resume:
        _refuse_existing(folders.values())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # a random start (weights 'none') is the same one in every run and after a resume
        backbone = create_backbone(recipe.model, recipe.weights)
    if any(recipe.method(name).norm != "shared" for name in recipe.methods):
        require_batch_norm(backbone.module)  # now, not after the methods that do without have been trained
    done = {run: _finished(folder, recipe, run, backbone) for run, folder in folders.items()}
    if any(done.values()):
        write_summary(out)  # a run that was killed right after its result may have left an older one
    left = [run for run in plan if done[run] is None]
    if left:
        device = recipe.train_settings(0).torch_device()
        sequence = place(load_sequence(recipe, backbone, console), device, recipe.pixels)
        for group in _groups(left, parallel_seeds):
            for run, result in zip(group, _run_group(recipe, group, out, backbone, sequence, console), strict=True):
                done[run] = result
            write_summary(out)
    return [result for result in done.values() if result is not None]


def _groups(runs: list[Run], size: int) -> list[list[Run]]:
    """Runs of one method, at most so many together."""
    groups: list[list[Run]] = []
    for run in runs:
        if groups and groups[-1][0][0] == run[0] and len(groups[-1]) < size:
            groups[-1].append(run)
        else:
            groups.append([run])
    return groups


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


def _run_group(
    recipe: Recipe, group: list[Run], out: Path, backbone: Backbone, sequence: TaskSequence, console: Console
) -> list[RunResult]:
    settings = recipe.train_settings(0, group[0][0])
    turns = Turns(len(group), apart=steps_of(sequence[0], settings) // len(group))
    with ExitStack() as stack:
        # Switches are the whole process's: set here, they stay while the runs' threads come and go.
        stack.enter_context(library_switches(settings, settings.step_mode(settings.torch_device())))
        board = stack.enter_context(progress_board(console)) if len(group) > 1 and console.is_terminal else None
        runs = [
            partial(_run_one, recipe, run, out, backbone, sequence, console, board, turns.listener(place))
            for place, run in enumerate(group)
        ]
        return turns.run(runs) if len(runs) > 1 else [runs[0]()]


def _run_one(
    recipe: Recipe,
    run: Run,
    out: Path,
    backbone: Backbone,
    sequence: TaskSequence,
    console: Console,
    board: Progress | None,
    turn: Listener,
) -> RunResult:
    method, seed = recipe.method(run[0]), run[1]
    net = ContinualNet(
        copy.deepcopy(backbone.module),
        norm=method.norm,
        means=recipe.means,
        statistics=recipe.statistics,
        **method.network,
    )
    folder = run_folder(out, recipe.dataset, *run)
    folder.mkdir(parents=True, exist_ok=True)
    label = f"{recipe.dataset} {method.name}" + (f" seed {seed}" if recipe.seeds > 1 else "")
    progress = LiveProgress(console, label, board)
    sequence_run = SequenceRun(
        net,
        sequence,
        method,
        recipe.train_settings(seed, run[0]),
        folder=folder,
        config=recipe.identity(run[0], seed, backbone.weights_sha256),
        listeners=(progress, CsvLog(folder), TensorBoardLog(folder), turn),
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
