"""Batch norm by the moments of a whole batch of which every process has a part.

torch's SyncBatchNorm does that on GPUs only, and its converter would replace our layers. Here every batch norm of a
network stays what it is, timm's and a user's own included: where its forward asks torch to normalise by batch moments,
`WholeBatchNorm` does it, with the same arguments.

A layer takes one message forward (mean, variance and count of every part, 2C + 1 numbers) and one backward (2C
numbers). Moments of parts are merged through their deviations (Chan, Golub, LeVeque 1983), not through sums of squares,
which cancel; parts may differ in length.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import batch_norm
from torch.overrides import TorchFunctionMode

from confitune.ranks import Ranks


class WholeBatchNorm(TorchFunctionMode):
    """Within, what torch would normalise by the moments of this process's images it normalises by those of all."""

    def __init__(self, ranks: Ranks) -> None:
        super().__init__()
        self._ranks = ranks

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is batch_norm:
            return self._batch_norm(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _batch_norm(
        self,
        x: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        if not training:
            return batch_norm(x, running_mean, running_var, weight, bias, training, momentum, eps)
        with torch.no_grad():
            mean, var, count = whole_moments(x, self._ranks)
            if running_mean is not None and running_var is not None:
                running_mean.lerp_(mean.to(running_mean.dtype), momentum)
                running_var.lerp_((var * (count / (count - 1))).to(running_var.dtype), momentum)
        normalised: Tensor = _Normalise.apply(x, weight, bias, mean, var, count, eps, self._ranks)
        return normalised


def whole_moments(x: Tensor, ranks: Ranks) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and (biased) variance of each channel of the whole batch, and how many numbers they are of."""
    exact = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    var, mean = torch.var_mean(exact, [0, *range(2, x.dim())], correction=0)
    channels, here = len(mean), x.numel() // x.shape[1]
    parts = ranks.gathered(torch.cat([mean, var, mean.new_full((1,), here)]))
    means, variances, counts = parts[:, :channels], parts[:, channels:-1], parts[:, -1:]
    count = counts.sum()
    share = counts / count
    mean = (share * means).sum(0)
    var = (share * (variances + (means - mean).square())).sum(0)
    return mean, var, count


class _Normalise(torch.autograd.Function):
    """y = (x - mean) / sqrt(var + eps) * weight + bias, where mean and var are those of the whole batch."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        var: Tensor,
        count: Tensor,
        eps: float,
        ranks: Ranks,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, mean, var, count)
        ctx.eps, ctx.ranks = eps, ranks
        return batch_norm(x, mean, var, weight, bias, False, 0.0, eps)

    @staticmethod
    def backward(ctx: Any, *of_outputs: Tensor) -> Any:
        x, weight, mean, var, count = ctx.saved_tensors
        # As if the moments were constants. The gradients of weight and bias, sum(dy * x_hat) and sum(dy), stay those of
        # this part: they are added up with all other parameters' gradients.
        of_x, of_weight, of_bias = torch.ops.aten.native_batch_norm_backward(
            of_outputs[0], x, weight, mean, var, None, None, False, ctx.eps, [True, True, True]
        )
        if ctx.needs_input_grad[0]:
            # Every image moved the moments that all images were normalised by.
            both = torch.cat([of_bias, of_weight]).to(mean.dtype)
            ctx.ranks.add_up([both])
            of_mean, of_deviation = (both / count).chunk(2)
            inverse = (var + ctx.eps).rsqrt()
            scale = inverse if weight is None else inverse * weight
            slope = scale * inverse * of_deviation
            shape = (1, -1, *(1,) * (x.dim() - 2))
            moved = torch.addcmul((scale * of_mean - slope * mean).view(shape), x, slope.view(shape))
            of_x = (of_x - moved).to(x.dtype)
        return (
            of_x if ctx.needs_input_grad[0] else None,
            of_weight if ctx.needs_input_grad[1] else None,
            of_bias if ctx.needs_input_grad[2] else None,
            *(None,) * 5,
        )
