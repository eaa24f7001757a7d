"""A pull towards earlier weights, stronger where they matter: what EWC, SI, RWalk, MAS and AFEC have in common."""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from confitune.nn import ContinualNet

Tensors = dict[str, Tensor]  # by the name of a shared parameter

# Strengths were chosen with clipping in the CPR code: at large ones plain gradient steps diverge. They may still swing
# around the weights that matter until nothing is left of what was learned, so the pull on these has a limit.
CLIPPED = MappingProxyType({"clip_norm": 100.0, "pull_limit": 1.0})


class Pull(NamedTuple):
    """The penalty slope / 2 * sum of weight * (theta - anchor)^2, over the parameters that all tasks use."""

    anchor: Tensors
    weight: Tensors
    slope: float

    @torch.no_grad()
    def add_gradient(self, net: ContinualNet, most: float | None = None) -> None:
        """Add its gradient in closed form, where there are gradients: cheaper than sending it through autograd.

        For no weight it is more than `most` times the distance.
        """
        shared = net.shared_parameters()
        gradients = gradients_of(shared)
        if not gradients:
            return
        change = torch._foreach_sub(of(shared, gradients), of(self.anchor, gradients))
        weights = of(self.weight, gradients)
        if most is not None:
            weights = list(torch._foreach_clamp_max(weights, most / self.slope))
        torch._foreach_mul_(change, weights)
        torch._foreach_add_(list(gradients.values()), change, alpha=self.slope)

    def steepest(self) -> float:
        """The largest factor of a distance in its gradient."""
        return self.slope * float(torch.stack([weight.max() for weight in self.weight.values()]).max())


def shared_values(net: ContinualNet) -> Tensors:
    """The parameters that all tasks use, as plain tensors, not copied."""
    return {name: parameter.detach() for name, parameter in net.shared_parameters().items()}


def gradients_of(parameters: Mapping[str, Tensor]) -> Tensors:
    """Of those that have a gradient; what is frozen has none."""
    return {name: parameter.grad for name, parameter in parameters.items() if parameter.grad is not None}


@torch.no_grad()
def copy_into(targets: Tensors, sources: Mapping[str, Tensor]) -> None:
    """Copy what there is, by name, in place."""
    if sources:
        torch._foreach_copy_(of(targets, sources), list(sources.values()))


def of(tensors: Mapping[str, Tensor], names: Iterable[str]) -> list[Tensor]:
    """Those of these names, in their order."""
    return [tensors[name] for name in names]


@torch.no_grad()
def moved(net: ContinualNet, previous: Tensors) -> Tensors:
    """How far a step moved each trained weight from `previous`, which then holds the weights of now."""
    shared = net.shared_parameters()
    now = {name: shared[name] for name in gradients_of(shared)}
    if not now:
        return {}
    change = torch._foreach_sub(list(now.values()), of(previous, now))
    copy_into(previous, now)
    return dict(zip(now, change, strict=True))
