"""Statistics of a tensor that convolutions read, kept while a task is trained.

They belong to the tensor, not to a convolution: a block's first convolution and its shortcut read the same one, so it
is measured once and both hold views.

Averages are linear, so a training step only adds the batch's mean plane to a sum, in two kernels that read the input
once. Tables of windows or phases are made of the sum when somebody asks for them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from confitune.errors import ConfituneError
from confitune.nn.geometry import ConvGeometry, Means, Size
from confitune.nn.recovery import on_device, window_means_from_phases

Statistics = Literal["running", "pass"]


class _Reader(NamedTuple):
    geometry: ConvGeometry
    table: int
    place: tuple[slice, slice]


class InputMeans(nn.Module):
    """Running means of one tensor in the form its reading convolutions need.

    Tables are [C, K, K] window means or [C, s, s] phase means. A geometry whose window means stand inside another's
    (or that has the same stride, for phase means) gets a view instead of a table of its own.

    Buffers are not persistent, so a converted network has the keys of the original; `ContinualNet` saves them. Their
    addresses never change: captured graphs rely on them.

    Attributes:
        tracking: whether training batches are taken in.
        cumulative: whether their average is a plain one, not an exponential one with `momentum`.
        size: of the tensor's planes in this task.
        batches: taken in since the last reset.
    """

    share: Tensor

    def __init__(self, channels: int, geometries: Sequence[ConvGeometry], means: Means, momentum: float) -> None:
        super().__init__()
        self.channels, self.means, self.momentum = channels, means, momentum
        self.tracking, self.cumulative = True, False
        self.size: Size | None = None
        self.batches = 0
        self._pending = 0  # of them, how many are in `_plane` and not yet in the tables
        self._owners, self.readers = _share(geometries, means)
        for table, owner in enumerate(self._owners):
            shape = owner.kernel if means == "window" else owner.stride
            self.register_buffer(f"table{table}", torch.zeros(channels, *shape), persistent=False)
        self.register_buffer("share", torch.ones(()), persistent=False)  # of the next batch in an exponential average

    @property
    def tables(self) -> list[Tensor]:
        """The distinct tables."""
        self.fold()
        return self.unfolded

    @property
    def unfolded(self) -> list[Tensor]:
        """The same without the pending batches."""
        return [self.get_buffer(f"table{index}") for index in range(len(self._owners))]

    @property
    def _plane(self) -> Tensor:
        """[H, W, C]: what the pending batches add up to. Made when it is needed: a task that is only used has none."""
        assert self.size is not None
        name = f"plane{self.size[0]}x{self.size[1]}"
        if name not in self._buffers:
            self.register_buffer(name, self.share.new_zeros(*self.size, self.channels), persistent=False)
        return self.get_buffer(name)

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
            self._plane.copy_(state["plane"])
            self._pending = state["pending"]

    def reset(self) -> None:
        """Forget everything; the next tracked batch sets the tables."""
        self.restore(None, 0)
        for table in self.unfolded:
            table.zero_()

    def restore(self, size: Size | None, batches: int) -> None:
        """What was live is replaced: by tables of so many batches, measured at `size`, that the caller puts in."""
        if self._pending:
            self._plane.zero_()
        self.size, self.counts = size, (batches, 0)

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
        if bool(counts[0]) != bool(self.batches):
            self.share.fill_(self.momentum if counts[0] else 1.0)
        self.batches, self._pending = counts

    def count(self) -> None:
        """One more batch was taken in: said by `observe`, or by who ran it as compiled or captured code."""
        self.counts = self.batches + 1, self._pending + 1

    @torch.no_grad()
    def fold(self) -> None:
        """Bring the tables up to date."""
        if not self._pending:
            return
        assert self.size is not None
        earlier, plane = self.batches - self._pending, self._plane
        if self.cumulative:
            keep, add = earlier / self.batches, 1 / self.batches
        else:
            keep, add = (1 - self.momentum) ** self._pending if earlier else 0.0, 1.0
        for table, owner in zip(self.unfolded, self._owners, strict=True):
            of = owner.taps if self.means == "window" else owner.phases
            rows, columns = (on_device(of, axis, self.size[axis], plane.device, plane.dtype) for axis in (0, 1))
            of_rows = (rows @ plane.reshape(len(plane), -1)).view(-1, *plane.shape[1:])
            table.mul_(keep).add_((columns @ of_rows).permute(2, 0, 1), alpha=add)  # from [I, J, C]
        plane.zero_()
        self._pending = 0

    def window_means(self, reader: int) -> Tensor:
        """Window means [C, K, K] for one reading convolution, implied by phase means where those are what is kept."""
        geometry, table, (rows, columns) = self.readers[reader]
        kept = self.tables[table][:, rows, columns]
        if self.means == "window":
            return kept
        assert self.size is not None
        return window_means_from_phases(kept, geometry, self.size)


def _take_in(x: Tensor, plane: Tensor, share: Tensor | None) -> None:
    """Add the batch's mean to a sum of planes, or with a `share` to their exponential average (Eq. 10)."""
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
    for geometry in sorted(geometries, key=lambda g: -g.kernel[0] * g.kernel[1]):
        if not any(owner.contains(geometry, means) for owner in owners):
            owners.append(geometry)
    readers = []
    for geometry in geometries:
        places = ((table, owner.contains(geometry, means)) for table, owner in enumerate(owners))
        readers.append(next(_Reader(geometry, table, place) for table, place in places if place))
    return owners, readers
