"""One task of a network folded into a plain module, and such modules made fast on a CPU.

Folded, changes of weights are added and norms have the task's own state; means are those recovered through today's
weights. What is left is the stock network, of torch's and timm's classes alone. Batch norms stay: the ONNX exporter
folds them into the convolutions before them.

A runner is a backbone in one state that is asked for again: its weights are constants there, so that batch norms go
into convolutions and weights into the order that the processor likes. onnxruntime does that where it is installed
(`confitune[export]`), otherwise torch.
"""

import copy
import io
import logging
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, cast

import torch
from timm.layers import Conv2dSame
from timm.layers.padding import get_same_padding
from torch import Tensor, nn

from confitune.methods.ccll import Calibrations
from confitune.nn import ContinualNet, Deltas, InputMeans, guess_input, state_sha256
from confitune.nn.geometry import Size

_log = logging.getLogger(__name__)
_TWICE, _OFTEN = 2, 16  # batches before a runner is worth its making: while there is room, and in place of another
_TOLERANCE = 1e-5  # of features
_BYTES = 1_000_000_000  # of all runners' weights
Run = Callable[[Tensor], Tensor]


def folded(net: ContinualNet, task: str) -> nn.Sequential:
    """A copy of one task's network as a plain module on the CPU, in float32 and evaluation mode: images -> logits.

    >>> from confitune.nn import Head, XconvNorms
    >>> layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    >>> net = ContinualNet(nn.Sequential(*layers), [XconvNorms(), Head()])
    >>> net.add_task("pets", ["cat", "dog"])
    >>> folded(net, "pets").head
    Linear(in_features=8, out_features=2, bias=True)
    """
    own = copied_to_cpu(net)
    own.prepare(task)
    return nn.Sequential(OrderedDict(backbone=_plain(own), head=own.head.linear)).eval().requires_grad_(False)


def folded_pretrained(net: ContinualNet, only: Sequence[str] | None = None) -> nn.Module:
    """The same of the backbone, its parts (or only some) as pre-trained, where that is kept: images -> features."""
    own = copied_to_cpu(net)
    own.start_pretrained(only)
    return _plain(own)


def copied_to_cpu(net: ContinualNet) -> ContinualNet:
    """A copy that shares nothing with `net`, in evaluation mode and float32: its logits are the ones to agree with."""
    return copy.deepcopy(net).to("cpu", torch.float32).eval()


@torch.no_grad()
def example_images(backbone: nn.Module, size: Size) -> Tensor | None:
    """Two blank images of `size` that go through `backbone`; None where none do."""
    guess = guess_input(backbone)
    if guess.dim() != 4:
        return None
    # timm's description of a network says three channels, even where it was built with another number.
    convs = (module.in_channels for module in backbone.modules() if isinstance(module, nn.Conv2d))
    for channels in dict.fromkeys((guess.shape[1], next(convs, guess.shape[1]))):
        example = guess.new_zeros(2, channels, *size)
        with suppress(Exception):
            backbone(example)
            return example
    return None


@torch.no_grad()
def _plain(net: ContinualNet) -> nn.Module:
    """The backbone with what the parts of the live task do put into it, and without our hooks."""
    for part in net.parts.values():
        if isinstance(part, Deltas):
            merged = part.merged()
            for name, layer in part.layers.items():
                layer.get_parameter("weight").copy_(merged[name])
                vars(layer).pop("forward")
        elif isinstance(part, Calibrations):
            for name, calibration in zip(part.names, part.layers, strict=True):
                norm = net.backbone.get_submodule(name)
                norm._forward_pre_hooks.clear()
                norm._forward_hooks.clear()
                spatial, gate = calibration.children()
                _become(norm, nn.Sequential(spatial, copy.copy(norm), gate))
    for module in net.backbone.modules():
        for key, hook in list(module._forward_pre_hooks.items()):
            if isinstance(getattr(hook, "__self__", None), InputMeans):
                del module._forward_pre_hooks[key]
    return net.backbone.eval().requires_grad_(False)


def _become(module: nn.Module, other: nn.Module) -> None:
    """Turn `module` into `other` where it is: a network may hold it by more names than its registered one."""
    state = dict(vars(other))
    module.__class__ = type(other)
    vars(module).clear()
    vars(module).update(state)


# ---- runners ---------------------------------------------------------------------------------------------------------


