"""Statistics of a tensor that convolutions read, kept while a task is trained.

They belong to the tensor, not to a convolution: a block's first convolution and its shortcut read the same one, so it
is measured once and both hold views.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from confitune.errors import ConfituneError
from confitune.nn.geometry import ConvGeometry, Means, Size
from confitune.nn.recovery import window_means_from_phases


@dataclass(frozen=True)
class _Reader:
    geometry: ConvGeometry
    table: int
    place: tuple[slice, slice]


class InputMeans(nn.Module):
    """Running means of one tensor in the form its reading convolutions need.

    Tables are [C, K, K] window means or [C, s, s] phase means. A geometry whose window means stand inside another's
    (or that has the same stride, for phase means) gets a view instead of a table of its own.

    Buffers are not persistent, so a converted network has the keys of the original; `ContinualNet` saves them.
    """

    batches: Tensor

    def __init__(self, channels: int, geometries: Sequence[ConvGeometry], means: Means, momentum: float | None) -> None:
        super().__init__()
        self.channels = channels
        self.means = means
        self.momentum = momentum
        self.tracking = True
        self.cumulative = momentum is None
        self.size: Size | None = None
        self._owners, self.readers = _share(geometries, means)
        for table, owner in enumerate(self._owners):
            shape = owner.kernel if means == "window" else owner.stride
            self.register_buffer(f"table{table}", torch.zeros(channels, *shape), persistent=False)
        self.register_buffer("batches", torch.zeros((), dtype=torch.int64), persistent=False)
        self._averages: dict[tuple[Size, torch.device, torch.dtype], list[tuple[Tensor, Tensor]]] = {}

    @property
    def tables(self) -> list[Tensor]:
        """The distinct tables, at fixed addresses."""
        return [self.get_buffer(f"table{index}") for index in range(len(self._owners))]

    @torch.no_grad()
    def reset(self) -> None:
        """Forget everything; the next tracked batch sets the tables."""
        self.batches.zero_()
        for table in self.tables:
            table.zero_()
        self.size = None

    @torch.no_grad()
    def observe(self, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        """Forward pre-hook of the first convolution that reads the tensor."""
        if not (self.training and self.tracking):
            return
        x = args[0].detach()
        if x.dim() == 2:  # Linear: a 1x1 convolution on a 1x1 plane
            x = x[:, :, None, None]
        size = (x.shape[-2], x.shape[-1])
        if self.size is None:
            self.size = size
        elif self.size != size:
            raise ConfituneError(
                f"a layer saw inputs of {self.size[0]}x{self.size[1]} and then of {size[0]}x{size[1]} in one task; "
                "its input statistics hold for one size: resize all images of a task alike"
            )
        table = self.tables[0]
        with torch.autocast(x.device.type, enabled=False):
            # The one pass over the input; all else is 1/batch of its size. Channels last, so that few and large matrix
            # products follow instead of one tiny one per channel.
            plane = x.mean(0, dtype=table.dtype).permute(1, 2, 0).reshape(size[0], -1)
            if self.cumulative:
                share = 1 / (self.batches + 1).to(table.dtype)
            else:
                assert self.momentum is not None
                share = torch.where(self.batches == 0, table.new_ones(()), self.momentum)
            for table, (rows, columns) in zip(self.tables, self._averaging(size, plane), strict=True):
                averaged = columns @ (rows @ plane).view(len(rows), size[1], self.channels)  # [I, J, C]
                table.lerp_(averaged.permute(2, 0, 1), share)
        self.batches += 1

    def view(self, reader: int, tables: Sequence[Tensor] | None = None) -> Tensor:
        """The part of the tables that one reading convolution needs (of `tables`, or of the live ones)."""
        which = self.readers[reader]
        return (self.tables if tables is None else tables)[which.table][:, which.place[0], which.place[1]]

    def window_means(self, reader: int, tables: Sequence[Tensor] | None = None, size: Size | None = None) -> Tensor:
        """Window means [C, K, K] for one reading convolution, implied by phase means where those are what is kept."""
        part = self.view(reader, tables)
        if self.means == "window":
            return part
        size = size or self.size
        if size is None:
            raise ConfituneError("no input statistics yet: train the task (at least one batch) first")
        return window_means_from_phases(part, self.readers[reader].geometry, size)

    def _averaging(self, size: Size, like: Tensor) -> list[tuple[Tensor, Tensor]]:
        key = (size, like.device, like.dtype)
        if key not in self._averages:
            self._averages[key] = [
                (owner_rows.to(like), owner_columns.to(like))
                for owner_rows, owner_columns in (
                    (owner.taps(0, size[0]), owner.taps(1, size[1]))
                    if self.means == "window"
                    else (owner.phases(0, size[0]), owner.phases(1, size[1]))
                    for owner in self._owners
                )
            ]
        return self._averages[key]

    def extra_repr(self) -> str:
        return f"{self.channels}, means={self.means}, tables={[tuple(t.shape) for t in self.tables]}"


def _share(geometries: Sequence[ConvGeometry], means: Means) -> tuple[list[ConvGeometry], list[_Reader]]:
    """Fewest tables that serve all geometries, and each geometry's place in them (in the given order)."""
    owners: list[ConvGeometry] = []
    for geometry in sorted(dict.fromkeys(geometries), key=lambda g: -g.kernel[0] * g.kernel[1]):
        if not any(_place(owner, geometry, means) for owner in owners):
            owners.append(geometry)
    readers = []
    for geometry in geometries:
        places = ((table, _place(owner, geometry, means)) for table, owner in enumerate(owners))
        readers.append(next(_Reader(geometry, table, place) for table, place in places if place))
    return owners, readers


def _place(owner: ConvGeometry, geometry: ConvGeometry, means: Means) -> tuple[slice, slice] | None:
    if means == "window":
        return owner.contains(geometry)
    return (slice(None), slice(None)) if owner.stride == geometry.stride else None
