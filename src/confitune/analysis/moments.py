"""Means of every convolution's output that a batch norm follows: the true ones, and those that batch norm uses.

True moments are those of a task's whole TEST set, measured in evaluation mode with the task's state, so a layer's input
is what the layers before it, normalised as at test time, really give it:

    mean[c] = 1 / (N H W) * sum of x[n, c, h, w]

Used ones are recovered through today's weights, stored or shared, as the network's kind has it.
"""

import copy
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from confitune.engine import TrainSettings
from confitune.engine.feed import batches
from confitune.errors import ConfituneError
from confitune.methods.ccll import Calibrations
from confitune.nn import ContinualNet, XconvNorms, trace_flow
from confitune.tasks import Task

_SLICE = 32  # images turned into float64 at a time


class Moments:
    """Mean and biased variance per channel of tensors [N, C, ...], taken in piece by piece in float64.

    Each piece's own two-pass moments are merged (Chan, Golub, LeVeque 1983), which loses nothing where a difference of
    mean squares would.

    >>> moments = Moments()
    >>> for piece in torch.arange(6.0).reshape(3, 2).split(2):
    ...     moments.add(piece)
    >>> moments.mean.tolist(), [round(v, 4) for v in moments.variance.tolist()]
    ([2.0, 3.0], [2.6667, 2.6667])
    """

    def __init__(self) -> None:
        self.count = 0
        self.mean = torch.zeros(())
        self._squares = torch.zeros(())  # sum of squared distances from the mean

    @property
    def variance(self) -> Tensor:
        """Biased, as batch norm normalises with."""
        return self._squares / self.count

    def add(self, x: Tensor) -> None:
        """Take in one more piece."""
        for part in x.detach().split(_SLICE):
            axes = [axis for axis in range(part.dim()) if axis != 1]
            variance, mean = torch.var_mean(part.double(), axes, correction=0)
            count = part.numel() // part.shape[1]
            if not self.count:
                self.count, self.mean, self._squares = count, mean, variance * count
                continue
            total, apart = self.count + count, mean - self.mean
            self._squares = self._squares + variance * count + apart.square() * (self.count * count / total)
            self.mean = self.mean + apart * (count / total)
            self.count = total


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
