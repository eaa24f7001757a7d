"""Xconv batch normalisation (ConFiT, sec. 3.2).

Keeps the mean of the convolution's INPUT per task and recovers the output's mean through today's weights, so a
convolution that moved since the task was learned no longer leaves a stale running mean behind. In training it is
ordinary BN; only what is stored and what is used at test time differ.

The classes here are what `convert_xconv_bn` turns batch norms into. They subclass the stock layers and keep their
state-dict keys, so checkpoints go in and out unharmed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from timm.layers import BatchNormAct2d
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from confitune.errors import ConfituneError
from confitune.nn.calibration import Calibration, Start
from confitune.nn.input_means import InputMeans
from confitune.nn.recovery import recover_output_mean

if TYPE_CHECKING:
    from confitune.nn.memory import TaskMemory

    _NormBase = _BatchNorm
else:
    _NormBase = object

# Forwards whose whole effect is normalise, then drop, then act: only these can be done for a mixed batch.
_KNOWN_FORWARDS = {_BatchNorm.forward, BatchNormAct2d.forward}


class TaskNorm(_NormBase):
    """Mixin of batch norms whose state is kept per task."""

    _mixed: tuple[Tensor, Tensor] | None = None  # per image: scale [N, C] and shift [N, C]

    def forward(self, x: Tensor) -> Tensor:
        """The stock forward; a mixed batch takes each image's own precomputed scale and shift."""
        calibration = self.calibrated_by
        if calibration is not None:
            x = calibration(x)
        if self._mixed is None:
            return super().forward(x)
        scale, shift = (rows.reshape(*rows.shape, *(1,) * (x.dim() - 2)) for rows in self._mixed)
        y = torch.addcmul(shift, x.to(shift.dtype), scale).to(x.dtype)
        for name in ("drop", "act"):
            if hasattr(self, name):
                y = getattr(self, name)(y)
        return y

    @property
    def calibrated_by(self) -> Calibration | None:
        """The calibration of the convolution's output, where there is one: the submodule `calibration`."""
        found = self._modules.get("calibration")
        assert found is None or isinstance(found, Calibration)
        return found

    def calibrate(self, start: Start) -> None:
        """Have one from now on."""
        like = self.running_var
        assert like is not None
        self.add_module("calibration", Calibration(self.num_features, start).to(like))

    def scale_and_shift(self) -> tuple[Tensor, Tensor]:
        """Evaluation-mode BN as y = x * scale + shift, in float64 from the live state."""
        if self.running_mean is None or self.running_var is None:
            raise ConfituneError("a batch norm without running statistics has no scale and shift for a mixed batch")
        scale = (self.running_var.double() + self.eps).rsqrt()
        if self.weight is not None:
            scale = scale * self.weight.detach().double()
        shift = -self.running_mean.double() * scale
        if self.bias is not None:
            shift = shift + self.bias.detach().double()
        return scale, shift

    def mixes(self) -> bool:
        """Whether this layer's forward is known well enough to normalise each image by its own task."""
        stock = next(base for base in type(self).__mro__ if not issubclass(base, TaskNorm))
        known = getattr(stock, "forward", None) in _KNOWN_FORWARDS
        return known and self.track_running_stats and self.calibrated_by is None


