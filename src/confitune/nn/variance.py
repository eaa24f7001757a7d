"""How far the variances of convolutions' outputs have drifted since earlier tasks were learned.

A task keeps the variances of its own time. When a later task ends, every convolution is run twice on that task's
images: with the weights from before the task and with those after it. The ratio of the two variances, channel by
channel, is taken for what happened to the variances of all earlier tasks, too. Their product over tasks is kept once
for the network; a task's stored variances are relative to it, so rows of earlier tasks need no change.

Variances are compared, and corrected, with the eps that batch norm adds to them: a channel that hardly varied before
has no ratio to speak of otherwise, and what batch norm divides by is the sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from confitune.nn.whole_batch import whole_moments
from confitune.nn.xconv import XconvNorm
from confitune.ranks import Ranks

Variance = Literal["stored", "ratio"]

MOST = 100.0  # a ratio beyond it, or below its inverse, is an accident of few images


class VarianceDrift(nn.Module):
    """Of every layer that recovers its mean.

    Args:
        norms: by name.

    Attributes:
        captured: whether comparing is the same each time, so that it can be captured.
        option: of the network, that asks for it.
    """

    captured = True
    option = "variance='ratio'"

    def __init__(self, norms: Mapping[str, XconvNorm]) -> None:
        super().__init__()
        self._norms = dict(norms)
        self._keys = {name: f"ratio{place}" for place, name in enumerate(norms)}
        for name, norm in norms.items():
            assert norm.running_var is not None
            self.register_buffer(self._keys[name], torch.ones_like(norm.running_var), persistent=False)
        self.waits = False  # for the end of a task whose effect on earlier ones is to be measured
        self.active = False  # comparing
        self.ranks = Ranks()
        # At addresses that captured passes rely on.
        self._before: dict[str, dict[str, Tensor]] = {}  # weights of convolutions before the task at hand
        self._sums: dict[str, tuple[Tensor, Tensor]] = {}  # of variances before and after, while comparing
        self._found: list[Tensor] = []  # ratios by layer, after it

    def ratios(self) -> dict[str, Tensor]:
        """By layer [C]: what has become of a variance (plus eps) of the pre-trained network's time."""
        return {name: self._ratio(name) for name in self._keys}

    def _ratio(self, name: str) -> Tensor:
        return self.get_buffer(self._keys[name])

    def relative(self, variances: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Variances of today, by layer, as they are kept: in terms of the pre-trained network's time."""
        eps = [self._norms[name].eps for name in variances]
        values = torch._foreach_add(list(variances.values()), eps)
        torch._foreach_div_(values, [self._ratio(name) for name in variances])
        torch._foreach_sub_(values, eps)
        return dict(zip(variances, values, strict=True))

    def today(self, kept: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What kept variances, by layer, are today."""
        ratios, eps = [self._ratio(name) for name in kept], [self._norms[name].eps for name in kept]
        return dict(zip(kept, scaled(list(kept.values()), ratios, eps), strict=True))

    def relative_means(self, name: str, table: int, means: Tensor) -> Tensor:
        """Input means of today as they are kept; here as they are."""
        return means

    def means_today(self, name: str, table: int, kept: Tensor) -> Tensor:
        """What kept input means are today."""
        return kept

    def begin(self) -> None:
        """Remember the weights: a task is going to move them."""
        for name, norm in self._norms.items():
            self._remember(name, dict(norm.conv.named_parameters()))
        self.waits = True

    @torch.no_grad()
    def _remember(self, name: str, weights: Mapping[str, Tensor]) -> None:
        like = self._ratio(name)
        known = self._before.setdefault(name, {})
        for key, weight in weights.items():
            if key not in known or known[key].device != like.device or known[key].dtype != weight.dtype:
                known[key] = weight.detach().to(like.device, copy=True)
            else:
                known[key].copy_(weight)

    @contextmanager
    def comparing(self, batches: int) -> Iterator[None]:
        """Within, so many training batches are run through both weights; what comes of it waits for `take_over`."""
        ratios = self.ratios()
        if any(n not in self._sums or self._sums[n][0].device != r.device for n, r in ratios.items()):
            self._sums = {name: (torch.zeros_like(r), torch.zeros_like(r)) for name, r in ratios.items()}
        torch._foreach_zero_([total for pair in self._sums.values() for total in pair])
        hooks = [
            norm.conv.register_forward_hook(
                lambda conv, args, output, name=name: self._compare(name, conv, args, output)
            )
            for name, norm in self._norms.items()
        ]
        self.active = True
        try:
            yield
        finally:
            self.active = False
            for hook in hooks:
                hook.remove()
        pairs = ((self._sums[name], batches * norm.eps) for name, norm in self._norms.items())  # sums, as they are
        self._found = [ratio_of(after, before, eps) for (before, after), eps in pairs]

    @torch.no_grad()
    def take_over(self) -> None:
        """What was found by comparing holds for all earlier tasks from now on."""
        torch._foreach_mul_(list(self.ratios().values()), self._found)
        self._found, self.waits = [], False

    @torch.no_grad()
    def _compare(self, name: str, conv: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        with computing_with(conv, self._before[name]):
            earlier = conv.forward(args[0])
        for total, values in zip(self._sums[name], (earlier, output), strict=True):
            total.add_(self._variance(values))

    def _variance(self, values: Tensor) -> Tensor:
        """By channel, of the whole batch."""
        if self.ranks.several:
            return whole_moments(values, self.ranks)[1]
        axes = [axis for axis in range(values.dim()) if axis != 1]
        return values.float().var(axes, correction=0)

    def shared(self) -> dict[str, Tensor]:
        """What all tasks share of it, by name; to be copied to where it comes back."""
        return {f"{name}.variance_ratio": ratio for name, ratio in self.ratios().items()}

    def state(self) -> dict[str, Any]:
        """Everything, for a checkpoint."""
        return {"ratios": self.ratios(), "before": self._before if self.waits else None}

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Any]) -> None:
        """Put back what `state` gave."""
        for name, ratio in self.ratios().items():
            ratio.copy_(state["ratios"][name])
        self.waits = state["before"] is not None
        for name, weights in (state["before"] or {}).items():
            self._remember(name, weights)


def ratio_of(after: Tensor, before: Tensor, eps: float) -> Tensor:
    """Of variances, eps added to both, within bounds.

    >>> ratio_of(torch.tensor([3.0, 0.0, 9e9]), torch.tensor([1.0, 0.0, 0.0]), 1.0)
    tensor([  2.,   1., 100.])
    """
    return ((after + eps) / (before + eps)).nan_to_num(nan=1.0).clamp(1 / MOST, MOST)


def scaled(variances: list[Tensor], ratios: list[Tensor], eps: list[float]) -> list[Tensor]:
    """Variances of layers, each after what `ratio_of` says happened to it.

    >>> scaled([torch.tensor([1.0])], [torch.tensor([2.0])], [1.0])
    [tensor([3.])]
    """
    values = torch._foreach_add(variances, eps)
    torch._foreach_mul_(values, ratios)
    torch._foreach_sub_(values, eps)
    torch._foreach_clamp_min_(values, 0.0)
    return list(values)


@contextmanager
def computing_with(conv: nn.Module, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Within, the module computes with these instead of its own."""
    places = [(conv.get_submodule(key.rpartition(".")[0]), key.rpartition(".")[2], key) for key in weights]
    own = [module._parameters[name] for module, name, _ in places]
    try:
        for module, name, key in places:
            module._parameters[name] = nn.Parameter(weights[key], requires_grad=False)
        yield
    finally:
        for (module, name, _), parameter in zip(places, own, strict=True):
            module._parameters[name] = parameter
