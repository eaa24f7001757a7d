"""Representational shift of every convolution that a batch norm follows (ConFiT, sec. 4.2.2, ablation study).

With mu_te^j the true mean of a convolution's output on the TEST set of the first task after training task j, and mu_r^j
the one that its batch norm uses when that task is tested then, both [C], the paper measures

    D0 = ||mu_r^1 - mu_te^1||     how far a running mean is off anyway
    D1 = ||mu_te^1 - mu_te^T||    how far the representation moved
    D2 = ||mu_r^T - mu_te^T||     how far the running mean is off at the end; D2 - D0 is what forgetting added

Euclidean norms over channels. True means are over all images and pixels, measured in evaluation mode with the task's
state, so a layer's input is what the layers before it, normalised as at test time, really give it. Used ones are
recovered through today's weights, stored or shared, as the network's kind has it.
"""

import copy
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from confitune.analysis.moments import Moments
from confitune.analysis.transductive import transductive_accuracy
from confitune.engine import Listener, TrainSettings
from confitune.engine.feed import batches
from confitune.errors import ConfituneError
from confitune.files import write_whole
from confitune.methods import METHODS
from confitune.methods.ccll import Calibrations
from confitune.nn import ContinualNet, XconvNorms, trace_flow
from confitune.tasks import Task, TaskSequence

AFTER_FIRST_TASK = "shift-after-first-task.safetensors"


class ShiftRecorder(Listener):
    """Measures the shift of a run's first task; give it to the `SequenceRun` as a listener.

    What it measures after the first task is kept in the run's folder, so an interrupted run can be resumed.
    """

    def __init__(self, net: ContinualNet, sequence: TaskSequence, settings: TrainSettings, folder: Path) -> None:
        self._net, self._sequence, self._settings = net, sequence, settings
        self._path = folder / AFTER_FIRST_TASK

    def run_started(self, name: str, tasks: Sequence[str], epochs: int, first_task: int) -> None:
        own = [task.name for task in self._sequence]
        method = METHODS.get(name)
        if list(tasks) != own or (method is not None and method.separate):
            raise ConfituneError(
                f"{name!r} does not learn {own[0]!r} and then the other tasks in one network: no shift to measure"
            )
        if first_task == 0:
            self._path.unlink(missing_ok=True)  # of an earlier run
        else:
            self._before()  # fail now, not at the end

    def task_ended(self, task: int, accuracies: Sequence[float]) -> None:
        if task == 0:
            kept = self._measure()
            write_whole(self._path, lambda out: out.write(save(kept)))

    def result(self) -> dict[str, Any]:
        """The layers in network order, and D0, D1 and D2 of each; call it after the last task."""
        before, after = self._before(), self._measure()
        pairs = [(*before[name], *after[name]) for name in after]  # true and used means, then and now
        return {
            "layers": list(after),
            "d0": [_distance(used, true) for true, used, _, _ in pairs],
            "d1": [_distance(first, last) for first, _, last, _ in pairs],
            "d2": [_distance(used, true) for _, _, true, used in pairs],
        }

    def measured(self) -> dict[str, Any]:
        """Also what the true moments of all tasks' test images would give, in the end."""
        accuracy = transductive_accuracy(self._net, self._sequence.tasks, self._settings)
        return {"shift": self.result(), "transductive": accuracy}

    def _measure(self) -> dict[str, Tensor]:
        return moments_at_test(self._net, self._sequence[0], self._settings)

    def _before(self) -> dict[str, Tensor]:
        try:
            return load(self._path.read_bytes())
        except (OSError, SafetensorError) as error:
            raise ConfituneError(
                f"{self._path} cannot be read ({error}): start this run anew for this analysis"
            ) from error


def _distance(a: Tensor, b: Tensor) -> float:
    return float(torch.linalg.vector_norm(a - b))


def paired_convs(net: ContinualNet, example_input: Tensor | None = None) -> dict[str, str]:
    """Convolution -> the batch norm that reads its output, both by their names in the backbone."""
    if Calibrations.name in net.parts:
        raise ConfituneError(
            "a calibrated network (CCLL) normalises what its calibrations make of a convolution's output, so the "
            "output's moments have no running ones to be compared with; its convolutions never move anyway"
        )
    for part in net.parts.values():
        if isinstance(part, XconvNorms):
            return {conv: norm for norm, conv in part.pairs.items()}
    flow = trace_flow(net.backbone, example_input)
    layers = net.backbone.named_modules()
    norms = [name for name, m in layers if isinstance(m, _BatchNorm) and m.track_running_stats]
    return {call.module: norm for norm in norms if (call := flow.conv_before(norm)[0]) is not None}


@torch.no_grad()
def moments_at_test(net: ContinualNet, task: Task, settings: TrainSettings) -> dict[str, Tensor]:
    """The true and the used mean, float64 [2, C], of every paired convolution's output on the task's test set.

    The network, its slot included, stays as it is: a copy is measured. Convolutions are done in full float32 whatever
    the settings say, since rounded weights would put a gap between the recovered and the true mean that is none of the
    method's.
    """
    twin = copy.deepcopy(net).eval()
    twin.prepare(task.name)
    device = next(twin.parameters()).device
    two, _ = task.test.batch(torch.arange(len(task.test))[[0, -1]])
    pairs = paired_convs(twin, task.preprocess(two))
    true: dict[str, Moments] = {}

    def add(conv: str, module: nn.Module, args: object, output: Tensor) -> None:
        true.setdefault(conv, Moments()).add(output)

    for conv in pairs:
        twin.backbone.get_submodule(conv).register_forward_hook(partial(add, conv))
    cudnn = {"enabled": torch.backends.cudnn.enabled, "deterministic": torch.backends.cudnn.deterministic}
    with torch.backends.cudnn.flags(**cudnn, allow_tf32=False), torch.autocast(device.type, enabled=False):
        for pixels, _ in batches(task.test, settings.eval_batch_size, device):
            twin(task.inputs(pixels))
    if not true:
        raise ConfituneError(f"no batch norm of {type(net.backbone).__name__} follows a convolution: nothing to watch")
    used = {conv: twin.backbone.get_submodule(pairs[conv]).get_buffer("running_mean").double() for conv in true}
    return {conv: torch.stack([moments.mean, used[conv]]).cpu() for conv, moments in true.items()}
