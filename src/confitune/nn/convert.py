"""Turn any network with batch norm into one with Xconv BN, and say what was done to each layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from confitune.errors import ConfituneError
from confitune.nn.calibration import Start
from confitune.nn.flow import ConvCall, Flow, trace_flow
from confitune.nn.geometry import Means
from confitune.nn.input_means import InputMeans
from confitune.nn.xconv import TaskNorm, XconvNorm, converted_class

Statistics = Literal["running", "pass"]


class NoBatchNormError(ConfituneError):
    """The network has no batch norm, so there is nothing to keep per task."""


@dataclass(frozen=True)
class LayerReport:
    """What became of one batch norm."""

    norm: str
    conv: str | None  # its convolution; None: kept as plain task-specific BN
    reason: str = ""  # why there is no convolution
    shares_with: str | None = None  # the convolution whose input statistics it uses, too


@dataclass(frozen=True)
class ConversionReport:
    """Which batch norm is paired with which convolution, and which fall back to plain task-specific BN."""

    layers: tuple[LayerReport, ...]
    means: Means
    statistics: Statistics

    @property
    def pairs(self) -> dict[str, str]:
        """Batch norm -> convolution."""
        return {layer.norm: layer.conv for layer in self.layers if layer.conv is not None}

    @property
    def fallbacks(self) -> dict[str, str]:
        """Batch norm -> why it keeps all its moments instead of recovering its mean."""
        return {layer.norm: layer.reason for layer in self.layers if layer.conv is None}

    def __str__(self) -> str:
        width = max(len(layer.norm) for layer in self.layers)
        lines = [f"{len(self.pairs)} of {len(self.layers)} batch norms recover their mean ({self.means} means)"]
        for layer in self.layers:
            shared = f" (statistics shared with {layer.shares_with})" if layer.shares_with else ""
            what = f"after {layer.conv}{shared}" if layer.conv else f"plain task-specific BN: {layer.reason}"
            lines.append(f"  {layer.norm:<{width}}  {what}")
        return "\n".join(lines)


def convert_xconv_bn(
    model: nn.Module,
    means: Means = "window",
    statistics: Statistics = "running",
    example_input: Tensor | None = None,
) -> ConversionReport:
    """Give every batch norm of `model` the task-specific form, in place, and report.

    A batch norm that directly follows a convolution (or a Linear) becomes an `XconvBatchNorm2d` (`...1d`); every other
    becomes plain task-specific BN. No output changes, no state-dict key changes.

    Args:
        means: 'window' (exact for any convolution) or 'phase' (the paper's, fewer numbers).
        statistics: 'running' averages while training as BN does; 'pass' waits for a pass with the final weights.
        example_input: a batch of two inputs; needed only where the network's input shape cannot be guessed.

    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
    >>> print(convert_xconv_bn(model))
    1 of 1 batch norms recover their mean (window means)
      1  after 0
    """
    require_unconverted(model)
    require_batch_norm(model)
    return apply_xconv(model, trace_flow(model, example_input), means, statistics)


def require_unconverted(model: nn.Module) -> None:
    """Refuse a network whose batch norms keep state per task already: it would be measured twice."""
    converted = next((name for name, module in model.named_modules() if isinstance(module, TaskNorm)), None)
    if converted is not None:
        raise ConfituneError(
            f"{type(model).__name__} is converted already ({converted} keeps its state per task): convert a network "
            "once, or give ContinualNet one that is not converted"
        )


def require_batch_norm(model: nn.Module) -> None:
    """Raise `NoBatchNormError` for a network without batch norm."""
    if any(isinstance(module, _BatchNorm) for module in model.modules()):
        return
    others = sorted({type(m).__name__ for m in model.modules() if "norm" in type(m).__name__.lower()})
    has = f"it normalises with {', '.join(others)}" if others else "it has no normalisation layer"
    raise NoBatchNormError(
        f"{type(model).__name__} has no batch norm ({has}): ConFiT corrects batch-norm statistics and has nothing to "
        "work on here. Choose a network with batch norm (`confitune models` lists some)."
    )


def apply_xconv(model: nn.Module, flow: Flow, means: Means, statistics: Statistics) -> ConversionReport:
    """Convert with a flow that is already known."""
    if means not in ("window", "phase"):
        raise ConfituneError(f"means={means!r} is not known; choose 'window' or 'phase'")
    if statistics not in ("running", "pass"):
        raise ConfituneError(f"statistics={statistics!r} is not known; choose 'running' or 'pass'")
    norms = {name: module for name, module in model.named_modules() if isinstance(module, _BatchNorm)}
    found = {name: _conv_for(module, *flow.conv_before(name)) for name, module in norms.items()}
    sharing = _attach_statistics(model, {n: c for n, (c, _) in found.items() if c}, means, statistics)
    layers = []
    for name, module in norms.items():
        call, reason = found[name]
        if call is None:
            module.__class__ = converted_class(type(module), xconv=False)
            layers.append(LayerReport(name, None, reason))
        else:
            layers.append(LayerReport(name, call.module, shares_with=sharing.get(call.module)))
    return ConversionReport(tuple(layers), means, statistics)


def convert_task_bn(model: nn.Module) -> None:
    """Make every batch norm plain task-specific BN, in place."""
    for module in list(model.modules()):
        if isinstance(module, _BatchNorm):
            module.__class__ = converted_class(type(module), xconv=False)


def convert_calibrated(model: nn.Module, flow: Flow, start: Start) -> None:
    """Make every batch norm task-specific, in place, and give those that follow a convolution a calibration of it."""
    convert_task_bn(model)
    for name, module in list(model.named_modules()):
        if isinstance(module, TaskNorm) and isinstance(module, nn.BatchNorm2d) and flow.conv_before(name)[0]:
            module.calibrate(start)


def _conv_for(norm: _BatchNorm, call: ConvCall | None, reason: str) -> tuple[ConvCall | None, str]:
    if not norm.track_running_stats:
        return None, "keeps no running statistics"
    return call, reason


def _attach_statistics(
    model: nn.Module, calls: dict[str, ConvCall], means: Means, statistics: Statistics
) -> dict[str, str]:
    """One `InputMeans` per tensor that is read, hooked to the first convolution that reads it; who shares with whom."""
    readers: dict[tuple[int, int], dict[str, ConvCall]] = {}
    for call in calls.values():
        readers.setdefault(call.reads, {})[call.module] = call
    sharing: dict[str, str] = {}
    attached: dict[str, tuple[InputMeans, int]] = {}
    for group in readers.values():
        names = list(group)
        first = model.get_submodule(names[0])
        norm_name = next(name for name, call in calls.items() if call.module == names[0])
        momentum: float | None = model.get_submodule(norm_name).momentum  # type: ignore[assignment]
        means_of_tensor = InputMeans(
            _channels(first), [c.geometry for c in group.values() if c.geometry], means, momentum
        )
        means_of_tensor.to(next(first.parameters()))
        means_of_tensor.train(first.training)
        means_of_tensor.tracking = statistics == "running"
        first.register_forward_pre_hook(means_of_tensor.observe)
        for index, name in enumerate(names):
            attached[name] = (means_of_tensor, index)
            if index and means_of_tensor.readers[index].table == means_of_tensor.readers[0].table:
                sharing[name] = names[0]
    for norm_name, call in calls.items():
        norm = model.get_submodule(norm_name)
        norm.__class__ = converted_class(type(norm), xconv=True)  # type: ignore[arg-type]
        assert isinstance(norm, XconvNorm)
        norm.attach(model.get_submodule(call.module), *attached[call.module], call.direct_weight)
    return sharing


def _channels(conv: nn.Module) -> int:
    return conv.in_channels if isinstance(conv, nn.Conv2d) else conv.in_features  # type: ignore[return-value]
