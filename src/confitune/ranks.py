"""Several processes that train one network: who each is, its part of a batch, and how they add up.

torchrun starts the processes and tells each in environment variables who it is; `joined` makes them a group, here and
nowhere else, and takes it down again. All of them run the same program on the same tasks with the same seeds, and take
their own part of every batch. What is said of a batch is added up over all, so each holds the same network at every
moment; only the first one writes and speaks.

One process alone is `Ranks()`. It communicates with nobody: whatever only several have to do is behind `several`.

Everything is built on one operation, the sum over all processes, which every backend has for every kind of tensor.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from confitune.errors import ConfituneError, SaidElsewhereError

_PATIENCE = timedelta(days=7)  # with one process that decodes a large dataset while the others wait


class LostProcessError(ConfituneError):
    """Another process of the group ended or cannot be reached."""


@dataclass(frozen=True)
class Ranks:
    """One of `size` processes that train one network together.

    Every method that communicates has to be called by all of them, in the same order.

    >>> Ranks().several
    False
    >>> [Ranks(rank, 3).part(torch.arange(8)).tolist() for rank in range(3)]
    [[0, 1], [2, 3, 4], [5, 6, 7]]
    """

    rank: int = 0
    size: int = 1
    local: int = 0  # among those on this machine: the number of its GPU
    store: Any = field(default=None, compare=False, repr=False)  # what torchrun keeps for all, whoever ends

    def __deepcopy__(self, memo: dict[int, Any]) -> Ranks:
        """A copied network is trained by the same processes."""
        return self

    @property
    def several(self) -> bool:
        """Whether there are others."""
        return self.size > 1

    @property
    def first(self) -> bool:
        """Whether this is the one that writes and speaks."""
        return self.rank == 0

    def part(self, whole: Tensor, dim: int = 0) -> Tensor:
        """What this process has of a batch; parts differ by one at most where it cannot be divided evenly."""
        length = whole.shape[dim]
        begin, end = (length * rank // self.size for rank in (self.rank, self.rank + 1))
        return whole.narrow(dim, begin, end - begin)

    def own(self, *purpose: object) -> tuple[object, ...]:
        """What a seed is for, where each process is to draw numbers of its own; the first draws what one alone does."""
        return purpose if self.first else (*purpose, "process", self.rank)

    # ---- with all others -------------------------------------------------------------------------------------------

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum over all processes: one message for all tensors of a type."""
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
            alike = [tensor for tensor in tensors if tensor.dtype == dtype]
            flat = torch.cat([tensor.reshape(-1) for tensor in alike])
            with _others():
                dist.all_reduce(flat)
            parts = flat.split([tensor.numel() for tensor in alike])
            torch._foreach_copy_(alike, [part.view(t.shape) for part, t in zip(parts, alike, strict=True)])

    def gathered(self, row: Tensor) -> Tensor:
        """Every process's row, in their order: [size, len(row)]."""
        table = row.new_zeros(self.size, len(row))
        table[self.rank] = row
        with _others():
            dist.all_reduce(table)
        return table

    def share(self, count: int, device: torch.device) -> Tensor:
        """What share of a batch is here if so many of its images are; the device is not waited for."""
        here = torch.full((1,), count, dtype=torch.float64, device=device)  # a third is no float32
        return here[0] / self.gathered(here).sum()

    def decided(self, choice: bool) -> bool:
        """What the first one chose: clocks differ."""
        if not self.several:
            return choice
        return bool(self.gathered(torch.tensor([int(choice)]))[0])

    def require_same(self, value: object, what: str) -> None:
        """Refuse to go on where processes found different things."""
        if not self.several:
            return
        digest = hashlib.sha256(repr(value).encode()).digest()
        found = self.gathered(torch.tensor([int.from_bytes(digest[:7], "big")])).flatten().tolist()
        if len(set(found)) > 1:
            other = next(rank for rank, one in enumerate(found) if one != found[0])
            raise ConfituneError(
                f"processes 0 and {other} do not have the same {what}: all of them need the same command, the same "
                "data and the same --out folder"
            )

    @contextmanager
    def first_goes_before(self, what: str) -> Iterator[None]:
        """Within, the first one does its work while the others wait: then they find it done."""
        if self.several and not self.first:
            with _others():
                self.store.wait([f"confitune/{what}"], _PATIENCE)
        yield
        if self.several and self.first:
            self.store.set(f"confitune/{what}", "done")

    # ---- what they work on -----------------------------------------------------------------------------------------

    def require_device(self, device: torch.device) -> None:
        """Refuse a device that not every process can have."""
        if not self.several or device.type == "cpu":
            return
        if device.index is not None:
            raise ConfituneError(
                f"{self.size} processes take a GPU each, {device} is one: leave --device at 'auto', and choose GPUs "
                "with CUDA_VISIBLE_DEVICES"
            )
        if self.local >= torch.cuda.device_count():
            raise ConfituneError(
                f"there are {torch.cuda.device_count()} GPUs here and more processes: start torchrun with "
                f"--nproc-per-node {torch.cuda.device_count()}, or train with --device cpu"
            )


@contextmanager
def joined() -> Iterator[Ranks]:
    """Within, the processes that torchrun started are a group; without torchrun this one is alone.

    Processes with a GPU each talk through NCCL, on CPUs through gloo. If some fail, the first to do so raises its
    error; in the others it becomes `SaidElsewhereError`, so that a message is shown once.
    """
    size = int(os.environ.get("WORLD_SIZE", "1")) if "LOCAL_RANK" in os.environ else 1
    if size == 1:
        yield Ranks()
        return
    store, rank, _ = next(rendezvous("env://"))
    ranks = Ranks(rank, size, int(os.environ["LOCAL_RANK"]), store)
    with_gpu = torch.cuda.is_available()
    if with_gpu and ranks.local < torch.cuda.device_count():
        torch.cuda.set_device(ranks.local)
    backend = "cpu:gloo,cuda:nccl" if with_gpu else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    failed = True
    try:
        yield ranks
        failed = False
    except Exception as error:
        if not _first_to_fail(ranks):
            raise SaidElsewhereError(str(error)) from error
        raise
    finally:
        # NCCL would wait for those that no longer answer; torchrun ends them all.
        if not (failed and with_gpu):
            dist.destroy_process_group()


def refuse_several(what: str) -> None:
    """Refuse work that processes cannot share."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return
    message = f"{what} cannot be shared by several processes: start it without torchrun"
    raise ConfituneError(message) if os.environ.get("RANK", "0") == "0" else SaidElsewhereError(message)


def _first_to_fail(ranks: Ranks) -> bool:
    try:
        return int(ranks.store.add("confitune/failed", 1)) == 1
    except RuntimeError:  # who kept the store is gone, and has said why
        return False


@contextmanager
def _others() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise LostProcessError(
            "another process of this run ended or cannot be reached, so this one ends, too; the same command with "
            f"--resume goes on where it was ({str(error).splitlines()[0]})"
        ) from error
