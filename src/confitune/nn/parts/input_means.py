"""Statistics of a tensor that convolutions read, kept while a task is trained.

They belong to the tensor, not to a convolution: a block's first convolution and its shortcut read the same one, so it
is measured once.

Averages are linear, so a training step only adds the batch's mean plane to a sum, in two kernels that read the input
once. Tables of windows or phases are made of the sum when somebody asks for them.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from confitune.errors import ConfituneError
from confitune.nn.geometry import ConvGeometry, Means, Size, both_axes

Statistics = Literal["running", "pass"]


class InputMeans(nn.Module):
    """Running means of one tensor in the form its reading convolutions need.

    Tables are [C, K, K] window means of a geometry, or [C, s, s] phase means of a stride. The addresses of buffers
    never change: captured graphs rely on them.
    """

    share: Tensor

    def __init__(self, channels: int, means: Means, momentum: float) -> None:
        super().__init__()
        self.channels = channels
        self.means = means
        self.momentum = momentum
        self.tracking = True  # whether training batches are taken in
        self.cumulative = False  # whether their average is a plain one, not an exponential one with `momentum`
        self.size: Size | None = None  # of the tensor's planes in this task
        self.batches = 0  # taken in since the last reset
        self._pending = 0  # of them, how many are in `_plane` and not yet in the tables
        self._geometries: list[ConvGeometry] = []  # one for each table
        self.register_buffer("share", torch.ones(()), persistent=False)  # of the next batch in an exponential average

    def add_reader(self, geometry: ConvGeometry) -> None:
        """Keep what a convolution with this geometry needs; the same geometry (or stride, for phases) needs no more."""
        kept = self._kept(geometry)
        shape = geometry.kernel if self.means == "window" else geometry.stride
        if kept not in self._geometries:
            table = self.share.new_zeros(self.channels, *shape)
            self.register_buffer(f"table{len(self._geometries)}", table, persistent=False)
            self._geometries.append(kept)

    def _kept(self, geometry: ConvGeometry) -> ConvGeometry:
        """What a table depends on: phases on the stride alone."""
        return geometry if self.means == "window" else ConvGeometry(stride=geometry.stride)

    @property
    def tables(self) -> list[Tensor]:
        """All tables, without the pending batches: `fold` brings them in."""
        return [self.get_buffer(f"table{number}") for number in range(len(self._geometries))]

    @property
    def _plane(self) -> Tensor:
        """[H, W, C]: what the pending batches add up to. Made when it is needed: a task that is only used has none."""
        assert self.size is not None
        name = f"plane{self.size[0]}x{self.size[1]}"
        if name not in self._buffers:
            self.register_buffer(name, self.share.new_zeros(*self.size, self.channels), persistent=False)
        return self.get_buffer(name)

    def get_extra_state(self) -> dict[str, Any]:
        """Everything, exactly as it is: going on from it gives the same bits."""
        return {
            "tables": [table.clone() for table in self.tables],
            "size": self.size,
            "batches": self.batches,
            "pending": self._pending,
            "plane": self._plane.clone() if self._pending else None,
        }

    @torch.no_grad()
    def set_extra_state(self, state: dict[str, Any]) -> None:
        if [table.shape for table in state["tables"]] != [table.shape for table in self.tables]:
            raise ConfituneError("the state's input means belong to other layers: is it the state of another network?")
        self.restore(state["size"], state["batches"])
        torch._foreach_copy_(self.tables, list(state["tables"]))
        if state["pending"]:
            self._plane.copy_(state["plane"])
            self._pending = state["pending"]

    def restore(self, size: Size | None = None, batches: int = 0) -> None:
        """The tables have become those of so many batches with planes of this size; without batches they are empty."""
        if self._pending:
            self._plane.zero_()
        if not batches:
            for table in self.tables:
                table.zero_()
        self.size = size
        self.counts = (batches, 0)

    @torch.no_grad()
    def observe(self, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        """Forward pre-hook of the first convolution that reads the tensor."""
        if not (self.training and self.tracking):
            return
        x = args[0].detach()
        size = (x.shape[-2], x.shape[-1])
        if self.size is None:
            self.size = size
        elif self.size != size:
            what = f"a layer saw inputs of {self.size[0]}x{self.size[1]} and then of {size[0]}x{size[1]} in one task"
            raise ConfituneError(f"{what}; its input statistics hold for one size: resize all images of a task alike")
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
        """Bring the pending batches into the tables."""
        if not self._pending:
            return
        plane = self._plane
        earlier = self.batches - self._pending
        if self.cumulative:
            keep, add = earlier / self.batches, 1 / self.batches
        else:
            keep, add = ((1 - self.momentum) ** self._pending if earlier else 0.0), 1.0
        for table, geometry in zip(self.tables, self._geometries, strict=True):
            of = geometry.taps if self.means == "window" else geometry.phases
            rows, columns = both_axes(of, (plane.shape[0], plane.shape[1]), plane.device, plane.dtype)
            of_rows = (rows @ plane.reshape(len(plane), -1)).view(-1, *plane.shape[1:])
            table.mul_(keep).add_((columns @ of_rows).permute(2, 0, 1), alpha=add)  # from [I, J, C]
        plane.zero_()
        self._pending = 0

    def window_means(self, geometry: ConvGeometry) -> Tensor:
        """Window means [C, K, K] for a reading convolution.

        Of phase means [C, s, s] those of the periodic map that they define at the input's real size: the same number
        as building the map, running the convolution on it and averaging the output (Eq. 11), without the map.
        """
        self.fold()
        table = self.tables[self._geometries.index(self._kept(geometry))]
        if self.means == "window":
            return table
        assert self.size is not None
        rows, columns = both_axes(geometry.window_from_phases, self.size, table.device, table.dtype)
        return rows @ table @ columns.T


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
