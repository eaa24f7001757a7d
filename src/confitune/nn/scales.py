"""Features of two scales: what the last stage of a network gives, and the stage before it.

The last stage tells the classes of pre-training apart. Much of what tells other classes apart, colours and textures
above all, is clearer one stage earlier (Evci et al.: Head2Toe, ICML 2022). Both are averaged over the image. Their
square roots are taken, because activations are skewed, and brought to one length, so that neither drowns the other.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from confitune.nn.pairing import trace_flow

_SMOOTH = 0.1  # of the mean activation: at zero the slope of a root has no end


def two_scales(backbone: nn.Module) -> nn.Module:
    """Let a headless network give features of two scales, in place; of one where it has no stages, as a ViT.

    >>> stage = [nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1), nn.ReLU()]
    >>> last = [nn.Conv2d(4, 8, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    >>> net = two_scales(nn.Sequential(nn.Sequential(*stage), *last))
    >>> list(net(torch.rand(1, 3, 8, 8)).shape)
    [1, 12]
    """
    if not any(isinstance(getattr(hook, "__self__", None), _Scales) for hook in backbone._forward_hooks.values()):
        scales, stage = _Scales(), trace_flow(backbone).stage
        if stage is not None:
            backbone.get_submodule(stage).register_forward_hook(scales.keep)
        backbone.register_forward_hook(scales.join)
    return backbone


class _Scales:
    """The hooks of a network, which are copied with it."""

    def __init__(self) -> None:
        self._earlier: list[Tensor] = []

    def keep(self, module: nn.Module, args: object, output: Tensor) -> None:
        self._earlier = [output.float().mean((2, 3))]

    def join(self, module: nn.Module, args: object, output: Tensor) -> Tensor:
        scales, self._earlier = [output.float(), *self._earlier], []
        sizes = [x.abs().mean(1, keepdim=True).clamp_min(1e-20) for x in scales]
        roots = [x / (x.abs() + _SMOOTH * size).sqrt() for x, size in zip(scales, sizes, strict=True)]
        joined = torch.cat([normalize(x, dim=1) for x in roots], 1)
        return joined * math.sqrt(joined.shape[1] / len(scales))
