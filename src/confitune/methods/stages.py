"""When which parameters are trained: a task's epochs, cut into stages (ConFiT, sec. 3.3).

Groups of parameters have the names that `ContinualNet.groups` gives them: 'head', 'norms', 'weights' (all else of the
backbone), and parts such as 'calibrations'.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Stage:
    """A run of epochs in which the same groups of parameters are trained."""

    name: str
    epochs: int
    trains: frozenset[str]


def everything(epochs: int) -> tuple[Stage, ...]:
    """Everything from the first epoch on."""
    return _stages(0, 0, epochs)


def hierarchical(epochs: int) -> tuple[Stage, ...]:
    """Head, then head and norms, then everything: 20%, 30% and 50% of the epochs (the paper's shares).

    >>> [(stage.name, stage.epochs) for stage in hierarchical(10)]
    [('head', 2), ('head+norms', 3), ('all', 5)]
    >>> [(stage.name, stage.epochs) for stage in hierarchical(4)]  # too few for a stage of the head alone
    [('head+norms', 2), ('all', 2)]
    """
    head, norms = epochs // 5, epochs // 2
    return _stages(head, norms - head, epochs - norms)


def head_only(epochs: int) -> tuple[Stage, ...]:
    """The head alone."""
    return _stages(epochs)


def head_then_norms(epochs: int) -> tuple[Stage, ...]:
    """Head, then head and norms to the end: hierarchical fine-tuning without its last stage.

    >>> [(stage.name, stage.epochs) for stage in head_then_norms(10)]
    [('head', 2), ('head+norms', 8)]
    """
    head = epochs // 5
    return _stages(head, epochs - head)


def _stages(head: int, head_and_norms: int = 0, everything: int = 0) -> tuple[Stage, ...]:
    """Those that have epochs."""
    stages = (
        Stage("head", head, frozenset({"head"})),
        Stage("head+norms", head_and_norms, frozenset({"head", "norms"})),
        Stage("all", everything, frozenset({"head", "norms", "weights"})),
    )
    return tuple(stage for stage in stages if stage.epochs > 0)
