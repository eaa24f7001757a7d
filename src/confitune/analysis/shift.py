"""Representational shift of every convolution that a batch norm follows (ConFiT, sec. 4.2, ablation study).

With mu_te^j the true mean of a convolution's output on the TEST set of the first task after training task j, and mu_r^j
the mean that its batch norm uses when that task is tested then, both [C]:

    D0 = ||mu_r^1 - mu_te^1||     how far a running mean is off anyway
    D1 = ||mu_te^1 - mu_te^T||    how far the representation moved
    D2 = ||mu_r^T - mu_te^T||     how far the running mean is off at the end; D2 - D0 is what forgetting added

Euclidean norms over channels. Everything is measured in evaluation mode with the first task's state, so a layer's input
is what the layers before it, normalised as at test time, really give it.
"""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from confitune.analysis.saved import SavedResult
from confitune.engine import Listener, TrainSettings
from confitune.engine.feed import batches
from confitune.errors import ConfituneError
from confitune.files import write_whole
from confitune.methods import METHODS
from confitune.nn import ContinualNet
from confitune.nn.flow import trace_flow
from confitune.tasks import Task, TaskSequence

AFTER_FIRST_TASK = "shift-after-first-task.safetensors"


class ShiftResult(SavedResult):
    """D0, D1 and D2 of each layer, in the order in which the network computes them."""

    dataset: str
    method: str
    seed: int
    task: str  # whose representation was watched: the first
    last_task: str  # after which
    layers: list[str]
    d0: list[float]
    d1: list[float]
    d2: list[float]

    @property
    def added(self) -> list[float]:
        """D2 - D0 of each layer: the running mean's error that came after the first task."""
        return [after - before for after, before in zip(self.d2, self.d0, strict=True)]


def paired_convs(net: ContinualNet, example_input: Tensor | None = None) -> dict[str, str]:
    """Convolution -> the batch norm that reads its output, both by their names in the backbone.

    Args:
        example_input: a batch of two images, needed only where the network's input shape cannot be guessed.
    """
    if net.norm == "calibrated":
        raise ConfituneError(
            "a calibrated network (CCLL) normalises what its calibrations make of a convolution's output, so the "
            "output's mean has no running mean to be compared with; its convolutions never move anyway"
        )
    if net.conversion is not None:
        return {conv: norm for norm, conv in net.conversion.pairs.items()}
    flow = trace_flow(net.backbone, example_input)
    pairs = {}
    for norm, module in net.backbone.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.track_running_stats:
            call, _ = flow.conv_before(norm)
            if call is not None:
                pairs[call.module] = norm
    return pairs


@torch.no_grad()
def output_means(net: ContinualNet, task: Task, settings: TrainSettings | None = None) -> dict[str, Tensor]:
    """True mean of every paired convolution's output on the task's test set: name -> float64 [C], in network order.

    mu[c] = 1 / (N H W) * sum over images and positions of output[n, c, h, w]. The network, its slot included, stays as
    it is: a copy is measured. Convolutions are done in full float32 whatever the settings say, since rounded weights
    would put a gap between the recovered and the true mean that is none of the method's.
    """
    twin = _prepared_copy(net, task.name)
    device = next(twin.parameters()).device
    size = (settings or TrainSettings()).eval_batch_size
    sums: dict[str, Tensor] = {}
    counts: Counter[str] = Counter()

    def adding(name: str) -> Callable[[nn.Module, Any, Tensor], None]:
        def hook(module: nn.Module, args: Any, output: Tensor) -> None:
            total = output.sum([axis for axis in range(output.dim()) if axis != 1], dtype=torch.float64)
            sums[name] = sums[name] + total if name in sums else total
            counts[name] += output.numel() // output.shape[1]

        return hook

    for name in paired_convs(twin, _two_images(task)):
        twin.backbone.get_submodule(name).register_forward_hook(adding(name))
    with _full_precision(device):
        for pixels, _ in batches(task.test, size, device):
            twin(task.inputs(pixels))
    if not sums:
        raise ConfituneError(f"no batch norm of {type(net.backbone).__name__} follows a convolution: nothing to watch")
    return {name: (total / counts[name]).cpu() for name, total in sums.items()}


@torch.no_grad()
def running_means(net: ContinualNet, task: str, example_input: Tensor | None = None) -> dict[str, Tensor]:
    """The mean that each paired convolution's batch norm uses to test `task` now: name -> float64 [C].

    Recovered through today's weights for Xconv BN, the stored one for task-specific BN, the shared one for shared BN.
    The network stays as it is.
    """
    twin = _prepared_copy(net, task)
    norms = {conv: twin.backbone.get_submodule(norm) for conv, norm in paired_convs(twin, example_input).items()}
    return {conv: norm.get_buffer("running_mean").double().cpu() for conv, norm in norms.items()}


