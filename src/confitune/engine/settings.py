"""How a task is trained; every default that the paper sets is the paper's."""

from __future__ import annotations

import hashlib
import math
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field

from confitune.errors import ConfituneError


class TrainOptions(BaseModel):
    """How a step is made, whatever the dataset: what a recipe and `TrainSettings` have in common."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    lr: float = Field(0.01, gt=0, description="learning rate (paper: 0.01)")
    optimizer: Literal["sgd", "adam", "adamw"] = Field("sgd", description="made anew for each task (paper: sgd)")
    momentum: float = Field(0.0, ge=0, lt=1, description="of SGD (paper: none)")
    weight_decay: float = Field(0.0, ge=0, description="paper: none")
    clip_norm: float | None = Field(
        None, gt=0, description="gradients, penalties included, are scaled down to this norm; default: they are not"
    )
    lr_schedule: Literal["constant", "cosine", "step"] = Field("constant", description="over a task (paper: constant)")
    augmentation: Literal["none", "flip", "flip-shift"] = Field("none", description="of training images (paper: none)")
    device: str = Field("auto", description="'auto', 'cpu', 'cuda', 'cuda:1', ...")
    precision: Literal["auto", "fp32", "bf16"] = Field(
        "auto",
        description="bf16: convolutions and products in bfloat16, weights and statistics in float32; auto: on GPUs",
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


class TrainSettings(TrainOptions):
    """Settings of `fit` and `evaluate`."""

    epochs: int = Field(10, ge=1, description="epochs a task")
    batch_size: int = Field(32, ge=2, description="images a step; the last, smaller batch of an epoch is dropped")
    seed: int = Field(0, ge=0, description="of head initialisation and batch order")
    lr_milestones: tuple[float, ...] = Field(
        (1 / 3, 2 / 3, 5 / 6), description="for 'step': shares of a task's epochs after which lr is divided by 10"
    )
    eval_batch_size: int = Field(256, ge=1, description="images a forward pass in evaluation")
    track_from: float = Field(
        3e-5, ge=0, lt=1, description="input statistics stay silent until a step's weight in the final average is this"
    )

    def torch_device(self) -> torch.device:
        """The device to work on; 'auto' takes a GPU where there is one."""
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

    def step_mode(self, device: torch.device, processes: int = 1) -> Literal["eager", "graph", "compile"]:
        """How steps are run on a device; only CUDA has graphs, and several processes have to talk in every step."""
        if processes > 1:
            if self.step not in ("auto", "eager"):
                raise ConfituneError(f"step={self.step!r} is for one process, this is one of {processes}: use 'eager'")
            return "eager"
        if self.step == "graph" and device.type != "cuda":
            raise ConfituneError("step='graph' captures CUDA graphs and needs a GPU; leave it at 'auto'")
        if self.step == "auto":
            return "graph" if device.type == "cuda" else "eager"
        return self.step

    def execution(self, device: torch.device, processes: int = 1) -> str:
        """How the work is done, in words: what may change the last bits of a result, and how fast it is."""
        words = ["bf16" if self.bf16(device) else "fp32", self.step_mode(device, processes)]
        words += ["deterministic"] if self.deterministic else []
        return ", ".join(words + ([f"{processes} processes"] if processes > 1 else []))

    def lr_factor(self, epoch: int) -> float:
        """What the learning rate is multiplied by in an epoch (counted from 0)."""
        if self.lr_schedule == "cosine":
            return 0.5 * (1 + math.cos(math.pi * epoch / self.epochs))
        if self.lr_schedule == "step":
            return 0.1 ** sum(epoch >= round(share * self.epochs) for share in self.lr_milestones)
        return 1.0

    def tracked_steps(self, momentum: float) -> int:
        """How many last steps matter to an exponential average with this momentum.

        >>> TrainSettings().tracked_steps(0.1)
        99
        """
        return math.ceil(math.log(self.track_from) / math.log(1 - momentum)) if self.track_from else 10**12


def derived_seed(seed: int, *purpose: object) -> int:
    """A seed for one purpose, so that what one part draws never shifts what another gets.

    >>> derived_seed(0, "order", 1, 2) == derived_seed(0, "order", 1, 2) != derived_seed(0, "order", 1, 3)
    True
    """
    text = "/".join(map(str, (seed, *purpose)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


def derived_generator(seed: int, *purpose: object) -> torch.Generator:
    """A CPU generator for one purpose."""
    return torch.Generator().manual_seed(derived_seed(seed, *purpose))
