"""One task of a network folded into a plain module: changes of weights added, the norms with the task's own state.

Means are those recovered through today's weights. What is left is the stock network, of torch's and timm's classes
alone. Batch norms stay: the ONNX exporter folds them into the convolutions before them.
"""

from __future__ import annotations

import copy
from collections import OrderedDict

import torch
from torch import Tensor, nn

from confitune.methods.ccll import Calibrations
from confitune.nn import ContinualNet, Deltas, InputMeans, guess_input
from confitune.nn.geometry import Size


def folded(net: ContinualNet, task: str) -> nn.Sequential:
    """The network of one task as a plain module on the CPU, in float32 and evaluation mode: images -> logits.

    `net` does not change.

    >>> from confitune.nn import Head, XconvNorms
    >>> layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    >>> net = ContinualNet(nn.Sequential(*layers), [XconvNorms(), Head()])
    >>> net.add_task("pets", ["cat", "dog"])
    >>> folded(net, "pets").head
    Linear(in_features=8, out_features=2, bias=True)
    """
    own = copied_to_cpu(net)
    own.prepare(task)
    backbone, head = own.backbone, own.head.linear
    _make_plain(own)
    return nn.Sequential(OrderedDict(backbone=backbone, head=head)).eval().requires_grad_(False)


def copied_to_cpu(net: ContinualNet) -> ContinualNet:
    """A copy that shares nothing with `net`, in evaluation mode and float32: its logits are the ones to agree with."""
    return copy.deepcopy(net).to("cpu", torch.float32).eval()


@torch.no_grad()
def example_images(backbone: nn.Module, size: Size | None = None) -> Tensor | None:
    """Two blank images of `size` (default: guessed) that go through `backbone`; None where no guess does."""
    guess = guess_input(backbone)
    examples = [guess]
    if guess.dim() == 4:
        # timm's description of a network says three channels, even where it was built with another number.
        convs = (module.in_channels for module in backbone.modules() if isinstance(module, nn.Conv2d))
        channels = dict.fromkeys((guess.shape[1], next(convs, guess.shape[1])))
        examples = [guess.new_zeros(2, count, *(size or guess.shape[2:])) for count in channels]
    for example in examples:
        try:
            backbone(example)
        except Exception:
            continue
        return example
    return None


@torch.no_grad()
def _make_plain(net: ContinualNet) -> None:
    """Put what the parts of the live task do into the backbone itself, and take our hooks off."""
    for part in net.parts.values():
        if isinstance(part, Deltas):
            merged = part.merged()
            for name, layer in part.layers.items():
                layer.get_parameter("weight").copy_(merged[name])
                vars(layer).pop("forward")
    for module in net.backbone.modules():
        for key, hook in list(module._forward_pre_hooks.items()):
            if isinstance(getattr(hook, "__self__", None), InputMeans):
                del module._forward_pre_hooks[key]
    for part in net.parts.values():
        if isinstance(part, Calibrations):
            for name, calibration in zip(part.names, part.layers, strict=True):
                norm = net.backbone.get_submodule(name)
                norm._forward_pre_hooks.clear()
                norm._forward_hooks.clear()
                spatial, gate = calibration.children()
                _become(norm, nn.Sequential(spatial, copy.copy(norm), gate))


def _become(module: nn.Module, other: nn.Module) -> None:
    """Turn `module` into `other` where it is: a network may hold it by more names than its registered one."""
    state = dict(vars(other))
    module.__class__ = type(other)
    vars(module).clear()
    vars(module).update(state)
