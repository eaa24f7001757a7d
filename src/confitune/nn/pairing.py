"""Which batch norm follows which convolution, by tracing what flows through a network.

Found by running a throw-away copy of the network once, not by names or by module order: a pair is the same tensor at
the same version, so an in-place activation or an addition between the two is seen.
"""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from timm.layers import Conv2dSame
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from confitune.errors import ConfituneError
from confitune.nn.geometry import ConvGeometry

_Stamp = tuple[int, int]  # identity and version of a tensor


@dataclass(frozen=True)
class ConvCall:
    """One call of a convolution (or Linear) module."""

    module: str
    reads: _Stamp
    makes: _Stamp
    direct_weight: bool  # forward uses module.weight and module.bias as they are
    geometry: ConvGeometry | None  # None: more is done than a convolution of its input with them, zeros around it


@dataclass
class Flow:
    """What one forward pass showed."""

    features: tuple[int, ...] | None = None  # shape of the output, without the batch; None: not one tensor
    last: str | None = None  # the convolution or Linear whose output is the network's output
    convs: list[ConvCall] = field(default_factory=list)
    norms: list[tuple[str, _Stamp]] = field(default_factory=list)

    def conv_before(self, norm: str) -> tuple[ConvCall | None, str]:
        """The convolution whose output `norm` reads, or None and the reason in words."""
        calls = [stamp for name, stamp in self.norms if name == norm]
        if len(calls) != 1:
            return None, "is called more than once" if calls else "is not called in a forward pass"
        call = next((call for call in self.convs if call.makes == calls[0]), None)
        if call is None:
            return None, "reads no convolution's output as it is"
        if Counter(conv.module for conv in self.convs)[call.module] > 1:
            return None, f"its convolution {call.module} is called more than once"
        return call, ""


def trace_flow(model: nn.Module, example_input: Tensor | None = None) -> Flow:
    """Run a copy of `model` in training mode on `example_input` (default: guessed) and record what flows.

    The copy lives on the meta device where that works, so nothing is computed and no state or random number is touched.
    """
    example = guess_input(model) if example_input is None else example_input
    failure: Exception | None = None
    # For real where meta tensors cannot go (data-dependent control flow, tensors outside of buffers); in evaluation
    # mode where training needs more than an image (auxiliary classifiers of a larger input).
    for device, training in (("meta", True), ("cpu", True), ("cpu", False)):
        try:
            with torch.random.fork_rng(devices=[]):
                return _trace(copy.deepcopy(model).to(device).train(training), example.to(device))
        except Exception as error:
            failure = failure or error
    raise ConfituneError(
        f"{type(model).__name__} does not run on an input of shape {tuple(example.shape)} ({failure}); "
        "pass example_input, a batch of two images as the network expects them"
    ) from failure


def guess_input(model: nn.Module) -> Tensor:
    """Two blank images of the size a network was made for, in the number format of its weights."""
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    cfg = getattr(model, "pretrained_cfg", None) or getattr(model, "default_cfg", None) or {}
    if isinstance(cfg, dict) and "input_size" in cfg:
        return torch.zeros(2, *cfg["input_size"], dtype=dtype)
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            return torch.zeros(2, module.in_channels, 224, 224, dtype=dtype)
        if isinstance(module, nn.Linear):
            return torch.zeros(2, module.in_features, dtype=dtype)
    return torch.zeros(2, 3, 224, 224, dtype=dtype)


def _trace(model: nn.Module, example: Tensor) -> Flow:
    recorder = _Recorder(model)
    with torch.no_grad(), recorder:
        output = model(example)
    if isinstance(output, Tensor):
        recorder.flow.features = tuple(output.shape[1:])
        recorder.flow.last = next((c.module for c in recorder.flow.convs if c.makes == _stamp(output)), None)
    return recorder.flow


class _Recorder(TorchFunctionMode):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.flow = Flow()
        self._running: list[tuple[str, nn.Module, tuple[Tensor, ...]]] = []  # convolutions, and what they read
        self._alive: list[Any] = []  # so that no identity is used twice
        for name, module in model.named_modules():
            if isinstance(module, (nn.Conv2d, nn.Linear)):
                module.register_forward_pre_hook(partial(self._entering, name))
                module.register_forward_hook(self._leaving)
            elif isinstance(module, _BatchNorm):
                module.register_forward_pre_hook(partial(self._normalising, name))

    def _entering(self, name: str, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        self._alive.append(args)
        self._running.append((name, module, args))

    def _leaving(self, module: nn.Module, args: Any, output: Any) -> None:
        self._running.pop()

    def _normalising(self, name: str, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        self._alive.append(args)
        self.flow.norms += [(name, _stamp(x)) for x in args]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        self._alive.append(output)
        if self._running and func in (F.conv2d, F.linear):
            given = dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs
            self._record_conv(output, given["input"], given["weight"], given.get("bias"))
        return output

    def _record_conv(self, output: Tensor, conv_input: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        name, module, module_args = self._running[-1]
        module_input = next(iter(module_args), conv_input)
        direct = weight is module._parameters.get("weight") and bias is module._parameters.get("bias")
        followed = _stamp(module_input) == _stamp(conv_input) or type(module).forward is Conv2dSame.forward
        geometry = _geometry(module) if direct and followed and isinstance(module, nn.Conv2d) else None
        self.flow.convs.append(ConvCall(name, _stamp(module_input), _stamp(output), direct, geometry))


def _geometry(conv: nn.Conv2d) -> ConvGeometry:
    """Geometry of a convolution module, timm's dynamic 'same' padding included."""
    left, right, top, bottom = conv._reversed_padding_repeated_twice
    return ConvGeometry(
        kernel=(conv.kernel_size[0], conv.kernel_size[1]),
        stride=(conv.stride[0], conv.stride[1]),
        dilation=(conv.dilation[0], conv.dilation[1]),
        padding=None if isinstance(conv, Conv2dSame) else ((top, bottom), (left, right)),
    )


def _stamp(tensor: Tensor) -> _Stamp:
    return id(tensor), tensor._version