class Runners:
    """Runners by name, for images of `size` pixels; the least recently used ones make room.

    Args:
        most_bytes: that the weights of all runners may take; one is always kept.
    """

    def __init__(self, size: int, most_bytes: int = _BYTES) -> None:
        self._example = torch.zeros(2, 3, size, size)
        self._most = most_bytes
        self._compilers: dict[str, Callable[[Mapping[str, Tensor]], Run]] = {}  # by what networks are built like
        self._asked: Counter[str] = Counter()  # names without a runner: how often
        self._keys: dict[str, str] = {}  # by name: the hash of its state, one for tasks that differ in heads alone
        self._made: OrderedDict[str, tuple[int, Run]] = OrderedDict()  # by hash, with bytes; the last was used last

    def find(self, name: str, backbone: Callable[[], nn.Module]) -> Run | None:
        """The runner of the backbone that `backbone` makes; None while it is not worth making.

        A name stands for one state. The backbone is of plain modules, in evaluation mode.
        """
        key = self._keys.get(name, "")
        if key not in self._made:
            self._asked[name] += 1
            full = sum(size for size, _ in self._made.values()) >= self._most
            if self._asked[name] < (_OFTEN if full else _TWICE):
                return None
            del self._asked[name]
            module = backbone()
            key = self._keys[name] = f"{state_sha256(module)} {_built_like(module)}"
            if key not in self._made:
                size = sum(tensor.nbytes for tensor in module.state_dict().values())
                self._made[key] = size, self._compiled(module)
        self._made.move_to_end(key)
        while len(self._made) > 1 and sum(size for size, _ in self._made.values()) > self._most:
            self._made.popitem(last=False)
        return self._made[key][1]

    @torch.no_grad()
    def _compiled(self, backbone: nn.Module) -> Run:
        """The backbone made fast; as it is where that fails, as a trace does with decisions that depend on images."""
        chance = torch.Generator().manual_seed(0)
        images = torch.randn(3, *self._example.shape[1:], generator=chance)
        expected = backbone(images)
        state, like = backbone.state_dict(), _built_like(backbone)
        try:
            if like not in self._compilers:
                self._compilers[like] = compiler(copy.deepcopy(backbone), self._example)
            run = self._compilers[like](state)
            difference = float((run(images) - expected).abs().max())
        except Exception as error:  # whatever tracing and two runtimes can say
            _log.info("%s runs as it is: %s", type(backbone).__name__, error)
            return backbone
        return run if difference <= _TOLERANCE * max(1.0, float(expected.abs().max())) else backbone


def _built_like(backbone: nn.Module) -> str:
    """Equal for states of one network: tensors of the same names, and as many hooks, which add to what it computes."""
    return f"{list(backbone.state_dict())} {sum(len(module._forward_hooks) for module in backbone.modules())}"


def compiler(backbone: nn.Module, example: Tensor) -> Callable[[Mapping[str, Tensor]], Run]:
    """Makes any state of one network fast: tracing takes half a second, which the states share; each takes 50 ms then.

    `backbone` is changed; `example` is a batch of two images.
    """
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, whose newer exporter takes seconds, this one a fraction of one
        padding = _fix_padding(backbone)
        traced: Any = torch.jit.trace(backbone, example, check_trace=False)  # type: ignore[no-untyped-call]
        if find_spec("onnx") and find_spec("onnxruntime"):
            return partial(_onnx_run, _graph(traced, example, padding))
    return partial(_torch_run, traced)


def _torch_run(traced: Any, state: Mapping[str, Tensor]) -> Run:
    module = copy.deepcopy(traced)
    module.load_state_dict(state)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return cast(Run, torch.jit.freeze(module))  # type: ignore[no-untyped-call]


def _onnx_run(graph: Any, state: Mapping[str, Tensor]) -> Run:
    onnxruntime: Any = import_module("onnxruntime")
    model = copy.deepcopy(graph)
    for tensor in model.graph.initializer:
        tensor.raw_data = state[tensor.name].numpy().tobytes()
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors
    options.intra_op_num_threads = torch.get_num_threads()
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # there are many, and one runs
    options.enable_cpu_mem_arena = False  # each would keep what its largest batch took
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return lambda images: torch.from_numpy(session.run(None, {"images": images.contiguous().numpy()})[0])


def _graph(traced: Any, example: Tensor, padding: Mapping[str, list[int]]) -> Any:
    """The ONNX model of a traced network without its numbers; its tensors have the network's names."""
    file, batch = io.BytesIO(), {0: "batch"}
    torch.onnx.export(
        traced,
        (example,),
        file,  # type: ignore[arg-type]
        dynamo=False,
        training=torch.onnx.TrainingMode.PRESERVE,  # names stay: batch norms are for onnxruntime to fold
        do_constant_folding=False,
        input_names=["images"],
        output_names=["features"],
        dynamic_axes={"images": batch, "features": batch},
    )
    model = import_module("onnx").load_from_string(file.getvalue())
    makers = {output: node for node in model.graph.node for output in node.output}
    for node in list(model.graph.node):
        if node.op_type == "Conv" and (pads := padding.get(node.input[1].removesuffix(".weight"))):
            pad = makers[node.input[0]]
            node.input[0] = pad.input[0]  # a convolution can pad by itself
            next(own for own in node.attribute if own.name == "pads").ints[:] = pads
            model.graph.node.remove(pad)
    for tensor in model.graph.initializer:
        tensor.ClearField("raw_data")
    return model


def _fix_padding(backbone: nn.Module) -> dict[str, list[int]]:
    """Let timm's 'same' convolutions pad by constants; a trace fills in which: top, left, bottom, right by name."""
    found: dict[str, list[int]] = {}
    for name, conv in backbone.named_modules():
        if type(conv) is Conv2dSame:
            conv.forward = partial(_padded, conv, name, found)  # type: ignore[method-assign]
    return found


def _padded(conv: Conv2dSame, name: str, found: dict[str, list[int]], x: Tensor) -> Tensor:
    sizes = zip(map(int, x.shape[-2:]), conv.kernel_size, conv.stride, conv.dilation, strict=True)
    both = [get_same_padding(*numbers) for numbers in sizes]
    top, left, bottom, right = found[name] = [pad // 2 for pad in both] + [pad - pad // 2 for pad in both]
    x = nn.functional.pad(x, [left, right, top, bottom])
    return nn.functional.conv2d(x, conv.weight, conv.bias, conv.stride, 0, conv.dilation, conv.groups)
