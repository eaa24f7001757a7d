"""Which batch norm follows which convolution, by tracing what flows through a network.

Found by running a throw-away copy of the network once, not by names or by module order: a pair is the same tensor at
the same version, so an in-place activation or an addition between the two is seen.
"""

import copy
from collections import Counter
from dataclasses import dataclass, field
from functools import partial

import torch
from timm.layers import Conv2dSame
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from confitune.errors import ConfituneError
from confitune.nn.geometry import ConvGeometry

_Stamp = tuple[int, int]  # identity and version of a tensor
_KNOWN = (nn.Conv2d.forward, Conv2dSame.forward, nn.Linear.forward)


@dataclass(frozen=True)
class ConvCall:
    """One call of a convolution (or Linear) module."""

    module: str
    reads: _Stamp
    makes: _Stamp
    direct_weight: bool  # forward uses module.weight and module.bias as they are
    geometry: ConvGeometry | None  # of a plain convolution


@dataclass
class Flow:
    """What one forward pass showed."""

    features: tuple[int, ...] | None = None  # shape of the output, without the batch; None: not one tensor
    last: str | None = None  # the convolution or Linear whose output is the network's output
    stage: str | None = None  # the last block before the plane is halved for the last time
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
    what = f"{type(model).__name__} does not run on an input of shape {tuple(example.shape)} ({failure})"
    raise ConfituneError(f"{what}; pass example_input, two images as the network expects them") from failure


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
    flow = Flow()
    alive: list[object] = []  # so that no identity is used twice
    planes: list[tuple[str, int]] = []  # that modules leave, in their order, and the sides of these

    def left(name: str, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            made, plain, geometry = _stamp(output), _is_plain(module), _geometry(module)
            flow.convs += [ConvCall(name, _stamp(x), made, plain, geometry) for x in args]
            alive.append((args, output))
        elif isinstance(module, _BatchNorm):
            flow.norms += [(name, _stamp(x)) for x in args]
            alive.append(args)
        if isinstance(output, Tensor) and output.dim() == 4 and output.shape[2] == output.shape[3] > 1:
            planes.append((name, output.shape[2]))

    blocks: set[str] = set()  # single convolutions beside them widen or narrow channels on the way to the next block
    for name, module in model.named_modules():
        module.register_forward_hook(partial(left, name))
        if sum(isinstance(layer, (nn.Conv2d, nn.Linear)) for layer in module.modules()) > 1:
            blocks.add(name)
    with torch.no_grad():
        output = model(example)
    flow.stage = next((name for name, side in reversed(planes) if name in blocks and side > planes[-1][1]), None)
    if isinstance(output, Tensor):
        flow.features = tuple(output.shape[1:])
        flow.last = next((call.module for call in flow.convs if call.makes == _stamp(output)), None)
    return flow


def _is_plain(module: nn.Module) -> bool:
    """Whether a layer does what its class says: parametrised and standardised ones compute their weight on the way."""
    known = type(module).forward in _KNOWN and "forward" not in vars(module)
    return known and {"weight", "bias"} <= module._parameters.keys()


def _geometry(conv: nn.Module) -> ConvGeometry | None:
    """Of a plain convolution with zeros around its input, timm's dynamic 'same' padding included."""
    if not isinstance(conv, nn.Conv2d) or conv.padding_mode != "zeros" or not _is_plain(conv):
        return None
    left, right, top, bottom = conv._reversed_padding_repeated_twice
    padding = None if isinstance(conv, Conv2dSame) else ((top, bottom), (left, right))
    return ConvGeometry(conv.kernel_size, conv.stride, conv.dilation, padding)


def _stamp(tensor: Tensor) -> _Stamp:
    return id(tensor), tensor._version
