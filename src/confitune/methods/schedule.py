"""When which parameters are trained: a task's epochs, cut into stages (ConFiT, sec. 3.3)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

Part = Literal["head", "norm", "conv", "calibration"]


@dataclass(frozen=True)
class Stage:
    """A run of epochs in which the same parts of the network are trained."""

    name: str
    epochs: int
    trains: frozenset[Part]

    def without(self, held: frozenset[Part]) -> Stage:
        """The same with these parts left as they are.

        >>> Stage("all", 5, frozenset({"head", "norm", "conv"})).without(frozenset({"conv"})).name
        'head+norm'
        """
        if not self.trains & held:
            return self
        trains = self.trains - held
        return Stage("+".join(part for part in get_args(Part) if part in trains), self.epochs, trains)


Schedule = Callable[[int], tuple[Stage, ...]]  # from a task's number of epochs


def plain(epochs: int) -> tuple[Stage, ...]:
    """Everything from the first epoch on."""
    return (Stage("all", epochs, frozenset({"head", "norm", "conv"})),)


def hierarchical(epochs: int) -> tuple[Stage, ...]:
    """Head, then head and batch norms, then everything: 20%, 30% and 50% of the epochs (the paper's shares).

    >>> [(stage.name, stage.epochs) for stage in hierarchical(10)]
    [('head', 2), ('head+norm', 3), ('all', 5)]
    >>> [(stage.name, stage.epochs) for stage in hierarchical(4)]  # too few for a stage of the head alone
    [('head+norm', 2), ('all', 2)]
    """
    head, norm = epochs // 5, epochs // 2
    return _stages(
        Stage("head", head, frozenset({"head"})),
        Stage("head+norm", norm - head, frozenset({"head", "norm"})),
        Stage("all", epochs - norm, frozenset({"head", "norm", "conv"})),
    )


def head_only(epochs: int) -> tuple[Stage, ...]:
    """The head alone."""
    return (Stage("head", epochs, frozenset({"head"})),)


def head_and_norm(epochs: int) -> tuple[Stage, ...]:
    """Head, then head and batch norms to the end: hierarchical fine-tuning without its last stage.

    >>> [(stage.name, stage.epochs) for stage in head_and_norm(10)]
    [('head', 2), ('head+norm', 8)]
    """
    head = epochs // 5
    return _stages(
        Stage("head", head, frozenset({"head"})),
        Stage("head+norm", epochs - head, frozenset({"head", "norm"})),
    )


def _stages(*stages: Stage) -> tuple[Stage, ...]:
    return tuple(stage for stage in stages if stage.epochs > 0)
