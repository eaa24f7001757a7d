"""Runs of a recipe on this machine, one at a time or several seeds side by side."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from confitune.engine import (
    CsvLog,
    DivergedError,
    Listener,
    LiveProgress,
    RunResult,
    SequenceRun,
    TensorBoardLog,
    TrainSettings,
    Turns,
    library_switches,
    progress_board,
    steps_of,
)
from confitune.errors import ConfituneError
from confitune.experiments.recipe import Recipe
from confitune.nn import Backbone, ContinualNet
from confitune.ranks import Ranks
from confitune.tasks import TaskSequence, exclusive

RESULT, LOCK = "result.json", ".lock"

Run = tuple[str, int]  # method and seed
# From a network, its tasks, its settings and its folder to listeners that measure something on the way.
Watch = Callable[[ContinualNet, TaskSequence, TrainSettings, Path], Sequence[Listener]]


class TrainingError(ConfituneError):
    """A run whose numbers became infinite.

    Attributes:
        config: the run's identity.
    """

    def __init__(self, message: str, config: dict[str, Any]) -> None:
        super().__init__(message)
        self.config = config


@dataclass(frozen=True)
class LocalRuns:
    """What the runs of one recipe have in common."""

    recipe: Recipe
    out: Path
    backbone: Backbone
    sequence: TaskSequence  # where it will be trained on
    console: Console
    checkpoint_seconds: float
    watch: Watch | None = None
    ranks: Ranks = field(default_factory=Ranks)  # who does each run together; the first one writes

    def side_by_side(self, group: Sequence[Run]) -> list[RunResult]:
        """Results of runs of one method, which share the device; each is written as soon as it is there."""
        settings = self.recipe.train_settings(0, group[0][0])
        turns = Turns(len(group), apart=steps_of(self.sequence[0], settings) // len(group))
        with ExitStack() as stack:
            # Switches are the whole process's: set here, they stay while the runs' threads come and go.
            mode = settings.step_mode(settings.torch_device(), self.ranks.size)
            stack.enter_context(library_switches(settings, mode))
            several = len(group) > 1 and self.console.is_terminal
            board = stack.enter_context(progress_board(self.console)) if several else None
            runs = [partial(self._one, run, board, turns.listener(place)) for place, run in enumerate(group)]
            return turns.run(runs) if len(runs) > 1 else [runs[0]()]

    def _one(self, run: Run, board: Progress | None, turn: Listener) -> RunResult:
        folder = run_folder(self.out, self.recipe.dataset, *run)

        def busy() -> None:
            raise ConfituneError(f"another process is working in {folder}; wait for it, or choose another --out folder")

        with exclusive(folder / LOCK, busy) if self.ranks.first else nullcontext():
            return self._alone(run, folder, board, turn)

    def _alone(self, run: Run, folder: Path, board: Progress | None, turn: Listener) -> RunResult:
        recipe, (name, seed) = self.recipe, run
        method = recipe.method(name)
        net = ContinualNet(copy.deepcopy(self.backbone.module), **recipe.network(name))
        net.ranks = self.ranks
        label = f"{recipe.dataset} {name}" + (f" seed {seed}" if recipe.seeds > 1 else "")
        progress = LiveProgress(self.console, label, board)
        config = recipe.identity(name, seed, self.backbone.weights_sha256)
        settings = recipe.train_settings(seed, name)
        watching = self.watch(net, self.sequence, settings, folder) if self.watch else ()
        writing = (progress, CsvLog(folder), TensorBoardLog(folder)) if self.ranks.first else ()
        sequence_run = SequenceRun(
            net,
            self.sequence,
            method,
            settings,
            folder=folder,
            config=config,
            listeners=(*writing, *watching, turn),
            checkpoint_seconds=self.checkpoint_seconds,
            weights=self.backbone.weights,
        )
        sequence_run.resume()
        try:
            result = sequence_run.run()
        except DivergedError as error:
            raise TrainingError(str(error), config) from error
        finally:
            progress.close()
        if self.ranks.first:
            result.save(folder / RESULT)
        return result


def run_folder(out: Path, dataset: str, method: str, seed: int) -> Path:
    """`out/<dataset>/<method>/seed-<k>`; a dataset's path becomes a plain name."""
    return out / re.sub(r"[^A-Za-z0-9._+-]+", "-", dataset).strip("-.") / method / f"seed-{seed}"
