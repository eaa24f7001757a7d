"""CCLL (Singh et al.: Calibrating CNNs for Lifelong Learning, NeurIPS 2020).

The first task trains the backbone, which then stays as it is; every task learns small convolutions that calibrate each
layer's output, a batch norm and a head. Nothing that moves is shared, so nothing is forgotten.

Spatial (sec. 3.2): what a batch norm gets is x + GroupConv3x3(x). Channel (sec. 3.3): what it puts out is multiplied by
sigmoid(BN(GroupConv1x1(mean of it over the plane))). With groups of one channel these are 57,600 weights for ResNet18,
the 0.51% of its weights that the paper states.
"""

from types import MappingProxyType
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from confitune.methods.method import Method, Options
from confitune.methods.stages import Stage
from confitune.nn import Flow, Head, Norms, Part

Start = Literal["random", "identity"]


class CcllOptions(Options):
    """Choices of CCLL."""

    start: Start = Field("random", description="initial calibrations: random, or such that the network is unchanged")
    group: int = Field(
        1, ge=1, description="channels per group (Singh et al.: 1; the ConFiT paper's parameter count fits 4)"
    )
    frozen: Literal["after-first", "always"] = Field(
        "after-first", description="freeze the backbone after training it in the first task (Singh et al.), or always"
    )


class CCLL(Method):
    """Every task starts from the pre-trained batch norms."""

    name = "ccll"
    summary = "backbone frozen after the first task, small calibration layers per task; forgets nothing"
    cost = "two small convolutions per layer; its paper trains 150 epochs per task"
    reference = "Singh et al., NeurIPS 2020"
    settings = MappingProxyType({"epochs": 150, "lr_schedule": "step"})  # lr times 0.1 at 50, 100 and 125 of 150 epochs
    Options = CcllOptions

    def parts(self) -> list[Part]:
        return [Norms(start="pretrained"), Calibrations(self.options.start, self.options.group), Head()]

    def stages(self, epochs: int, index: int) -> tuple[Stage, ...]:
        calibrate = Stage("calibrate", epochs, frozenset({"head", "norms", "calibrations"}))
        if index == 0 and self.options.frozen == "after-first":
            return (Stage("all", epochs, calibrate.trains | {"weights"}),)
        return (calibrate,)


class Calibrations(Part):
    """A calibration around every batch norm that follows a convolution.

    Args:
        start: of a task: 'random' as layers usually start, with a gate around one half; 'identity' so that nothing
            changes at first: the convolutions at zero, and the gate scaled to be 1 there.
        group: channels of a group, at most; a layer whose channels it does not divide has smaller ones.
    """

    name = "calibrations"

    def __init__(self, start: Start = "random", group: int = 1) -> None:
        super().__init__()
        self.start_from, self.group = start, group
        self.layers: Any = nn.ModuleList()  # of `Calibration`
        self.names: list[str] = []  # of the batch norms that they stand around

    @property
    def kind(self) -> str:
        return f"Calibrations({self.start_from}, groups of {self.group})"

    def attach(self, backbone: nn.Module, flow: Flow) -> None:
        like = next(backbone.parameters())
        for name, norm in backbone.named_modules():
            if isinstance(norm, nn.BatchNorm2d) and flow.conv_before(name)[0]:
                layer = Calibration(norm.num_features, self.start_from, self.group).to(like)
                self.names.append(name)
                self.layers.append(layer)
                norm.register_forward_pre_hook(layer.before)
                norm.register_forward_hook(layer.after)

    def live(self, finished: bool) -> dict[str, Tensor]:
        states = zip(self.names, (layer.state_dict() for layer in self.layers), strict=True)
        found = {f"{name}.calibration.{key}": tensor for name, state in states for key, tensor in state.items()}
        return {key: tensor for key, tensor in found.items() if "num_batches" not in key}

    def start(self, generator: torch.Generator | None) -> None:
        for layer in self.layers:
            layer.reset(generator)

    def offered(self) -> list[nn.Parameter]:
        return list(self.parameters())


class Calibration(nn.Module):
    """Both calibrations of one convolution.

    >>> x, calibration = torch.rand(2, 8, 5, 5), Calibration(8, "identity")
    >>> torch.equal(calibration.spatial(x), x), torch.equal(calibration.gate(x), x)
    (True, True)
    """

    def __init__(self, channels: int, start: Start, group: int = 1) -> None:
        super().__init__()
        groups = channels // next(size for size in range(group, 0, -1) if channels % size == 0)
        self.start: Start = start
        self.spatial = Spatial(channels, channels, 3, padding=1, groups=groups, bias=False)
        self.gate = Gate(channels, groups, 2 if start == "identity" else 1)
        self.reset(None)

    @torch.no_grad()
    def reset(self, generator: torch.Generator | None) -> None:
        """Start anew; random numbers are drawn on the CPU so that a seed means the same on every device."""
        for weight in (self.spatial.weight, self.gate.conv.weight):
            if self.start == "identity":
                weight.zero_()
            else:  # as torch initialises convolutions
                bound = weight[0].numel() ** -0.5
                weight.copy_(torch.empty(weight.shape).uniform_(-bound, bound, generator=generator))
        self.gate.norm.reset_parameters()

    def before(self, norm: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Forward pre-hook of the batch norm; `after` is its forward hook."""
        return (self.spatial(args[0]), *args[1:])

    def after(self, norm: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        return self.gate(output)  # type: ignore[no-any-return]


class Spatial(nn.Conv2d):
    """Adds to the output of a convolution what this one makes of it."""

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


class Gate(nn.Module):
    """Multiplies what a batch norm puts out, with its activation where both are one layer, channel by channel."""

    def __init__(self, channels: int, groups: int, most: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 1, groups=groups, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.most = most

    def forward(self, y: Tensor) -> Tensor:
        gate = torch.sigmoid(self.norm(self.conv(y.mean((2, 3), keepdim=True))))
        return y * (self.most * gate)
