"""Statistics of a tensor that convolutions read, kept while a task is trained.

They belong to the tensor, not to a convolution: a block's first convolution and its shortcut read the same one, so it
is measured once.

Averages are linear, so a training step only adds the batch's mean plane to a sum. A hook makes that plane where it is
called, reading the input once; the sums of all inputs are then moved by one kernel. Tables of windows or phases are
made of the sums when somebody asks for them.
"""

from collections.abc import Iterator, Sequence
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

    def __init__(self, channels: int, means: Means, momentum: float) -> None:
        super().__init__()
        self.channels = channels
        self.means = means
        self.momentum = momentum
        self.tracking = True  # whether training batches are taken in
        self.cumulative = False  # whether their average is a plain one, not an exponential one with `momentum`
        self.size: Size | None = None  # of the tensor's planes in this task
        self.batches = 0  # taken in since the last reset
        self.pending = 0  # of them, how many are in `_plane` and not yet in the tables
        self.held = False  # whether somebody else takes batches in, of many inputs at once, at the end of a pass
        self.calls = 0  # how often the last pass read the tensor: each time is a batch
        self._geometries: list[ConvGeometry] = []  # one for each table

    def add_reader(self, geometry: ConvGeometry) -> None:
        """Keep what a convolution with this geometry needs; the same geometry (or stride, for phases) needs no more."""
        kept = self._kept(geometry)
        if kept not in self._geometries:
            table = torch.zeros(self.channels, *(kept.kernel if self.means == "window" else kept.stride))
            self.register_buffer(f"table{len(self._geometries)}", table, persistent=False)
            self._geometries.append(kept)

    def _kept(self, geometry: ConvGeometry) -> ConvGeometry:
        """What a table depends on: phases on the stride alone."""
        return geometry if self.means == "window" else ConvGeometry(stride=geometry.stride)

    @property
    def tables(self) -> list[Tensor]:
        """All tables, without the pending batches: `fold` brings them in."""
        return [self.get_buffer(f"table{number}") for number in range(len(self._geometries))]

    def _plane(self, of: str = "pending") -> Tensor:
        """[H, W, C]: what pending batches add up to, or a batch's mean. A task that is only used has none."""
        assert self.size is not None
        name = f"plane{self.size[0]}x{self.size[1]}_{of}"
        if name not in self._buffers:
            self.register_buffer(name, self.tables[0].new_zeros(*self.size, self.channels), persistent=False)
        return self.get_buffer(name)

    def get_extra_state(self) -> dict[str, Any]:
        """Everything, exactly as it is: going on from it gives the same bits."""
        return {
            "tables": [table.clone() for table in self.tables],
            "size": self.size,
            "batches": self.batches,
            "pending": self.pending,
            "plane": self._plane().clone() if self.pending else None,
        }

    @torch.no_grad()
    def set_extra_state(self, state: dict[str, Any]) -> None:
        if [table.shape for table in state["tables"]] != [table.shape for table in self.tables]:
            raise ConfituneError("the state's input means belong to other layers: is it the state of another network?")
        self.restore(state["size"], state["batches"])
        torch._foreach_copy_(self.tables, list(state["tables"]))
        if state["pending"]:
            self._plane().copy_(state["plane"])
            self.pending = state["pending"]

    def restore(self, size: Size | None = None, batches: int = 0) -> None:
        """The tables have become those of so many batches with planes of this size; without batches they are empty."""
        if self.pending:
            self._plane().zero_()
        if not batches:
            torch._foreach_zero_(self.tables)
        self.size, self.batches, self.pending = size, batches, 0

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
        call = self.calls if self.held else 0
        self.calls = call + 1
        mean = self._plane(f"{call}")
        (_batch_mean_operator if torch.compiler.is_compiling() else _batch_mean)(x, mean)
        if not self.held:
            take_in([self])
            count([self])

    def _terms(self) -> Iterator[tuple[Tensor, Tensor, float, float]]:
        """Each table, what the pending batches are in it, and the shares of both in what it becomes; both flat."""
        earlier, plane = self.batches - self.pending, self._plane()
        keep, add = ((1 - self.momentum) ** self.pending if earlier else 0.0), 1.0
        if self.cumulative:
            keep, add = earlier / self.batches, 1 / self.batches
        for table, geometry in zip(self.tables, self._geometries, strict=True):
            of = geometry.taps if self.means == "window" else geometry.phases
            rows, columns = both_axes(of, (plane.shape[0], plane.shape[1]), plane.device, plane.dtype)
            of_rows = (rows @ plane.reshape(len(plane), -1)).view(-1, *plane.shape[1:])
            yield table.view(-1), (columns @ of_rows).permute(2, 0, 1).reshape(-1), keep, add  # from [I, J, C]

    def window_means(self, geometry: ConvGeometry) -> Tensor:
        """Window means [C, K, K] for a reading convolution.

        Of phase means [C, s, s] those of the periodic map that they define at the input's real size: the same number
        as building the map, running the convolution on it and averaging the output (Eq. 11), without the map.
        """
        fold([self])
        table = self.tables[self._geometries.index(self._kept(geometry))]
        if self.means == "window":
            return table
        assert self.size is not None
        rows, columns = both_axes(geometry.window_from_phases, self.size, table.device, table.dtype)
        return rows @ table @ columns.T


@torch.no_grad()
def take_in(every: Sequence[InputMeans], call: int = 0) -> None:
    """Add means to sums or exponential averages (Eq. 10), from one call on. One network's: all move alike."""
    while now := [inputs for inputs in every if inputs.calls > call]:
        sums, means = [inputs._plane() for inputs in now], [inputs._plane(f"{call}") for inputs in now]
        if now[0].cumulative:
            torch._foreach_add_(sums, means)
        else:
            torch._foreach_lerp_(sums, means, now[0].momentum)
        call += 1


@torch.no_grad()
def count(every: Sequence[InputMeans]) -> None:
    """Count what was taken in, here or by a captured graph. That does not know which batch is a task's first."""
    if first := [inputs for inputs in every if inputs.calls and not inputs.batches]:
        torch._foreach_copy_([inputs._plane() for inputs in first], [inputs._plane("0") for inputs in first])
        take_in(first, call=1)
    for inputs in every:
        inputs.batches += inputs.calls
        inputs.pending += inputs.calls


@torch.no_grad()
def fold(every: Sequence[InputMeans]) -> None:
    """Bring pending batches into the tables."""
    if not (pending := [inputs for inputs in every if inputs.pending]):
        return
    tables, made, keep, add = zip(*[term for inputs in pending for term in inputs._terms()], strict=True)
    torch._foreach_mul_(tables, keep)
    torch._foreach_mul_(made, add)
    torch._foreach_add_(tables, made)
    torch._foreach_zero_([inputs._plane() for inputs in pending])
    for inputs in pending:
        inputs.pending = 0


def _batch_mean(x: Tensor, mean: Tensor) -> None:
    torch.mean(x.movedim(1, -1), 0, dtype=mean.dtype, out=mean)


# For torch.compile an operator, which it takes as it is: it would spread the reduction over kernels that read the input
# once more.
_batch_mean_operator = torch.library.custom_op("confitune::batch_mean", _batch_mean, mutates_args=("mean",))
