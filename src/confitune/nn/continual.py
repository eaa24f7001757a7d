"""A shared backbone with per-task batch-norm state and heads."""

from __future__ import annotations

from typing import get_args

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
from confitune.nn.following import Follow, MomentDrift
from confitune.nn.geometry import Means
from confitune.nn.learning import LearningSlots, Norm
from confitune.nn.measuring import plane_of
from confitune.nn.mixing import mixed_logits
from confitune.nn.pretrained import PretrainedState
from confitune.nn.variance import Variance, VarianceDrift


class ContinualNet(LearningSlots):
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
        follow: 'weights' (the paper's: means are recovered through today's weights) or 'images' (what convolutions read
            and variances are brought up to date, too, on the images of later tasks, see `following.py`).
        rank: of what is kept of window means, see `low_rank.py`; None: all of them.
        keep_pretrained: keep the state of pre-training, once for the network, for tasks that need no other (xconv).
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
        follow: Follow = "weights",
        rank: int | None = None,
        keep_pretrained: bool = False,
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
        self.follow: Follow = follow
        if follow == "images" and variance == "ratio":
            raise ConfituneError("follow='images' follows variances, too: leave variance at 'stored'")
        if rank is not None and rank < 1:
            raise ConfituneError(f"a rank of {rank} keeps nothing of the input means: give 1 or more, or None for all")
        self.rank = self._memory.rank = rank
        further = ([variance] if variance != "stored" else []) + ([f"rank {rank}"] if rank is not None else [])
        further += ["follows images"] if follow == "images" else []
        kept = (norm, means, statistics, *further, *(["pretrained state"] if keep_pretrained else []))
        self.kind = {"xconv": kept, "calibrated": (norm, start)}.get(norm, (norm,))
        self.drift = self.pretrained = None
        if norm == "xconv" and (variance == "ratio" or follow == "images"):
            recovering, statistics_of = self._memory.recovering, self._memory.statistics
            self.drift = self._memory.drift = (
                MomentDrift(recovering, statistics_of) if follow == "images" else VarianceDrift(recovering)
            )
        if norm == "xconv" and keep_pretrained:
            self.pretrained = self._memory.pretrained = PretrainedState(self._memory)
        self.momentum = momentum
        self.conversion = conversion
        self._pristine = self._norm_state() if norm == "calibrated" else {}
        self.train(self.training)

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

    def train(self, mode: bool = True) -> ContinualNet:
        """As in torch; frozen batch norms stay in evaluation mode."""
        super().train(mode)
        if self.norm == "frozen":
            for module in self._batch_norms():
                module.eval()
        return self
