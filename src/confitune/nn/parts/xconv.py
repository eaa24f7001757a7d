"""Xconv batch normalisation (ConFiT, sec. 3.2).

Keeps the mean of the convolution's INPUT per task and recovers the output's mean through today's weights, so a
convolution that moved since the task was learned no longer leaves a stale running mean behind. In training it is
ordinary batch norm; only what is stored and what is used at test time differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from confitune.errors import ConfituneError
from confitune.nn.geometry import Means
from confitune.nn.pairing import ConvCall, Flow
from confitune.nn.parts.input_means import InputMeans, Statistics
from confitune.nn.parts.norms import Norms, require_batch_norm
from confitune.nn.parts.part import Facts, Part
from confitune.nn.recovery import recover_output_mean


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
        if self.direct_weight and "forward" not in vars(self.conv):  # another part may change it on the way
            return self.conv.get_parameter("weight"), self.conv._parameters.get("bias")
        geometry = self.inputs.readers[self.reader].geometry
        size = self.inputs.size or tuple(
            d * (k - 1) + 1 for k, d in zip(geometry.kernel, geometry.dilation, strict=True)
        )
        probe = next(self.conv.parameters()).new_zeros(1, self.inputs.channels, *size)
        if isinstance(self.conv, nn.Linear):
            probe = probe.reshape(1, -1)
        was_training, tracking = self.conv.training, self.inputs.tracking
        self.conv.eval()  # spectral norm and the like move their buffers in training mode
        self.inputs.tracking = False  # the probe is no batch
        try:
            with _WeightSpy() as spy:
                self.conv(probe)
        finally:
            self.conv.train(was_training)
            self.inputs.tracking = tracking
        assert spy.seen is not None
        weight, bias = spy.seen
        return weight, bias


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
        self.inputs = nn.ModuleList()
        self.readers: list[str] = []  # the first convolution that reads each of the inputs
        self.layers: dict[str, XconvLayer] = {}  # by the name of the batch norm
        self.pairs: dict[str, str] = {}  # batch norm -> the convolution before it
        self.fallbacks: dict[str, str] = {}  # batch norm -> why it keeps all its moments

    @property
    def kind(self) -> str:
        return f"XconvNorms({self.means}, {self.statistics})"

    @property
    def input_means(self) -> Sequence[InputMeans]:  # type: ignore[override]
        return list(self.inputs)  # type: ignore[arg-type]

    def attach(self, backbone: nn.Module, flow: Flow) -> None:
        require_batch_norm(backbone)
        self.norms.attach(backbone, flow)
        calls: dict[str, ConvCall] = {}
        for name, norm in self.norms.layers.items():
            if isinstance(norm, _BatchNorm):
                call, reason = flow.conv_before(name)
                if call is not None and norm.track_running_stats:
                    calls[name] = call
                else:
                    self.fallbacks[name] = reason or "keeps no running statistics"
        readers: dict[tuple[int, int], dict[str, ConvCall]] = {}
        for call in calls.values():
            readers.setdefault(call.reads, {})[call.module] = call
        for group in readers.values():
            names = [name for name, call in calls.items() if call.module in group]
            inputs = self._observed(backbone, group, self.norms.layers[names[0]].momentum)  # type: ignore[arg-type]
            for name in names:
                call, conv, norm = calls[name], backbone.get_submodule(calls[name].module), self.norms.layers[name]
                assert isinstance(norm, _BatchNorm)
                self.layers[name] = XconvLayer(norm, conv, inputs, list(group).index(call.module), call.direct_weight)
        self.layers = {name: self.layers[name] for name in calls}
        self.pairs = {name: call.module for name, call in calls.items()}

    def _observed(self, backbone: nn.Module, group: dict[str, ConvCall], momentum: float | None) -> InputMeans:
        """Statistics of a tensor that convolutions read, hooked to the first of them."""
        first = backbone.get_submodule(next(iter(group)))
        if any(isinstance(getattr(hook, "__self__", None), InputMeans) for hook in first._forward_pre_hooks.values()):
            raise ConfituneError(
                f"{type(backbone).__name__} keeps input means already: make one ContinualNet of a network, or copy it"
            )
        channels = first.in_channels if isinstance(first, nn.Conv2d) else first.in_features
        inputs = InputMeans(channels, [call.geometry for call in group.values() if call.geometry], self.means, momentum)  # type: ignore[arg-type]
        inputs.to(next(first.parameters()))
        inputs.train(first.training)
        first.register_forward_pre_hook(inputs.observe)
        self.inputs.append(inputs)
        self.readers.append(next(iter(group)))
        return inputs

    def report(self) -> str:
        """Which batch norm is paired with which convolution, and which keep all their moments."""
        layers = [*self.pairs, *self.fallbacks]
        lines = [f"{len(self.pairs)} of {len(layers)} batch norms recover their mean ({self.means} means)"]
        for name in (name for name in self.norms.layers if name in layers):
            what = f"after {self.pairs[name]}" if name in self.pairs else f"keeps its mean: {self.fallbacks[name]}"
            lines.append(f"  {name:<{max(map(len, layers))}}  {what}")
        return "\n".join(lines)

    def live(self, finished: bool) -> dict[str, Tensor]:
        for inputs in self.input_means:
            inputs.fold()
        return self._live(finished)

    def shapes(self, finished: bool, classes: int) -> dict[str, torch.Size]:
        """As they are, without folding: asking must not change the last bits of a task in training."""
        return {key: tensor.shape for key, tensor in self._live(finished).items()}

    def _live(self, finished: bool) -> dict[str, Tensor]:
        found = self.norms.live(finished)
        if finished:  # means that are recovered are not kept
            found = {
                key: tensor for key, tensor in found.items() if key.removesuffix(".running_mean") not in self.layers
            }
        for conv, inputs in zip(self.readers, self.input_means, strict=True):
            for number, table in enumerate(inputs.unfolded):
                found[f"{conv}.input_means" + (f".{number}" if number else "")] = table
        return found

    def facts(self) -> Facts:
        """Height and width of what each convolution reads, and how many batches its means are of."""
        inputs = zip(self.readers, self.input_means, strict=True)
        return {f"{conv}.input_size": (*(of.size or (0, 0)), of.batches) for conv, of in inputs}

    def restore(self, facts: Facts) -> None:
        for conv, inputs in zip(self.readers, self.input_means, strict=True):
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

    @contextmanager
    def mixing(self, rows: Sequence[Tensor], place: Tensor) -> Iterator[None]:
        with self.norms.mixing(rows, place):
            yield

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

    seen: tuple[Tensor, Tensor | None] | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.conv2d, nn.functional.conv2d, nn.functional.linear):
            bias = args[2] if len(args) > 2 else kwargs.get("bias")
            self.seen = (args[1] if len(args) > 1 else kwargs["weight"], bias)
        return func(*args, **kwargs)
