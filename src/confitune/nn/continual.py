"""A shared backbone with per-task batch-norm state and heads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, islice
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from confitune.errors import ConfituneError
from confitune.nn.backbones import headless
from confitune.nn.calibration import Start
from confitune.nn.convert import (
    ConversionReport,
    Statistics,
    apply_xconv,
    convert_calibrated,
    convert_task_bn,
    require_batch_norm,
    require_unconverted,
)
from confitune.nn.flow import trace_flow
from confitune.nn.geometry import Means
from confitune.nn.lanes import moments_of
from confitune.nn.measuring import MeasuredSlots, plane_of
from confitune.nn.memory import TaskEntry
from confitune.nn.mixing import mixed_logits
from confitune.nn.slots import initialise_head
from confitune.nn.variance import Variance, VarianceDrift
from confitune.nn.xconv import XconvNorm

_COMPARED = 4  # batches that variances before and after a task are taken from

Norm = Literal["xconv", "task", "shared", "frozen", "calibrated"]


class ContinualNet(MeasuredSlots):
    """One backbone for many tasks.

    Args:
        backbone: maps images to feature vectors [N, F]. A timm or torchvision classifier loses its last layer; its
            batch norms are converted in place.
        norm: 'xconv' (ConFiT), 'task' (plain task-specific BN), 'shared' (one BN for all tasks), 'frozen' (shared,
            pre-trained statistics, evaluation mode throughout) or 'calibrated' (CCLL: task-specific BN and small
            convolutions before it; every task starts from the pre-trained BN).
        means: of what Xconv BN keeps, see `convert_xconv_bn`.
        statistics: likewise.
        variance: 'stored' (the paper's: a task keeps the variances of its own time) or 'ratio' (they are multiplied by
            what later tasks did to variances on their own images, see `VarianceDrift`).
        rank: of what is kept of window means, see `low_rank.py`; None: all of them.
        start: of 'calibrated' layers, see `Calibration`.
        momentum: of all running statistics. The default is the paper's; timm's tf_ networks come with 0.01, which is
            too slow for tasks of a few hundred steps. None keeps what the layers have.
        example_input: a batch of two inputs; needed only where the backbone's input shape cannot be guessed.

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
        variance: Variance = "stored",
        rank: int | None = None,
        start: Start = "random",
        momentum: float | None = 0.1,
        example_input: Tensor | None = None,
    ) -> None:
        if norm not in get_args(Norm):
            raise ConfituneError(f"norm={norm!r} is not known; choose one of {', '.join(map(repr, get_args(Norm)))}")
        require_unconverted(backbone)
        if norm != "shared":
            require_batch_norm(backbone)
        backbone = headless(backbone)
        flow = trace_flow(backbone, example_input)
        if flow.features is None or len(flow.features) != 1:
            found = "no single tensor" if flow.features is None else f"[N, {', '.join(map(str, flow.features))}]"
            raise ConfituneError(
                f"the backbone returns {found} where feature vectors [N, F] are needed: add pooling and nn.Flatten()"
            )
        for module in backbone.modules():
            if isinstance(module, _BatchNorm) and momentum is not None:
                module.momentum = momentum
        conversion: ConversionReport | None = None
        if norm == "xconv":
            conversion = apply_xconv(backbone, flow, means, statistics)
        elif norm == "task":
            convert_task_bn(backbone)
        elif norm == "calibrated":
            convert_calibrated(backbone, flow, start)
        super().__init__(backbone, flow.features[0])
        self.norm: Norm = norm
        self.means: Means = means
        self.statistics: Statistics = statistics
        self.variance: Variance = variance
        if rank is not None and rank < 1:
            raise ConfituneError(f"a rank of {rank} keeps nothing of the input means: give 1 or more, or None for all")
        self.rank = self._memory.rank = rank
        further = ([variance] if variance != "stored" else []) + ([f"rank {rank}"] if rank is not None else [])
        kept = (norm, means, statistics, *further)
        self.kind = {"xconv": kept, "calibrated": (norm, start)}.get(norm, (norm,))
        self.drift: VarianceDrift | None = None
        if norm == "xconv" and variance == "ratio":
            recovering = {name: n for name, n in self._memory.norms.items() if isinstance(n, XconvNorm)}
            self.drift = self._memory.drift = VarianceDrift(recovering)
        self.momentum = momentum
        self.conversion = conversion
        self._pristine = self._norm_state() if norm == "calibrated" else {}
        self.train(self.training)

    # ---- learning a task -------------------------------------------------------------------------------------------

    def add_task(self, name: str, classes: int | Sequence[str], generator: torch.Generator | None = None) -> None:
        """Add a task and make it current: the last task's batch-norm state, a fresh head, no input statistics.

        Args:
            name: of the task.
            classes: names of the classes, or how many.
            generator: for the head's initialisation (a CPU generator; default: torch's global one).
        """
        if name in self.tasks:
            raise ConfituneError(f"there is a task {name!r} already; choose another name, or reopen it to train it on")
        names = tuple(map(str, range(classes))) if isinstance(classes, int) else tuple(classes)
        if not names or len(set(names)) != len(names):
            raise ConfituneError(f"task {name!r} needs one or more classes with names of their own, got {list(names)}")
        if self.tasks:
            self.prepare(self.last_task)
            self._store_current()
            if self.drift is not None:
                self.drift.begin()
        self._reset_statistics()
        self._start_calibrations(generator)
        head = self._head(len(names))
        initialise_head(head, generator)
        entry = TaskEntry(names, head.weight.new_empty(0))
        self._memory.store(entry, head, finished=False)
        self._memory.tasks[name] = entry
        self._current = name
        self._recovered_at = None

    def _norm_state(self) -> dict[str, Tensor]:
        return {
            f"{name}.{key}": tensor.clone()
            for name, norm in self._memory.norms.items()
            for key, tensor in norm.state_dict().items()
        }

    @torch.no_grad()
    def _start_calibrations(self, generator: torch.Generator | None) -> None:
        if self.norm != "calibrated":
            return
        for name, norm in self._memory.norms.items():
            norm.load_state_dict({key: self._pristine[f"{name}.{key}"] for key in norm.state_dict()})
            if norm.calibrated_by is not None:
                norm.calibrated_by.reset(generator)

    def get_extra_state(self) -> dict[str, Any]:
        """What is in no tensor of the network; the batch norm that calibrated tasks start from, too."""
        drift = {} if self.drift is None else {"drift": self.drift.state()}
        return {**super().get_extra_state(), "pristine": self._pristine, **drift}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """See `get_extra_state`."""
        super().set_extra_state(state)
        self._pristine = state["pristine"]
        if self.drift is not None:
            self.drift.load_state(state["drift"])

    def shared_state_dict(self) -> dict[str, Tensor]:
        """What all tasks share: the backbone without its batch norms' state, and how far variances have drifted."""
        ratios = {} if self.drift is None else self.drift.ratios()
        return {**super().shared_state_dict(), **{f"{name}.variance_ratio": ratio for name, ratio in ratios.items()}}

    @torch.no_grad()
    def load_shared_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Put back what `shared_state_dict` gave."""
        super().load_shared_state_dict(state)
        if self.drift is not None:
            for name, ratio in self.drift.ratios().items():
                ratio.copy_(state[f"{name}.variance_ratio"])

    def finish_task(
        self,
        batches: Iterable[Tensor] | None = None,
        forward: Callable[..., object] | None = None,
        at_once: int = 1,
    ) -> None:
        """End the current task's training: measure what is to be measured, and store its state for good.

        Args:
            batches: the task's training inputs in batches of the training size; needed for statistics='pass'.
            forward: how batches go through the network, see `measure`.
            at_once: how many of them.
        """
        name = self.current_task
        entry = self.tasks[name]
        if entry.finished:
            raise ConfituneError(f"task {name!r} is finished already")
        if self.drift is not None and self.drift.waits:
            if batches is None:
                raise ConfituneError("variance='ratio' needs the task's training batches: finish_task(batches)")
            batches = iter(batches)
            compared = list(islice(batches, _COMPARED))
            self._compare(self.drift, compared, forward)
            batches = chain(compared, batches)
        if self.norm == "xconv" and self.statistics == "pass":
            if batches is None:
                raise ConfituneError("statistics='pass' needs the task's training batches: finish_task(batches)")
            self.measure(batches, forward, at_once)
        if any(not statistics.batches for statistics in self._memory.statistics.values()):
            raise ConfituneError(f"task {name!r} has seen no training batch: train it before finishing it")
        self._memory.store(entry, self.head, finished=True)
        if self.rank is not None:
            self._memory.load(entry, self.head)  # it is used as it is kept
        entry.image_size = self._image_size
        self._mixed.forget(name)  # a row from before may hold for these weights, but not for this state
        self._recovered_at = None

    @torch.no_grad()
    def _compare(self, drift: VarianceDrift, batches: Sequence[Tensor], forward: Callable[..., object] | None) -> None:
        was_training = self.training
        self.train()
        try:
            with self.untracked(), drift.comparing(len(batches)):
                for batch in batches:
                    (forward or self)(batch)
        finally:
            self.train(was_training)

    def reopen(self, name: str) -> None:
        """Make a finished task trainable again, from its state under today's weights."""
        if not self._memory.entry(name).finished:
            raise ConfituneError(f"task {name!r} is not finished: set_task({name!r}) to train it on")
        self.prepare(name)
        self._reset_statistics()
        self._memory.store(self.tasks[name], self.head, finished=False)

    # ---- using it --------------------------------------------------------------------------------------------------

    def weights_moved(self) -> None:
        """Say that weights changed where tensor versions do not show it."""
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
        norms = [norm for norm in self._memory.norms.values() if isinstance(norm, XconvNorm)]
        if norms:
            torch._foreach_copy_([moments_of(norm)[0] for norm in norms], [norm.recovered_mean() for norm in norms])
        self._recovered_at = key

    def forward(self, x: Tensor, task: str | Tensor | None = None) -> Tensor:
        """Logits of a task's head.

        Args:
            x: images as the backbone takes them.
            task: a name (default: the current task), or in evaluation one task index per image (a mixed batch: each
                image is normalised by its own task; rows are padded with -inf to the largest number of classes).
        """
        if isinstance(task, Tensor):
            return self._forward_mixed(x, task)
        if task is not None:
            self.set_task(task)
        name = self.current_task
        if not self.training:
            self._check_size(x, name)
            self.prepare()
        elif self.tasks[name].finished:
            raise ConfituneError(f"task {name!r} is finished; reopen({name!r}) to train it on")
        else:
            self._image_size = plane_of(x)
        features = self._train_backbone(x) if self.training else self.backbone(x)
        logits: Tensor = self.head(features)
        return logits

    def _forward_mixed(self, x: Tensor, index: Tensor) -> Tensor:
        if self.training:
            raise ConfituneError("a mixed batch is for evaluation: batch moments belong to one task; call eval() first")
        if index.shape != x.shape[:1] or index.is_floating_point():
            raise ConfituneError(f"a mixed batch needs one task index per image, got {tuple(index.shape)} for {len(x)}")
        names = list(self.tasks)
        unique, place = torch.unique(index, return_inverse=True)
        if not len(unique) or not 0 <= int(unique[0]) <= int(unique[-1]) < len(names):
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
        if self.norm == "xconv" and self.tasks[task].finished and size is not None and size != plane_of(x):
            raise ConfituneError(
                f"task {task!r} was trained on {size[0]}x{size[1]} images, these are {x.shape[-2]}x{x.shape[-1]}; its "
                "recovered means hold for the size it was trained on: resize the images"
            )

    def _weights_key(self) -> int:
        convs = [norm.conv for norm in self._memory.norms.values() if isinstance(norm, XconvNorm)]
        tensors = (tensor for conv in convs for tensor in (*conv.parameters(), *conv.buffers()))
        return self._moves + sum(tensor._version for tensor in tensors)

    def train(self, mode: bool = True) -> ContinualNet:
        """As in torch; frozen batch norms stay in evaluation mode."""
        super().train(mode)
        if self.norm == "frozen":
            for module in self._batch_norms():
                module.eval()
        return self
