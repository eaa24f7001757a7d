"""Batches whose images belong to different tasks, in one pass: each image reads its own task's numbers.

What a task owns is one row of a table on the device: for each norm a scale and a shift (those of a batch norm have its
moments in them), for each changed layer the factors of the change, and the head. A batch norm is x * scale + shift, a
convolution with a change of low rank is W x + B (A x), where A x has only as many channels as the change has ranks: a
mixed batch costs little more than one task's. On a GPU that is done by kernels of our own, together with the batch norm
that follows, see `mixed_kernels.py`.

On a GPU a batch is padded to the next of a few sizes, for each of which the pass is captured as a CUDA graph. The table
and the weights stay where they are, so graphs stay valid whatever tasks come and go.
"""

import logging
from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, cast

import torch
from timm.layers import BatchNormAct2d, Conv2dSame, GroupNorm, GroupNorm1, LayerNorm, LayerNorm2d, pad_same
from torch import Tensor, nn
from torch.nn.functional import conv2d, pad, relu
from torch.nn.modules.batchnorm import _BatchNorm
from torchvision.models.convnext import LayerNorm2d as TorchvisionLayerNorm2d

from confitune.deploy.folding import folded_pretrained
from confitune.engine.capture import forget_capture
from confitune.errors import ConfituneError
from confitune.nn import ContinualNet, Deltas, Head, Moments, Norms, XconvNorms
from confitune.nn.geometry import ConvGeometry
from confitune.nn.pairing import Flow, trace_flow
from confitune.nn.parts.deltas import product
from confitune.nn.parts.norms import norm_layers

_log = logging.getLogger(__name__)
SIZES = (1, 8, 32, 64, 128, 256)  # of captured batches; larger ones go in pieces
_PARTS = (Head, Norms, Moments, XconvNorms, Deltas)
# Norms that end with a scale and a shift (of timm's with an activation: before it), and along which axis.
_FIRST = (_BatchNorm, BatchNormAct2d, nn.GroupNorm, GroupNorm, GroupNorm1, LayerNorm2d, TorchvisionLayerNorm2d)
_LAST = (nn.LayerNorm, LayerNorm, nn.RMSNorm)
_AXES: dict[Any, int] = {**{kind.forward: 1 for kind in _FIRST}, **{kind.forward: -1 for kind in _LAST}}
Outputs = tuple[Tensor, Tensor]


class CannotMixError(ConfituneError):
    """A network in which images of one batch cannot have tasks of their own."""


