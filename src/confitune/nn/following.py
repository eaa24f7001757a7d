"""Moments of earlier tasks that follow what later tasks do to the network, seen on the later tasks' images.

Recovering a mean through today's weights takes it that a convolution reads what it read when the task was learned. Only
the first one does: the others read what the layers before them give, and those have moved. How far that changes what a
convolution reads can be seen on the images of the task that is learned now. They go through the network in the state of
the task before it, twice: with the weights from before, and with those of today. The second time each layer is
corrected before the next one is reached:

    input means    +=  their difference between the two, on these images
    output mean     =  recovered from those, through today's weights
    variance       *=  its ratio between the two, on these images (eps added to both)

Differences and ratios are taken over to all earlier tasks. Their sum and product over tasks are kept once for the
network; what is stored of a task is relative to them, so rows need no change and the cost of a task stays the same
however many there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from confitune.nn.input_means import InputMeans
from confitune.nn.lanes import moments_of
from confitune.nn.variance import VarianceDrift, computing_with, ratio_of, scaled
from confitune.nn.xconv import XconvNorm

Follow = Literal["weights", "images"]


class MomentDrift(VarianceDrift):
    """Of every layer that recovers its mean, and of the input means it is recovered from.

    Args:
        norms: by name.
        statistics: by the name of the first convolution that reads the tensor.
    """

    captured = False  # what is done on the way differs between the two passes
    option = "follow='images'"

    def __init__(self, norms: Mapping[str, XconvNorm], statistics: Mapping[str, InputMeans]) -> None:
        super().__init__(norms)
        self._statistics = dict(statistics)
        self._tables: dict[str, dict[int, str]] = {}
        for place, (name, of_it) in enumerate(statistics.items()):
            self._tables[name] = {number: f"shift{place}_{number}" for number in range(len(of_it.tables))}
            for number, table in enumerate(of_it.tables):
                self.register_buffer(self._tables[name][number], torch.zeros_like(table), persistent=False)

    def shift(self, name: str, table: int) -> Tensor:
        """By how much input means have moved since the pre-trained network's time."""
        return self.get_buffer(self._tables[name][table])

    def shifts(self) -> dict[str, Tensor]:
        """All of them, by name."""
        return {f"{name}.{number}": self.shift(name, number) for name, of in self._tables.items() for number in of}

    def relative_means(self, name: str, table: int, means: Tensor) -> Tensor:
        return means - self.shift(name, table)

    def means_today(self, name: str, table: int, kept: Tensor) -> Tensor:
        return kept + self.shift(name, table)

    def shared(self) -> dict[str, Tensor]:
        return {**super().shared(), **{f"{name}.input_shift": shift for name, shift in self.shifts().items()}}

    def state(self) -> dict[str, Any]:
        return {**super().state(), "shifts": self.shifts()}

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Any]) -> None:
        super().load_state(state)
        for name, shift in self.shifts().items():
            shift.copy_(state["shifts"][name])

    @torch.no_grad()
    def follow(self, load: Callable[[], None], run: Callable[[], object]) -> None:
        """See the module's text.

        Args:
            load: puts the state of an earlier task into the live slot, ready for the weights that are in the network.
            run: takes images through the backbone, in evaluation mode.
        """
        self.active = True
        try:
            with self._weights_before():
                load()
                before = _Seen(self)
                with before.looking():
                    run()
            load()
            after = _Seen(self, before)
            with after.looking():
                run()
        finally:
            self.active = False
        for name, ratio in self.ratios().items():
            ratio.mul_(after.ratio(name))
        for name, tables in self._tables.items():
            for number in tables:
                moved = after.tables[name][number] - before.tables[name][number]
                self.shift(name, number).add_(moved.nan_to_num(0.0, 0.0, 0.0))
        self.waits = False

    @contextmanager
    def _weights_before(self) -> Iterator[None]:
        with ExitStack() as stack:
            for name, norm in self._norms.items():
                stack.enter_context(computing_with(norm.conv, self._before[name]))
            yield


class _Seen:
    """What one pass shows, layer by layer; with a pass `before` every layer is corrected on the way."""

    def __init__(self, drift: MomentDrift, before: _Seen | None = None) -> None:
        self._drift, self._before = drift, before
        self.tables: dict[str, list[Tensor]] = {}
        self.variances: dict[str, Tensor] = {}

    def ratio(self, name: str) -> Tensor:
        """Of a layer's variances, to those of the pass before."""
        assert self._before is not None
        return ratio_of(self.variances[name], self._before.variances[name], self._drift._norms[name].eps)

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Within, a batch goes through the network."""
        statistics, norms = self._drift._statistics, self._drift._norms
        with ExitStack() as stack:
            for name, norm in norms.items():  # while input means are those of the task
                stack.callback(norm.register_forward_pre_hook(self._normaliser(name, norm)).remove)
            for name, s in statistics.items():
                read = self._reader(name, s, [table.clone() for table in s.tables])
                stack.enter_context(s.averaging())
                for norm in norms.values():
                    if norm.input_statistics is s:  # after the tensor was taken in, which is a hook, too
                        stack.callback(norm.conv.register_forward_pre_hook(read).remove)
            yield

    def _reader(self, name: str, statistics: InputMeans, kept: list[Tensor]) -> Callable[..., None]:
        def seen(conv: nn.Module, args: Any) -> None:
            if name in self.tables:
                return  # another convolution has read it
            self.tables[name] = [table.clone() for table in statistics.tables]
            for number, table in enumerate(statistics.tables):
                if self._before is not None:
                    moved = table - self._before.tables[name][number]
                    table.copy_(kept[number] + moved)

        return seen

    def _normaliser(self, name: str, norm: XconvNorm) -> Callable[..., None]:
        mean, var = moments_of(norm)
        beyond, own = mean - norm.recovered_mean(), var.clone()  # of the mean: what is not recovered

        def seen(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            self.variances[name] = self._drift._variance(args[0])
            if self._before is not None:
                mean.copy_(norm.recovered_mean() + beyond)
                var.copy_(scaled([own], [self.ratio(name)], [norm.eps])[0])

        return seen
