"""Learn a sequence of tasks and measure what is forgotten on the way."""

from __future__ import annotations

import copy
import hashlib
import json
import time
from pathlib import Path
from typing import Any

import numpy as np

from confitune.engine.batches import resident
from confitune.engine.checkpoint import Checkpoint
from confitune.engine.evaluation import evaluate, evaluate_groups
from confitune.engine.events import EpochEnd, Listener, Listeners
from confitune.engine.result import RunResult, command_line, device_name, summary_of, versions
from confitune.engine.settings import TrainSettings
from confitune.engine.training import TaskFit
from confitune.methods import Method, hierarchical
from confitune.nn import ContinualNet, state_sha256
from confitune.tasks import Images, Task, TaskSequence


class SequenceRun:
    """One method on one sequence of tasks with one seed.

    Args:
        net: a fresh network with the method's kind of batch norm; it is trained in place.
        folder: where checkpoints go; None keeps none.
        config: what identifies the computation, for `resume` to compare.
        checkpoint_epochs: a checkpoint is written after each task and every so many epochs within one.
    """

    def __init__(
        self,
        net: ContinualNet,
        sequence: TaskSequence,
        method: Method,
        settings: TrainSettings,
        *,
        folder: Path | None = None,
        config: dict[str, Any] | None = None,
        listeners: tuple[Listener, ...] = (),
        checkpoint_epochs: int = 5,
        weights: str = "",
    ) -> None:
        self.net, self.method, self.settings = net, method, settings
        self.original = sequence
        self.sequence = sequence.joined() if method.joint else sequence
        self.folder = folder
        self.config = config or {}
        self.checkpoint_epochs = checkpoint_epochs
        self.weights = weights
        self.weights_sha256 = state_sha256(net.backbone)
        self.device = settings.torch_device()
        self.matrix = np.full((len(sequence), len(sequence)), np.nan)
        self.task = 0
        self.seconds = self.train_seconds = 0.0
        self.images = 0
        self.listener = Listeners((*listeners, _Counter(self)))
        self._pristine = copy.deepcopy(net.backbone.state_dict()) if method.separate else None
        self._saved_fit: dict[str, Any] | None = None
        self._test_sets: dict[str, Images] = {}

    def resume(self) -> bool:
        """Go on from the folder's checkpoint, if there is one."""
        checkpoint = Checkpoint.load(self.folder, self.config) if self.folder else None
        if checkpoint is None:
            return False
        self.net.to(self.device)
        self.net.load_state_dict(checkpoint.net)
        for penalty, state in zip(self.method.penalties, checkpoint.penalties, strict=True):
            penalty.load_state_dict(state)
        self.task, self._saved_fit = checkpoint.task, checkpoint.fit
        self.matrix = np.array(checkpoint.matrix)
        self.seconds, self.train_seconds, self.images = checkpoint.seconds, checkpoint.train_seconds, checkpoint.images
        return True

    def run(self) -> RunResult:
        """Learn what is left of the sequence."""
        self._started = time.perf_counter() - self.seconds
        self._say_what_is_odd()
        names = [task.name for task in self.sequence]
        self.listener.run_started(self.method.name, names, self.settings.epochs, self.task)
        for index in range(self.task, len(self.sequence)):
            self._learn(index, self.sequence[index])
        return self._result()

    def _learn(self, index: int, task: Task) -> None:
        if self._pristine is not None and self._saved_fit is None:
            self.net.backbone.load_state_dict(self._pristine)
            self.net.weights_moved()
        fit = TaskFit(self.net, task, self.method, self.settings, self.listener, index)
        if self._saved_fit is not None:
            fit.load_state_dict(self._saved_fit)
            self._saved_fit = None
        self.listener.task_started(index, task.name, fit.epoch)
        fit.run(after_epoch=lambda: self._after_epoch(fit))
        self._evaluate(index)
        self.task = index + 1
        # Logs first: a run killed in between does the task again, and logs then drop what they have of it.
        self.listener.task_ended(index, [a for a in self.matrix[:, self._column(index)] if not np.isnan(a)])
        self._checkpoint(None)

    def _after_epoch(self, fit: TaskFit) -> None:
        if fit.epoch % self.checkpoint_epochs == 0 and fit.epoch < self.settings.epochs:
            self._checkpoint(fit)

    def _column(self, index: int) -> int:
        return len(self.original) - 1 if self.method.joint else index

    def _evaluate(self, index: int) -> None:
        if self.method.joint:
            task = self.sequence[0]
            self.matrix[:, -1] = evaluate_groups(self.net, task, self.settings, self._test_set(task))
            return
        for earlier in range(index + 1):
            if self.method.separate and earlier < index:
                # Its network was left as it was: there is nothing to measure again.
                self.matrix[earlier, index] = self.matrix[earlier, index - 1]
                continue
            task = self.sequence[earlier]
            self.matrix[earlier, index] = evaluate(self.net, task, self.settings, images=self._test_set(task))

    def _test_set(self, task: Task) -> Images:
        if task.name not in self._test_sets:
            self._test_sets[task.name] = resident(task.test, self.device)
        return self._test_sets[task.name]

    def _checkpoint(self, fit: TaskFit | None) -> None:
        if self.folder is None:
            return
        self.seconds = time.perf_counter() - self._started
        Checkpoint(
            config=self.config,
            task=self.task,
            net=self.net.state_dict(),
            fit=fit.state_dict() if fit else None,
            penalties=[penalty.state_dict() for penalty in self.method.penalties],
            matrix=self.matrix.tolist(),
            seconds=self.seconds,
            train_seconds=self.train_seconds,
            images=self.images,
        ).save(self.folder)

    def _say_what_is_odd(self) -> None:
        stages = self.method.schedule(self.settings.epochs)
        if self.method.schedule is hierarchical and stages[0].name != "head":
            self.listener.note(f"with {self.settings.epochs} epochs no stage is left for the head alone; use 5 or more")

    def _result(self) -> RunResult:
        self.seconds = time.perf_counter() - self._started
        backbone = sum(p.numel() for p in self.net.backbone.parameters())
        storage = self.net.storage()
        tasks = [
            {
                "name": task.name,
                "classes": list(task.classes),
                "train_images": len(task.train),
                "test_images": len(task.test),
                "norm_numbers": storage[task.name].norm_numbers + (backbone if self.method.separate else 0),
                "head_numbers": storage[task.name].head_numbers,
            }
            for task in self.sequence
        ]
        return RunResult(
            dataset=self.original.name,
            method=self.method.name,
            seed=self.settings.seed,
            **summary_of(self.matrix),
            tasks=tasks,
            config=self.config,
            versions=versions(),
            device=device_name(self.device),
            weights=self.weights,
            weights_sha256=self.weights_sha256,
            final_sha256=network_sha256(self.net),
            seconds=round(self.seconds, 3),
            images_per_second=round(self.images / max(self.train_seconds, 1e-9), 1),
            command=command_line(),
        )


class _Counter(Listener):
    def __init__(self, run: SequenceRun) -> None:
        self._run = run

    def epoch_ended(self, end: EpochEnd) -> None:
        self._run.train_seconds += end.seconds
        self._run.images += end.images


def network_sha256(net: ContinualNet) -> str:
    """One hash over the shared weights and every task's row."""
    net.prepare(net.last_task)  # whose state is live must not matter
    digest = hashlib.sha256(state_sha256(net.backbone).encode())
    for name, entry in net.tasks.items():
        digest.update(json.dumps([name, entry.classes, entry.finished, entry.sizes]).encode())
        digest.update(entry.row.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
