"""Xconv batch normalisation (ConFiT, sec. 3.2).

Keeps the mean of the convolution's INPUT per task and recovers the output's mean through today's weights, so a
convolution that moved since the task was learned no longer leaves a stale running mean behind. In training it is
ordinary batch norm; only what is stored and what is used at test time differ.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from confitune.errors import ConfituneError
from confitune.nn.geometry import ConvGeometry, Means
from confitune.nn.pairing import Flow
from confitune.nn.parts.input_means import InputMeans, Statistics
from confitune.nn.parts.norms import Norms, batch_norms
from confitune.nn.parts.part import Facts, Part


def recover_output_mean(weight: Tensor, bias: Tensor | None, window_means: Tensor, groups: int = 1) -> Tensor:
    """The mean of a convolution's output, [O], from means of its input (Eq. 9, in its exact form).

    mu[o] = bias[o] + sum over c, i, j of W[o, c, i, j] * M[c, i, j], c running over o's group. Exact, because a
    convolution is linear in its input; no assumption about borders is left.

    Args:
        weight: [O, C / groups, K, K] (a Linear layer's [O, C] counts as K = 1).
        window_means: M, [C, K, K]: mean over batch and output positions of what tap (i, j) reads.
    """
    outputs = weight.shape[0]
    # Multiply and sum rather than a matrix product: that would follow the user's TF32 and autocast settings. Flattened,
    # though it copies weights in the order that convolutions like: the order of a sum must not depend on it.
    grouped = weight.reshape(groups, outputs // groups, -1).to(window_means.dtype)
    mean = (grouped * window_means.reshape(groups, 1, -1)).sum(2).reshape(outputs)
    return mean if bias is None else mean + bias.to(mean.dtype)


class NoBatchNormError(ConfituneError):
    """The network has no batch norm, which this method corrects the statistics of."""


@dataclass(frozen=True)
class XconvLayer:
    """A batch norm that directly follows a convolution, and the statistics of what that one reads."""

    norm: _BatchNorm
    conv: nn.Conv2d
    geometry: ConvGeometry
    inputs: InputMeans

    @torch.no_grad()
    def recovered_mean(self) -> Tensor:
        """Output mean under the current weights (Eq. 11; exact for window means), of the task that is live."""
        if not self.inputs.batches:
            raise ConfituneError("no input statistics yet: run training batches through the network first")
        means = self.inputs.window_means(self.geometry)
        return recover_output_mean(self.conv.weight, self.conv.bias, means, self.conv.groups)


class XconvNorms(Part):
    """Task-specific batch norms that recover their means.

    A batch norm that does not directly follow a plain convolution keeps all its moments; `fallbacks` says why.

    Args:
        means: of the input: 'window' (exact for any convolution) or 'phase' (the paper's, fewer numbers).
        statistics: 'running' averages while training, as batch norm does; 'pass' is one with the final weights.
    """

    name = "norms"

    def __init__(self, means: Means = "window", statistics: Statistics = "running") -> None:
        super().__init__()
        if means not in ("window", "phase"):
            raise ConfituneError(f"means={means!r} is not known; choose 'window' or 'phase'")
        if statistics not in ("running", "pass"):
            raise ConfituneError(f"statistics={statistics!r} is not known; choose 'running' or 'pass'")
        self.means = means
        self.statistics = statistics
        self.norms = Norms()
        self.inputs: dict[str, InputMeans] = {}  # by the first convolution that reads the tensor
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
                "(`confitune models` lists some) or another method: finetune, bn-only and linear-probe run on any"
            )
        self.norms.attach(backbone, flow)
        of_tensor: dict[tuple[int, int], InputMeans] = {}
        for name, norm in self.norms.layers.items():
            if not isinstance(norm, _BatchNorm):
                continue
            call, reason = flow.conv_before(name)
            if call is not None and call.geometry is None:
                reason = f"follows {call.module}, which is no plain convolution"
            elif not norm.track_running_stats:
                reason = "keeps no running statistics"
            if call is None or call.geometry is None or reason:
                self.fallbacks[name] = reason
                continue
            conv = backbone.get_submodule(call.module)
            assert isinstance(conv, nn.Conv2d)
            if call.reads not in of_tensor:
                of_tensor[call.reads] = self.inputs[call.module] = self._observing(conv, norm)
            inputs = of_tensor[call.reads]
            inputs.add_reader(call.geometry)
            inputs.to(conv.weight)
            self.layers[name] = XconvLayer(norm, conv, call.geometry, inputs)
            self.pairs[name] = call.module
        self.registered = nn.ModuleList(self.inputs.values())

    def _observing(self, conv: nn.Conv2d, norm: _BatchNorm) -> InputMeans:
        """Statistics of what a convolution reads, hooked to it; they move as those of its norm do."""
        if any(isinstance(getattr(hook, "__self__", None), InputMeans) for hook in conv._forward_pre_hooks.values()):
            raise ConfituneError("the network keeps input means already: make one ContinualNet of a network")
        assert norm.momentum is not None
        inputs = InputMeans(conv.in_channels, self.means, norm.momentum).train(conv.training)
        conv.register_forward_pre_hook(inputs.observe)
        return inputs

    def report(self) -> str:
        """Which batch norm is paired with which convolution, and which keep all their moments."""
        told = {name: f"after {conv}" for name, conv in self.pairs.items()}
        told |= {name: f"keeps its mean: {reason}" for name, reason in self.fallbacks.items()}
        first = f"{len(self.pairs)} of {len(told)} batch norms recover their mean ({self.means} means)"
        return "\n".join([first, *(f"  {name}  {told[name]}" for name in self.norms.layers if name in told)])

    def live(self, finished: bool) -> dict[str, Tensor]:
        recovered = {f"{name}.running_mean" for name in self.layers if finished}  # these are not kept
        found = {key: tensor for key, tensor in self.norms.live(finished).items() if key not in recovered}
        for conv, inputs in self.inputs.items():
            for number, table in enumerate(inputs.tables):
                found[f"{conv}.input_means" + (f".{number}" if number else "")] = table
        return found

    def facts(self) -> Facts:
        """Height and width of what each convolution reads, and how many batches its means are of."""
        return {f"{conv}.input_size": (*(of.size or (0, 0)), of.batches) for conv, of in self.inputs.items()}

    def restore(self, facts: Facts) -> None:
        for conv, inputs in self.inputs.items():
            height, width, batches = facts.get(f"{conv}.input_size", (0, 0, 0))
            inputs.restore((height, width) if height else None, batches)

    def start(self, generator: torch.Generator | None) -> None:
        if changed := [name for name, layer in self.layers.items() if "forward" in vars(layer.conv)]:
            why = "another part changes the weight of the convolution before it, as Deltas does"
            raise ConfituneError(f"the mean of {changed[0]} cannot be recovered: {why}; use Norms, not XconvNorms")

    def offered(self) -> list[nn.Parameter]:
        return self.norms.offered()

    @torch.no_grad()
    def prepare(self) -> None:
        """Recover the means of all layers through today's weights."""
        if layers := self.layers.values():
            means = [layer.norm.get_buffer("running_mean") for layer in layers]
            torch._foreach_copy_(means, [layer.recovered_mean() for layer in layers])
