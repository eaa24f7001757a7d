"""Statistics of a tensor that convolutions read, kept while a task is trained.

They belong to the tensor, not to a convolution: a block's first convolution and its shortcut read the same one, so it
is measured once and both hold views.

Averages are linear, so a training step only adds the batch's mean plane to a sum, in two kernels that read the input
once. Tables of windows or phases are made of the sum when somebody asks for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from confitune.errors import ConfituneError
from confitune.nn.geometry import ConvGeometry, Means, Size
from confitune.nn.recovery import on_device, window_means_from_phases

Statistics = Literal["running", "pass"]


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

    share: Tensor

    def __init__(self, channels: int, geometries: Sequence[ConvGeometry], means: Means, momentum: float | None) -> None:
        super().__init__()
        self.channels = channels
        self.means = means
        self.momentum = momentum
        self.tracking = True
        self.cumulative = momentum is None
        self.size: Size | None = None
        self.batches = 0  # seen since the last reset
        self._pending = 0  # of them, how many are in `_plane` and not yet in the tables
        self._owners, self.readers = _share(geometries, means)
        for table, owner in enumerate(self._owners):
            shape = owner.kernel if means == "window" else owner.stride
            self.register_buffer(f"table{table}", torch.zeros(channels, *shape), persistent=False)
        self.register_buffer("share", torch.ones(()), persistent=False)  # of the next batch in an exponential average
        self._share_is = 1.0
        self._plane = torch.empty(0)  # [H, W, C]: what the pending batches add up to
        self._planes: dict[Size, Tensor] = {}  # at addresses that captured graphs can rely on

    @property
    def tables(self) -> list[Tensor]:
        """The distinct tables, at fixed addresses."""
        self.fold()
        return self.unfolded

    @property
    def unfolded(self) -> list[Tensor]:
        """The same without the pending batches."""
        return [self.get_buffer(f"table{index}") for index in range(len(self._owners))]

    def live_state(self) -> dict[str, Any]:
        """Everything, exactly as it is: going on from it gives the same bits."""
        return {
            "tables": [table.clone() for table in self.unfolded],
            "size": self.size,
            "batches": self.batches,
            "pending": self._pending,
            "plane": self._plane.clone() if self._pending else None,
        }

    @torch.no_grad()
    def load_live_state(self, state: Mapping[str, Any]) -> None:
        """Put back what `live_state` gave."""
        self.restore(state["size"], state["batches"])
        torch._foreach_copy_(self.unfolded, list(state["tables"]))
        if state["pending"]:
            self.resize(state["size"])
            self._plane.copy_(state["plane"])
            self._pending = state["pending"]

    def reset(self) -> None:
        """Forget everything; the next tracked batch sets the tables."""
        self.restore(None, 0)
        for table in self.tables:
            table.zero_()

    def restore(self, size: Size | None, batches: int) -> None:
        """What was live is replaced: by tables of so many batches, measured at `size`, that the caller puts in."""
        if self._pending:
            self._plane.zero_()
        self.size, self.batches, self._pending = size, batches, 0
        self._plane = self._known_plane()
        self._set_share()

    @contextmanager
    def averaging(self) -> Iterator[None]:
        """Within, a new average over whole batches is taken, in evaluation mode, too."""
        tracked, was_training = self.tracking, self.training
        self.reset()
        self.train()
        self.tracking = self.cumulative = True
        try:
            yield
        finally:
            self.fold()  # while it is still known to be a sum
            self.train(was_training)
            self.cumulative, self.tracking = self.momentum is None, tracked

    @torch.no_grad()
    def observe(self, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        """Forward pre-hook of the first convolution that reads the tensor."""
        if not (self.training and self.tracking):
            return
        x = args[0].detach()
        if x.dim() == 2:  # Linear: a 1x1 convolution on a 1x1 plane
            x = x[:, :, None, None]
        size = (x.shape[-2], x.shape[-1])
        if self.size is None or (self.size == size and not self._plane.numel()):
            self.resize(size)
        elif self.size != size:
            raise ConfituneError(
                f"a layer saw inputs of {self.size[0]}x{self.size[1]} and then of {size[0]}x{size[1]} in one task; "
                "its input statistics hold for one size: resize all images of a task alike"
            )
        share = None if self.cumulative else self.share
        if torch.compiler.is_compiling():
            _take_in_operator(x, self._plane, share)
        else:
            _take_in(x, self._plane, share)
            self.count()

    @property
    def counts(self) -> tuple[int, int]:
        """Batches seen, and how many of them are pending."""
        return self.batches, self._pending

    @counts.setter
    def counts(self, counts: tuple[int, int]) -> None:
        self.batches, self._pending = counts
        self._set_share()

    def count(self) -> None:
        """One more batch was taken in: said by `observe`, or by who ran it as compiled or captured code."""
        self.batches += 1
        self._pending += 1
        self._set_share()

    def resize(self, size: Size) -> None:
        """Take in planes of this size from now on."""
        self.fold()
        self.size, self._plane = size, self._plane_of(size)

    def _known_plane(self) -> Tensor:
        """Of the size at hand, if a batch of that size was ever taken in: a task that is only used needs none."""
        known = self._planes.get(self.size) if self.size is not None else None
        return torch.empty(0) if known is None else known

    def _plane_of(self, size: Size) -> Tensor:
        table, plane = self.get_buffer("table0"), self._planes.get(size)
        if plane is None or plane.device != table.device or plane.dtype != table.dtype:
            plane = self._planes[size] = table.new_zeros(*size, self.channels)
        return plane

    @torch.no_grad()
    def fold(self) -> None:
        """Bring the tables up to date."""
        if not self._pending:
            return
        assert self.size is not None
        earlier = self.batches - self._pending
        if self.cumulative:
            keep, add = earlier / self.batches, 1 / self.batches
        else:
            assert self.momentum is not None
            keep, add = (1 - self.momentum) ** self._pending if earlier else 0.0, 1.0
        plane = self._plane
        rows_of, columns_of = (plane.shape[0], -1), (-1, self.size[1], self.channels)
        for index, owner in enumerate(self._owners):
            of = owner.taps if self.means == "window" else owner.phases
            rows, columns = (on_device(of, axis, self.size[axis], plane) for axis in (0, 1))
            averaged = columns @ (rows @ plane.reshape(rows_of)).view(columns_of)  # [I, J, C]
            self.unfolded[index].mul_(keep).add_(averaged.permute(2, 0, 1), alpha=add)
        self._plane.zero_()
        self._pending = 0

    def _set_share(self) -> None:
        share = 1.0 if not self.batches or self.momentum is None else self.momentum
        if share != self._share_is:
            self.share.fill_(share)
            self._share_is = share

    def _apply(self, fn: Any, recurse: bool = True) -> InputMeans:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._planes = {key: fn(plane) for key, plane in self._planes.items()}
        self._plane = self._known_plane()
        return self

    def view(self, reader: int) -> Tensor:
        """The part of the tables that one reading convolution needs."""
        which = self.readers[reader]
        return self.tables[which.table][:, which.place[0], which.place[1]]

    def window_means(self, reader: int) -> Tensor:
        """Window means [C, K, K] for one reading convolution, implied by phase means where those are what is kept."""
        if self.means == "window":
            return self.view(reader)
        assert self.size is not None
        return window_means_from_phases(self.view(reader), self.readers[reader].geometry, self.size)


def _take_in(x: Tensor, plane: Tensor, share: Tensor | None) -> None:
    """Add the batch's mean to a sum of planes, or with a `share` to their exponential average."""
    mean = x.movedim(1, -1).mean(0, dtype=plane.dtype)
    if share is None:
        plane.add_(mean)
    else:
        plane.lerp_(mean, share)


# For torch.compile an operator, which it takes as it is: it would spread the reduction over kernels that read the input
# once more.
_take_in_operator = torch.library.custom_op("confitune::take_in", _take_in, mutates_args=("plane",))


@_take_in_operator.register_fake
def _(x: Tensor, plane: Tensor, share: Tensor | None) -> None:
    return None


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
