"""Every setting of data, network and training, with its default and what it means.

One home for what recipes, the command line and Python share: a recipe embeds all three models, and the options of the
command line are made from their fields. torch is imported only where a device is asked for, so that `--help` is quick.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from confitune.errors import ConfituneError

if TYPE_CHECKING:
    import torch

_STRICT = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


def _readable(value: Any) -> Any:
    """What no file can be called is said here, not where it would be opened."""
    os.fsencode(str(value))
    if "\0" in str(value):
        raise ValueError("it has a character of code 0, which no name has")
    return value


Name = Annotated[str, AfterValidator(_readable)]
Folder = Annotated[Path, AfterValidator(_readable)]
Scenario = Literal["task", "class", "domain"]


class DataSettings(BaseModel):
    """What is learned: a dataset, cut into tasks."""

    model_config = _STRICT

    dataset: Name = Field(
        "photos",
        description="photos, digits (both offline), flowers102, cifar100, cub200, caltech101, folder:PATH, or your "
        "own: FILE.py:FUNCTION; tasks of several, counted from 1: photos:1-2+digits:1+photos:3-5",
    )
    data_dir: Folder | None = Field(None, description="folder that holds the datasets")
    cache_dir: Folder | None = Field(None, description="folder for decoded images")
    order_seed: int = Field(
        0, ge=0, lt=2**63, description="seed of the order of classes, and so of which classes make a task (paper: 0)"
    )
    tasks: int | None = Field(
        None, ge=1, description="only the first so many tasks, of all parts of the dataset together"
    )
    classes_per_task: int | None = Field(None, ge=2, description="in every part of the dataset; default: the dataset's")
    held_out: float | None = Field(
        None, gt=0, lt=1, description="test on this share of the training images instead, to choose options by"
    )
    scenario: Scenario = Field(
        "task",
        description="task: the task of a test image is given; class: it is not, all classes learned so far compete; "
        "domain: nor is it, and every task has the same classes, in images of another kind",
    )
    pipeline: Literal["clean", "published"] = Field(
        "clean", description="how images are prepared; published: as the paper's code did, for the paper's datasets"
    )


class NetworkSettings(BaseModel):
    """What adapts: a pre-trained network, and what Xconv BN keeps of each task."""

    model_config = _STRICT

    model: Name = Field("tf_efficientnet_lite0", description="a timm or torchvision name, e.g. resnet18.tv_in1k")
    weights: Name | None = Field(
        None, description="a .safetensors or .pth file, or 'none' for a random start; default: the published ones"
    )
    means: Literal["window", "phase"] = Field(
        "window", description="input means of Xconv BN: window (exact) or phase (the paper's, fewer numbers)"
    )
    statistics: Literal["running", "pass"] = Field(
        "running", description="when input means are measured: in the last steps (the paper's), or in a pass after them"
    )


class TrainSettings(BaseModel):
    """How a task is trained; every default that the paper sets is the paper's."""

    model_config = _STRICT

    epochs: int = Field(10, ge=1, description="epochs per task; a run's default: the method's, or the dataset's")
    min_steps: int = Field(
        0, ge=0, description="steps that a task gets at least, by more epochs where it has few images (paper: any)"
    )
    batch_size: int = Field(
        32, ge=2, description="images per step; a smaller last batch is dropped; a run's default: the dataset's"
    )
    last_batch: bool = Field(False, description="train on the smaller last batch of an epoch, too (CPR code)")
    seed: int = Field(0, ge=0, description="of head initialisation and batch order; of several runs the first one's")
    lr: float = Field(0.01, gt=0, le=1e38, description="learning rate (paper: 0.01)")
    optimizer: Literal["sgd", "adam", "adamw"] = Field("sgd", description="made anew for each task (paper: sgd)")
    momentum: float = Field(0.0, ge=0, lt=1, description="of SGD (paper: none)")
    weight_decay: float = Field(0.0, ge=0, description="L2 penalty on weights (paper: none)")
    clip_norm: float | None = Field(
        None, gt=0, description="scale gradients, penalties included, down to this norm; default: no clipping"
    )
    pull_limit: float | None = Field(
        None,
        gt=0,
        description="a penalty pulls no weight by more than this times its distance in a step; from 2 on plain steps "
        "swing up. Default: 1 with methods that pull; no limit in `reproduce`",
    )
    lr_schedule: Literal["constant", "cosine", "step"] = Field("constant", description="over a task (paper: constant)")
    lr_milestones: tuple[float, ...] = Field(
        (1 / 3, 2 / 3, 5 / 6), description="for 'step': shares of a task's epochs after which lr is divided by 10"
    )
    validation: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="share of a task's training images that is left out; the epoch with the lowest loss on it is the "
        "one that is kept (paper: not said; CPR code: 0.1)",
    )
    lr_patience: int | None = Field(
        None,
        ge=1,
        description="epochs without a lower loss on 'validation' after which lr is divided by 3 (CPR code: 5)",
    )
    warmup: float = Field(0.0, ge=0, lt=1, description="share of a task's steps in which lr grows from 0 (paper: none)")
    label_smoothing: float = Field(
        0.0, ge=0, lt=1, description="share of a label spread over all classes (paper: none)"
    )
    augmentation: Literal["none", "flip", "crop"] = Field(
        "none", description="of training images: flip; crop: flipped, and cut at random and resized (paper: none)"
    )
    device: Name = Field("auto", description="auto, cpu, cuda, cuda:1, ...")
    precision: Literal["auto", "fp32", "bf16"] = Field(
        "auto",
        description="bf16: convolutions and products in bfloat16, all else in float32; auto: bf16 on GPUs",
    )
    step: Literal["auto", "eager", "graph", "compile"] = Field(
        "auto",
        description="eager: kernel by kernel; graph: captured once and replayed; compile: a graph of kernels fused by "
        "torch.compile, for long runs; auto: graph on GPUs",
    )
    pixels: Literal["auto", "device", "host"] = Field(
        "auto", description="where images lie: all on the GPU, or copied there batch by batch; auto: there if they fit"
    )
    deterministic: bool = Field(False, description="only algorithms that give the same bits each time; slower on GPUs")
    eval_batch_size: int = Field(256, ge=1, description="images per forward pass in evaluation")
    track_from: float = Field(
        3e-5, ge=0, lt=1, description="input means are tracked once a step's weight in the final average is this large"
    )

    def torch_device(self) -> torch.device:
        """The device to work on; 'auto' takes a GPU where there is one."""
        import torch

        name = ("cuda" if torch.cuda.is_available() else "cpu") if self.device == "auto" else self.device
        try:
            device = torch.device(name)
            torch.empty(1, device=device).item()
        except (RuntimeError, AssertionError, NotImplementedError) as error:
            raise ConfituneError(f"device {self.device!r} cannot be used ({error}); try --device cpu") from error
        return device

    def bf16(self, device: torch.device) -> bool:
        """Whether convolutions and products are done in bfloat16; CPUs emulate it slowly."""
        return self.precision == "bf16" or (self.precision == "auto" and device.type == "cuda")

    def step_mode(self, device: torch.device) -> Literal["eager", "graph", "compile"]:
        """How steps are run on a device; only CUDA has graphs."""
        if self.step == "graph" and device.type != "cuda":
            raise ConfituneError("step='graph' captures CUDA graphs and needs a GPU; leave it at 'auto'")
        if self.step == "auto":
            return "graph" if device.type == "cuda" else "eager"
        return self.step

    def execution(self, device: torch.device) -> str:
        """How the work is done, in words: what may change the last bits of a result, and how fast it is."""
        words = ["bf16" if self.bf16(device) else "fp32", self.step_mode(device)]
        return ", ".join(words + (["deterministic"] if self.deterministic else []))

    def lr_factor(self, epochs: float) -> float:
        """What the learning rate is multiplied by after so many epochs.

        >>> settings = TrainSettings(epochs=10, lr_schedule="cosine", warmup=0.2)
        >>> [round(settings.lr_factor(epochs), 3) for epochs in (0, 1, 2, 6, 9.99)]
        [0.0, 0.5, 1.0, 0.5, 0.0]
        """
        done = epochs / self.epochs
        if done < self.warmup:
            return done / self.warmup
        if self.lr_schedule == "cosine":
            return 0.5 * (1 + math.cos(math.pi * (done - self.warmup) / (1 - self.warmup)))
        if self.lr_schedule == "step":
            return float(0.1 ** sum(epochs >= round(share * self.epochs) for share in self.lr_milestones))
        return 1.0

    def tracked_steps(self, momentum: float) -> int:
        """How many last steps matter to an exponential average with this momentum.

        >>> TrainSettings().tracked_steps(0.1)
        99
        """
        return math.ceil(math.log(self.track_from) / math.log(1 - momentum)) if self.track_from else 10**12
