"""A shared backbone with per-task batch-norm state and heads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from confitune.errors import ConfituneError
from confitune.nn.backbones import headless
from confitune.nn.convert import ConversionReport, Statistics, apply_xconv, convert_task_bn, require_batch_norm
from confitune.nn.flow import trace_flow
from confitune.nn.geometry import Means, Size
from confitune.nn.memory import TaskEntry, TaskMemory
from confitune.nn.mixing import MixedRows, mixed_logits
from confitune.nn.task_state import memory_from_state, memory_to_state, task_from_state, task_to_state
from confitune.nn.xconv import XconvNorm

Norm = Literal["xconv", "task", "shared", "frozen"]


@dataclass(frozen=True)
class TaskStorage:
    """What a task adds to the network."""

    norm_numbers: int  # batch-norm state and input statistics
    head_numbers: int
    bytes: int

    @property
    def numbers(self) -> int:
        """All of it."""
        return self.norm_numbers + self.head_numbers


class ContinualNet(nn.Module):
    """One backbone for many tasks.

    Args:
        backbone: maps images to feature vectors [N, F]. A timm or torchvision classifier loses its last layer; its
            batch norms are converted in place.
        norm: 'xconv' (ConFiT), 'task' (plain task-specific BN), 'shared' (one BN for all tasks) or 'frozen' (shared,
            pre-trained statistics, evaluation mode throughout).
        means, statistics: see `convert_xconv_bn`.
        momentum: of all running statistics. The default is the paper's; timm's tf_ networks come with 0.01, which is
            too slow for tasks of a few hundred steps. None keeps what the layers have.

    >>> net = ContinualNet(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.AdaptiveAvgPool2d(1), nn.Flatten()))
    >>> net.add_task("pets", ["cat", "dog"])
    >>> net.train()(torch.zeros(4, 3, 16, 16)).shape
    torch.Size([4, 2])
    >>> net.finish_task()
    >>> net.storage()["pets"].norm_numbers  # weight, bias, variance of 8 channels; window means of 3 channels
    51
    """

    def __init__(
        self,
        backbone: nn.Module,
        *,
        norm: Norm = "xconv",
        means: Means = "window",
        statistics: Statistics = "running",
        momentum: float | None = 0.1,
        example_input: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.backbone = headless(backbone)
        self.norm: Norm = norm
        self.means: Means = means
        self.statistics: Statistics = statistics
        self.momentum = momentum
        self.conversion: ConversionReport | None = None
        flow = trace_flow(self.backbone, example_input)
        if flow.features is None or len(flow.features) != 1:
            raise ConfituneError(
                f"the backbone returns {'no single tensor' if flow.features is None else f'[N, {flow.features}]'} where "
                "feature vectors [N, F] are needed: add pooling and nn.Flatten() at its end"
            )
        self.features = flow.features[0]
        if norm != "shared":
            require_batch_norm(self.backbone)
        for module in self.backbone.modules():
            if isinstance(module, _BatchNorm) and momentum is not None:
                module.momentum = momentum
        if norm == "xconv":
            self.conversion = apply_xconv(self.backbone, flow, means, statistics)
        elif norm == "task":
            convert_task_bn(self.backbone)
        elif norm not in ("shared", "frozen"):
            raise ConfituneError(f"norm={norm!r} is not known; choose 'xconv', 'task', 'shared' or 'frozen'")
        self.heads = nn.ModuleDict()  # live heads by number of classes: tasks of one shape share one address
        self._memory = TaskMemory.of(self.backbone)
        self._current: str | None = None
        self._image_size: Size | None = None
        self._moves = 0  # counts what tensor versions do not see: graph replays, loads
        self._recovered_at: tuple[str, int] | None = None  # task and weights for which the slot's means were recovered
        self._mixed = MixedRows(self._memory)
        self.train(self.training)

    # ---- tasks -----------------------------------------------------------------------------------------------------

    @property
    def tasks(self) -> Mapping[str, TaskEntry]:
        """Name -> entry, in the order in which they were added; a task's index is its place here."""
        return MappingProxyType(self._memory.tasks)

    @property
    def current_task(self) -> str:
        """The task whose state is in the live slot."""
        if self._current is None:
            raise ConfituneError("no task yet: add_task(name, classes) first")
        return self._current

    @property
    def head(self) -> nn.Linear:
        """The live head of the current task."""
        return self._head(len(self.tasks[self.current_task].classes))

    def add_task(self, name: str, classes: int | Sequence[str], generator: torch.Generator | None = None) -> None:
        """Add a task and make it current: the last task's batch-norm state, a fresh head, no input statistics.

        Args:
            classes: names of the classes, or how many.
            generator: for the head's initialisation (a CPU generator; default: torch's global one).
        """
        if name in self.tasks:
            raise ConfituneError(f"there is a task {name!r} already; choose another name, or reopen it to train it on")
        names = tuple(map(str, range(classes))) if isinstance(classes, int) else tuple(classes)
        if not names or len(set(names)) != len(names):
            raise ConfituneError(f"task {name!r} needs one or more classes with names of their own, got {list(names)}")
        if self.tasks:
            self.prepare(next(reversed(self.tasks)))
        for statistics in self._memory.statistics.values():
            statistics.reset()
        head = self._head(len(names))
        _initialise(head, generator)
        entry = TaskEntry(names, head.weight.new_empty(0))
        self._memory.store(entry, head, finished=False)
        self._memory.tasks[name] = entry
        self._current = name
        self._recovered_at = None
        self._image_size = None

    def set_task(self, name: str) -> None:
        """Copy a task's state into the live slot; an unfinished task that leaves the slot is stored first."""
        entry = self._memory.entry(name)
        if name == self._current:
            return
        self._store_current()
        self._memory.load(entry, self._head(len(entry.classes)))
        self._current = name
        self._image_size = entry.image_size
        self._recovered_at = None

    def finish_task(self, batches: Iterable[Tensor] | None = None) -> None:
        """End the current task's training: measure what is to be measured, and store its state for good.

        Args:
            batches: the task's training inputs in batches of the training size; needed for statistics='pass'.
        """
        entry = self.tasks[self.current_task]
        if entry.finished:
            raise ConfituneError(f"task {self.current_task!r} is finished already")
        if self.norm == "xconv" and self.statistics == "pass":
            if batches is None:
                raise ConfituneError("statistics='pass' needs the task's training batches: finish_task(batches)")
            self.measure(batches)
        if any(int(statistics.batches) == 0 for statistics in self._memory.statistics.values()):
            raise ConfituneError(f"task {self.current_task!r} has seen no training batch: train it before finishing it")
        self._memory.store(entry, self.head, finished=True)
        entry.image_size = self._image_size
        self._recovered_at = None

    def reopen(self, name: str) -> None:
        """Make a finished task trainable again, from its state under today's weights."""
        self.prepare(name)
        for statistics in self._memory.statistics.values():
            statistics.reset()
        self._memory.store(self.tasks[name], self.head, finished=False)
        self._image_size = None

    @torch.no_grad()
    def measure(self, batches: Iterable[Tensor]) -> None:
        """Statistics of the current task with the current weights: a cumulative average over `batches`.

        In training mode, because batch moments are part of what was trained.
        """
        was_training, norms = self.training, [m for m in self._memory.norms.values() if m.track_running_stats]
        momenta = [norm.momentum for norm in norms]
        self.track(True)
        for statistics in self._memory.statistics.values():
            statistics.reset()
            statistics.cumulative = True
        for norm in norms:
            norm.momentum = None  # BN's own cumulative average
            norm.num_batches_tracked.zero_()  # type: ignore[union-attr]
        self.train()
        try:
            for batch in batches:
                self(batch)
        finally:
            for norm, momentum in zip(norms, momenta, strict=True):
                norm.momentum = momentum
            for statistics in self._memory.statistics.values():
                statistics.cumulative = statistics.momentum is None
            self.track(False)
            self.train(was_training)

    def track(self, on: bool) -> None:
        """Switch the input statistics on or off; an exponential average needs only a task's last steps."""
        for statistics in self._memory.statistics.values():
            statistics.tracking = on

    # ---- evaluation ------------------------------------------------------------------------------------------------

    def weights_moved(self) -> None:
        """Say that weights changed where tensor versions do not show it (a graph replay, a load)."""
        self._moves += 1

    @torch.no_grad()
    def prepare(self, task: str | None = None) -> None:
        """Make `task` (default: the current one) ready for evaluation: recover its means through today's weights.

        Does nothing where that was done and no weight has moved since.
        """
        self.set_task(task if task is not None else self.current_task)
        key = (self.current_task, self._weights_key())
        if not self.tasks[self.current_task].finished or self._recovered_at == key:
            return
        for norm in self._memory.norms.values():
            if isinstance(norm, XconvNorm):
                assert norm.running_mean is not None
                norm.running_mean.copy_(norm.recovered_mean())
        self._recovered_at = key

    def forward(self, x: Tensor, task: str | Tensor | None = None) -> Tensor:
        """Logits of a task's head.

        Args:
            task: a name (default: the current task), or in evaluation one task index per image (a mixed batch: each
                image is normalised by its own task; rows are padded with -inf to the largest number of classes).
        """
        if isinstance(task, Tensor):
            return self._forward_mixed(x, task)
        if task is not None:
            self.set_task(task)
        entry = self.tasks[self.current_task]
        if not self.training:
            self._check_size(x, self.current_task)
            self.prepare()
        elif entry.finished:
            raise ConfituneError(f"task {self.current_task!r} is finished; reopen({self.current_task!r}) to train it on")
        else:
            self._image_size = _plane(x)
        return self.head(self.backbone(x))  # type: ignore[no-any-return]

    def _forward_mixed(self, x: Tensor, index: Tensor) -> Tensor:
        if self.training:
            raise ConfituneError("a mixed batch is for evaluation: batch moments belong to one task; call eval() first")
        if index.shape != x.shape[:1] or index.is_floating_point():
            raise ConfituneError(f"a mixed batch needs one task index per image, got {tuple(index.shape)} for {len(x)}")
        names = list(self.tasks)
        unique, place = torch.unique(index, return_inverse=True)
        if len(unique) and not 0 <= int(unique[0]) <= int(unique[-1]) < len(names):
            raise ConfituneError(f"task indices run from 0 to {len(names) - 1}, got {unique.tolist()}")
        wanted = [names[i] for i in unique.tolist()]
        current, key = self.current_task, self._weights_key()
        for name in wanted:
            self._check_size(x, name)
            if not self._mixed.fresh(name, key):
                self.prepare(name)
                self._mixed.remember(name, key)
        self.set_task(current)
        with self._mixed.normalising(wanted, place):
            features = self.backbone(x)
        self._store_current()
        parts = [self._memory.named_parts(self.tasks[name]) for name in wanted]
        return mixed_logits(features, [(part["head.weight"], part["head.bias"]) for part in parts], place)

    def _check_size(self, x: Tensor, task: str) -> None:
        size = self.tasks[task].image_size
        if self.norm == "xconv" and self.tasks[task].finished and size not in (None, _plane(x)):
            assert size is not None
            raise ConfituneError(
                f"task {task!r} was trained on {size[0]}x{size[1]} images, these are {x.shape[-2]}x{x.shape[-1]}; its "
                "recovered means hold for the size it was trained on: resize the images"
            )

    def _weights_key(self) -> int:
        convs = (norm.conv for norm in self._memory.norms.values() if isinstance(norm, XconvNorm))
        return self._moves + sum(parameter._version for conv in convs for parameter in conv.parameters())

    def train(self, mode: bool = True) -> ContinualNet:
        """As in torch; frozen batch norms stay in evaluation mode."""
        super().train(mode)
        if self.norm == "frozen":
            for module in self.backbone.modules():
                if isinstance(module, _BatchNorm):
                    module.eval()
        return self

    # ---- parameters, storage, state --------------------------------------------------------------------------------

    def norm_parameters(self) -> list[nn.Parameter]:
        """Affine parameters of all batch norms."""
        norms = [m for m in self.backbone.modules() if isinstance(m, _BatchNorm)]
        return [p for norm in norms for p in norm.parameters(recurse=False)]

    def conv_parameters(self) -> list[nn.Parameter]:
        """Everything in the backbone that is not a batch norm's: convolutions, and Linear layers where there are any."""
        norm = set(map(id, self.norm_parameters()))
        return [p for p in self.backbone.parameters() if id(p) not in norm]

    def storage(self) -> dict[str, TaskStorage]:
        """What each task takes, measured from what is stored."""
        sizes = {}
        for name, entry in self.tasks.items():
            norm = self._memory.norm_numbers(entry)
            sizes[name] = TaskStorage(norm, entry.row.numel() - norm, entry.row.numel() * entry.row.element_size())
        return sizes

    def task_state_dict(self, name: str) -> dict[str, Tensor]:
        """Everything that is the task's own, by layer; the task's name is not part of the keys."""
        entry = self._memory.entry(name)
        if name == self._current:
            self._store_current()
        return task_to_state(self._memory, entry)

    def load_task_state_dict(
        self, name: str, state: Mapping[str, Tensor], classes: Sequence[str] | None = None
    ) -> None:
        """Put a task's state back, as a new task or over an existing one of that name, and make it current."""
        if "head.weight" not in state:
            raise ConfituneError(f"the state for task {name!r} has no head.weight: it is not a task's state")
        count = state["head.weight"].shape[0]
        old = self.tasks.get(name)
        names = tuple(classes or (old.classes if old else map(str, range(count))))
        if len(names) != count:
            raise ConfituneError(f"task {name!r}: {len(names)} class names for a head of {count} classes")
        like = next(self.backbone.parameters())
        entry = task_from_state(self._memory, name, state, names, self.features, like)
        if name == self._current:
            self._current = None  # what was live is replaced, not stored
        self._memory.tasks[name] = entry
        self._mixed.forget(name)
        self.set_task(name)

    def get_extra_state(self) -> dict[str, Any]:
        """Tasks, rows and live statistics, so that `state_dict` holds all there is."""
        kind = [self.norm, self.means, self.statistics]
        return {"kind": kind, **memory_to_state(self._memory, self._current, self._image_size)}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """See `get_extra_state`."""
        kind = [self.norm, self.means, self.statistics]
        if state["kind"][0] != self.norm or (self.norm == "xconv" and state["kind"] != kind):
            raise ConfituneError(f"the state is of a network with {state['kind']}, this one has {kind}")
        memory_from_state(self._memory, state, next(self.backbone.parameters()))
        for entry in self.tasks.values():
            self._head(len(entry.classes))
        self._current, self._image_size = state["current"], state["image_size"]
        self._forget_recovered()

    def _apply(self, fn: Any, recurse: bool = True) -> ContinualNet:
        super()._apply(fn, recurse)
        for entry in self._memory.tasks.values():
            entry.row = fn(entry.row)
        self._forget_recovered()
        return self

    def _forget_recovered(self) -> None:
        self._recovered_at = None
        self._mixed.forget()

    def _store_current(self) -> None:
        """An unfinished task's row follows the slot; a finished one's never changes."""
        if self._current is not None and not self.tasks[self._current].finished:
            self._memory.store(self.tasks[self._current], self.head, finished=False)
            self.tasks[self._current].image_size = self._image_size

    def _head(self, classes: int) -> nn.Linear:
        key = str(classes)
        if key not in self.heads:
            like = next(self.backbone.parameters())
            self.heads[key] = nn.Linear(self.features, classes, device=like.device, dtype=like.dtype)
            self.heads[key].train(self.training)
        return self.heads[key]  # type: ignore[return-value]


def _initialise(head: nn.Linear, generator: torch.Generator | None) -> None:
    """torch's own initialisation of a Linear layer, drawn on the CPU so that a seed means the same on every device."""
    bound = head.in_features**-0.5
    with torch.no_grad():
        for parameter in (head.weight, head.bias):
            parameter.copy_(torch.empty(parameter.shape).uniform_(-bound, bound, generator=generator))


def _plane(x: Tensor) -> Size | None:
    return (x.shape[-2], x.shape[-1]) if x.dim() == 4 else None
