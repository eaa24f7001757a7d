"""Xconv batch normalisation (ConFiT, sec. 3.2).

Keeps the mean of the convolution's INPUT per task and recovers the output's mean through today's weights, so a
convolution that moved since the task was learned no longer leaves a stale running mean behind. In training it is
ordinary batch norm; only what is stored and what is used at test time differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from confitune.errors import ConfituneError
from confitune.nn.geometry import Means
from confitune.nn.pairing import ConvCall, Flow, conv_arguments
from confitune.nn.parts.input_means import InputMeans, Statistics
from confitune.nn.parts.norms import Norms, batch_norms
from confitune.nn.parts.part import Facts, Part
from confitune.nn.recovery import recover_output_mean


class NoBatchNormError(ConfituneError):
    """The network has no batch norm, which this method corrects the statistics of."""


@dataclass(frozen=True)
class XconvLayer:
    """A batch norm that directly follows a convolution (or a Linear), and the statistics of what that one reads."""

    norm: _BatchNorm
    conv: nn.Module
    inputs: InputMeans
    reader: int  # which of the convolutions that read the tensor
    direct_weight: bool  # forward uses conv.weight and conv.bias as they are

    @torch.no_grad()
    def recovered_mean(self) -> Tensor:
        """Output mean under the current weights (Eq. 11; exact for window means), of the task that is live."""
        if not self.inputs.batches:
            raise ConfituneError("no input statistics yet: run training batches through the network first")
        weight, bias = self._weight_in_use()
        return recover_output_mean(weight, bias, self.inputs.window_means(self.reader), getattr(self.conv, "groups", 1))

    def _weight_in_use(self) -> tuple[Tensor, Tensor | None]:
        """The weight that forward uses: a standardised or parametrised convolution computes it on the way."""
        conv = self.conv
        if self.direct_weight and "forward" not in vars(conv):  # another part may change it on the way
            return conv.get_parameter("weight"), conv._parameters.get("bias")
        geometry = self.inputs.readers[self.reader].geometry
        extent = [d * (k - 1) + 1 for k, d in zip(geometry.kernel, geometry.dilation, strict=True)]
        probe = next(conv.parameters()).new_zeros(1, self.inputs.channels, *extent)
        training, tracking = conv.training, self.inputs.tracking
        conv.eval()  # spectral norm and the like move their buffers in training mode
        self.inputs.tracking = False  # the probe is no batch
        with _WeightSpy() as spy:
            conv(probe.flatten(1) if isinstance(conv, nn.Linear) else probe)
        conv.train(training)
        self.inputs.tracking = tracking
        return spy.weight, spy.bias


class XconvNorms(Part):
    """Task-specific batch norms that recover their means.

    A batch norm that no convolution directly precedes keeps all its moments; `fallbacks` says which and why.

    Args:
        means: of the input: 'window' (exact for any convolution) or 'phase' (the paper's, fewer numbers).
        statistics: 'running' averages while training, as batch norm does; 'pass' is one with the final weights.
    """

    name = "norms"
    sized = True

    def __init__(self, means: Means = "window", statistics: Statistics = "running") -> None:
        super().__init__()
        if means not in ("window", "phase"):
            raise ConfituneError(f"means={means!r} is not known; choose 'window' or 'phase'")
        if statistics not in ("running", "pass"):
            raise ConfituneError(f"statistics={statistics!r} is not known; choose 'running' or 'pass'")
        self.means, self.statistics = means, statistics
        self.norms = Norms()
        self.inputs: dict[str, InputMeans] = {}  # by the first convolution that reads the tensor
        self.registered = nn.ModuleList()  # the same
        self.layers: dict[str, XconvLayer] = {}  # by the name of the batch norm
        self.pairs: dict[str, str] = {}  # batch norm -> the convolution before it
        self.fallbacks: dict[str, str] = {}  # batch norm -> why it keeps all its moments

    @property
    def kind(self) -> str:
        return f"XconvNorms({self.means}, {self.statistics})"

    @property
    def input_means(self) -> Sequence[InputMeans]:  # type: ignore[override]
        return list(self.inputs.values())

    def attach(self, backbone: nn.Module, flow: Flow) -> None:
        if not batch_norms(backbone):
            raise NoBatchNormError(
                f"{type(backbone).__name__} has no batch norm for ConFiT to correct. Choose a network with batch norm "
                "(`confitune models` lists some), or another method: finetune, bn-only and linear-probe run on any "
                "network."
            )
        self.norms.attach(backbone, flow)
        found: list[tuple[str, _BatchNorm, ConvCall]] = []
        readers: dict[Any, dict[str, ConvCall]] = {}  # of each tensor that is read, by their names
        for name, norm in self.norms.layers.items():
            if isinstance(norm, _BatchNorm):
                call, reason = flow.conv_before(name)
                if call is not None and norm.track_running_stats:
                    found.append((name, norm, call))
                    readers.setdefault(call.reads, {})[call.module] = call
                    self.pairs[name] = call.module
                else:
                    self.fallbacks[name] = reason or "keeps no running statistics"
        for name, norm, call in found:
            group = readers[call.reads]
            first = next(iter(group))
            if first not in self.inputs:
                self.inputs[first] = self._observed(backbone, group, norm.momentum)
            conv, reader = backbone.get_submodule(call.module), list(group).index(call.module)
            self.layers[name] = XconvLayer(norm, conv, self.inputs[first], reader, call.direct_weight)

    def _observed(self, backbone: nn.Module, group: dict[str, ConvCall], momentum: Any) -> InputMeans:
        """Statistics of a tensor that convolutions read, hooked to the first of them."""
        first: Any = backbone.get_submodule(next(iter(group)))
        if any(isinstance(getattr(hook, "__self__", None), InputMeans) for hook in first._forward_pre_hooks.values()):
            raise ConfituneError(
                f"{type(backbone).__name__} keeps input means already: make one ContinualNet of a network, or copy it"
            )
        channels = first.in_channels if isinstance(first, nn.Conv2d) else first.in_features
        inputs = InputMeans(channels, [call.geometry for call in group.values() if call.geometry], self.means, momentum)
        inputs.to(next(first.parameters())).train(first.training)
        first.register_forward_pre_hook(inputs.observe)
        self.registered.append(inputs)
        return inputs

    def report(self) -> str:
        """Which batch norm is paired with which convolution, and which keep all their moments."""
        told = {name: f"after {conv}" for name, conv in self.pairs.items()}
        told |= {name: f"keeps its mean: {reason}" for name, reason in self.fallbacks.items()}
        width = max(map(len, told))
        lines = [f"  {name:<{width}}  {told[name]}" for name in self.norms.layers if name in told]
        return "\n".join(
            [f"{len(self.pairs)} of {len(told)} batch norms recover their mean ({self.means} means)", *lines]
        )

    def live(self, finished: bool) -> dict[str, Tensor]:
        for inputs in self.input_means:
            inputs.fold()
        return self._live(finished)

    def shapes(self, finished: bool, classes: int) -> dict[str, torch.Size]:
        """As they are, without folding: asking must not change the last bits of a task in training."""
        return {key: tensor.shape for key, tensor in self._live(finished).items()}

    def _live(self, finished: bool) -> dict[str, Tensor]:
        recovered = {f"{name}.running_mean" for name in self.layers if finished}  # these are not kept
        found = {key: tensor for key, tensor in self.norms.live(finished).items() if key not in recovered}
        for conv, inputs in self.inputs.items():
            for number, table in enumerate(inputs.unfolded):
                found[f"{conv}.input_means" + (f".{number}" if number else "")] = table
        return found

    def facts(self) -> Facts:
        """Height and width of what each convolution reads, and how many batches its means are of."""
        return {f"{conv}.input_size": (*(of.size or (0, 0)), of.batches) for conv, of in self.inputs.items()}

    def restore(self, facts: Facts) -> None:
        for conv, inputs in self.inputs.items():
            height, width, batches = facts[f"{conv}.input_size"]
            inputs.restore((height, width) if height else None, batches)

    def start(self, generator: torch.Generator | None) -> None:
        self.reopen()

    def reopen(self) -> None:
        for inputs in self.input_means:
            inputs.reset()

    def offered(self) -> list[nn.Parameter]:
        return self.norms.offered()

    def finish(self, task: str) -> None:
        if any(not inputs.batches for inputs in self.input_means):
            before = " and measure(batches) of its images" if self.statistics == "pass" else ""
            raise ConfituneError(f"task {task!r} has seen no training batch: train it{before} before finishing it")

    def weights_version(self) -> int:
        tensors = (t for layer in self.layers.values() for t in (*layer.conv.parameters(), *layer.conv.buffers()))
        return sum(tensor._version for tensor in tensors)

    @torch.no_grad()
    def prepare(self) -> None:
        """Recover the means of all layers through today's weights."""
        means = [layer.recovered_mean() for layer in self.layers.values()]
        if means:
            torch._foreach_copy_([layer.norm.get_buffer("running_mean") for layer in self.layers.values()], means)

    def mixed_row(self) -> Tensor:
        return self.norms.mixed_row()

    def mixing(self, rows: Sequence[Tensor], place: Tensor) -> AbstractContextManager[None]:
        return self.norms.mixing(rows, place)

    def get_extra_state(self) -> list[dict[str, Any]]:
        """The live statistics, exactly as they are."""
        return [inputs.live_state() for inputs in self.input_means]

    def set_extra_state(self, state: list[dict[str, Any]]) -> None:
        """See `get_extra_state`."""
        shapes = [[table.shape for table in inputs.tables] for inputs in self.input_means]
        if [[table.shape for table in live["tables"]] for live in state] != shapes:
            raise ConfituneError("the state's input means belong to other layers: is it the state of another network?")
        for inputs, live in zip(self.input_means, state, strict=True):
            inputs.load_live_state(live)


class _WeightSpy(TorchFunctionMode):
    """Remembers the weight and bias that a convolution hands to torch."""

    weight: Tensor
    bias: Tensor | None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if used := conv_arguments(func, args, kwargs or {}):
            _, self.weight, self.bias = used
        return func(*args, **(kwargs or {}))