@dataclass(frozen=True)
class _Means:
    true: dict[str, Tensor]
    running: dict[str, Tensor]

    def write(self, path: Path, task: str) -> None:
        tensors = {f"true/{name}": mean for name, mean in self.true.items()}
        tensors |= {f"running/{name}": mean for name, mean in self.running.items()}
        described = {"task": task, "layers": json.dumps(list(self.true))}  # tensors of a file have no order
        write_whole(path, lambda out: out.write(save(tensors, described)))

    @classmethod
    def read(cls, path: Path, task: str) -> _Means:
        try:
            with safe_open(path, "pt") as file:
                described = file.metadata() or {}
                layers = json.loads(described["layers"])
                true, running = ({n: file.get_tensor(f"{kind}/{n}") for n in layers} for kind in ("true", "running"))
        except (OSError, SafetensorError, KeyError, ValueError, TypeError, RecursionError) as error:
            raise ConfituneError(f"{path} cannot be read ({error}): start this run anew for this analysis") from error
        if described.get("task") != task:
            raise ConfituneError(
                f"{path} was measured on task {described.get('task')!r}, this run began with {task!r}: start it anew"
            )
        return cls(true, running)


class ShiftRecorder(Listener):
    """Measures a run after its first and after its last task; give it to the `SequenceRun` as a listener.

    Args:
        net: the network that is trained.
        sequence: its tasks.
        settings: of the run.
        folder: the run's folder, where what was measured after the first task waits for a run that is broken off and
            resumed; without one, only a run that is not broken off can be measured.
    """

    def __init__(
        self, net: ContinualNet, sequence: TaskSequence, settings: TrainSettings, folder: Path | None = None
    ) -> None:
        self._net, self._sequence, self._settings = net, sequence, settings
        self._path = None if folder is None else folder / AFTER_FIRST_TASK
        self._method = ""
        self._first: _Means | None = None
        self._last: _Means | None = None

    def run_started(self, name: str, tasks: Sequence[str], epochs: int, first_task: int) -> None:
        self._method = name
        own = [task.name for task in self._sequence]
        method = METHODS.get(name)
        if list(tasks) != own or (method is not None and method.separate):
            raise ConfituneError(
                f"{name!r} has no network that learns {own[0]!r} and then the other tasks: no shift to be measured"
            )
        if first_task == 0:
            self._first = self._last = None
            if self._path is not None:
                self._path.unlink(missing_ok=True)  # of a run that was here before
        elif self._first is None:
            self._first = self._remembered()
        if first_task == len(own):
            self._last = self._measure()  # broken off between the last task and its result

    def task_ended(self, task: int, accuracies: Sequence[float]) -> None:
        if task == 0:
            self._first = self._measure()
            if self._path is not None:
                self._first.write(self._path, self._sequence[0].name)
        if task == len(self._sequence) - 1:
            self._last = self._measure()

    def result(self) -> ShiftResult:
        """What was measured, once the run is over."""
        if self._first is None or self._last is None:
            raise ConfituneError("the shift is known after the last task: run a SequenceRun that listens with this")
        first, last, layers = self._first, self._last, list(self._last.true)
        if set(layers) != set(first.true):
            raise ConfituneError(
                f"{self._path} is of another network: it has the layers {list(first.true)}, this one {layers}; "
                "start this run anew for this analysis"
            )
        return ShiftResult(
            dataset=self._sequence.name,
            method=self._method,
            seed=self._settings.seed,
            task=self._sequence[0].name,
            last_task=self._sequence[-1].name,
            layers=layers,
            d0=[_distance(first.running[name], first.true[name]) for name in layers],
            d1=[_distance(first.true[name], last.true[name]) for name in layers],
            d2=[_distance(last.running[name], last.true[name]) for name in layers],
        )

    def _measure(self) -> _Means:
        task = self._sequence[0]
        return _Means(
            output_means(self._net, task, self._settings), running_means(self._net, task.name, _two_images(task))
        )

    def _remembered(self) -> _Means:
        if self._path is None or not self._path.exists():
            where = "it was given no folder" if self._path is None else f"{self._path} is missing"
            raise ConfituneError(
                f"this run goes on after its first task, and what the shift was measured from then is not there "
                f"({where}): start the run anew for this analysis, or resume it without"
            )
        return _Means.read(self._path, self._sequence[0].name)


def _prepared_copy(net: ContinualNet, task: str) -> ContinualNet:
    twin = copy.deepcopy(net).eval()
    twin.prepare(task)
    return twin


def _two_images(task: Task) -> Tensor:
    pixels, _ = task.test.batch(torch.arange(len(task.test))[[0, -1]])
    return task.preprocess(pixels)


def _distance(a: Tensor, b: Tensor) -> float:
    return float(torch.linalg.vector_norm(a - b))


@contextmanager
def _full_precision(device: torch.device) -> Iterator[None]:
    """Within, no autocast that a caller may have on, and no TensorFloat32 in convolutions."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        torch.backends.cudnn.allow_tf32 = before
