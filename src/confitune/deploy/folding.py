"""One task of a network as a plain module: batch norms folded into the convolutions before them.

In evaluation a batch norm is a scale and a shift per channel, and a convolution can do both itself: w * scale and
(b - mean) * scale + beta. The mean is the one recovered through today's weights. What is left is the stock network, of
torch's and timm's classes alone, smaller and faster than the one it came from.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from timm.layers import BatchNormAct2d
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.fusion import fuse_conv_bn_weights
from torch.overrides import TorchFunctionMode

from confitune.errors import ConfituneError
from confitune.nn import Calibrations, ContinualNet, Deltas, InputMeans, guess_input, trace_flow
from confitune.nn.geometry import Size

# Exactly these: a subclass may do more in its forward than normalise, drop and act.
_FOLDABLE = (nn.BatchNorm1d, nn.BatchNorm2d, BatchNormAct2d)


def folded(net: ContinualNet, task: str) -> nn.Module:
    """The network of one task as a plain module on the CPU, in float32 and evaluation mode: images -> logits.

    A batch norm is kept where no convolution can take it over: there is none directly before it, or the convolution's
    output is read elsewhere, too. Calibrated layers stay as they are. `net` does not change.

    >>> from confitune.nn import Head, XconvNorms
    >>> layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    >>> net = ContinualNet(nn.Sequential(*layers), [XconvNorms(), Head()])
    >>> net.add_task("pets", ["cat", "dog"])
    >>> folded(net, "pets")
    Sequential(
      (backbone): Sequential(
        (0): Conv2d(3, 8, kernel_size=(3, 3), stride=(1, 1))
        (1): Identity()
        (2): ReLU()
        (3): AdaptiveAvgPool2d(output_size=1)
        (4): Flatten(start_dim=1, end_dim=-1)
      )
      (head): Linear(in_features=8, out_features=2, bias=True)
    )
    """
    own = copied_to_cpu(net)
    own.prepare(task)
    backbone, head = own.backbone, own.head.linear
    _make_plain(own)
    example = example_images(backbone, net.tasks[task].image_size)
    if example is not None:
        _fold(backbone, example)
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
                _become(norm, nn.Sequential(calibration, copy.copy(norm)))


@torch.no_grad()
def _fold(backbone: nn.Module, example: Tensor) -> None:
    try:
        flow = trace_flow(backbone, example)
    except ConfituneError:  # runs in evaluation alone: nothing is known about pairs
        return
    readers = _Readers(copy.deepcopy(backbone), example)
    for name, norm in list(backbone.named_modules()):
        if type(norm) not in _FOLDABLE or norm._forward_hooks or norm._forward_pre_hooks:
            continue
        assert isinstance(norm, _BatchNorm)
        call, _ = flow.conv_before(name)
        if call is None or not call.direct_weight or norm.running_mean is None or norm.running_var is None:
            continue
        if readers.only_pair(call.module, name):
            _take_over(backbone.get_submodule(call.module), norm)
            _become(norm, _rest(norm))


def _take_over(conv: nn.Module, norm: _BatchNorm) -> None:
    """Let a convolution (or Linear) do what `norm` does; in float64, so that it is rounded once."""
    weight, bias, mean, var = (
        None if tensor is None else tensor.double()
        for tensor in (norm.weight, norm.bias, norm.running_mean, norm.running_var)
    )
    assert mean is not None
    assert var is not None
    before, shift = conv.get_parameter("weight"), conv._parameters["bias"]
    conv.weight, conv.bias = fuse_conv_bn_weights(before, shift, mean, var, norm.eps, weight, bias)


def _rest(norm: _BatchNorm) -> nn.Module:
    """What a batch norm does besides normalising."""
    parts = [part for part in norm.children() if not isinstance(part, nn.Identity)]  # timm's: drop, then act
    if not parts:
        return nn.Identity()
    return parts[0] if len(parts) == 1 else nn.Sequential(*parts)


def _become(module: nn.Module, other: nn.Module) -> None:
    """Turn `module` into `other` where it is: a network may hold it by more names than its registered one."""
    state = dict(vars(other))
    module.__class__ = type(other)
    vars(module).clear()
    vars(module).update(state)


class _Readers(TorchFunctionMode):
    """Which modules read which tensors in one evaluation pass of a network that is thrown away afterwards.

    Pairs alone do not tell: the output of a convolution may also go past its batch norm, as in pre-activation networks,
    and its weight may be used by others.
    """

    def __init__(self, model: nn.Module, example: Tensor) -> None:
        super().__init__()
        self._model = model
        self._readers: defaultdict[int, list[str]] = defaultdict(list)
        self._made: dict[str, int] = {}
        self._inside: list[str] = []
        self._alive: list[Any] = []  # so that no identity is used twice
        for name, module in model.named_modules():
            module.register_forward_pre_hook(self._entering(name))
            module.register_forward_hook(self._leaving)
        with self:
            model(example)

    def only_pair(self, conv: str, norm: str) -> bool:
        """Whether `norm` alone reads the output of `conv`, and nothing but the two reads their parameters."""
        if self._readers[self._made.get(conv, 0)] != [norm]:
            return False
        own = ((name, tensor) for name in (conv, norm) for tensor in self._model.get_submodule(name).parameters())
        return all(set(self._readers[id(tensor)]) <= {name} for name, tensor in own)

    def _entering(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any) -> None:
            self._inside.append(name)

        return hook

    def _leaving(self, module: nn.Module, args: Any, output: Any) -> None:
        self._alive.append(output)
        self._made[self._inside.pop()] = id(output)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        self._alive.append((args, kwargs, output))
        if self._inside and any(True for _ in _tensors(output)):  # asking for a shape reads nothing
            for tensor in _tensors((args, kwargs)):
                self._readers[id(tensor)].append(self._inside[-1])
        return output


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item)
