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
        names, values, gradients = trained(net)
        if not names:
            return
        change, weights = torch._foreach_sub(values, of(self.anchor, names)), of(self.weight, names)
        if most is not None:
            weights = list(torch._foreach_clamp_max(weights, most / self.slope))
        torch._foreach_mul_(change, weights)
        torch._foreach_add_(gradients, change, alpha=self.slope)

    def steepest(self) -> float:
        """The largest factor of a distance in its gradient."""
        return self.slope * float(torch.stack([weight.max() for weight in self.weight.values()]).max())

    def value(self, net: ContinualNet) -> Tensor:
        """The penalty itself, without a gradient."""
        now = shared_values(net)
        parts = [(self.weight[name] * (now[name] - self.anchor[name]).square()).sum() for name in self.anchor]
        return self.slope / 2 * torch.stack(parts).sum()


def shared_values(net: ContinualNet) -> Tensors:
    """The parameters that all tasks use, as plain tensors, not copied."""
    return {name: parameter.detach() for name, parameter in net.shared_parameters().items()}


@torch.no_grad()
def copy_into(targets: Tensors, sources: Mapping[str, Tensor]) -> None:
    """Copy by name, in place."""
    torch._foreach_copy_(list(targets.values()), of(sources, targets))


def of(tensors: Mapping[str, Tensor], names: Iterable[str]) -> list[Tensor]:
    """Those of these names, in their order."""
    return [tensors[name] for name in names]


def trained(net: ContinualNet) -> tuple[list[str], list[Tensor], list[Tensor]]:
    """Names, values and gradients of the shared parameters that have a gradient; what is frozen has none."""
    found = [(name, p.detach(), p.grad) for name, p in net.shared_parameters().items() if p.grad is not None]
    return [name for name, _, _ in found], [value for _, value, _ in found], [gradient for _, _, gradient in found]


@torch.no_grad()
def keep_gradients(net: ContinualNet, into: Tensors) -> None:
    """Copy the gradients that there are."""
    names, _, gradients = trained(net)
    if names:
        torch._foreach_copy_(of(into, names), gradients)


@torch.no_grad()
def moved(net: ContinualNet, previous: Tensors) -> Tensors:
    """How far a step moved each trained weight from `previous`, which then holds the weights of now."""
    names, now, _ = trained(net)
    if not names:
        return {}
    change = torch._foreach_sub(now, of(previous, names))
    torch._foreach_copy_(of(previous, names), now)
    return dict(zip(names, change, strict=True))