class XconvNorm(TaskNorm):
    """Mixin: a task-specific batch norm that recovers its mean through the convolution before it."""

    input_statistics: InputMeans
    # Not registered submodules: keys stay unchanged; a tuple is deep-copied along with the network.
    _conv: tuple[nn.Module]
    _reader: int
    _direct_weight: bool
    _memory: tuple[TaskMemory] | None = None

    @property
    def conv(self) -> nn.Module:
        """The convolution (or Linear) whose output this layer normalises."""
        return self._conv[0]

    @property
    def input_means(self) -> Tensor:
        """Live means of the convolution's input: [C, K, K] (window) or [C, s, s] (phase); a view."""
        return self.input_statistics.view(self._reader)

    @torch.no_grad()
    def recovered_mean(self, task: str | None = None) -> Tensor:
        """Output mean of `task` under the current weights (Eq. 9; exact for window means).

        Without a task: from the statistics that are live in the layer.
        """
        offset = None
        if task is None:
            if not self.input_statistics.batches:
                raise ConfituneError("no input statistics yet: run training batches through the network first")
            means = self.input_statistics.window_means(self._reader)
        else:
            if self._memory is None:
                raise ConfituneError("stored tasks live in a ContinualNet: make one of the unconverted network")
            tables, size = self._memory[0].stored_tables(task, self.input_statistics)
            means = self.input_statistics.window_means(self._reader, tables, size)
            offset = self._memory[0].offset(task, self)
        weight, bias = self._weight_in_use()
        recovered = recover_output_mean(weight, bias, means, getattr(self.conv, "groups", 1))
        return recovered if offset is None else recovered + offset

    def _weight_in_use(self) -> tuple[Tensor, Tensor | None]:
        """The weight that forward uses: a standardised or parametrised convolution computes it on the way."""
        conv = self.conv
        if self._direct_weight:
            return conv.get_parameter("weight"), conv._parameters.get("bias")
        geometry = self.input_statistics.readers[self._reader].geometry
        size = self.input_statistics.size or tuple(
            d * (k - 1) + 1 for k, d in zip(geometry.kernel, geometry.dilation, strict=True)
        )
        first = next(conv.parameters())
        probe = first.new_zeros(1, self.input_statistics.channels, *size)
        if isinstance(conv, nn.Linear):
            probe = probe.reshape(1, -1)
        was_training, tracking = conv.training, self.input_statistics.tracking
        conv.eval()  # spectral norm and the like move their buffers in training mode
        self.input_statistics.tracking = False  # the probe is no batch
        try:
            with _WeightSpy() as spy:
                conv(probe)
        finally:
            conv.train(was_training)
            self.input_statistics.tracking = tracking
        assert spy.seen is not None
        weight, bias = spy.seen
        return weight, bias

    def attach(self, conv: nn.Module, statistics: InputMeans, reader: int, direct_weight: bool) -> None:
        """Link the layer to its convolution and to the statistics of the tensor that convolution reads."""
        self._conv = (conv,)
        self._reader = reader
        self._direct_weight = direct_weight
        self.input_statistics = statistics


class _WeightSpy(TorchFunctionMode):
    """Remembers the weight and bias that a convolution hands to torch."""

    seen: tuple[Tensor, Tensor | None] | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.conv2d, nn.functional.conv2d, nn.functional.linear):
            bias = args[2] if len(args) > 2 else kwargs.get("bias")
            self.seen = (args[1] if len(args) > 1 else kwargs["weight"], bias)
        return func(*args, **kwargs)


class TaskBatchNorm1d(TaskNorm, nn.BatchNorm1d):
    """Plain task-specific BN: all moments and affine parameters are kept per task."""


class TaskBatchNorm2d(TaskNorm, nn.BatchNorm2d):
    """Plain task-specific BN: all moments and affine parameters are kept per task."""


class TaskBatchNormAct2d(TaskBatchNorm2d, BatchNormAct2d):
    """Plain task-specific BN with timm's built-in activation."""


class XconvBatchNorm1d(XconvNorm, nn.BatchNorm1d):
    """Xconv BN after a Linear layer: the K = 1 case."""


class XconvBatchNorm2d(XconvNorm, nn.BatchNorm2d):
    """Xconv BN after a convolution."""


class XconvBatchNormAct2d(XconvBatchNorm2d, BatchNormAct2d):
    """Xconv BN with timm's built-in activation."""


_CONVERTED: dict[tuple[type, bool], type] = {
    (nn.BatchNorm1d, False): TaskBatchNorm1d,
    (nn.BatchNorm2d, False): TaskBatchNorm2d,
    (BatchNormAct2d, False): TaskBatchNormAct2d,
    (nn.BatchNorm1d, True): XconvBatchNorm1d,
    (nn.BatchNorm2d, True): XconvBatchNorm2d,
    (BatchNormAct2d, True): XconvBatchNormAct2d,
}


def converted_class(original: type, xconv: bool) -> type[TaskNorm]:
    """The task-specific class for a batch-norm class; a user's own subclass gets one made, with its own forward."""
    if (original, xconv) not in _CONVERTED:
        if issubclass(original, nn.BatchNorm2d):
            base: type = XconvBatchNorm2d if xconv else TaskBatchNorm2d
        elif issubclass(original, nn.BatchNorm1d):
            base = XconvBatchNorm1d if xconv else TaskBatchNorm1d
        else:
            base = XconvNorm if xconv else TaskNorm
        name = f"{'Xconv' if xconv else 'Task'}{original.__name__}"
        _CONVERTED[original, xconv] = type(name, (base, original), {})
    return _CONVERTED[original, xconv]
