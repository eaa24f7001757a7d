"""From a recipe to results: every (method, seed) a run in a folder of its own."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from rich.console import Console

from confitune.engine import BEFORE, CHECKPOINT, Checkpoint, RunResult, decoding_bar, place, require_same_config
from confitune.errors import ConfituneError
from confitune.experiments.local import RESULT, LocalRuns, Run, Watch, run_folder
from confitune.experiments.recipe import Recipe
from confitune.experiments.summary import write_summary
from confitune.files import require_writable
from confitune.nn import Backbone, create_backbone, require_batch_norm
from confitune.tasks import TaskSequence


def run_recipe(
    recipe: Recipe,
    out: Path,
    *,
    resume: bool = False,
    parallel_seeds: int = 1,
    checkpoint_seconds: float = 30.0,
    watch: Watch | None = None,
    console: Console | None = None,
) -> list[RunResult]:
    """Run what the recipe asks for and is not done yet; results, logs, summary and pictures go below `out`.

    Args:
        resume: take finished runs as they are and go on with broken-off ones; without it, an `out` that holds any of
            them is refused, so nothing is overwritten.
        parallel_seeds: how many seeds of a method run at once on the device; each gives what it gives alone.
        checkpoint_seconds: a run that is killed loses at most this much work and an epoch's.
        watch: makes listeners that measure something while a run goes on.
    """
    console = console or Console(quiet=True)
    plan = [(method, seed) for method in recipe.methods for seed in range(recipe.seeds)]
    folders = {run: run_folder(out, recipe.dataset, *run) for run in plan}
    if not resume:
        refuse_existing(folders.values())
    backbone = load_backbone(recipe)
    if any(recipe.method(name).norm != "shared" for name in recipe.methods):
        require_batch_norm(backbone.module)  # now, not after the methods that do without have been trained
    done = {run: _finished(folder, recipe, run, backbone) for run, folder in folders.items()}
    if any(done.values()):
        write_summary(out)  # a run that was killed right after its result may have left an older one
    left = [run for run in plan if done[run] is None]
    if left:
        require_writable(out)
        device = recipe.train_settings(0).torch_device()
        sequence = place(load_sequence(recipe, backbone, console), device, recipe.pixels)
        runs = LocalRuns(recipe, out, backbone, sequence, console, checkpoint_seconds, watch)
        for group in _groups(left, parallel_seeds):
            done.update(zip(group, runs.side_by_side(group), strict=True))
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


def load_backbone(recipe: Recipe) -> Backbone:
    """The recipe's network; a random start (weights 'none') is the same one in every run and after a resume."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return create_backbone(recipe.model, recipe.weights)


def load_sequence(recipe: Recipe, backbone: Backbone, console: Console) -> TaskSequence:
    """The recipe's tasks, with a progress bar while images are decoded."""
    with decoding_bar(console) as bar:
        sequence = recipe.load_tasks(backbone.mean, backbone.std, bar)
    return sequence.validating(recipe.held_out, recipe.order_seed) if recipe.held_out is not None else sequence


def _finished(folder: Path, recipe: Recipe, run: Run, backbone: Backbone) -> RunResult | None:
    config = recipe.identity(*run, backbone.weights_sha256)
    if (folder / RESULT).exists():
        result = RunResult.load(folder / RESULT)
        require_same_config(result.config, config, folder / RESULT)
        return result
    Checkpoint.load(folder, config)  # one of another configuration is refused before any work is done
    return None


def refuse_existing(folders: Iterable[Path]) -> None:
    """Refuse to write where a run is, finished or not."""
    for folder in folders:
        for name, what in ((RESULT, "a finished run"), (CHECKPOINT, "a broken-off run"), (BEFORE, "a broken-off run")):
            if (folder / name).exists():
                raise ConfituneError(
                    f"{folder} holds {what}: add --resume to take it as it is and go on, or choose another --out folder"
                )
