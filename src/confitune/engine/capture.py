"""How a step is run: directly, or on a GPU captured once as a CUDA graph and replayed, so that Python and the launch
of some 300 kernels cost nothing from then on.

A replay does what was captured on the tensors that were there then. So whatever a step reads or writes lives at a fixed
address: the network's live slot, the captured inputs and outputs here, the learning rate.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from confitune.engine.events import Listener
from confitune.engine.settings import TrainSettings
from confitune.nn import ContinualNet

_DIRECT_FIRST = 2  # direct steps of a kind before it is captured: libraries choose their algorithms there

Inputs = tuple[Tensor | None, ...]


@dataclass(frozen=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    remembered: Any  # by the network, after a step of this kind
    inputs: Inputs
    output: Tensor | None


class Executor:
    """Runs the steps of one network.

    Args:
        net: what the steps train.
        settings: `step` says how: 'eager' launches kernel by kernel, 'graph' captures and replays, 'compile' has
            torch.compile fuse the backbone's kernels first.
        listener: is told when a network cannot be captured.
    """

    def __init__(self, net: ContinualNet, settings: TrainSettings, listener: Listener | None = None) -> None:
        self.net, self.settings = net, settings
        self.device = settings.torch_device()
        self.mode = settings.step_mode(self.device)
        self.lr: float | Tensor = settings.lr
        if self.device.type == "cuda":
            self.lr = torch.tensor(settings.lr, device=self.device)
        self._listener = listener or Listener()
        self._graphs: dict[Hashable, _Captured] = {}
        self._seen: Counter[Hashable] = Counter()
        self._pool: object = None
        self._captures = self.mode != "eager" and self.device.type == "cuda"
        self._compiled = _compiled(net) if self.mode == "compile" else None

    @contextmanager
    def session(self) -> Iterator[None]:
        """Within, steps may be run: library switches as the settings ask, and a stream of this network's own."""
        with _library_switches(self.settings.deterministic), _own_stream(self.device):
            yield

    def set_lr(self, lr: float) -> None:
        """The learning rate of the steps to come, captured ones included."""
        if isinstance(self.lr, Tensor):
            self.lr.fill_(lr)
        else:
            self.lr = lr

    def __call__(self, kind: Hashable, function: Callable[..., Tensor | None], *inputs: Tensor | None) -> Tensor | None:
        """What `function(*inputs)` gives; the tensor is valid until the next call.

        Args:
            kind: functions of one kind do the same to the same tensors, whatever those and the inputs hold.
            function: launches work on the device and waits for nothing.
        """
        kind = (kind, tuple(None if x is None else (x.shape, x.dtype) for x in inputs))
        self.net.compiled = self._compiled
        try:
            if kind not in self._graphs:
                self._seen[kind] += 1
                if not self._captures or self._seen[kind] <= _DIRECT_FIRST:
                    return function(*inputs)
                if not self._capture(kind, function, inputs):
                    return function(*inputs)
                return self._replay(kind, inputs)  # a capture runs nothing, though Python has counted it
        finally:
            self.net.compiled = None
        output = self._replay(kind, inputs)
        self.net.replayed(self._graphs[kind].remembered)
        return output

    def _replay(self, kind: Hashable, inputs: Inputs) -> Tensor | None:
        captured = self._graphs[kind]
        for static, given in zip(captured.inputs, inputs, strict=True):
            if static is not None and given is not None:
                static.copy_(given, non_blocking=True)
        captured.graph.replay()
        return captured.output

    def _capture(self, kind: Hashable, function: Callable[..., Tensor | None], inputs: Inputs) -> bool:
        static = tuple(None if x is None else x.clone() for x in inputs)
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.current_stream(self.device)
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()  # one for all: they never run at the same time
        try:
            # 'thread_local': other threads may copy images to the device meanwhile.
            with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):  # type: ignore[arg-type]
                output = function(*static)
        except RuntimeError as error:
            self._captures = False
            torch.cuda.synchronize(self.device)
            self._listener.note(
                "this network cannot be captured as a CUDA graph and is trained kernel by kernel, which is slower: "
                f"{str(error).splitlines()[0]}"
            )
            return False
        self._graphs[kind] = _Captured(graph, self.net.remembered(), static, output)
        return True


def _compiled(net: ContinualNet) -> Callable[[Tensor], Tensor]:
    import torch._dynamo.config as dynamo  # slow to import, and needed by this mode only

    # Every stage is compiled for itself, and every seed's network again: more than the default lets pass.
    dynamo.recompile_limit = max(dynamo.recompile_limit, 64)  # type: ignore[has-type]
    backbone = net.backbone
    compiled: Callable[[Tensor], Tensor] = torch.compile(lambda x: backbone(x), dynamic=False)
    return compiled


@contextmanager
def _own_stream(device: torch.device) -> Iterator[None]:
    if device.type != "cuda":
        yield
        return
    before = torch.cuda.current_stream(device)
    stream = torch.cuda.Stream(device)  # the default stream cannot be captured
    stream.wait_stream(before)
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        before.wait_stream(stream)


@contextmanager
def _library_switches(deterministic: bool) -> Iterator[None]:
    cudnn = torch.backends.cudnn
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
    cudnn.benchmark, cudnn.deterministic = not deterministic, deterministic
    try:
        yield
    finally:
        cudnn.benchmark, cudnn.deterministic = before[:2]
        torch.use_deterministic_algorithms(before[2], warn_only=before[3])
        torch.utils.deterministic.fill_uninitialized_memory = before[4]  # type: ignore[attr-defined]
