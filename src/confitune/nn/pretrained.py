"""The state that pre-training left, kept beside those of the tasks.

Batch norm's statistics from pre-training come from a million images of all kinds. For a task of few images, or of ones
that look alike, they can be better than anything measured on the task itself. Tasks for which they are share this one
state and keep nothing but a head.

Convolutions may move all the same, for other tasks. Then the state follows as a task's own does: with M the means of
what a convolution reads under this state, which were measured when the weights were W_then,

    mean today = mean then + (W today - W then) M = W today M + offset

so what is kept, once for the network, is the affine parameters, the variances, M and the offset.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from confitune.nn.geometry import Size
from confitune.nn.xconv import XconvNorm

if TYPE_CHECKING:
    from confitune.nn.memory import TaskMemory


class PretrainedState(nn.Module):
    """Of the network whose live slot holds what pre-training left.

    Args:
        memory: of that network.
    """

    row: Tensor

    def __init__(self, memory: TaskMemory) -> None:
        super().__init__()
        self._memory = memory
        self.images = 0  # that M was measured on, of all tasks together
        self.sizes: tuple[Size | None, ...] = (None,) * len(memory.statistics)
        self.register_buffer("row", memory.packed("pretrained"), persistent=False)

    def parts(self) -> dict[str, Tensor]:
        """What is kept, by name: views of the row."""
        return self._memory.unpacked(self.row, "pretrained")

    def load(self) -> None:
        """Copy it into the live slot; means are those of today only after `means_today` was copied there."""
        self._memory.unpack(self.row, "pretrained")
        for statistics, size in zip(self._memory.statistics.values(), self.sizes, strict=True):
            statistics.restore(size, 1 if self.images else 0)

    def means_today(self) -> list[Tensor]:
        """Of every layer that recovers its mean, under today's weights; the state must be in the live slot."""
        parts = self.parts()
        offsets = {name: parts[f"{name}.running_mean"] for name in self._memory.recovering}
        if not self.images:
            return list(offsets.values())
        return [norm.recovered_mean() + offsets[name] for name, norm in self._memory.recovering.items()]

    def offset(self, norm: XconvNorm) -> Tensor:
        """What one layer's mean is beyond what is recovered from M."""
        name = next(name for name, known in self._memory.recovering.items() if known is norm)
        return self.parts()[f"{name}.running_mean"]

    @contextmanager
    def measuring(self, images: int, means: list[Tensor]) -> Iterator[None]:
        """Within, what passes the network, in evaluation mode and in this state, is averaged into M.

        Args:
            images: how many will.
            means: those of today, which it leaves as they are.
        """
        statistics = list(self._memory.statistics.values())
        tables = [table for s in statistics for table in s.tables]
        before = [table.clone() for table in tables]
        with ExitStack() as stack:
            for s in statistics:
                stack.enter_context(s.averaging())
            yield
        sizes = tuple(s.size for s in statistics)
        if self.images and sizes != self.sizes:  # M holds for planes of one size: it stays as it is
            torch._foreach_copy_(tables, before)
            return
        torch._foreach_lerp_(before, tables, images / (self.images + images))
        torch._foreach_copy_(tables, before)
        self.images, self.sizes = self.images + images, sizes
        self._keep(means)

    @torch.no_grad()
    def _keep(self, means: list[Tensor]) -> None:
        """Take M from the live tables; means of today stay what they are."""
        parts, drift = self.parts(), self._memory.drift
        for name, statistics in self._memory.statistics.items():
            for number, table in enumerate(statistics.tables):
                kept = table if drift is None else drift.relative_means(name, number, table)
                parts[self._memory.table_key(name, number)].copy_(kept)
        for (name, norm), mean in zip(self._memory.recovering.items(), means, strict=True):
            parts[f"{name}.running_mean"].copy_(mean - norm.recovered_mean())

    def state(self) -> dict[str, Tensor]:
        """Everything, by name."""
        sizes = zip(self._memory.statistics, self.sizes, strict=True)
        named = {f"{name}.input_size": torch.tensor(size or (0, 0)) for name, size in sizes}
        return {**self.parts(), **named, "images": torch.tensor(self.images)}

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Put back what `state` gave."""
        for key, part in self.parts().items():
            part.copy_(state[key])
        sizes = [state[f"{name}.input_size"].tolist() for name in self._memory.statistics]
        self.sizes = tuple((height, width) if height else None for height, width in sizes)
        self.images = int(state["images"])

    def extra_repr(self) -> str:
        return f"images={self.images}"