class MixedNet:
    """A copy of a network for batches of images of any tasks; tasks are loaded from that network, which stays as it is.

    Args:
        net: its backbone and parts count, not its tasks.
        image: shape of one, [C, H, W].
        tasks: for how many there is room.
        classes: of a task, at most.
    """

    def __init__(self, net: ContinualNet, image: Sequence[int], tasks: int, classes: int) -> None:
        if others := [name for name, part in net.parts.items() if type(part) not in _PARTS]:
            raise CannotMixError(f"tasks own {', '.join(others)}, which all images of a batch share")
        self._image, self.classes = tuple(image), classes
        self._device = next(net.backbone.parameters()).device
        self._backbone = folded_pretrained(net, ["deltas"])
        flow = trace_flow(self._backbone, torch.zeros(2, *image))
        self._geometries = {call.module: call.geometry for call in flow.convs}
        self._backbone.to(memory_format=torch.channels_last).to(self._device)
        self._slots: dict[str, tuple[int, torch.Size]] = {}  # of a row: where what starts, and its shape
        self._numbers = 0
        for name, norm in norm_layers(self._backbone).items():
            self._replace_norm(name, norm)
        for layer in self._backbone.modules():
            if type(layer) is nn.ReLU:
                layer.forward = partial(self._relu, layer.inplace)  # type: ignore[method-assign]
        for name in net.part(Deltas).layers if "deltas" in net.parts else ():
            self._replace_changed(name, self._backbone.get_submodule(name), net.part(Deltas).live(True))
        self._slot("head.weight", (classes, net.head.features))
        self._slot("head.bias", (classes,))
        self._table = torch.zeros(tasks, self._numbers, device=self._device)
        self._rows: dict[str | None, int] = {}
        self._own: dict[str, Tensor] = {}  # during a pass: of each image
        self._norm_after: dict[str, str] = {}  # of convolutions: the batch norm that finishes what they do
        self._left: dict[str, Callable[..., Tensor]] = {}  # during a pass: to be done by such a norm
        self._rectified: set[str] = set()  # such norms that do the ReLU after them, too
        self._before_relu: set[str] = set()  # all norms that a ReLU follows
        self._fresh: tuple[str, Tensor | None, int] = "", None, 0  # during a pass: the last norm, what it gave, version
        self._passes: dict[int, Callable[..., Outputs]] = {}  # by size
        self._pool = torch.cuda.graph_pool_handle() if self._device.type == "cuda" else None
        try:  # five: no layer has as many windows or tokens, so one that sees something else than images is found
            self._pair(flow, net)
        except Exception as error:
            raise CannotMixError(f"{type(net.backbone).__name__} does not take images one by one: {error}") from error

    # ---- tasks -----------------------------------------------------------------------------------------------------

    def __contains__(self, task: str | None) -> bool:
        return task in self._rows

    @torch.no_grad()
    def load(self, task: str | None, net: ContinualNet) -> None:
        """Copy what is live in `net` into the task's row. None is no task, and has no head."""
        if task not in self._rows:
            self._rows[task] = min(set(range(len(self._table))) - set(self._rows.values()))
        row = self._rows[task]
        own = {key: tensor[0] for key, tensor in self._read(self._table[row : row + 1]).items()}
        for name, norm in norm_layers(net.backbone).items():
            if f"{name}.scale" in own:
                for key, value in zip(("scale", "shift"), _affine(norm), strict=True):
                    own[f"{name}.{key}"].copy_(value)
        for key, value in net.part(Deltas).live(True).items() if "deltas" in net.parts else ():
            own[key].copy_(value)
        own["head.weight"].zero_()
        own["head.bias"].fill_(-torch.inf)
        for key, value in net.head.linear.state_dict().items() if task is not None else ():
            own[f"head.{key}"][: len(value)].copy_(value)

    def drop(self, task: str | None) -> None:
        """Make room, if the task has a row."""
        self._rows.pop(task, None)

    # ---- images ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def __call__(self, x: Tensor, tasks: Sequence[str | None]) -> Outputs:
        """Features, and logits padded with -inf, of images under their tasks, which have been loaded."""
        rows = torch.tensor([self._rows[task] for task in tasks], device=self._device)
        pieces = zip(x.split(SIZES[-1]), rows.split(SIZES[-1]), strict=True)
        features, logits = zip(*(self._piece(*piece) for piece in pieces), strict=True)
        return torch.cat(features), torch.cat(logits)

    def _piece(self, x: Tensor, rows: Tensor) -> Outputs:
        if self._device.type != "cuda":
            return self._forward(x, rows)
        size = next(size for size in SIZES if size >= len(x))
        if size not in self._passes:
            self._passes[size] = self._captured(size)
        return self._passes[size](x, rows)

    def _captured(self, size: int) -> Callable[..., Outputs]:
        try:
            return Captured(self._forward, self._blank(size), self._pool)
        except Exception as error:  # whatever a runtime can say
            _log.warning("batches of %d images take longer than they could: %s", size, str(error).partition("\n")[0])
            return self._forward

    def _blank(self, count: int) -> tuple[Tensor, Tensor]:
        x = torch.zeros(count, *self._image, device=self._device).contiguous(memory_format=torch.channels_last)
        return x, torch.zeros(count, dtype=torch.long, device=self._device)

    def _forward(self, x: Tensor, rows: Tensor) -> Outputs:
        self._own = self._read(self._table[rows])
        features: Tensor = self._backbone(x)
        weight, bias = self._own["head.weight"], self._own["head.bias"]
        self._own, self._fresh = {}, ("", None, 0)
        return features, torch.baddbmm(bias[..., None], weight, features[..., None])[..., 0]

    @torch.no_grad()
    def _pair(self, flow: Flow, net: ContinualNet) -> None:
        """Let batch norms finish what the convolutions before them do, and do the ReLU after them, unless that makes a
        difference: it does where something else reads what is in between."""
        chance = torch.Generator().manual_seed(0)
        x, rows = self._blank(5)
        x.copy_(torch.randn(x.shape, generator=chance))
        self.load(None, net)
        self._table[0] += 0.05 * torch.randn(self._numbers, generator=chance).to(x)
        expected = self._forward(x, rows)[0]
        norms = [name for name, norm in norm_layers(self._backbone).items() if isinstance(norm, _BatchNorm)]
        self._norm_after = {call.module: norm for norm in norms if (call := flow.conv_before(norm)[0]) is not None}
        self._rectified = self._before_relu & set(self._norm_after.values())
        if not torch.allclose(self._forward(x, rows)[0], expected, 1e-3, 1e-3 * float(expected.abs().max())):
            self._norm_after, self._rectified = {}, set()
        self._table.zero_()
        self._rows.clear()

    # ---- layers ----------------------------------------------------------------------------------------------------

    def _slot(self, name: str, shape: Sequence[int]) -> None:
        self._slots[name] = self._numbers, torch.Size(shape)
        self._numbers += -(-torch.Size(shape).numel() // 16) * 16  # what starts there is read several numbers at a time

    def _read(self, rows: Tensor) -> dict[str, Tensor]:
        """Views of what rows [N, numbers] hold, by name."""
        slots = self._slots.items()
        return {name: rows[:, at : at + shape.numel()].unflatten(1, shape) for name, (at, shape) in slots}

    def _of(self, name: str, keys: Sequence[str], x: Tensor) -> list[Tensor]:
        """What each image that a layer sees has of its own."""
        own = [self._own[f"{name}.{key}"] for key in keys if f"{name}.{key}" in self._own]
        if len(own[0]) != len(x):
            raise CannotMixError(f"{name} sees {len(x)} entries of {len(own[0])} images")
        return own

    def _replace_norm(self, name: str, norm: Any) -> None:
        batch, axis = isinstance(norm, _BatchNorm), _AXES.get(type(norm).forward)
        if batch or norm.weight is not None:
            if axis is None or (batch and norm.running_mean is None):
                raise CannotMixError(f"{name} is a {type(norm).__name__} that all images of a batch share")
            for key, value in zip(("scale", "shift"), _affine(norm), strict=True):
                self._slot(f"{name}.{key}", value.shape)
            if not batch:
                norm.weight = norm.bias = None
            norm.forward = partial(self._normalised, name, norm, axis)

    def _normalised(self, name: str, norm: Any, axis: int, x: Tensor) -> Tensor:
        own = self._of(name, ("scale", "shift"), x)
        if name in self._left:
            y = self._left.pop(name)(x, *own, name in self._rectified)
        else:
            shape = [len(x)] + [1] * (x.dim() - 1)
            shape[axis] = -1
            scale, shift = (values.view(shape) for values in own)
            y = torch.addcmul(shift, x if isinstance(norm, _BatchNorm) else type(norm).forward(norm, x), scale)
        self._fresh = name, y, y._version
        return cast(Tensor, norm.act(norm.drop(y))) if isinstance(norm, BatchNormAct2d) else y

    def _relu(self, in_place: bool, x: Tensor) -> Tensor:
        norm, made, version = self._fresh
        if x is made and x._version == version:  # nothing was added to it in place
            self._before_relu.add(norm)
            if norm in self._rectified:
                return x
        return relu(x, in_place)

    def _replace_changed(self, name: str, layer: Any, live: Any) -> None:
        for key in ("delta.a", "delta.b", "delta.window"):
            if f"{name}.{key}" in live:
                self._slot(f"{name}.{key}", live[f"{name}.{key}"].shape)
        linear = isinstance(layer, nn.Linear)
        layer.forward = partial(self._linear if linear else self._conv, name, layer)

    def _linear(self, name: str, layer: nn.Linear, x: Tensor) -> Tensor:
        a, b, *window = self._of(name, ("delta.a", "delta.b", "delta.window"), x)
        rows = product(a, window[0]) if window else a
        y: Tensor = type(layer).forward(layer, x)
        return y + (x.reshape(len(x), -1, x.shape[-1]) @ rows.mT @ b.mT).view_as(y)

    def _conv(self, name: str, layer: nn.Conv2d, x: Tensor) -> Tensor:
        a, b, *window = self._of(name, ("delta.a", "delta.b", "delta.window"), x)
        if layer.groups > 1:  # (W + B A) x: the weights are few, and A x of all groups would be many channels
            rows = product(a, window[0]) if window else a
            grouped = _convolved(layer, x, layer.weight + (b @ rows).unflatten(2, layer.weight.shape[1:]))
            return grouped if layer.bias is None else grouped + layer.bias[:, None, None]
        y: Tensor = type(layer).forward(layer, x)
        geometry, last = self._geometries[name], torch.channels_last
        fast = x.is_cuda and x.is_contiguous(memory_format=last) and y.is_contiguous(memory_format=last)
        finish: Callable[..., Tensor] = _finished
        if fast and window and geometry is not None and (kernels := _kernels()) is not None:
            inner, finish = kernels.inner(x, a, window[0], geometry, y.shape[2:]), kernels.finished
        elif window:
            z = (a @ x.flatten(2)).unflatten(2, x.shape[2:])
            inner = _convolved(layer, z, window[0].unflatten(2, (1, *layer.kernel_size)))
        else:
            inner = _convolved(layer, x, a.unflatten(2, layer.weight.shape[1:]))
        if name in self._norm_after:
            self._left[self._norm_after[name]] = partial(finish, inner, b)
            return y
        return finish(inner, b, y)


@cache
def _kernels() -> Any:
    """For GPUs, where Triton is there, as it is with torch on Linux, and finds the C compiler that it needs."""
    if find_spec("triton") is None:
        return None
    kernels = import_module("confitune.deploy.mixed_kernels")
    try:
        x, one = torch.zeros(1, 1, 1, 1, device="cuda"), torch.zeros(1, 1, 1, device="cuda")
        kernels.finished(kernels.inner(x, one, one, ConvGeometry(), (1, 1)), one, x)
    except Exception as error:  # whatever a compiler can say
        _log.warning("batches that mix tasks take longer than they could: %s", str(error).partition("\n")[0])
        return None
    return kernels


def _finished(
    inner: Tensor, b: Tensor, y: Tensor, scale: Tensor | None = None, shift: Tensor | None = None, rectify: bool = False
) -> Tensor:
    """(y + B inner) * scale + shift, in place, perhaps without its negative values."""
    y.view(*y.shape[:2], -1).mT.baddbmm_(inner.flatten(2).mT, b.mT)
    if scale is not None and shift is not None:
        torch.addcmul(shift[..., None, None], y, scale[..., None, None], out=y)
    return y.relu_() if rectify else y


def _affine(norm: Any) -> tuple[Tensor, Tensor]:
    """Scale and shift of a norm, with the moments of a batch norm in them."""
    scale, shift = norm.weight, getattr(norm, "bias", None)
    if hasattr(norm, "running_var"):
        inverse = (norm.running_var + norm.eps).rsqrt()
        scale = inverse if scale is None else scale * inverse
        return scale, (0 if shift is None else shift) - norm.running_mean * scale
    return scale, torch.zeros_like(scale) if shift is None else shift


def _convolved(layer: nn.Conv2d, x: Tensor, weight: Tensor) -> Tensor:
    """Images [N, C, H, W] as the layer convolves, with a weight [N, O, C / groups, K, K] for each."""
    if isinstance(layer, Conv2dSame):
        x = pad_same(x, list(layer.kernel_size), list(layer.stride), list(layer.dilation))
    else:
        mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
        x = pad(x, layer._reversed_padding_repeated_twice, mode)
    (n, _, *sides), groups = x.shape, x.shape[1] // weight.shape[2]
    y = conv2d(x.reshape(1, -1, *sides), weight.flatten(0, 1), None, layer.stride, 0, layer.dilation, n * groups)
    return cast(Tensor, y[0].unflatten(0, (n, -1)))


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """One for all captures: libraries keep tens of megabytes for every stream that they have seen."""
    return torch.cuda.Stream(device)


class Captured:
    """A function of tensors as a CUDA graph, for batches of up to as many as `inputs` have, which become its own."""

    def __init__(self, function: Callable[..., Outputs], inputs: Sequence[Tensor], pool: Any = None) -> None:
        device = inputs[0].device
        self._inputs, self._graph, stream = inputs, torch.cuda.CUDAGraph(), _stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in range(3):  # libraries choose their algorithms
                function(*inputs)
        torch.cuda.current_stream(device).wait_stream(stream)
        # 'thread_local': other threads may use the device meanwhile. Graphs of one pool never run at the same time.
        try:
            with torch.cuda.graph(self._graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                self._outputs = function(*inputs)
        except Exception:
            forget_capture()
            raise

    def __call__(self, *given: Tensor) -> Outputs:
        """The outputs for what is given, without those for what is left in the inputs' other places."""
        for own, tensor in zip(self._inputs, given, strict=True):
            own[: len(tensor)].copy_(tensor, non_blocking=True)
        self._graph.replay()
        features, logits = (output[: len(given[0])].clone() for output in self._outputs)
        return features, logits
