"""Every setting of data, network and training, with its default and what it means.

One home for what recipes, the command line and Python share: a recipe embeds all three models, and the options of the
command line are made from their fields. torch is imported only where a device is asked for, so that `--help` is quick.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, Field

from confitune.errors import ConfituneError

if TYPE_CHECKING:
    import torch


def _readable(value: Any) -> Any:
    """What no file can be called is said here, not where it would be opened."""
    os.fsencode(str(value))
    if "\0" in str(value):
        raise ValueError("it has a character of code 0, which no name has")
    return value


Name = Annotated[str, AfterValidator(_readable)]
Folder = Annotated[Path, AfterValidator(_readable)]
Share = Annotated[float, Field(ge=0, lt=1)]
Scenario = Literal["task", "class", "domain"]


class DataSettings(BaseModel, frozen=True, extra="forbid", allow_inf_nan=False):
    """What is learned: a dataset, cut into tasks."""

    dataset: Name = Field(
        "photos",
        description="photos or digits (no download needed), flowers102, cifar100, cub200, caltech101, folder:PATH, or "
        "your own FILE.py:FUNCTION; join tasks of several datasets with '+': photos:1-2+digits:1+photos:3-5",
    )
    data_dir: Folder | None = Field(None, description="folder that holds the datasets")
    cache_dir: Folder | None = Field(None, description="folder for the cache of decoded images")
    order_seed: int = Field(
        0, ge=0, lt=2**63, description="seed of the class order, which decides the classes of each task (paper: 0)"
    )
    tasks: int | None = Field(None, ge=1, description="use only the first N tasks")
    classes_per_task: int | None = Field(None, ge=2, description="classes in each task; default: the dataset's own")
    held_out: float | None = Field(
        None, gt=0, lt=1, description="test on this fraction of the training images instead, to tune settings"
    )
    scenario: Scenario = Field(
        "task",
        description="task: the task of a test image is known; class: it is unknown, and all classes so far compete; "
        "domain: it is unknown, and all tasks have the same classes in different kinds of images",
    )
    pipeline: Literal["clean", "published"] = Field(
        "clean", description="preprocessing; published: what the paper's code does, for the paper's datasets only"
    )


class NetworkSettings(BaseModel, frozen=True, extra="forbid", allow_inf_nan=False):
    """What adapts: a pre-trained network, and what Xconv BN keeps of each task."""

    model: Name = Field("tf_efficientnet_lite0", description="a timm or torchvision model name, e.g. resnet18.tv_in1k")
    weights: Name | None = Field(
        None, description="a .safetensors or .pth file, or 'none' for random weights; default: pre-trained"
    )
    means: Literal["window", "phase"] = Field(
        "window", description="input means that Xconv BN keeps: window (exact) or phase (the paper's, smaller)"
    )
    statistics: Literal["running", "pass"] = Field(
        "running", description="when input means are measured: in the last training steps (paper), or in an extra pass"
    )


class TrainSettings(BaseModel, frozen=True, extra="forbid", allow_inf_nan=False):
    """How a task is trained; every default that the paper sets is the paper's."""

    epochs: int = Field(10, ge=1, description="epochs per task; default of a run: the method's or the dataset's")
    min_steps: int = Field(
        0, ge=0, description="minimum number of training steps per task; small tasks get more epochs (paper: none)"
    )
    batch_size: int = Field(
        32, ge=2, description="images per step; an incomplete last batch is dropped; default of a run: the dataset's"
    )
    seed: int = Field(
        0, ge=0, description="random seed of head initialisation and batch order; with several runs, that of the first"
    )
    lr: float = Field(0.01, gt=0, le=1e38, description="learning rate (paper: 0.01)")
    optimizer: Literal["sgd", "adam", "adamw"] = Field("sgd", description="created anew for each task (paper: sgd)")
    momentum: Share = Field(0.0, description="momentum of SGD (paper: 0)")
    weight_decay: float = Field(0.0, ge=0, description="weight decay (paper: 0)")
    clip_norm: float | None = Field(
        None, gt=0, description="clip the gradient norm, penalties included; default: no clipping"
    )
    pull_limit: float | None = Field(
        None,
        gt=0,
        description="largest fraction of the way back that a quadratic penalty may move a weight in one step; SGD "
        "diverges above 2. Default: 1 with penalty methods; no limit in `reproduce`",
    )
    lr_schedule: Literal["constant", "cosine", "step"] = Field(
        "constant", description="learning rate schedule within a task (paper: constant)"
    )
    lr_milestones: tuple[float, ...] = Field(
        (1 / 3, 2 / 3, 5 / 6), description="for 'step': fractions of a task's epochs after which lr is divided by 10"
    )
    warmup: Share = Field(0.0, description="fraction of a task's steps with linear warm-up (paper: 0)")
    label_smoothing: Share = Field(0.0, description="label smoothing (paper: 0)")
    augmentation: Literal["none", "flip"] = Field("none", description="flip: random horizontal flips (paper: none)")
    device: Name = Field("auto", description="auto, cpu, cuda, cuda:1, ...")
    precision: Literal["auto", "fp32", "bf16"] = Field(
        "auto", description="bf16: bfloat16 autocast; auto: bf16 on GPUs, fp32 on CPUs"
    )
    step: Literal["auto", "eager", "graph", "compile"] = Field(
        "auto",
        description="eager; graph: training steps captured as CUDA graphs; compile: graphs of torch.compile, for long "
        "runs; auto: graph on GPUs, eager on CPUs",
    )
    pixels: Literal["auto", "device", "host"] = Field(
        "auto", description="where images are kept: on the GPU (device) or in RAM (host); auto: on the GPU if they fit"
    )
    deterministic: bool = Field(False, description="use deterministic algorithms only; slower on GPUs")
    eval_batch_size: int = Field(256, ge=1, description="batch size in evaluation")
    track_from: Share = Field(
        3e-5, description="track input means only in steps whose weight in the final running average exceeds this"
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
