"""A pull towards earlier weights, stronger where they matter: what EWC, SI, RWalk, MAS and AFEC have in common."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from confitune.methods.penalty import Penalty, TaskContext, shared_parameters, shared_values
from confitune.nn import ContinualNet

Tensors = dict[str, Tensor]  # by the name of the parameter


class QuadraticPenalty(Penalty):
    """slope / 2 * sum over parameters of weight * (theta - anchor)^2.

    `anchor` and `weight` are allocated once and changed in place. Whatever else a method keeps by parameter it lists in
    `kept` (between tasks), `running` (within a task) or `scratch` (for a moment).
    """

    kept: tuple[str, ...] = ("anchor", "weight")
    running: tuple[str, ...] = ()
    scratch: tuple[str, ...] = ()

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.anchored = False  # whether there is an earlier task to stay close to
        for field in (*self.kept, *self.running, *self.scratch):
            setattr(self, field, {})
        self.anchor: Tensors
        self.weight: Tensors

    @property
    def slope(self) -> float:
        """The factor of weight * (theta - anchor) in the gradient."""
        return float(self.options.strength)

    def attach(self, net: ContinualNet) -> None:
        """Allocate, or move to the network's device, everything that is kept."""
        parameters = shared_parameters(net)
        for field in (*self.kept, *self.running, *self.scratch):
            tensors: Tensors = getattr(self, field)
            for name, parameter in parameters.items():
                if name not in tensors:
                    tensors[name] = torch.zeros_like(parameter)  # of the parameter's memory format
                else:
                    tensors[name] = tensors[name].to(parameter.device)

    @torch.no_grad()
    def add_gradients(self, net: ContinualNet) -> None:
        """slope * weight * (theta - anchor)."""
        if not self.anchored:
            return
        trained = _trained(net)
        if not trained:
            return
        pull = torch._foreach_sub([p.detach() for p in trained.values()], _of(self.anchor, trained))
        torch._foreach_mul_(pull, _of(self.weight, trained))
        torch._foreach_add_(_gradients(trained), pull, alpha=self.slope)

    @torch.no_grad()
    def anchor_here(self, context: TaskContext) -> None:
        """From now on stay close to the current weights."""
        copy_into(self.anchor, shared_values(context.net))
        self.anchored = True

    def captured_kind(self, index: int) -> Hashable:
        """One without a pull and one with it."""
        return self.anchored

    def state_dict(self) -> dict[str, Any]:
        tensors = {field: dict(getattr(self, field)) for field in (*self.kept, *self.running)}
        return {"anchored": self.anchored, **tensors}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.anchored = state["anchored"]
        for field in (*self.kept, *self.running):
            setattr(self, field, dict(state[field]))

    def storage(self) -> int:
        return sum(tensor.numel() for field in self.kept for tensor in getattr(self, field).values())


def copy_into(targets: Tensors, sources: Mapping[str, Tensor]) -> None:
    """Copy by name, in place."""
    torch._foreach_copy_(list(targets.values()), _of(sources, targets))


def _trained(net: ContinualNet) -> dict[str, nn.Parameter]:
    """Shared parameters that have a gradient; what is frozen has none."""
    return {name: p for name, p in shared_parameters(net).items() if p.grad is not None}


def _gradients(trained: Mapping[str, nn.Parameter]) -> list[Tensor]:
    return [p.grad for p in trained.values() if p.grad is not None]


def _of(tensors: Mapping[str, Tensor], names: Iterable[str]) -> list[Tensor]:
    return [tensors[name] for name in names]


class PathPenalty(QuadraticPenalty):
    """A pull whose weights grow from what each step did: SI and RWalk.

    `previous` holds the weights before the step at hand, `gradient` the unregularised loss's gradient there.
    """

    running: tuple[str, ...] = ("previous", "gradient")
    previous: Tensors
    gradient: Tensors

    def begin_task(self, context: TaskContext) -> None:
        """The path starts here."""
        copy_into(self.previous, shared_values(context.net))

    @torch.no_grad()
    def read_gradients(self, net: ContinualNet) -> None:
        """Keep the gradient; what is frozen has none."""
        trained = _trained(net)
        if trained:
            torch._foreach_copy_(_of(self.gradient, trained), _gradients(trained))

    @torch.no_grad()
    def after_step(self, net: ContinualNet) -> None:
        """Take in how far each weight went."""
        trained = _trained(net)
        if not trained:
            return
        now = [p.detach() for p in trained.values()]
        moved = torch._foreach_sub(now, _of(self.previous, trained))
        self.take_in(list(trained), moved, self._gradients(trained))
        torch._foreach_copy_(_of(self.previous, trained), now)

    def _gradients(self, trained: Mapping[str, Any]) -> list[Tensor]:
        return _of(self.gradient, trained)

    def take_in(self, names: list[str], moved: Iterable[Tensor], gradients: list[Tensor]) -> None:
        """What a step that moved these weights says of them."""
        raise NotImplementedError
