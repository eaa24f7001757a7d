"""Learn a sequence of tasks and measure what is forgotten on the way."""

import copy
import hashlib
import json
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from confitune.engine.capture import Executor
from confitune.engine.checkpoint import Checkpoint, fitting
from confitune.engine.context import epochs_of
from confitune.engine.evaluation import evaluate_all, evaluate_joined, right_answers
from confitune.engine.events import EpochEnd, Listener, Listeners
from confitune.engine.label_space import LabelSpace, require_scenario
from confitune.engine.result import RunResult, command_line, device_name, summary_of, versions
from confitune.engine.training import TaskFit
from confitune.errors import ConfituneError
from confitune.methods import Method
from confitune.nn import ContinualNet, state_sha256
from confitune.settings import Scenario, TrainSettings
from confitune.tasks import Task, TaskSequence


class SequenceRun(Listener):
    """One method on one sequence of tasks with one seed; it listens to itself, to count what it was trained on.

    Args:
        net: a fresh network with the method's parts; it is trained in place.
        sequence: its pixels where they are to lie, see `place`.
        scenario: whether the task of a test image is given, see `LabelSpace` for where it is not.
        pretrained: the backbone without the method's parts, for features; default: with those of a fresh network.
        folder: where checkpoints go; None keeps none.
        config: what identifies the computation, for `resume` to compare.
        checkpoint_seconds: a checkpoint is written after a task or an epoch when the last one is this old.
        command: how the run was asked for; default: the command line of this process.
    """

    def __init__(
        self,
        net: ContinualNet,
        sequence: TaskSequence,
        method: Method,
        settings: TrainSettings,
        *,
        scenario: Scenario = "task",
        pretrained: nn.Module | None = None,
        folder: Path | None = None,
        config: dict[str, Any] | None = None,
        listeners: tuple[Listener, ...] = (),
        checkpoint_seconds: float = 30.0,
        weights: str = "",
        command: str | None = None,
    ) -> None:
        require_scenario(scenario, method, sequence)
        self.net, self.method, self.settings, self.scenario = net, method, settings, scenario
        self.original = sequence
        self.sequence = sequence.joined(by_name=scenario != "task") if method.joint else sequence
        self.folder = folder
        self.checkpoint_seconds = checkpoint_seconds
        self.weights, self.command = weights, command
        # What the network, the methods and the task's training know themselves is left out until it is saved.
        matrix = [[math.nan] * len(sequence) for _ in sequence]
        self.state = Checkpoint(config or {}, task=0, net={}, fit=None, hooks=[], matrix=matrix, as_learned=[])
        self.weights_sha256 = self.state.config.get("weights_sha256") or state_sha256(net.backbone)
        self._just_learned: Tensor | None = None  # accuracy of a task as learned, not yet read from the device
        self.listener = Listeners((*listeners, self))
        self._pristine = copy.deepcopy(net.backbone.state_dict()) if method.separate else None
        self._executor = Executor(net, settings, self.listener)
        self.device = self._executor.device
        without_task = scenario != "task" and not method.joint
        self._space = LabelSpace(pretrained or net, settings) if without_task or method.sums_only else None
        self._checkpointed_at = 0.0

    def resume(self) -> bool:
        """Go on from the folder's checkpoint, if there is one."""
        checkpoint = Checkpoint.load(self.folder, self.state.config, self.listener.note) if self.folder else None
        if self.folder is None or checkpoint is None:
            return False
        if checkpoint.data not in (0, self.original.checksum):
            raise ConfituneError(
                f"the images of {self.original.name} are not those that the run in {self.folder} was begun with: bring "
                "them back, or choose another --out folder"
            )
        if checkpoint.threads not in (0, threads := torch.get_num_threads()):
            self.listener.note(f"begun with {checkpoint.threads} threads, now {threads}: last digits may differ")
        with fitting(self.folder):
            self.net.load_state_dict(checkpoint.net)
            for hook, state in zip(self.method.hooks, checkpoint.hooks, strict=True):
                hook.load_state_dict(state)
            shape = np.array(checkpoint.matrix, dtype=np.float64).shape
            if shape != (len(self.original),) * 2 or not 0 <= checkpoint.task <= len(self.sequence):
                raise ValueError(f"it has {checkpoint.task} tasks done and accuracies {list(shape)}")
        self.state = replace(checkpoint, config=self.state.config, net={}, hooks=[])
        return True

    def run(self) -> RunResult:
        """Learn what is left of the sequence."""
        self._started = time.perf_counter() - self.state.seconds
        self._checkpointed_at = self.state.seconds
        usually_first = self.method.stages(10, 0)[0].name
        if usually_first == "head" and self.method.stages(self.settings.epochs, 0)[0].name != "head":
            self.listener.note(f"with {self.settings.epochs} epochs no stage is left for the head alone; use more")
        names = [task.name for task in self.sequence]
        epochs = max(epochs_of(task, self.settings) for task in self.sequence)
        self.listener.run_started(self.method.name, names, epochs, self.state.task)
        with self._executor.session():
            for index in range(self.state.task, len(self.sequence)):
                self._learn(index, self.sequence[index])
        return self._result()

    def _learn(self, index: int, task: Task) -> None:
        if self._pristine is not None and self.state.fit is None:
            self.net.backbone.load_state_dict(self._pristine)
            self.net.weights_moved()
        fit = TaskFit(self._executor, task, self.method, index)
        if self.state.fit is not None:
            assert self.folder is not None
            with fitting(self.folder):
                fit.load_state_dict(self.state.fit)
                if not 0 <= fit.epoch <= fit.epochs:
                    raise ValueError(f"{fit.epoch} epochs are done, of {fit.epochs}")
            self.state.fit = None
        self.listener.task_started(index, task.name, fit.epoch)
        fit.fit(after_epoch=lambda: self._after_epoch(fit))
        accuracies = self._evaluate(index)
        for row, accuracy in zip(self.state.matrix, accuracies, strict=False):
            row[-1 if self.method.joint else index] = accuracy
        if self._just_learned is not None:
            self.state.as_learned.append(100.0 * self._just_learned.item())
            self._just_learned = None
        self.state.task = index + 1
        # Logs first: a run killed in between does the task again, and logs then drop what they have of it.
        self.listener.task_ended(index, accuracies)
        if self._checkpoint_due():
            self._checkpoint(None)

    def epoch_ended(self, end: EpochEnd) -> None:
        self.state.train_seconds += end.seconds
        self.state.images += end.images

    def _after_epoch(self, fit: TaskFit) -> None:
        if fit.epoch == fit.epochs and self.net.observer.tracks and self.scenario == "task":
            self._just_learned = right_answers(self.net, self.sequence[fit.index], self.settings).double().mean()
        if fit.epoch < fit.epochs and self._checkpoint_due():
            fit.report()  # what is in the checkpoint must be finite, and in the logs
            self._checkpoint(fit)

    def _checkpoint_due(self) -> bool:
        passed = time.perf_counter() - self._started - self._checkpointed_at
        return self.folder is not None and passed >= self.checkpoint_seconds

    def _evaluate(self, index: int) -> list[float]:
        """Accuracy in percent on each task so far; joint training has learned them all."""
        tasks = self.sequence.tasks[: index + 1]
        if self.method.joint:
            return evaluate_joined(self.net, tasks[0], self.original.tasks, self.settings)
        if self._space is not None:
            given = self.scenario == "task"
            return self._space.accuracies(self.net, tasks, given, self.method, self.listener)
        if self.method.separate:
            # Earlier networks were left as they were: there is nothing to measure again.
            before = [row[index - 1] for row in self.state.matrix[:index]]
            return before + evaluate_all(self.net, tasks[index:], self.settings, self.listener)
        return evaluate_all(self.net, tasks, self.settings, self.listener)

    def _checkpoint(self, fit: TaskFit | None) -> None:
        assert self.folder is not None
        self.state.seconds = self._checkpointed_at = time.perf_counter() - self._started
        replace(
            self.state,
            net=self.net.state_dict(),
            fit=fit.state_dict() if fit else None,
            hooks=[hook.state_dict() for hook in self.method.hooks],
            data=self.original.checksum,
            threads=torch.get_num_threads(),
        ).save(self.folder)

    def _result(self) -> RunResult:
        state = self.state
        state.seconds = time.perf_counter() - self._started
        backbone = sum(p.numel() for p in self.net.backbone.parameters())
        storage = self.net.storage()
        tasks = [
            {
                "name": task.name,
                "classes": list(task.classes),
                "train_images": len(task.train),
                "test_images": len(task.test),
                "norm_numbers": storage[task.name].beside_head + (backbone if self.method.separate else 0),
                "head_numbers": storage[task.name].parts["head"],
                **({"choice": self.method.choices[task.name]} if task.name in self.method.choices else {}),
            }
            for task in self.sequence
        ]
        return RunResult(
            dataset=self.original.name,
            method=self.method.name,
            seed=self.settings.seed,
            **summary_of(np.array(state.matrix)),
            as_learned=state.as_learned or None,
            tasks=tasks,
            config=state.config,
            versions=versions(),
            device=device_name(self.device),
            execution=self.settings.execution(self.device),
            weights=self.weights,
            weights_sha256=self.weights_sha256,
            final_sha256=network_sha256(self.net),
            seconds=round(state.seconds, 3),
            images_per_second=round(state.images / max(state.train_seconds, 1e-9), 1),
            command=self.command or command_line(),
        )


def network_sha256(net: ContinualNet) -> str:
    """One hash over the backbone and every task's row."""
    net.prepare(list(net.tasks)[-1])  # whose state is live must not matter
    digest = hashlib.sha256(state_sha256(net.backbone).encode())
    for name, entry in net.tasks.items():
        sizes = [list(fact[:2]) if fact[0] else None for fact in entry.facts.values()]
        digest.update(json.dumps([name, entry.classes, entry.finished, sizes]).encode())
        digest.update(entry.row.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
