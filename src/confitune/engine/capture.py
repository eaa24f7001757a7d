"""How a step is run: directly, or on a GPU captured once as a CUDA graph and replayed, so that Python and the launch
of some 300 kernels cost nothing from then on.

A replay does what was captured on the tensors that were there then. So whatever a step reads or writes lives at a fixed
address: the network's live slot, the optimizer's state, the captured inputs and outputs here, the learning rate.
"""

from __future__ import annotations

import gc
import os
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from confitune.engine.events import Listener
from confitune.engine.optimizer import Optimizers
from confitune.nn import ContinualNet
from confitune.settings import TrainSettings

# The first step of a kind is plain Python, which settles sizes; the second may be compiled; both let libraries choose
# their algorithms. The third is captured.
_NOT_CAPTURED = 2
_KEPT = 24  # graphs: where every task has its own, those of tasks long past go

Inputs = tuple[Tensor | None, ...]


@dataclass(frozen=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    seen: Any  # what the observer of statistics knew after a step of this kind
    inputs: Inputs
    output: Tensor | None


class Executor:
    """Runs the steps of one network, which it moves to its device, as `settings.step` says.

    The listener is told how training goes, and when a network cannot be captured.
    """

    def __init__(self, net: ContinualNet, settings: TrainSettings, listener: Listener | None = None) -> None:
        self.net, self.settings, self.listener = net, settings, listener or Listener()
        self.device = settings.torch_device()
        self.mode = settings.step_mode(self.device)
        # In the order that convolutions are faster in: on GPUs, and on CPUs depthwise ones above all.
        net.to(self.device).to(memory_format=torch.channels_last)
        self.optimizers = Optimizers(settings, self.device)
        # One for good: libraries keep tens of megabytes for every stream they have seen.
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self._graphs: OrderedDict[Hashable, _Captured] = OrderedDict()  # the one replayed last is the last
        self._others: dict[int, Executor] = {}
        self._seen: Counter[Hashable] = Counter()
        self._pool: Any = None
        self._captures = self.mode != "eager" and self.device.type == "cuda"
        self._compiled: dict[Hashable, Callable[[Tensor], Tensor]] = {}
        self._backbone: Callable[[Tensor], Tensor] | None = None  # compiled, while a step runs with it

    @contextmanager
    def session(self) -> Iterator[None]:
        """Within, steps may be run: library switches as the settings ask, and a stream of this network's own."""
        with library_switches(self.settings, self.mode):
            if self._stream is None:
                yield
                return
            before = torch.cuda.current_stream(self.device)
            self._stream.wait_stream(before)
            try:
                with torch.cuda.stream(self._stream):
                    yield
            finally:
                before.wait_stream(self._stream)

    def of(self, other: ContinualNet) -> Executor:
        """The executor of another network, the same each time. Nobody is told how that one's training goes."""
        if id(other) not in self._others:
            self._others[id(other)] = Executor(other, self.settings)
        return self._others[id(other)]

    def features(self, x: Tensor) -> Tensor:
        """What the backbone makes of training images, by compiled code where that is there."""
        return self.net.features(x, self._backbone)

    def __call__(
        self,
        kind: Hashable,
        function: Callable[..., Tensor | None],
        *inputs: Tensor | None,
        trains: bool = True,
        forward: Hashable = None,
    ) -> Tensor | None:
        """What `function(*inputs)` gives; the tensor is valid until the next call.

        Args:
            kind: functions of one kind do the same to the same tensors, whatever those and the inputs hold.
            function: launches work on the device and waits for nothing.
            trains: whether the network is trained or measured by it, not only looked at.
            forward: what of the kind the backbone's forward and backward depend on: compiled once for each.
        """
        shapes = tuple(None if x is None else (x.shape, x.dtype) for x in inputs)
        kind, forward = (kind, shapes), (forward or kind, shapes)
        if kind in self._graphs:
            self._graphs.move_to_end(kind)
            return self._replay(kind, inputs, trains)
        self._seen[kind] += 1
        if trains and self.mode == "compile" and self._seen[kind] > 1 and self.net.observer.sizes_known:
            if forward not in self._compiled:
                self._compiled[forward] = _compiled(self.net)
            self._backbone = self._compiled[forward]
        try:
            if self._captures and self._seen[kind] == _NOT_CAPTURED and self.mode == "graph":
                return self._watched(function, inputs)
            if self._captures and self._seen[kind] > _NOT_CAPTURED and self._capture(kind, function, inputs):
                return self._replay(kind, inputs, trains)  # a capture runs nothing
            return function(*inputs)
        finally:
            self._backbone = None

    def _watched(self, function: Callable[..., Tensor | None], inputs: Inputs) -> Tensor | None:
        """Run it, and see whether it waits for the device anywhere: a capture would break on that."""
        before = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                output = function(*inputs)
            finally:
                torch.cuda.set_sync_debug_mode(before)
        if any("synchronizing CUDA operation" in str(warning.message) for warning in seen):
            self._give_up("it waits for the device (.item(), a copy to the CPU, an `if` on a value)")
        return output

    def _give_up(self, why: str) -> None:
        self._captures = False
        self.listener.note(
            f"this network cannot be captured as a CUDA graph and is trained kernel by kernel, which is slower: {why}"
        )

    def _replay(self, kind: Hashable, inputs: Inputs, trains: bool) -> Tensor | None:
        captured = self._graphs[kind]
        for static, given in zip(captured.inputs, inputs, strict=True):
            if static is not None and given is not None:
                static.copy_(given, non_blocking=True)
        with _drawing(torch.cuda.current_device()).in_turn():
            captured.graph.replay()
        if trains:
            self.net.weights_moved()
            self.net.observer.replayed(captured.seen)
        return captured.output

    def _capture(self, kind: Hashable, function: Callable[..., Tensor | None], inputs: Inputs) -> bool:
        static = tuple(None if x is None else x.clone() for x in inputs)
        graph = torch.cuda.CUDAGraph()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()  # one for all: they never run at the same time
        try:
            with _drawing(torch.cuda.current_device()).in_turn(captures=True), _capturing(graph, self._pool):
                self.net.observer.recording = True
                output = function(*static)
        except RuntimeError as error:
            torch.cuda.synchronize(self.device)
            forget_capture()
            self._give_up(str(error).splitlines()[0])
            return False
        finally:
            self.net.observer.recording = False
        self._graphs[kind] = _Captured(graph, self.net.observer.seen, static, output)
        if len(self._graphs) > _KEPT:
            self._graphs.popitem(last=False)
        return True


class _Drawing:
    """Launches of graphs that draw random numbers, of all networks on a device.

    They read where the generator stands from the device, where torch keeps it once for all graphs and writes it at
    every launch, and when a capture begins: on another stream that must wait until the graphs before have read theirs.
    """

    def __init__(self, device: int) -> None:
        self._generator = torch.cuda.default_generators[device]
        self._last: torch.cuda.Event | None = None  # after the last graph that drew, or the last capture

    @contextmanager
    def in_turn(self, captures: bool = False) -> Iterator[None]:
        """Within, a graph is launched on the current stream, or captured."""
        if self._last is not None:
            torch.cuda.current_stream().wait_event(self._last)
        before = self._generator.get_offset()
        yield
        if captures or self._generator.get_offset() != before:
            self._last = self._last or torch.cuda.Event()
            self._last.record()


@cache
def _drawing(device: int) -> _Drawing:
    return _Drawing(device)


@contextmanager
def _capturing(graph: torch.cuda.CUDAGraph, pool: Any) -> Iterator[None]:
    """What is launched on the current stream goes into the graph.

    As `torch.cuda.graph` does it, but without emptying memory caches and collecting garbage first, which takes longer
    than everything else; collecting it in the middle would free memory that the graph must not lose.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        # 'thread_local': other threads may copy images to the device meanwhile.
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            yield
        finally:
            graph.capture_end()
    finally:
        if collects:
            gc.enable()


def forget_capture() -> None:
    """After a capture that broke off, which leaves generators of random numbers believing that they are in one."""
    for generator in torch.cuda.default_generators:
        generator.graphsafe_set_state(generator.clone_state())


def _compiled(net: ContinualNet) -> Callable[[Tensor], Tensor]:
    """The backbone, compiled for one kind of step.

    Each time with a code object of its own, which is what torch.compile keeps its results by: it does not see that a
    parameter was frozen or thawed in between (torch 2.11), and would run the code of another stage.
    """
    backbone = net.backbone

    def forward(x: Tensor) -> Tensor:
        features: Tensor = backbone(x)
        return features

    own = FunctionType(forward.__code__.replace(), forward.__globals__, "forward", None, forward.__closure__)
    compiled: Callable[[Tensor], Tensor] = torch.compile(own, dynamic=False)
    return compiled


@contextmanager
def library_switches(settings: TrainSettings, mode: str) -> Iterator[None]:
    """Within, torch's own switches are as the settings ask; they are the whole process's."""
    deterministic, cudnn = settings.deterministic, torch.backends.cudnn
    before = (
        cudnn.benchmark,
        cudnn.deterministic,
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
    )
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    # Trying algorithms takes seconds and gains a percent: for long runs only.
    cudnn.benchmark, cudnn.deterministic = mode == "compile" and not deterministic, deterministic
    try:
        yield
    finally:
        cudnn.benchmark, cudnn.deterministic = before[:2]
        torch.use_deterministic_algorithms(before[2], warn_only=before[3])
        torch.utils.deterministic.fill_uninitialized_memory = before[4]  # type: ignore[attr-defined]
